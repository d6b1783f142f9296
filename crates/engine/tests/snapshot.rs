//! Snapshots and session files: what comes back is what was there, checkpoints included; and what cannot be
//! restored is refused with the file's name and a remedy, before anything changes. How restored sequences go on
//! is in `state.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::flaky::Switch;
use common::schedule::{Family, Setup, bits, ids};
use common::tiny::Tiny;
use minfer_engine::{Chunk, Engine, EngineError, KvFormat, Outs, SequenceId, SessionError, Snapshot};
use minfer_format::BlockType;

fn engine(family: &Family, setup: Setup) -> Engine {
    setup.engine(&family.model, &Switch::default())
}

/// Appends tokens, and returns the bits of all their rows.
fn append(engine: &mut Engine, sequence: SequenceId, tokens: &[u32]) -> Vec<Vec<u32>> {
    let out = engine.step(&[Chunk { sequence, tokens, outs: Outs::All, window: false }]).unwrap();
    (0..out.len()).map(|i| bits(out.row(i))).collect()
}

fn filled(engine: &mut Engine, tokens: &[u32]) -> SequenceId {
    let sequence = engine.new_sequence();
    append(engine, sequence, tokens);
    sequence
}

fn free(engine: &Engine) -> (usize, usize) {
    (engine.free_pages(), engine.free_state_slots())
}

/// In another engine, as in another process, a restored sequence can be taken back to wherever the first one
/// can, and goes on from there with the same bits. Its own state being a checkpoint or not makes no difference.
#[test]
fn a_restored_sequence_goes_back_as_far() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    for family in Family::all() {
        let setup = family.setup(16, 64, 4);
        let mut first = engine(&family, setup);
        for n in [family.context - 16, family.context - 11] {
            let old = filled(&mut first, &ids(n, 1));
            first.snapshot(old).unwrap().save(&path).unwrap();
            let mut second = engine(&family, setup);
            let all = free(&second);
            let new = second.restore(&Snapshot::open(&path).unwrap()).unwrap();
            let used = |(pages, slots): (usize, usize), now: (usize, usize)| (pages - now.0, slots - now.1);
            assert_eq!(
                used(all, free(&second)),
                used(all, free(&first)),
                "{}: as many as before",
                family.name
            );
            for len in [0, 1, 15, 16, 40, 64, 100, n - 1, n] {
                let (a, b) = (first.fork(old).unwrap(), second.fork(new).unwrap());
                let kept = first.truncate(a, len).unwrap();
                assert_eq!(second.truncate(b, len).unwrap(), kept, "{}: {len}", family.name);
                let next = ids(9, len as u64 + 2);
                assert!(
                    append(&mut first, a, &next) == append(&mut second, b, &next),
                    "{}: {len}",
                    family.name
                );
                first.release(a).unwrap();
                second.release(b).unwrap();
            }
            first.release(old).unwrap();
            second.release(new).unwrap();
            assert_eq!(free(&second), all);
        }
        assert_eq!((first.reuse_counters().snapshots, first.reuse_counters().restores), (2, 0));
    }
}

/// An empty sequence, and one that ends with a page.
#[test]
fn short_sequences() {
    for family in Family::all() {
        let mut engine = engine(&family, family.setup(64, 4, 3));
        for n in [0, 1, 64, 65] {
            let before = free(&engine);
            let old = engine.new_sequence();
            if n > 0 {
                append(&mut engine, old, &ids(n, 1));
            }
            let snapshot = engine.snapshot(old).unwrap();
            let new = engine.restore(&snapshot).unwrap();
            assert_eq!(engine.tokens(new).unwrap().len(), n);
            let next = ids(5, 2);
            assert!(
                append(&mut engine, old, &next) == append(&mut engine, new, &next),
                "{}: {n}",
                family.name
            );
            engine.release(old).unwrap();
            engine.release(new).unwrap();
            assert_eq!(free(&engine), before, "{}: {n}", family.name);
        }
    }
}

