//! One step: what it takes (pages, slots of recurrent state), the inputs that it binds, and what it gives back
//! if it fails.

use minfer_graph::Bind;

use super::{Chunk, Engine, Logits, Outs, takes};
use crate::block_table::PageCopy;
use crate::error::EngineError;
use crate::sequence::{Sequence, SequenceId};
use crate::states::StateMove;

/// Inputs of a step, kept so that a step allocates nothing in the long run.
#[derive(Default)]
pub(super) struct StepInputs {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    slots: Vec<i32>,
    table_at: Vec<i32>,
    pages: Vec<i32>,
    out_rows: Vec<i32>,
    state_from: Vec<i32>,
    state_to: Vec<i32>,
    window_slots: Vec<i32>,
    window_pages: Vec<i32>,
    /// f32 by their bits.
    ngrams: Vec<i32>,
}

impl StepInputs {
    fn clear(&mut self) {
        for list in [
            &mut self.tokens,
            &mut self.positions,
            &mut self.slots,
            &mut self.table_at,
            &mut self.pages,
            &mut self.out_rows,
            &mut self.state_from,
            &mut self.state_to,
            &mut self.window_slots,
            &mut self.window_pages,
            &mut self.ngrams,
        ] {
            list.clear();
        }
    }
}

/// What a step has taken and gives back if it fails.
#[derive(Default)]
struct Taken {
    /// One for each chunk, for models with recurrent state.
    moves: Vec<StateMove>,
    copies: Vec<(SequenceId, PageCopy)>,
}

