//! State that a sequence cannot simply cut off: which slot holds its recurrent state, which pages its last
//! positions, its checkpoints, and windows of guesses.
//!
//! A step never writes the slot that it reads. So an error leaves the old state as it was, a fork shares a
//! slot, a checkpoint is a slot that is kept, and keeping the first rows of a window is choosing one of the
//! slots that its rows were written to. Nothing is copied and nothing is computed again.
//!
//! Of some state only the last positions are needed (sliding windows, open blocks of an indexer). Its pages are
//! given back as the sequence goes on; a checkpoint holds on to those that its own last positions lie in.

use std::collections::BTreeMap;

use minfer_graph::{PAGE, state_from};

use crate::block_table::{BlockTable, PageCopy};
use crate::engine::Chunk;
use crate::error::EngineError;
use crate::options::EngineOptions;
use crate::pages::PagePool;
use crate::sequence::Sequence;

/// The recurrent side of a sequence; empty for models without.
#[derive(Clone, Debug, Default)]
pub(crate) struct SequenceState {
    /// State after the last token; `None`: nothing yet, all zero.
    slot: Option<u32>,
    /// States after earlier tokens, shortest first.
    checkpoints: Vec<Checkpoint>,
    /// Guesses that wait for [`crate::Engine::commit`].
    pub(crate) window: Option<Window>,
    /// Pages of the last positions.
    pub(crate) recent: BlockTable,
}

impl SequenceState {
    /// Tokens seen, slot and pages of the last positions of every checkpoint, ascending.
    pub(crate) fn checkpoints(&self) -> impl Iterator<Item = (usize, u32, &BlockTable)> {
        self.checkpoints.iter().map(|c| (c.len, c.slot, &c.recent))
    }

    /// The slot of the state after the last token.
    pub(crate) fn slot(&self) -> Option<u32> {
        self.slot
    }
}

#[derive(Clone, Debug)]
struct Checkpoint {
    /// Tokens that the state has seen.
    len: usize,
    slot: u32,
    /// Pages of the last positions before it.
    recent: BlockTable,
    /// For finding the oldest.
    age: u64,
}

/// Pages of last positions.
#[derive(Debug)]
struct Recent {
    pool: PagePool,
    /// How many positions are needed before the next one.
    positions: usize,
}

/// Rows of a draft head that may lie ahead of a sequence's tokens.
const AHEAD: usize = PAGE;

impl Recent {
    /// Numbered from `first` on.
    fn new(options: &EngineOptions, positions: usize, first: usize) -> Recent {
        // A step's rows and what they see, in pages that begin and end anywhere, and a copy of a shared one.
        let sequence = (positions + options.max_rows + AHEAD).div_ceil(PAGE) + 2;
        let checkpoint = positions.div_ceil(PAGE) + 1;
        let pages = options.sequences * sequence + options.checkpoints * checkpoint;
        Recent { pool: PagePool::new(first, pages), positions }
    }

    /// The first position that is needed behind `len` positions.
    fn start(&self, len: usize) -> usize {
        len.saturating_sub(self.positions)
    }
}

/// Where a restored state goes.
#[derive(Clone, Debug)]
pub(crate) struct Adopted {
    pub(crate) slot: u32,
    /// Pages of the last positions before it.
    pub(crate) recent: BlockTable,
}

/// A step whose tokens may not all stay.
#[derive(Clone, Debug, Default)]
pub(crate) struct Window {
    /// Tokens before it.
    pub(crate) start: usize,
    /// State before it, and after each of its rows.
    before: Option<u32>,
    rows: Vec<u32>,
}

/// Slots that a chunk's rows are written to, decided before the step.
#[derive(Debug, Default)]
pub(crate) struct StateMove {
    /// `(row, slot)`, ascending; the last row's is the new state.
    to: Vec<(usize, u32)>,
    /// Tokens before the chunk.
    start: usize,
    window: bool,
}

impl StateMove {
    /// Appends `state_from` and `state_to` of the chunk's rows.
    pub(crate) fn bind(&self, state: &SequenceState, rows: usize, from: &mut Vec<i32>, to: &mut Vec<i32>) {
        let first = state.slot.map_or(state_from::ZERO, |s| s as i32);
        from.extend((0..rows).map(|r| if r == 0 { first } else { state_from::PREVIOUS_ROW }));
        let at = to.len();
        to.resize(at + rows, -1);
        for &(row, slot) in &self.to {
            to[at + row] = slot as i32;
        }
    }
}

