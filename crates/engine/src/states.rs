//! Recurrent state: which slot holds a sequence's state, its checkpoints, and windows of guesses.
//!
//! A step never writes the slot that it reads. So an error leaves the old state as it was, a fork shares a
//! slot, a checkpoint is a slot that is kept, and keeping the first rows of a window is choosing one of the
//! slots that its rows were written to. Nothing is copied and nothing is computed again.

use std::collections::BTreeMap;

use minfer_graph::state_from;

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
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Checkpoint {
    /// Tokens that the state has seen.
    len: usize,
    slot: u32,
    /// For finding the oldest.
    age: u64,
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

/// All slots of an engine.
pub(crate) struct Recurrent {
    pool: PagePool,
    slots: usize,
    checkpoint_every: usize,
    /// Most checkpoints at one time, and how many there are.
    max_checkpoints: usize,
    clock: u64,
}

impl Recurrent {
    pub(crate) fn new(options: &EngineOptions) -> Recurrent {
        // Each sequence in a step has the slot that it reads and the one that it writes; a window has one
        // for each row.
        let slots = 2 * options.sequences + options.checkpoints + options.max_window();
        Recurrent {
            pool: PagePool::new(slots),
            slots,
            checkpoint_every: options.checkpoint_every,
            max_checkpoints: options.checkpoints,
            clock: 0,
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

    /// Drops the oldest checkpoints of all sequences until the chunk's slots fit.
    pub(crate) fn make_room(&mut self, chunk: &Chunk<'_>, sequences: &mut BTreeMap<u32, Sequence>) {
        let needed = if chunk.window { chunk.tokens.len() } else { 1 };
        while self.pool.free() < needed {
            let all = sequences.values_mut().filter(|s| !s.state.checkpoints.is_empty());
            let oldest = all.min_by_key(|s| s.state.checkpoints.iter().map(|c| c.age).min());
            let Some(state) = oldest.map(|s| &mut s.state) else { return };
            if let Some(at) = (0..state.checkpoints.len()).min_by_key(|&i| state.checkpoints[i].age) {
                let dropped = state.checkpoints.remove(at);
                self.pool.release(dropped.slot);
            }
        }
    }

    /// Takes the slots that a chunk will be written to.
    pub(crate) fn plan(&mut self, start: usize, chunk: &Chunk<'_>) -> Result<StateMove, EngineError> {
        let rows = chunk.tokens.len();
        let mut state_move = StateMove { to: Vec::new(), start, window: chunk.window };
        let Some(last) = rows.checked_sub(1) else { return Ok(state_move) };
        let wanted: Vec<usize> = match chunk.window {
            true => (0..rows).collect(),
            // One free slot stays for the state itself.
            false => {
                let spare = self.pool.free().saturating_sub(1).min(self.max_checkpoints);
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
        let Some(&(last, slot)) = state_move.to.last() else { return };
        let before = state.slot.replace(slot);
        if state_move.window {
            let rows = state_move.to.iter().map(|&(_, slot)| slot).collect();
            state.window = Some(Window { start: state_move.start, before, rows });
            return;
        }
        for &(row, slot) in &state_move.to {
            let len = state_move.start + row + 1;
            let is_state = row == last;
            if is_state && self.due(len - 1, 1).next().is_some() && self.max_checkpoints > 0 {
                self.pool.share(slot);
            } else if is_state {
                continue;
            }
            self.clock += 1;
            state.checkpoints.push(Checkpoint { len, slot, age: self.clock });
        }
        if let Some(before) = before {
            self.pool.release(before);
        }
    }

    /// Returns to the last checkpoint at or before `len` and says where that is.
    pub(crate) fn go_back(&mut self, state: &mut SequenceState, len: usize) -> usize {
        while let Some(late) = state.checkpoints.pop_if(|c| c.len > len) {
            self.pool.release(late.slot);
        }
        if let Some(slot) = state.slot.take() {
            self.pool.release(slot);
        }
        match state.checkpoints.last() {
            Some(c) => {
                self.pool.share(c.slot);
                state.slot = Some(c.slot);
                c.len
            }
            None => 0,
        }
    }

    /// Keeps the first `keep` rows of a window.
    pub(crate) fn settle(&mut self, state: &mut SequenceState, window: Window, keep: usize) {
        let slots = window.before.into_iter().map(|s| (0, s));
        let rows = window.rows.iter().enumerate().map(|(i, &s)| (i + 1, s));
        state.slot = None;
        for (kept, slot) in slots.chain(rows) {
            if kept == keep {
                state.slot = Some(slot);
            } else {
                self.pool.release(slot);
            }
        }
    }

    /// One more user of everything that a sequence refers to.
    pub(crate) fn share(&mut self, state: &SequenceState) {
        let checkpoints = state.checkpoints.iter().map(|c| c.slot);
        state.slot.into_iter().chain(checkpoints).for_each(|slot| self.pool.share(slot));
    }

    /// One user less.
    pub(crate) fn release(&mut self, state: SequenceState) {
        let checkpoints = state.checkpoints.iter().map(|c| c.slot);
        match state.window {
            Some(w) => w.before.into_iter().chain(w.rows).for_each(|slot| self.pool.release(slot)),
            None => state.slot.into_iter().for_each(|slot| self.pool.release(slot)),
        }
        checkpoints.for_each(|slot| self.pool.release(slot));
    }

    /// Slots that nobody refers to.
    pub(crate) fn free(&self) -> usize {
        self.pool.free()
    }
}
