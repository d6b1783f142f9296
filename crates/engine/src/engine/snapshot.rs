//! Snapshots: a sequence to the host, and a new sequence from there.

use std::sync::Arc;

use minfer_graph::{PAGE, StateId};
use minfer_model::{Checkpoint, Hyper};
use minfer_runtime::{Executor, RuntimeError};

use super::Engine;
use crate::draft::Draft;
use crate::error::EngineError;
use crate::options::EngineOptions;
use crate::reuse::ReuseCounters;
use crate::sequence::{Sequence, SequenceId};
use crate::snapshot::{Origin, Piece, Place, Snapshot};

impl Origin {
    /// Of an engine that is being opened.
    pub(super) fn of(
        model: &Checkpoint,
        hyper: &Hyper,
        options: &EngineOptions,
        executor: &Executor,
        draft: Option<&Draft>,
    ) -> Result<Arc<Origin>, EngineError> {
        let head = draft.and_then(Draft::own).into_iter().flat_map(|e| Origin::held(e, true));
        let states = Origin::held(executor, false).chain(head).collect();
        let fingerprint = model.fingerprint()?;
        let how = if options.official_rounding { " with --official-rounding" } else { "" };
        let (arch, kv_format) = (format!("{}{how}", hyper.arch), options.kv_format);
        Ok(Arc::new(Origin { arch, fingerprint, kv_format, states }))
    }
}

impl Engine {
    /// Copies everything that a sequence keeps to the host: tokens, pages (those of a draft head too),
    /// recurrent state and checkpoints. The sequence stays as it is.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`], [`EngineError::OpenWindow`], too little memory, or a device that
    /// fails.
    pub fn snapshot(&mut self, id: SequenceId) -> Result<Snapshot, EngineError> {
        let sequence = self.sequence(id)?;
        sequence.check_no_window()?;
        let table = sequence.table.clone();
        let earlier = sequence.state.checkpoints();
        let (checkpoints, mut marks): (Vec<_>, Vec<_>) =
            earlier.map(|(len, slot, recent)| (len, (Some(slot), recent.clone()))).unzip();
        let tokens = sequence.tokens.clone();
        let current = (sequence.state.slot(), sequence.state.recent.clone());
        let mut snapshot = Snapshot::new(self.origin.clone(), tokens, checkpoints)?;
        if !snapshot.last_is_checkpoint() {
            marks.push(current);
        }
        let mut payload = std::mem::take(&mut snapshot.payload);
        let homes = self.homes();
        for Piece { state, place, rows, .. } in snapshot.pieces() {
            let unit = match place {
                Place::Page { at, .. } => table.page(at),
                Place::Slot { mark } => marks[mark].0,
                Place::Recent { mark, at, .. } => marks[mark].1.page(at),
            };
            let missing = || RuntimeError::Internal("a sequence misses a page of its own".to_string());
            let unit = unit.ok_or_else(missing)?;
            let (executor, id) = self.home(homes[state])?;
            executor.read_state(id, unit, rows, &mut payload)?;
        }
        self.reuse.snapshots += 1;
        Ok(Snapshot { payload, ..snapshot })
    }