/// Where there is room for fewer checkpoints, the latest come back; and older ones of others make room.
#[test]
fn the_oldest_checkpoints_are_left_out() {
    for family in Family::all().into_iter().filter(|f| f.recurrent) {
        let mut many = engine(&family, family.setup(16, 64, 2));
        let old = filled(&mut many, &ids(130, 1));
        let snapshot = many.snapshot(old).unwrap();
        for (checkpoints, busy) in [(0, false), (2, false), (2, true)] {
            let mut few = engine(&family, family.setup(16, checkpoints, 2));
            let all = free(&few);
            if busy {
                let other = filled(&mut few, &ids(100, 2));
                few.truncate(other, 100).unwrap();
            }
            let new = few.restore(&snapshot).unwrap();
            for (len, kept) in [(130, 130), (129, 128), (127, 112), (111, 0)] {
                let fork = few.fork(new).unwrap();
                let want = if checkpoints == 0 && len < 130 { 0 } else { kept };
                assert_eq!(few.truncate(fork, len).unwrap(), want, "{}: {checkpoints}, {len}", family.name);
                few.release(fork).unwrap();
            }
            let next = ids(5, 3);
            let again = many.restore(&snapshot).unwrap();
            assert!(append(&mut few, new, &next) == append(&mut many, again, &next), "{}", family.name);
            many.release(again).unwrap();
            few.release(new).unwrap();
            assert!(busy || free(&few) == all, "{}", family.name);
        }
    }
}

/// What an engine says about a session file of another one, and that it changes nothing.
fn refused(engine: &mut Engine, path: &std::path::Path) -> EngineError {
    let live = filled(engine, &ids(20, 8));
    let before = free(engine);
    let error = engine.restore(&Snapshot::open(path).unwrap()).unwrap_err();
    assert_eq!(free(engine), before, "{error}");
    assert_eq!(engine.tokens(live).unwrap(), ids(20, 8));
    assert_eq!(engine.reuse_counters().restores, 0);
    engine.release(live).unwrap();
    error
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    let named = format!("the session file {}", path.display());
    for family in Family::all() {
        let setup = family.setup(16, 4, 2);
        let mut first = engine(&family, setup);
        let old = filled(&mut first, &ids(150, 1));
        first.snapshot(old).unwrap().save(&path).unwrap();

        let error = refused(&mut engine(&family, Setup { kv: KvFormat::F32, ..setup }), &path);
        let want = format!(
            "{named} keeps keys and values as f16, this engine as f32: open the engine with --kv f16"
        );
        assert!(error.to_string().starts_with(&want), "{error}");

        let error = refused(&mut engine(&family, Setup { context: 140, ..setup }), &path);
        assert!(
            matches!(error, EngineError::ContextOverflow { have: 0, add: 150, limit: 140, .. }),
            "{error}"
        );

        // The pages of one sequence and a half.
        let mut full = engine(&family, Setup { context: 192, sequences: 1, ..setup });
        let error = refused(&mut full, &path);
        assert!(matches!(error, EngineError::OutOfPages { needed: 3, free: 2, .. }), "{error}");

        let others = Family::all().into_iter().filter(|f| f.name != family.name);
        for other in others {
            let error = refused(&mut engine(&other, other.setup(16, 4, 2)), &path);
            assert!(matches!(error, EngineError::Session(SessionError::OtherModel { .. })), "{error}");
            assert!(error.to_string().starts_with(&format!("{named} belongs to another model (")), "{error}");
        }
    }
}

/// A model of the same sizes and names whose weights differ is another model.
#[test]
fn other_weights_are_another_model() {
    let family = Family::dense();
    let setup = family.setup(16, 4, 2);
    let mut first = engine(&family, setup);
    let old = filled(&mut first, &ids(30, 1));
    let snapshot = first.snapshot(old).unwrap();
    let mut tiny = Tiny::new(BlockType::F32, false);
    let weight = &mut tiny.tensors.iter_mut().find(|t| t.0 == "blk.1.attn_v.weight").unwrap().3;
    weight[2] ^= 1;
    let other = Family { model: tiny.open(), ..Family::dense() };
    let error = engine(&other, setup).restore(&snapshot).unwrap_err();
    assert!(matches!(error, EngineError::Session(SessionError::OtherModel { .. })), "{error}");
    // The same weights opened again are the same model.
    assert!(engine(&Family::dense(), setup).restore(&snapshot).is_ok());
}

/// Slots that windows hold are not taken away: a restore without a slot is refused.
#[test]
fn no_slot_is_left() {
    let family = Family::qwen4_exp();
    let setup = family.setup(16, 0, 4);
    let mut engine = engine(&family, setup);
    let old = filled(&mut engine, &ids(20, 1));
    let snapshot = engine.snapshot(old).unwrap();
    while engine.free_state_slots() > 0 {
        let sequence = engine.new_sequence();
        let tokens = ids(engine.free_state_slots().min(8), 2);
        engine.step(&[Chunk { sequence, tokens: &tokens, outs: Outs::None, window: true }]).unwrap();
    }
    let before = free(&engine);
    let error = engine.restore(&snapshot).unwrap_err();
    assert!(matches!(error, EngineError::OutOfStateSlots { .. }), "{error}");
    assert_eq!(free(&engine), before);
}
