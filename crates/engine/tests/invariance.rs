//! Row invariance: a token's logits have the same bits whatever else is in the batch, however the prompt is
//! cut, on any number of threads, on either instruction set, and after fork and truncate.
//! Reference: the whole prompt in one step, alone, on one thread.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::tiny::{Tiny, tokens};
use common::{bits, cpu, logits_in_chunks, open};
use minfer_cpu::Isa;
use minfer_engine::{Checkpoint, Chunk, Engine, EngineOptions, KvFormat, Outs, SequenceId};
use minfer_format::BlockType;
use proptest::prelude::*;

/// Longer than two pages, so that tiles, pages and chunks all have borders inside.
const LENGTH: usize = 150;

fn options(threads: usize, isa: Isa, kv_format: KvFormat) -> EngineOptions {
    EngineOptions {
        kv_format,
        context: Some(320),
        sequences: 8,
        max_rows: 1024,
        max_outs: 512,
        ..EngineOptions::new(cpu(threads, isa))
    }
}

/// The prompt's logits while seven sequences of other lengths are in the same steps.
fn batched(engine: &mut Engine, prompt: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let main = engine.new_sequence();
    let others: Vec<(SequenceId, Vec<u32>)> =
        (1..8).map(|i| (engine.new_sequence(), tokens(17 * i, 100 + i as u64))).collect();
    let mut logits = Vec::new();
    let steps = prompt.len().div_ceil(chunk);
    for step in 0..steps {
        let part = |t: &[u32]| {
            let size = t.len().div_ceil(steps);
            (step * size).min(t.len())..((step + 1) * size).min(t.len())
        };
        let mine = &prompt[step * chunk..((step + 1) * chunk).min(prompt.len())];
        let mut chunks: Vec<Chunk<'_>> = others
            .iter()
            .map(|(sequence, t)| Chunk {
                sequence: *sequence,
                tokens: &t[part(t)],
                outs: Outs::None,
                window: false,
            })
            .collect();
        chunks.insert(3, Chunk { sequence: main, tokens: mine, outs: Outs::All, window: false });
        let out = engine.step(&chunks).unwrap();
        logits.extend((0..out.len()).map(|i| out.row(i).to_vec()));
    }
    for (sequence, _) in others {
        engine.release(sequence).unwrap();
    }
    engine.release(main).unwrap();
    logits
}

/// The prompt's logits with a detour: a fork that goes another way, and rows that are taken back.
fn after_fork_and_truncate(engine: &mut Engine, prompt: &[u32]) -> Vec<Vec<f32>> {
    let parent = engine.new_sequence();
    let mut logits = Vec::new();
    let mut add = |engine: &mut Engine, sequence, tokens: &[u32], keep: bool| {
        let out = engine.step(&[Chunk { sequence, tokens, outs: Outs::All, window: false }]).unwrap();
        if keep {
            logits.extend((0..out.len()).map(|i| out.row(i).to_vec()));
        }
    };
    add(engine, parent, &prompt[..70], true);
    let child = engine.fork(parent).unwrap();
    // Both write to the page that they share; the parent's rows must not reach the child, nor back.
    add(engine, parent, &tokens(30, 5), false);
    add(engine, child, &prompt[70..90], true);
    add(engine, child, &tokens(45, 6), false);
    engine.truncate(child, 90).unwrap();
    let grandchild = engine.fork(child).unwrap();
    engine.release(child).unwrap();
    add(engine, grandchild, &prompt[90..], true);
    engine.release(parent).unwrap();
    engine.release(grandchild).unwrap();
    logits
}

fn check(model: &Checkpoint, kv: KvFormat, name: &str) {
    let prompt = tokens(LENGTH, 1);
    let mut reference = open(model, options(1, Isa::detect(), kv));
    let free = reference.free_pages();
    let want = bits(&logits_in_chunks(&mut reference, &prompt, &[LENGTH]));
    assert!(want.iter().flatten().all(|b| f32::from_bits(*b).is_finite()), "{name}: logits are numbers");
    for threads in [1, 2, 3] {
        let mut engine = open(model, options(threads, Isa::detect(), kv));
        for chunk in [1, 7, 64, LENGTH] {
            let got = bits(&logits_in_chunks(&mut engine, &prompt, &[chunk]));
            assert!(got == want, "{name}, {threads} threads, chunks of {chunk}");
            let got = bits(&batched(&mut engine, &prompt, chunk));
            assert!(got == want, "{name}, {threads} threads, batched, chunks of {chunk}");
        }
        let got = bits(&after_fork_and_truncate(&mut engine, &prompt));
        assert!(got == want, "{name}, {threads} threads, after fork and truncate");
        assert_eq!(engine.free_pages(), free, "{name}: every page is given back");
    }
    let mut scalar = open(model, options(2, Isa::Scalar, kv));
    let got = bits(&logits_in_chunks(&mut scalar, &prompt, &[64]));
    assert!(got == want, "{name}: the scalar definition");
}

fn check_type(ty: BlockType, moe: bool) {
    let model = Tiny::new(ty, moe).open();
    for kv in KvFormat::ALL {
        check(&model, kv, &format!("{ty}{} with {} KV", if moe { " experts" } else { "" }, kv.name()));
    }
}