    /// A new sequence like the one that the snapshot was taken of. It takes pages and state slots of its own;
    /// where slots are short, the oldest checkpoints are left out.
    ///
    /// # Errors
    /// A snapshot of another model, KV format, draft head, device or layout, one that does not fit the
    /// context, pages or slots (all found before anything changes), or a device that fails. After any error
    /// every sequence is as it was; old checkpoints may have made room, as in a step.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<SequenceId, EngineError> {
        self.check_restore(snapshot)?;
        let mut sequence = Sequence { tokens: snapshot.tokens.clone(), ..Sequence::default() };
        match self.fill(&mut sequence, snapshot) {
            Ok(()) => {
                self.reuse.restores += 1;
                Ok(self.insert(sequence))
            }
            Err(error) => {
                self.give_back(sequence);
                Err(error)
            }
        }
    }

    /// How much truncations kept, and how many snapshots there were.
    pub fn reuse_counters(&self) -> ReuseCounters {
        self.reuse
    }

    fn check_restore(&self, snapshot: &Snapshot) -> Result<(), EngineError> {
        self.origin.check(&snapshot.origin, &snapshot.name)?;
        let len = snapshot.tokens.len();
        self.check_context(0, len)?;
        let vocab = self.hyper.vocab;
        if let Some(&id) = snapshot.tokens.iter().find(|&&t| t as usize >= vocab) {
            return Err(EngineError::TokenOutOfRange { id, vocab });
        }
        self.pool.check(len.div_ceil(PAGE))
    }

    /// Takes pages, then slots, and writes the snapshot into them.
    fn fill(&mut self, sequence: &mut Sequence, snapshot: &Snapshot) -> Result<(), EngineError> {
        let homes = self.homes();
        sequence.table.reserve(0, sequence.tokens.len(), &mut self.pool)?;
        let mut adopted = Vec::new();
        if let Some(recurrent) = &mut self.recurrent {
            let (marks, last) = (snapshot.marks(), snapshot.last_is_checkpoint());
            (sequence.state, adopted) = recurrent.adopt(&marks, last, &mut self.sequences)?;
        }
        let mark = |at: usize| adopted.get(at).and_then(Option::as_ref);
        for Piece { state, place, rows, bytes } in snapshot.pieces() {
            let unit = match place {
                Place::Page { at, .. } => sequence.table.page(at),
                Place::Slot { mark: at } => mark(at).map(|a| a.slot),
                Place::Recent { mark: of, at, .. } => mark(of).and_then(|a| a.recent.page(at)),
            };
            // A checkpoint that there was no room for.
            let Some(unit) = unit else { continue };
            let (executor, id) = self.home(homes[state])?;
            executor.write_state(id, unit, rows, &snapshot.payload[bytes])?;
        }
        Ok(())
    }

    /// Whether it is the draft head's, and its id there, of each piece of state in the origin's order.
    fn homes(&self) -> Vec<(bool, StateId)> {
        let trunk = self.executor.states().map(|s| (false, s.0));
        let head = self.draft.iter().filter_map(Draft::own).flat_map(Executor::states).map(|s| (true, s.0));
        trunk.chain(head).collect()
    }

    fn home(&mut self, (draft, id): (bool, StateId)) -> Result<(&mut Executor, StateId), EngineError> {
        match (draft, self.draft.as_mut().and_then(Draft::own_mut)) {
            (false, _) => Ok((&mut self.executor, id)),
            (true, Some(own)) => Ok((own, id)),
            (true, None) => Err(EngineError::NoDraftHead),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{EngineOptions, Generate, Speculate, Text, cpu_devices};

    /// The rows of a draft head come back too: a snapshot of the restored sequence has the same bytes.
    #[test]
    #[ignore = "needs MINFER_NANO_NEXT_DIR"]
    fn the_draft_heads_rows_come_back() {
        let path =
            std::env::var_os("MINFER_NANO_NEXT_DIR").unwrap_or_else(|| panic!("set MINFER_NANO_NEXT_DIR"));
        let model =
            Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)).unwrap();
        let text = Text::open(&model).unwrap();
        let open = |draft| {
            let options =
                EngineOptions { context: Some(512), draft, ..EngineOptions::new(cpu_devices(None).unwrap()) };
            Engine::open(&model, EngineOptions { sequences: 2, ..options }, &mut |_, _| ()).unwrap()
        };
        let mut engine = open(true);
        let prompt = text.encode_raw("Once upon a time there was").unwrap();
        let mut session = engine.session();
        let options = Generate {
            max_tokens: Some(150),
            ignore_end: true,
            speculate: Speculate::Head { depth: 2 },
            ..Generate::default()
        };
        let mut generation = session.generate(&text, &prompt, &options).unwrap();
        while generation.next_piece().unwrap().is_some() {}
        let snapshot = session.engine.snapshot(session.id).unwrap();
        let head = snapshot.pieces().filter(|p| snapshot.origin.states[p.state].draft);
        let head: Vec<&[u8]> = head.map(|p| &snapshot.payload[p.bytes]).collect();
        assert!(head.len() >= 3 && head.iter().all(|rows| rows.iter().any(|&b| b != 0)), "the head has rows");
        drop(session);
        let mut other = open(true);
        let id = other.restore(&snapshot).unwrap();
        assert!(other.snapshot(id).unwrap() == snapshot);
        let error = open(false).restore(&snapshot).unwrap_err().to_string();
        assert!(error.contains("open the engine with it"), "{error}");
    }
}
