//! State under random schedules and under failures: whatever chunks, decoding, windows, forks, truncations and
//! failed steps led to a sequence, every row of its logits has the bits of a straight run of the same tokens,
//! and in the end every page and every slot of recurrent state is free again.
//! Reference: the same tokens in one step, alone, in an engine that did nothing else.
//! The trained model's test needs `MINFER_NANO_NEXT_DIR`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use common::flaky::{Fault, Switch};
use common::schedule::{CONTEXT, LIVE, Move, Part, Setup, Straight, bits, hybrid, ids, schedule, setup};
use common::tiny::Tiny;
use common::{cpu, open, path_from_env};
use minfer_cpu::Isa;
use minfer_engine::{Checkpoint, Chunk, Engine, EngineError, EngineOptions, KvFormat, Outs, SequenceId};
use minfer_format::BlockType;
use minfer_runtime::RuntimeError;
use proptest::prelude::*;

/// A schedule being played.
struct Play<'a> {
    setup: Setup,
    engine: Engine,
    switch: Switch,
    straight: &'a mut Straight,
    live: Vec<SequenceId>,
    /// Rows of open windows.
    windows: HashMap<SequenceId, usize>,
    seed: u64,
    /// Rows that were compared, and moves that came to something, for the check that schedules reach far.
    compared: usize,
    seen: HashSet<&'static str>,
}

/// What must not change when something is refused or fails.
type Snapshot = (Vec<Vec<u32>>, usize);

