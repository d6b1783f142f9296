//! Playing schedules: every row of logits is compared with a straight run of the same tokens, every refusal and
//! every failure must leave all sequences as they were, and in the end all pages and slots must be free.

use std::collections::{HashMap, HashSet};

use minfer_engine::{Chunk, Engine, EngineError, Outs, SequenceId, Snapshot};
use minfer_runtime::RuntimeError;

use super::flaky::{Fault, Switch};
use super::schedule::{Family, LIVE, Move, Part, Setup, Straight, Way, bits, ids};

/// A schedule being played.
pub struct Play<'a> {
    family: &'a Family,
    pub setup: Setup,
    pub engine: Engine,
    pub switch: Switch,
    pub straight: &'a mut Straight,
    pub live: Vec<SequenceId>,
    /// Rows of open windows.
    windows: HashMap<SequenceId, usize>,
    seed: u64,
    /// Rows that were compared, and moves that came to something, for the check that schedules reach far.
    pub compared: usize,
    pub seen: HashSet<&'static str>,
    folder: tempfile::TempDir,
}

/// What must not change when something is refused or fails.
type Kept = (Vec<Vec<u32>>, usize);

impl Play<'_> {
    pub fn new<'a>(family: &'a Family, setup: Setup, straight: &'a mut Straight) -> Play<'a> {
        let switch = Switch::default();
        let mut engine = setup.engine(&family.model, &switch);
        let live = vec![engine.new_sequence()];
        let (windows, seen) = (HashMap::new(), HashSet::new());
        Play {
            family,
            setup,
            engine,
            switch,
            straight,
            live,
            windows,
            seed: 0,
            compared: 0,
            seen,
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn pick(&self, which: usize) -> SequenceId {
        self.live[which % self.live.len()]
    }

    pub fn len(&self, id: SequenceId) -> usize {
        self.engine.tokens(id).unwrap().len()
    }

    pub fn kept(&self) -> Kept {
        let all = self.live.iter().map(|&id| self.engine.tokens(id).unwrap().to_vec()).collect();
        (all, self.engine.free_pages())
    }

    /// The parts that can be asked for: each sequence once, none with a window, new tokens that fit.
    fn batch(&mut self, parts: &[Part]) -> Vec<(SequenceId, Vec<u32>, Part)> {
        let mut batch: Vec<(SequenceId, Vec<u32>, Part)> = Vec::new();
        for &part in parts {
            let id = self.pick(part.which);
            let n = part.n.min(self.setup.context - self.len(id));
            if n > 0 && !self.windows.contains_key(&id) && batch.iter().all(|b| b.0 != id) {
                self.seed += 1;
                batch.push((id, ids(n, self.seed), part));
            }
        }
        batch
    }

    fn step(&mut self, parts: &[Part]) {
        let batch = self.batch(parts);
        self.append(&batch);
    }

    /// Runs a step and compares its rows. Being out of pages or slots is allowed when it is true.
    pub fn append(&mut self, batch: &[(SequenceId, Vec<u32>, Part)]) -> bool {
        if batch.is_empty() {
            return true;
        }
        let before = self.kept();
        let chunks = chunks(batch);
        let rows: Vec<Vec<u32>> = match self.engine.step(&chunks) {
            Ok(logits) => (0..logits.len()).map(|i| bits(logits.row(i))).collect(),
            Err(error) => {
                assert_eq!(self.kept(), before, "{error}");
                self.check_shortage(&error, batch);
                return false;
            }
        };
        let mut rows = rows.into_iter();
        for (id, added, part) in batch {
            let all = self.engine.tokens(*id).unwrap().to_vec();
            let old = all.len() - added.len();
            let wanted = if part.all || part.window { old + 1..=all.len() } else { all.len()..=all.len() };
            for len in wanted {
                let row = rows.next().expect("a row of logits for each wanted token");
                assert!(
                    row == self.straight.row(&all[..len]),
                    "row {} of {part:?}, {} tokens",
                    len - 1,
                    all.len()
                );
                self.compared += 1;
            }
            if part.window {
                self.windows.insert(*id, added.len());
            }
            self.seen.insert(if part.window { "window" } else { "step" });
        }
        assert!(rows.next().is_none(), "no rows that nobody asked for");
        true
    }

    /// Pages and slots ran out: at most as many as all sequences could hold without sharing.
    fn check_shortage(&mut self, error: &EngineError, batch: &[(SequenceId, Vec<u32>, Part)]) {
        match error {
            EngineError::OutOfPages { needed, free, .. } => {
                assert!(needed > free, "{error}");
                self.seen.insert("out of pages");
            }
            EngineError::OutOfStateSlots { .. } => {
                let held: usize = self.live.iter().map(|id| 1 + self.windows.get(id).unwrap_or(&0)).sum();
                let asked: usize = batch.iter().map(|(_, t, p)| if p.window { t.len() } else { 1 }).sum();
                assert!(held + asked > self.setup.slots(), "{held} held, {asked} asked: {error}");
                self.seen.insert("out of slots");
            }
            _ => panic!("{error}"),
        }
    }

    pub fn fault(&mut self, fault: Fault, parts: &[Part]) {
        let batch = self.batch(parts);
        if batch.is_empty() {
            return;
        }
        let before = self.kept();
        let slots = self.engine.free_state_slots();
        self.switch.arm(fault);
        match self.engine.step(&chunks(&batch)).map(|_| ()) {
            Err(EngineError::Runtime(RuntimeError::Device { .. })) => {
                assert!(!self.switch.is_armed());
                self.seen.insert(fault.name());
            }
            Err(error) => self.check_shortage(&error, &batch),
            // Only a step without copies of pages gets through.
            Ok(()) => {
                assert_eq!(fault, Fault::CopyPage);
                self.switch.disarm();
                for (id, added, part) in &batch {
                    if part.window {
                        self.windows.insert(*id, added.len());
                    }
                }
                return;
            }
        }
        self.switch.disarm();
        assert_eq!(self.kept(), before, "{fault:?}");
        // Old checkpoints may have made room for the step; nothing else may be gone or kept.
        assert!(self.engine.free_state_slots() >= slots, "{fault:?}");
    }

    pub fn commit(&mut self, id: SequenceId, share: usize) {
        let Some(rows) = self.windows.remove(&id) else { return };
        let keep = (rows * share).div_ceil(16);
        let want = self.engine.tokens(id).unwrap()[..self.len(id) - rows + keep].to_vec();
        self.engine.commit(id, keep).unwrap();
        assert_eq!(self.engine.tokens(id).unwrap(), want);
        let kept = if keep == 0 { "none kept" } else { "some kept" };
        self.seen.insert(if keep == rows { "all kept" } else { kept });
    }

    pub fn fork(&mut self, id: SequenceId) {
        if self.live.len() < LIVE && !self.windows.contains_key(&id) {
            self.live.push(self.engine.fork(id).unwrap());
            self.seen.insert("fork");
        }
    }

    fn truncate(&mut self, id: SequenceId, share: usize, size: usize) {
        if self.windows.contains_key(&id) {
            return;
        }
        let all = self.engine.tokens(id).unwrap().to_vec();
        let len = all.len() * share / 16;
        let kept = self.engine.truncate(id, len).unwrap();
        assert!(kept <= len && (kept == len || self.family.recurrent), "{kept} kept, {len} asked");
        assert!(kept == len || kept.is_multiple_of(self.setup.every), "{kept} is a checkpoint");
        assert_eq!(self.engine.tokens(id).unwrap(), &all[..kept]);
        self.seen.insert(if kept > 0 && kept < len { "truncate to a checkpoint" } else { "truncate" });
        let part = Part { which: 0, n: size, window: false, all: true };
        for piece in all[kept..].chunks(size) {
            if !self.append(&[(id, piece.to_vec(), part)]) {
                break;
            }
        }
    }

    fn release(&mut self, which: usize) {
        let id = self.live.remove(which % self.live.len());
        self.windows.remove(&id);
        self.engine.release(id).unwrap();
        assert!(matches!(self.engine.tokens(id), Err(EngineError::UnknownSequence(_))));
        if self.live.is_empty() {
            self.live.push(self.engine.new_sequence());
        }
    }

    /// A new sequence of a snapshot, if there are pages and slots for it.
    fn take_in(&mut self, snapshot: &Snapshot) -> Option<SequenceId> {
        let before = self.kept();
        match self.engine.restore(snapshot) {
            Ok(id) => {
                assert_eq!(self.engine.tokens(id).unwrap(), snapshot.tokens());
                if snapshot.tokens().len() > 128 {
                    self.seen.insert("restore more than 128 tokens");
                }
                Some(id)
            }
            Err(error) => {
                assert_eq!(self.kept(), before, "{error}");
                let one = Part { which: 0, n: 1, window: false, all: true };
                self.check_shortage(&error, &[(self.live[0], vec![1], one)]);
                None
            }
        }
    }

    /// Appends to a restored sequence: its next rows read all that was restored.
    fn go_on(&mut self, id: SequenceId, n: usize) {
        self.seed += 1;
        let n = n.min(self.setup.context - self.len(id));
        if n > 0 {
            self.append(&[(id, ids(n, self.seed), Part { which: 0, n, window: false, all: true })]);
        }
    }

    pub fn restore(&mut self, id: SequenceId, way: Way, n: usize) {
        if self.windows.contains_key(&id) {
            return;
        }
        let mut snapshot = self.engine.snapshot(id).unwrap();
        if way == Way::File {
            snapshot = self.through_file(&snapshot);
        }
        let Some(new) = self.take_in(&snapshot) else { return };
        self.seen.insert(if way == Way::File { "restore from a file" } else { "restore" });
        self.live.push(new);
        if self.live.len() > LIVE {
            self.release(0);
        }
        self.go_on(new, n);
    }

    fn through_file(&self, snapshot: &Snapshot) -> Snapshot {
        let path = self.folder.path().join("session");
        snapshot.save(&path).unwrap();
        Snapshot::open(&path).unwrap()
    }

    /// All sequences into a new engine, where they share nothing, so that not all of them may fit.
    pub fn reload(&mut self, which: usize, n: usize) {
        for id in self.live.clone() {
            self.commit(id, 16);
        }
        let old: Vec<Snapshot> = self.live.iter().map(|&id| self.engine.snapshot(id).unwrap()).collect();
        let old: Vec<Snapshot> = old.iter().map(|snapshot| self.through_file(snapshot)).collect();
        self.engine = self.setup.engine(&self.family.model, &self.switch);
        self.live = vec![self.engine.new_sequence()];
        for snapshot in &old {
            let new = self.take_in(snapshot);
            self.live.extend(new);
        }
        self.release(0);
        self.seen.insert("reload");
        self.go_on(self.pick(which), n);
    }

    /// A device that fails in the middle of a snapshot or of a restore.
    pub fn faulty_restore(&mut self, id: SequenceId, fault: Fault, passes: usize) {
        if self.windows.contains_key(&id) {
            return;
        }
        let before = self.kept();
        let slots = self.engine.free_state_slots();
        let mut snapshot = None;
        if fault == Fault::WriteState {
            snapshot = Some(self.engine.snapshot(id).unwrap());
        }
        self.switch.arm_after(fault, passes);
        let result = match &snapshot {
            Some(snapshot) => self.engine.restore(snapshot).map(Some),
            None => self.engine.snapshot(id).map(|_| None),
        };
        match result {
            // There were fewer units.
            Ok(new) => new.into_iter().for_each(|id| self.engine.release(id).unwrap()),
            Err(EngineError::Runtime(RuntimeError::Device { .. })) => {
                assert!(!self.switch.is_armed());
                self.seen.insert(fault.name());
            }
            Err(error) => {
                let one = Part { which: 0, n: 1, window: false, all: true };
                self.check_shortage(&error, &[(id, vec![1], one)]);
            }
        }
        self.switch.disarm();
        assert_eq!(self.kept(), before, "{fault:?}");
        assert!(self.engine.free_state_slots() >= slots, "{fault:?}");
    }

    /// Refusals change nothing; what follows in the schedule shows that the sequence is still exact.
    fn refused(&mut self, id: SequenceId) {
        let (before, slots, len) = (self.kept(), self.engine.free_state_slots(), self.len(id));
        let one = |tokens| Chunk { sequence: id, tokens, outs: Outs::Last, window: false };
        let e = &mut self.engine;
        if let Some(&rows) = self.windows.get(&id) {
            assert!(matches!(e.step(&[one(&[1])]), Err(EngineError::OpenWindow)));
            let window = Chunk { window: true, ..one(&[1, 2]) };
            assert!(matches!(e.step(&[window]), Err(EngineError::OpenWindow)));
            assert!(matches!(e.fork(id), Err(EngineError::OpenWindow)));
            assert!(matches!(e.snapshot(id), Err(EngineError::OpenWindow)));
            assert!(matches!(e.truncate(id, len - 1), Err(EngineError::OpenWindow)));
            assert!(matches!(e.commit(id, rows + 1), Err(EngineError::BadTruncation { .. })));
            self.seen.insert("refused in a window");
        } else {
            assert!(matches!(e.commit(id, 0), Err(EngineError::NoWindow)));
            assert!(matches!(e.truncate(id, len + 1), Err(EngineError::BadTruncation { .. })));
            assert!(matches!(e.step(&[one(&[1_000_000])]), Err(EngineError::TokenOutOfRange { .. })));
            assert!(matches!(e.step(&[one(&[])]), Err(EngineError::EmptyStep)));
            let twice = e.step(&[one(&[]), one(&[2])]);
            assert!(matches!(twice, Err(EngineError::SequenceTwice)));
            let long = vec![1; self.setup.context + 1 - len];
            assert!(matches!(e.step(&[one(&long)]), Err(EngineError::ContextOverflow { .. })));
            self.seen.insert("refused");
        }
        assert_eq!((self.kept(), self.engine.free_state_slots()), (before, slots));
    }

    pub fn run(&mut self, moves: &[Move]) {
        for m in moves {
            match m {
                Move::Step(parts) => self.step(parts),
                Move::Fault(fault, parts) => self.fault(*fault, parts),
                Move::Commit(which, share) => self.commit(self.pick(*which), *share),
                Move::Fork(which) => self.fork(self.pick(*which)),
                Move::Truncate(which, share, size) => self.truncate(self.pick(*which), *share, *size),
                Move::Release(which) => self.release(*which),
                Move::Restore(which, Way::Reload, n) => self.reload(*which, *n),
                Move::Restore(which, way, n) => self.restore(self.pick(*which), *way, *n),
                Move::FaultyRestore(which, fault, n) => self.faulty_restore(self.pick(*which), *fault, *n),
                Move::Refused(which) => self.refused(self.pick(*which)),
            }
        }
        self.live.drain(..).for_each(|id| self.engine.release(id).unwrap());
        let windows = self.setup.engine(&self.family.model, &Switch::default()).free_window_pages();
        assert_eq!(self.engine.free_window_pages(), windows, "every page of a window is given back");
        assert_eq!(self.engine.free_pages(), self.setup.pages(), "every page is given back");
        if self.family.recurrent {
            assert_eq!(self.engine.free_state_slots(), self.setup.slots(), "every slot is given back");
        }
    }
}

fn chunks(batch: &[(SequenceId, Vec<u32>, Part)]) -> Vec<Chunk<'_>> {
    let outs = |part: &Part| if part.all || part.window { Outs::All } else { Outs::Last };
    batch.iter().map(|(s, t, p)| Chunk { sequence: *s, tokens: t, outs: outs(p), window: p.window }).collect()
}