/// Longer than a range of attention, in steps of few rows whose positions threads share out, and in large ones.
#[test]
fn long_sequences() {
    let model = Tiny::new(BlockType::Q8_0, false).open();
    let prompt = tokens(1100, 5);
    for kv in KvFormat::ALL {
        let options = |threads, isa| EngineOptions {
            context: Some(1200),
            max_rows: 1100,
            max_outs: 1100,
            ..options(threads, isa, kv)
        };
        let mut reference = open(&model, options(1, Isa::detect()));
        let want = bits(&logits_in_chunks(&mut reference, &prompt, &[1100]));
        for (threads, isa, chunks) in [
            (1, Isa::detect(), &[1000, 1][..]),
            (2, Isa::detect(), &[500, 1, 3, 8, 1, 64]),
            (3, Isa::detect(), &[900, 2, 1]),
            (2, Isa::Avx2, &[1024, 1, 5]),
            (2, Isa::Scalar, &[700, 300, 2, 1]),
        ] {
            let mut engine = open(&model, options(threads, isa));
            let got = bits(&logits_in_chunks(&mut engine, &prompt, chunks));
            assert!(got == want, "{} KV, {threads} threads, {}, chunks {chunks:?}", kv.name(), isa.name());
        }
    }
}

#[test]
fn f32_weights() {
    check_type(BlockType::F32, false);
}

#[test]
fn bf16_weights() {
    check_type(BlockType::BF16, false);
}

#[test]
fn q8_0_weights() {
    check_type(BlockType::Q8_0, false);
}

#[test]
fn q4_0_weights() {
    check_type(BlockType::Q4_0, false);
}

#[test]
fn q4_k_weights() {
    check_type(BlockType::Q4_K, false);
}

#[test]
fn q6_k_weights() {
    check_type(BlockType::Q6_K, false);
}

#[test]
fn f32_experts() {
    check_type(BlockType::F32, true);
}

#[test]
fn q8_0_experts() {
    check_type(BlockType::Q8_0, true);
}

#[test]
fn q4_k_experts() {
    check_type(BlockType::Q4_K, true);
}

/// What a random schedule does next.
#[derive(Clone, Debug)]
enum Move {
    /// Up to three sequences add up to this many tokens each, in one step.
    Step(Vec<(usize, usize)>),
    Fork(usize),
    Truncate(usize, usize),
    Release(usize),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        4 => prop::collection::vec((0usize..6, 1usize..70), 1..4).prop_map(Move::Step),
        2 => (0usize..6).prop_map(Move::Fork),
        1 => (0usize..6, 0usize..200).prop_map(|(s, n)| Move::Truncate(s, n)),
        1 => (0usize..6).prop_map(Move::Release),
    ];
    prop::collection::vec(one, 1..14)
}

/// Plays a schedule. Each sequence follows its own fixed stream of tokens (a fork follows its parent's up to
/// there, then a stream of its own); every row of logits must equal the straight run's for the same tokens.
fn play(model: &Checkpoint, kv: KvFormat, threads: usize, moves: &[Move]) {
    let mut engine = open(model, options(threads, Isa::detect(), kv));
    let mut straight = open(model, options(1, Isa::detect(), kv));
    let mut live: Vec<SequenceId> = vec![engine.new_sequence()];
    let mut stream = 0;
    for m in moves {
        match m {
            Move::Step(parts) => {
                let mut batch: Vec<(SequenceId, Vec<u32>)> = Vec::new();
                for &(which, n) in parts {
                    let id = live[which % live.len()];
                    let room = 320 - engine.tokens(id).unwrap().len();
                    stream += 1;
                    let n = n.min(room);
                    if n > 0 && batch.iter().all(|b| b.0 != id) {
                        batch.push((id, tokens(n, stream)));
                    }
                }
                let chunks: Vec<_> = batch
                    .iter()
                    .map(|(s, t)| Chunk { sequence: *s, tokens: t, outs: Outs::All, window: false })
                    .collect();
                if chunks.is_empty() {
                    continue;
                }
                match engine.step(&chunks) {
                    Ok(out) => {
                        let got: Vec<Vec<f32>> = (0..out.len()).map(|i| out.row(i).to_vec()).collect();
                        let mut at = 0;
                        for (id, added) in &batch {
                            let all = engine.tokens(*id).unwrap().to_vec();
                            let want = logits_in_chunks(&mut straight, &all, &[320]);
                            let mine = &got[at..at + added.len()];
                            assert_eq!(bits(mine), bits(&want[all.len() - added.len()..]));
                            at += added.len();
                        }
                    }
                    Err(e) => assert!(matches!(e, minfer_engine::EngineError::OutOfPages { .. }), "{e}"),
                }
            }
            Move::Fork(which) if live.len() < 6 => live.push(engine.fork(live[which % live.len()]).unwrap()),
            Move::Fork(_) => {}
            Move::Truncate(which, len) => {
                let id = live[which % live.len()];
                let len = (*len).min(engine.tokens(id).unwrap().len());
                engine.truncate(id, len).unwrap();
            }
            Move::Release(which) => {
                let at = which % live.len();
                engine.release(live.swap_remove(at)).unwrap();
                if live.is_empty() {
                    live.push(engine.new_sequence());
                }
            }
        }
    }
    for id in live {
        engine.release(id).unwrap();
    }
    assert_eq!(engine.free_pages(), straight.free_pages(), "every page is given back");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn random_schedules(
        moves in moves(),
        ty in prop::sample::select(vec![BlockType::F32, BlockType::Q8_0, BlockType::Q4_0, BlockType::Q4_K]),
        moe: bool,
        kv in prop::sample::select(KvFormat::ALL.to_vec()),
        threads in 1usize..3,
    ) {
        let model = Tiny::new(ty, moe).open();
        play(&model, kv, threads, &moves);
    }
}