impl Play<'_> {
    fn new<'a>(model: &Checkpoint, setup: Setup, straight: &'a mut Straight) -> Play<'a> {
        let switch = Switch::default();
        let mut engine = setup.engine(model, &switch);
        let live = vec![engine.new_sequence()];
        let (windows, seen) = (HashMap::new(), HashSet::new());
        Play { setup, engine, switch, straight, live, windows, seed: 0, compared: 0, seen }
    }

    fn recurrent(&self) -> bool {
        self.straight.engine.free_state_slots() > 0
    }

    fn pick(&self, which: usize) -> SequenceId {
        self.live[which % self.live.len()]
    }

    fn len(&self, id: SequenceId) -> usize {
        self.engine.tokens(id).unwrap().len()
    }

    fn snapshot(&self) -> Snapshot {
        let all = self.live.iter().map(|&id| self.engine.tokens(id).unwrap().to_vec()).collect();
        (all, self.engine.free_pages())
    }

    /// The parts that can be asked for: each sequence once, none with a window, new tokens that fit.
    fn batch(&mut self, parts: &[Part]) -> Vec<(SequenceId, Vec<u32>, Part)> {
        let mut batch: Vec<(SequenceId, Vec<u32>, Part)> = Vec::new();
        for &part in parts {
            let id = self.pick(part.which);
            let n = part.n.min(CONTEXT - self.len(id));
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
    fn append(&mut self, batch: &[(SequenceId, Vec<u32>, Part)]) -> bool {
        if batch.is_empty() {
            return true;
        }
        let before = self.snapshot();
        let chunks = chunks(batch);
        let rows: Vec<Vec<u32>> = match self.engine.step(&chunks) {
            Ok(logits) => (0..logits.len()).map(|i| bits(logits.row(i))).collect(),
            Err(error) => {
                assert_eq!(self.snapshot(), before, "{error}");
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

    fn fault(&mut self, fault: Fault, parts: &[Part]) {
        let batch = self.batch(parts);
        if batch.is_empty() {
            return;
        }
        let before = self.snapshot();
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
        assert_eq!(self.snapshot(), before, "{fault:?}");
        // Old checkpoints may have made room for the step; nothing else may be gone or kept.
        assert!(self.engine.free_state_slots() >= slots, "{fault:?}");
    }

    fn commit(&mut self, id: SequenceId, share: usize) {
        let Some(rows) = self.windows.remove(&id) else { return };
        let keep = (rows * share).div_ceil(16);
        let want = self.engine.tokens(id).unwrap()[..self.len(id) - rows + keep].to_vec();
        self.engine.commit(id, keep).unwrap();
        assert_eq!(self.engine.tokens(id).unwrap(), want);
        let kept = if keep == 0 { "none kept" } else { "some kept" };
        self.seen.insert(if keep == rows { "all kept" } else { kept });
    }

    fn fork(&mut self, id: SequenceId) {
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
        assert!(kept <= len && (kept == len || self.recurrent()), "{kept} kept, {len} asked");
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

    /// Refusals change nothing; what follows in the schedule shows that the sequence is still exact.
    fn refused(&mut self, id: SequenceId) {
        let (before, slots, len) = (self.snapshot(), self.engine.free_state_slots(), self.len(id));
        let one = |tokens| Chunk { sequence: id, tokens, outs: Outs::Last, window: false };
        let e = &mut self.engine;
        if let Some(&rows) = self.windows.get(&id) {
            assert!(matches!(e.step(&[one(&[1])]), Err(EngineError::OpenWindow)));
            let window = Chunk { window: true, ..one(&[1, 2]) };
            assert!(matches!(e.step(&[window]), Err(EngineError::OpenWindow)));
            assert!(matches!(e.fork(id), Err(EngineError::OpenWindow)));
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
            let long = vec![1; CONTEXT + 1 - len];
            assert!(matches!(e.step(&[one(&long)]), Err(EngineError::ContextOverflow { .. })));
            self.seen.insert("refused");
        }
        assert_eq!((self.snapshot(), self.engine.free_state_slots()), (before, slots));
    }

    fn run(&mut self, moves: &[Move]) {
        for m in moves {
            match m {
                Move::Step(parts) => self.step(parts),
                Move::Fault(fault, parts) => self.fault(*fault, parts),
                Move::Commit(which, share) => self.commit(self.pick(*which), *share),
                Move::Fork(which) => self.fork(self.pick(*which)),
                Move::Truncate(which, share, size) => self.truncate(self.pick(*which), *share, *size),
                Move::Release(which) => self.release(*which),
                Move::Refused(which) => self.refused(self.pick(*which)),
            }
        }
        let all = (self.setup.sequences * CONTEXT.div_ceil(64), self.setup.slots());
        self.live.drain(..).for_each(|id| self.engine.release(id).unwrap());
        assert_eq!(self.engine.free_pages(), all.0, "every page is given back");
        if self.recurrent() {
            assert_eq!(self.engine.free_state_slots(), all.1, "every slot is given back");
        }
    }
}

fn chunks(batch: &[(SequenceId, Vec<u32>, Part)]) -> Vec<Chunk<'_>> {
    let outs = |part: &Part| if part.all || part.window { Outs::All } else { Outs::Last };
    batch.iter().map(|(s, t, p)| Chunk { sequence: *s, tokens: t, outs: outs(p), window: p.window }).collect()
}

/// Plays 24 schedules, or a few times as many, until together they reached everything in `reached`.
fn play_all(model: &Checkpoint, reached: &[&'static str]) {
    let seen = Mutex::new((HashSet::new(), 0));
    // One for each format of keys and values, for all schedules: they draw from the same tokens.
    let straight = [KvFormat::F32, KvFormat::F16].map(|kv| Mutex::new(Straight::new(model, kv)));
    let config = ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() };
    // Rare combinations may need another round of schedules.
    for _ in 0..8 {
        proptest!(config.clone(), |(setup in setup(), moves in schedule())| {
            let straight = &straight[usize::from(setup.kv == KvFormat::F16)];
            // A failed case leaves a poisoned lock behind; its rows are right all the same.
            let mut straight = straight.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let mut play = Play::new(model, setup, &mut straight);
            play.run(&moves);
            let mut seen = seen.lock().unwrap();
            seen.0.extend(play.seen);
            seen.1 += play.compared;
        });
        if reached.iter().all(|what| seen.lock().unwrap().0.contains(what)) {
            break;
        }
    }
    let (seen, compared) = seen.into_inner().unwrap();
    println!("{compared} rows compared; reached {seen:?}");
    assert!(compared > 500, "{compared} rows compared");
    for what in reached {
        assert!(seen.contains(what), "no schedule reached '{what}'");
    }
}

const REACHED: [&str; 12] = [
    "step",
    "window",
    "all kept",
    "none kept",
    "some kept",
    "fork",
    "truncate",
    "refused",
    "refused in a window",
    "before running",
    "halfway",
    "after running",
];

#[test]
fn random_schedules_of_a_hybrid() {
    play_all(&hybrid(), &[&REACHED[..], &["truncate to a checkpoint"]].concat());
}

#[test]
fn random_schedules_of_a_dense_model() {
    play_all(&Tiny::new(BlockType::F32, false).open(), &REACHED);
}

/// Every fault, in a plain step and in a window, on a forked sequence whose next token needs a copy of a page:
/// pages and slots are as before, to the number, and the next step is exact.
#[test]
fn a_failed_step_changes_nothing() {
    let setup = Setup { kv: KvFormat::F16, every: 8, checkpoints: 64, sequences: 4 };
    for model in [hybrid(), Tiny::new(BlockType::F32, false).open()] {
        let mut straight = Straight::new(&model, setup.kv);
        for (fault, window) in Fault::ALL.into_iter().flat_map(|f| [(f, false), (f, true)]) {
            let mut play = Play::new(&model, setup, &mut straight);
            let parent = play.live[0];
            let plain = Part { which: 0, n: 1, window: false, all: true };
            assert!(play.append(&[(parent, ids(70, 1), plain)]));
            play.fork(parent);
            let child = play.live[1];
            let before = (play.snapshot(), play.engine.free_state_slots());
            play.fault(fault, &[Part { which: 1, n: 8, window, all: true }, Part { n: 20, ..plain }]);
            assert!(play.seen.contains(fault.name()), "{fault:?} happened");
            assert_eq!((play.snapshot(), play.engine.free_state_slots()), before, "{fault:?}");
            let guesses = Part { window, ..plain };
            assert!(play.append(&[(child, ids(8, 2), guesses), (parent, ids(30, 3), plain)]));
            play.commit(child, 7);
            assert!(play.append(&[(parent, ids(9, 4), plain), (child, ids(9, 5), plain)]));
            play.run(&[]);
        }
    }
}

/// A sequence may be in a step without tokens, also as a window.
#[test]
fn a_window_without_tokens() {
    let setup = Setup { kv: KvFormat::F32, every: 8, checkpoints: 2, sequences: 2 };
    for model in [hybrid(), Tiny::new(BlockType::F32, false).open()] {
        let mut straight = Straight::new(&model, setup.kv);
        let mut play = Play::new(&model, setup, &mut straight);
        play.live.push(play.engine.new_sequence());
        let (a, b) = (play.live[0], play.live[1]);
        let plain = Part { which: 0, n: 1, window: false, all: true };
        let guesses = Part { window: true, ..plain };
        assert!(play.append(&[(a, ids(11, 1), plain)]));
        assert!(play.append(&[(a, vec![], guesses), (b, ids(5, 2), plain)]));
        play.commit(a, 0);
        assert!(play.append(&[(a, ids(5, 3), plain), (b, ids(5, 4), plain)]));
        play.run(&[]);
    }
}

/// Two long chunks of one step want more checkpoints than there is room for: both still get their states.
#[test]
fn checkpoints_leave_room_for_states() {
    let setup = Setup { kv: KvFormat::F32, every: 8, checkpoints: 16, sequences: 4 };
    let mut straight = Straight::new(&hybrid(), setup.kv);
    let mut play = Play::new(&hybrid(), setup, &mut straight);
    let plain = Part { which: 0, n: 1, window: false, all: false };
    (1..4).for_each(|_| play.live.push(play.engine.new_sequence()));
    let batch: Vec<_> = play.live.iter().zip(1..).map(|(&id, seed)| (id, ids(120, seed), plain)).collect();
    assert!(play.append(&batch));
    play.run(&[]);
}

/// Edits the prompt at `k`, appends the rest, and returns how many tokens were computed again. With a straight
/// run the new rows are compared.
fn edit(
    engine: &mut Engine,
    straight: Option<&mut Straight>,
    prompt: &[u32],
    k: usize,
    chunk: usize,
) -> usize {
    let id = engine.new_sequence();
    for tokens in prompt.chunks(chunk) {
        engine.step(&[Chunk { sequence: id, tokens, outs: Outs::None, window: false }]).unwrap();
    }
    let mut edited = prompt.to_vec();
    edited[k] = (edited[k] + 1) % 131;
    let kept = engine.truncate(id, k).unwrap();
    let mut last = Vec::new();
    for tokens in edited[kept..].chunks(chunk) {
        let out = engine.step(&[Chunk { sequence: id, tokens, outs: Outs::Last, window: false }]).unwrap();
        last = bits(out.row(0));
    }
    if let Some(straight) = straight {
        assert!(last == straight.row(&edited), "edit at {k}");
    }
    engine.release(id).unwrap();
    prompt.len() - kept
}

/// After a prompt of n tokens and an edit at token k at most n - k + 16 tokens are computed again, with
/// checkpoints every 16 tokens, also while other sequences' checkpoints fill all slots.
#[test]
fn an_edit_reuses_the_prefix() {
    let model = hybrid();
    let setup = Setup { kv: KvFormat::F32, every: 16, checkpoints: 12, sequences: 3 };
    let mut engine = setup.engine(&model, &Switch::default());
    let mut straight = Straight::new(&model, setup.kv);
    let prompt = ids(150, 9);
    let n = prompt.len();
    for crowded in [false, true] {
        for _ in 0..if crowded { 2 } else { 0 } {
            let id = engine.new_sequence();
            let other = ids(CONTEXT, 77);
            engine.step(&[Chunk { sequence: id, tokens: &other, outs: Outs::None, window: false }]).unwrap();
        }
        for chunk in [n, 40, 1] {
            for k in [1, 15, 16, 17, 90, 149] {
                let again = edit(&mut engine, Some(&mut straight), &prompt, k, chunk);
                println!("crowded: {crowded}, chunks of {chunk}: n = {n}, k = {k}: {again} computed again");
                assert!(again <= n - k + setup.every, "{again} computed again");
            }
        }
    }
}

/// Text that windows brought can be gone back into as well.
#[test]
fn windows_leave_checkpoints() {
    let setup = Setup { kv: KvFormat::F32, every: 16, checkpoints: 12, sequences: 2 };
    let mut straight = Straight::new(&hybrid(), setup.kv);
    let mut play = Play::new(&hybrid(), setup, &mut straight);
    let id = play.live[0];
    let guesses = Part { which: 0, n: 4, window: true, all: true };
    for seed in 0..30 {
        assert!(play.append(&[(id, ids(4, seed + 1), guesses)]));
        play.commit(id, 12);
    }
    assert_eq!(play.len(id), 90);
    assert_eq!(play.engine.truncate(id, 70).unwrap(), 64);
    assert!(play.append(&[(id, ids(5, 50), Part { window: false, ..guesses })]));
    play.run(&[]);
}

/// At most n - k + 64 tokens again, checkpoints every 64 tokens as by default; the logits after the edit have the
/// bits of a straight run.
#[test]
#[ignore = "needs MINFER_NANO_NEXT_DIR"]
fn an_edit_of_a_trained_models_prompt() {
    let model = Checkpoint::open(&path_from_env("MINFER_NANO_NEXT_DIR")).unwrap();
    let options = || EngineOptions {
        context: Some(512),
        max_rows: 512,
        max_outs: 512,
        ..EngineOptions::new(cpu(2, Isa::detect()))
    };
    let mut engine = open(&model, options());
    let mut straight = Straight { engine: open(&model, options()), rows: HashMap::new() };
    let prompt = ids(400, 3);
    let n = prompt.len();
    for k in [1, 63, 64, 65, 200, 399] {
        let again = edit(&mut engine, Some(&mut straight), &prompt, k, 256);
        println!("n = {n}, k = {k}: {again} computed again, {} allowed", n - k + 64);
        assert!(again <= n - k + 64, "k = {k}: {again} computed again");
    }
}