impl Engine {
    /// Runs one step: each chunk's tokens join its sequence, and the wanted logits come back. A row's logits
    /// depend on its own sequence only, not on the other chunks nor on how a prompt is cut into chunks.
    ///
    /// # Errors
    /// Limits, context and pages are checked before anything changes; after any error every sequence is as
    /// it was before the step.
    pub fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<Logits<'_>, EngineError> {
        self.check_step(chunks)?;
        let mut taken = Taken::default();
        let result = self.reserve(chunks, &mut taken).and_then(|()| self.run(chunks, &taken.moves));
        match result {
            Ok(()) => self.keep(chunks, taken),
            Err(_) => self.undo(chunks, taken),
        }
        result?;
        Ok(Logits { data: &self.logits, vocab: self.hyper.vocab })
    }

    /// After a step that succeeded: the chunks join their sequences.
    fn keep(&mut self, chunks: &[Chunk<'_>], taken: Taken) {
        let mut moves = taken.moves.into_iter();
        for chunk in chunks {
            let Some(sequence) = self.sequences.get_mut(&chunk.sequence.0) else { continue };
            if let (Some(recurrent), Some(state_move)) = (&mut self.recurrent, moves.next()) {
                recurrent.apply(&mut sequence.state, state_move);
            }
            sequence.extend(chunk.tokens, chunk.window);
        }
    }

    /// After a step that failed: what it took is given back. Its rows lie behind every sequence's tokens.
    fn undo(&mut self, chunks: &[Chunk<'_>], taken: Taken) {
        if let Some(recurrent) = &mut self.recurrent {
            taken.moves.into_iter().for_each(|state_move| recurrent.undo(state_move));
        }
        self.undo_copies(taken.copies);
        chunks.iter().for_each(|chunk| self.trim(chunk.sequence));
    }

    fn check_step(&self, chunks: &[Chunk<'_>]) -> Result<(), EngineError> {
        if chunks.iter().all(|c| c.tokens.is_empty()) {
            return Err(EngineError::EmptyStep);
        }
        let mut needed = 0;
        for (i, chunk) in chunks.iter().enumerate() {
            let sequence = self.sequence(chunk.sequence)?;
            sequence.check_no_window()?;
            if chunks[..i].iter().any(|c| c.sequence == chunk.sequence) {
                return Err(EngineError::SequenceTwice);
            }
            if let Some(&id) = chunk.tokens.iter().find(|&&t| t as usize >= self.hyper.vocab) {
                return Err(EngineError::TokenOutOfRange { id, vocab: self.hyper.vocab });
            }
            let (have, add) = (sequence.len(), chunk.tokens.len());
            self.check_context(have, add)?;
            needed += sequence.table.needed(have, add, &self.pool);
        }
        let live = self.sequences.len();
        if chunks.len() > self.limits.sequences.max(live) {
            return Err(EngineError::TooManySequences { asked: chunks.len(), limit: self.limits.sequences });
        }
        self.pool.check(needed)
    }

    /// Pages and state slots for every chunk, copies of shared pages included.
    fn reserve(&mut self, chunks: &[Chunk<'_>], taken: &mut Taken) -> Result<(), EngineError> {
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.make_room(chunks, &mut self.sequences);
        }
        for (i, chunk) in chunks.iter().enumerate() {
            let Some(len) = self.sequences.get(&chunk.sequence.0).map(Sequence::len) else { continue };
            if let Some(recurrent) = &mut self.recurrent {
                taken.moves.push(recurrent.plan(len, &chunks[i..])?);
            }
            self.make_pages(chunk.sequence, chunk.tokens.len(), &mut taken.copies)?;
        }
        Ok(())
    }

    fn run(&mut self, chunks: &[Chunk<'_>], moves: &[StateMove]) -> Result<(), EngineError> {
        self.bind(chunks, moves)?;
        let i = &self.inputs;
        let bind = Bind { rows: i.tokens.len(), outs: i.out_rows.len() };
        let mut inputs: Vec<(&str, &[i32])> = vec![
            ("tokens", &i.tokens),
            ("positions", &i.positions),
            ("slots", &i.slots),
            ("table_at", &i.table_at),
            ("pages", &i.pages),
            ("out_rows", &i.out_rows),
        ];
        if takes(&self.executor, "state_from") {
            inputs.extend([("state_from", &i.state_from[..]), ("state_to", &i.state_to[..])]);
        }
        if takes(&self.executor, "window_slots") {
            inputs.extend([("window_slots", &i.window_slots[..]), ("window_pages", &i.window_pages[..])]);
        }
        if self.ngrams.is_some() {
            inputs.push(("ngrams", &i.ngrams));
        }
        let outputs = self.executor.execute(bind, &inputs)?;
        let bytes = outputs.bytes("logits").unwrap_or_default();
        let number = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        self.logits.clear();
        self.logits.extend(bytes.chunks_exact(4).map(number));
        if self.draft.is_some() {
            let bytes = outputs.bytes("streams").unwrap_or_default();
            self.streams.clear();
            self.streams.extend(bytes.chunks_exact(4).map(number));
        }
        Ok(())
    }

    /// Fills the step's inputs from the chunks, their block tables and their state slots.
    fn bind(&mut self, chunks: &[Chunk<'_>], moves: &[StateMove]) -> Result<(), EngineError> {
        let windows = takes(&self.executor, "window_slots");
        let i = &mut self.inputs;
        i.clear();
        if let Some(ngrams) = &mut self.ngrams {
            ngrams.clear();
        }
        for (c, chunk) in chunks.iter().enumerate() {
            let sequence = self.sequences.get(&chunk.sequence.0);
            let sequence = sequence.ok_or(EngineError::UnknownSequence(chunk.sequence.0))?;
            let table_at = i.pages.len() as i32;
            i.pages.extend(sequence.table.pages().map(|p| p as i32));
            if windows {
                // Beside the others, so that one start serves both lists.
                let recent = |index| sequence.state.recent.page(index).map_or(-1, |page| page as i32);
                i.window_pages.extend((0..sequence.table.end()).map(recent));
                let positions = sequence.len()..sequence.len() + chunk.tokens.len();
                i.window_slots.extend(positions.map(|position| sequence.state.recent.slot(position)));
            }
            let first_row = i.tokens.len();
            for (n, &token) in chunk.tokens.iter().enumerate() {
                let position = sequence.len() + n;
                i.tokens.push(token as i32);
                i.positions.push(position as i32);
                i.slots.push(sequence.table.slot(position));
                i.table_at.push(table_at);
            }
            if let Some(state_move) = moves.get(c) {
                state_move.bind(&sequence.state, chunk.tokens.len(), &mut i.state_from, &mut i.state_to);
            }
            if let Some(ngrams) = &mut self.ngrams {
                ngrams.ask(&sequence.tokens, chunk.tokens);
            }
            let rows = first_row as i32..i.tokens.len() as i32;
            match chunk.outs {
                Outs::None => {}
                Outs::Last => i.out_rows.extend(rows.last()),
                Outs::All => i.out_rows.extend(rows),
            }
        }
        match &mut self.ngrams {
            Some(ngrams) => ngrams.read(&mut i.ngrams),
            None => Ok(()),
        }
    }
}