/// Slots that these chunks cannot do without: one for a new state, one for each row of a window.
fn slots_needed(chunks: &[Chunk<'_>]) -> usize {
    chunks.iter().map(|c| if c.window { c.tokens.len() } else { c.tokens.len().min(1) }).sum()
}

/// All slots of an engine.
pub(crate) struct Recurrent {
    pool: PagePool,
    slots: usize,
    checkpoint_every: usize,
    /// Most checkpoints at one time, and how many there are.
    max_checkpoints: usize,
    clock: u64,
    recent: Option<Recent>,
}

impl Recurrent {
    /// With `window`, the last so many positions have pages of their own, numbered from `first_page` on.
    pub(crate) fn new(options: &EngineOptions, window: Option<usize>, first_page: usize) -> Recurrent {
        // Each sequence in a step has the slot that it reads and the one that it writes; a window has one
        // for each row.
        let slots = 2 * options.sequences + options.checkpoints + options.max_window;
        Recurrent {
            pool: PagePool::new(0, slots),
            slots,
            checkpoint_every: options.checkpoint_every,
            max_checkpoints: options.checkpoints,
            clock: 0,
            recent: window.map(|positions| Recent::new(options, positions, first_page)),
        }
    }

    /// Pages of last positions, for all sequences.
    pub(crate) fn recent_pages(&self) -> usize {
        self.recent.as_ref().map_or(0, |r| r.pool.total())
    }

    /// Of these, those that nobody refers to.
    pub(crate) fn free_recent_pages(&self) -> usize {
        self.recent.as_ref().map_or(0, |r| r.pool.free())
    }

    /// Makes room for the last positions of a sequence of `len` and `add` more.
    pub(crate) fn reserve_recent(
        &mut self,
        state: &mut SequenceState,
        len: usize,
        add: usize,
    ) -> Result<Option<PageCopy>, EngineError> {
        match &mut self.recent {
            Some(recent) => state.recent.reserve(len, add, &mut recent.pool),
            None => Ok(None),
        }
    }

    /// Takes the replacement of a page back, after a step that failed.
    pub(crate) fn undo_copy(&mut self, state: &mut SequenceState, len: usize, copy: PageCopy) {
        if let Some(recent) = &mut self.recent {
            state.recent.undo_copy(len, copy, &mut recent.pool);
        }
    }

    /// Gives back pages of last positions behind the first `len`.
    pub(crate) fn trim_recent(&mut self, state: &mut SequenceState, len: usize) {
        if let Some(recent) = &mut self.recent {
            state.recent.trim(len, &mut recent.pool);
        }
    }

    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// Rows of a chunk after which a checkpoint is due.
    fn due(&self, start: usize, rows: usize) -> impl Iterator<Item = usize> + use<> {
        let every = self.checkpoint_every;
        (0..rows).filter(move |r| every > 0 && (start + r + 1).is_multiple_of(every))
    }

    /// Gives back pages that have fallen out of windows, then drops the oldest checkpoints of all sequences until
    /// the step's slots and pages fit, those of its own checkpoints included.
    pub(crate) fn make_room(&mut self, chunks: &[Chunk<'_>], sequences: &mut BTreeMap<u32, Sequence>) {
        let due = |chunk: &Chunk<'_>| {
            let start = sequences.get(&chunk.sequence.0).map_or(0, Sequence::len);
            let inner = chunk.tokens.len().saturating_sub(1);
            if chunk.window { 0 } else { self.due(start, inner).count() }
        };
        let checkpoints: usize = chunks.iter().map(due).sum();
        let mut pages = 0;
        if let Some(recent) = &mut self.recent {
            for chunk in chunks {
                let Some(sequence) = sequences.get_mut(&chunk.sequence.0) else { continue };
                let len = sequence.len();
                sequence.state.recent.retire(recent.start(len), &mut recent.pool);
                pages += sequence.state.recent.needed(len, chunk.tokens.len(), &recent.pool);
            }
        }
        self.free_up(slots_needed(chunks) + checkpoints.min(self.max_checkpoints), pages, sequences);
    }

    /// Drops the oldest checkpoints of all sequences until so many slots and pages of last positions are free, or
    /// no checkpoint is left.
    fn free_up(&mut self, slots: usize, pages: usize, sequences: &mut BTreeMap<u32, Sequence>) {
        while self.pool.free() < slots || self.free_recent_pages() < pages {
            let all = sequences.values_mut().filter(|s| !s.state.checkpoints.is_empty());
            let oldest = all.min_by_key(|s| s.state.checkpoints.iter().map(|c| c.age).min());
            let Some(state) = oldest.map(|s| &mut s.state) else { return };
            if let Some(at) = (0..state.checkpoints.len()).min_by_key(|&i| state.checkpoints[i].age) {
                let dropped = state.checkpoints.remove(at);
                self.drop_checkpoint(dropped);
            }
        }
    }

    /// Takes the slots that the first of `chunks`, a sequence of `start` tokens, will be written to. The other
    /// chunks are planned after it: what they cannot do without stays free.
    pub(crate) fn plan(&mut self, start: usize, chunks: &[Chunk<'_>]) -> Result<StateMove, EngineError> {
        let Some(chunk) = chunks.first() else { return Ok(StateMove::default()) };
        let rows = chunk.tokens.len();
        let mut state_move = StateMove { to: Vec::new(), start, window: chunk.window };
        let Some(last) = rows.checked_sub(1) else { return Ok(state_move) };
        let wanted: Vec<usize> = match chunk.window {
            true => (0..rows).collect(),
            false => {
                let spare = self.pool.free().saturating_sub(slots_needed(chunks)).min(self.max_checkpoints);
                let due: Vec<_> = self.due(start, last).collect();
                due[due.len().saturating_sub(spare)..].iter().copied().chain([last]).collect()
            }
        };
        for row in wanted {
            match self.pool.take() {
                Ok(slot) => state_move.to.push((row, slot)),
                Err(_) => {
                    self.undo(state_move);
                    return Err(EngineError::OutOfStateSlots { total: self.slots });
                }
            }
        }
        Ok(state_move)
    }

    /// After a step that failed.
    pub(crate) fn undo(&mut self, state_move: StateMove) {
        state_move.to.iter().for_each(|&(_, slot)| self.pool.release(slot));
    }

    /// After a step that succeeded: the last slot is the state, the others are checkpoints or a window.
    pub(crate) fn apply(&mut self, state: &mut SequenceState, state_move: StateMove) {
        let StateMove { to, start, window } = state_move;
        if window {
            let rows: Vec<u32> = to.iter().map(|&(_, slot)| slot).collect();
            let before = state.slot;
            state.slot = rows.last().copied().or(before);
            state.window = Some(Window { start, before, rows });
            return;
        }
        let Some(&(last, slot)) = to.last() else { return };
        let before = state.slot.replace(slot);
        for &(row, slot) in &to {
            let len = start + row + 1;
            if row != last || self.is_due(len) {
                self.add_checkpoint(state, len, slot);
            }
            if row == last && self.is_due(len) {
                self.pool.share(slot);
            }
        }
        if let Some(before) = before {
            self.pool.release(before);
        }
    }

    /// Whether the state after `len` tokens is to be kept.
    fn is_due(&self, len: usize) -> bool {
        self.max_checkpoints > 0 && self.due(len - 1, 1).next().is_some()
    }

    /// Takes over one reference to `slot`; the pages of the last positions before it are the sequence's.
    fn add_checkpoint(&mut self, state: &mut SequenceState, len: usize, slot: u32) {
        let recent = match &mut self.recent {
            Some(recent) => state.recent.part(recent.start(len), len, &mut recent.pool),
            None => BlockTable::default(),
        };
        self.push_checkpoint(state, len, slot, recent);
    }

    fn push_checkpoint(&mut self, state: &mut SequenceState, len: usize, slot: u32, recent: BlockTable) {
        self.clock += 1;
        state.checkpoints.push(Checkpoint { len, slot, recent, age: self.clock });
    }

    fn drop_checkpoint(&mut self, checkpoint: Checkpoint) {
        self.pool.release(checkpoint.slot);
        self.release_recent(checkpoint.recent);
    }

    fn release_recent(&mut self, table: BlockTable) {
        if let Some(recent) = &mut self.recent {
            table.release(&mut recent.pool);
        }
    }

    fn share_recent(&mut self, table: &BlockTable) {
        if let Some(recent) = &mut self.recent {
            table.share(&mut recent.pool);
        }
    }

    /// Returns to the last checkpoint at or before `len` and says where that is.
    pub(crate) fn go_back(&mut self, state: &mut SequenceState, len: usize) -> usize {
        while let Some(late) = state.checkpoints.pop_if(|c| c.len > len) {
            self.drop_checkpoint(late);
        }
        if let Some(slot) = state.slot.take() {
            self.pool.release(slot);
        }
        self.release_recent(std::mem::take(&mut state.recent));
        match state.checkpoints.last() {
            Some(c) => {
                self.pool.share(c.slot);
                self.share_recent(&c.recent);
                (state.slot, state.recent) = (Some(c.slot), c.recent.clone());
                c.len
            }
            None => 0,
        }
    }

    /// Keeps the first `keep` rows of a window, with the checkpoints that plain steps would have left there.
    pub(crate) fn settle(&mut self, state: &mut SequenceState, window: Window, keep: usize) {
        let slots = window.before.into_iter().map(|s| (0, s));
        let rows = window.rows.iter().enumerate().map(|(i, &s)| (i + 1, s));
        state.slot = None;
        for (kept, slot) in slots.chain(rows) {
            if (1..=keep).contains(&kept) && self.is_due(window.start + kept) {
                self.pool.share(slot);
                self.add_checkpoint(state, window.start + kept, slot);
            }
            if kept == keep {
                state.slot = Some(slot);
            } else {
                self.pool.release(slot);
            }
        }
    }

    /// Slots for a sequence of a snapshot, whose states have seen `lens` tokens each, ascending; the last is its
    /// current state, and a checkpoint too if `last_is_checkpoint`. The oldest checkpoints go without when there
    /// are not enough slots, those of other sequences first.
    pub(crate) fn adopt(
        &mut self,
        lens: &[usize],
        last_is_checkpoint: bool,
        sequences: &mut BTreeMap<u32, Sequence>,
    ) -> Result<(SequenceState, Vec<Option<Adopted>>), EngineError> {
        let mut state = SequenceState::default();
        match self.adopt_into(&mut state, lens, last_is_checkpoint, sequences) {
            Ok(adopted) => Ok((state, adopted)),
            Err(error) => {
                self.release(state);
                Err(error)
            }
        }
    }

    fn adopt_into(
        &mut self,
        state: &mut SequenceState,
        lens: &[usize],
        last_is_checkpoint: bool,
        sequences: &mut BTreeMap<u32, Sequence>,
    ) -> Result<Vec<Option<Adopted>>, EngineError> {
        let mut adopted = vec![None; lens.len()];
        let Some(last) = lens.len().checked_sub(1) else { return Ok(adopted) };
        let wanted = (1 + self.max_checkpoints).min(lens.len());
        let pages = lens[lens.len() - wanted..].iter().map(|&len| self.recent_needed(len)).sum();
        self.free_up(wanted, pages, sequences);
        let total = self.slots;
        let slot = self.pool.take().map_err(|_| EngineError::OutOfStateSlots { total })?;
        state.slot = Some(slot);
        state.recent = self.take_recent(lens[last])?;
        adopted[last] = Some(Adopted { slot, recent: state.recent.clone() });
        let shared = usize::from(last_is_checkpoint && self.max_checkpoints > 0);
        let fits = (self.max_checkpoints - shared).min(self.pool.free());
        for at in last - fits.min(last)..last {
            if self.recent_needed(lens[at]) > self.free_recent_pages() {
                continue;
            }
            let recent = self.take_recent(lens[at])?;
            let slot = self.pool.take()?;
            adopted[at] = Some(Adopted { slot, recent: recent.clone() });
            self.push_checkpoint(state, lens[at], slot, recent);
        }
        if shared > 0 {
            self.pool.share(slot);
            self.add_checkpoint(state, lens[last], slot);
        }
        Ok(adopted)
    }

    /// Pages for the last positions of `len`.
    fn recent_needed(&self, len: usize) -> usize {
        self.recent.as_ref().map_or(0, |r| len.div_ceil(PAGE) - r.start(len) / PAGE)
    }

    fn take_recent(&mut self, len: usize) -> Result<BlockTable, EngineError> {
        let mut table = BlockTable::default();
        if let Some(recent) = &mut self.recent {
            let start = recent.start(len);
            table.reserve(start, len - start, &mut recent.pool)?;
        }
        Ok(table)
    }

    /// One more user of everything that a sequence refers to.
    pub(crate) fn share(&mut self, state: &SequenceState) {
        let checkpoints = state.checkpoints.iter().map(|c| c.slot);
        state.slot.into_iter().chain(checkpoints).for_each(|slot| self.pool.share(slot));
        self.share_recent(&state.recent);
        state.checkpoints.iter().for_each(|c| self.share_recent(&c.recent));
    }

    /// One user less.
    pub(crate) fn release(&mut self, state: SequenceState) {
        match state.window {
            Some(w) => w.before.into_iter().chain(w.rows).for_each(|slot| self.pool.release(slot)),
            None => state.slot.into_iter().for_each(|slot| self.pool.release(slot)),
        }
        self.release_recent(state.recent);
        state.checkpoints.into_iter().for_each(|checkpoint| self.drop_checkpoint(checkpoint));
    }

    /// Slots that nobody refers to.
    pub(crate) fn free(&self) -> usize {
        self.pool.free()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
