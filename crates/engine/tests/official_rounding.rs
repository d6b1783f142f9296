//! DeepSeek V4 with the round trips of DeepSeek's own graph (`EngineOptions::official_rounding`), against transformers with
//! the same round trips put in. Fixture: `tests-data/oracle/deepseek_v4_official`, made as `tests-data/oracle/README.md`
//! says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Golden, bits, cpu, data, logits_in_chunks, max_difference, open};
use minfer_cpu::Isa;
use minfer_engine::{Checkpoint, Chunk, Engine, EngineOptions, KvFormat, Outs};
use minfer_graph::{Op, RoundFormat, RoundTrip};

/// Largest difference that a logit of the f32 path may have. A number that rounds to another value than in the reference
/// makes more: none is nearer to a tie than `report.json` says.
const TOLERANCE: f32 = 1e-4;

fn tiny() -> (Golden, Checkpoint) {
    let dir = data("oracle/deepseek_v4_official");
    (Golden::open(&dir.join("golden.safetensors")), Checkpoint::open(&dir).unwrap())
}

fn options(threads: usize, isa: Isa, official_rounding: bool) -> EngineOptions {
    EngineOptions {
        kv_format: KvFormat::F32,
        context: Some(192),
        max_rows: 192,
        max_outs: 192,
        official_rounding,
        ..EngineOptions::new(cpu(threads, isa))
    }
}

/// All at once, in chunks of 13, and token by token at the end.
#[test]
fn logits() {
    let (golden, model) = tiny();
    let tokens = golden.ids("input_ids");
    for isa in [Isa::detect(), Isa::Scalar] {
        let mut engine = open(&model, options(2, isa, true));
        for (run, name) in [
            (vec![tokens.len()], "full.logits"),
            (vec![13], "chunked.logits"),
            (vec![tokens.len() - 6, 1], "decode.logits"),
        ] {
            let got = logits_in_chunks(&mut engine, &tokens, &run);
            let worst = max_difference(&got, &golden.f32(name));
            println!("{isa:?}, {name}: largest difference {worst:e}");
            assert!(worst <= TOLERANCE, "{isa:?}, {name}: {worst}");
        }
    }
}

/// The round trips bind: without them the logits are others, and not by rounding errors.
#[test]
fn without_it_the_logits_differ() {
    let (golden, model) = tiny();
    let tokens = golden.ids("input_ids");
    let mut engine = open(&model, options(2, Isa::detect(), false));
    let got = logits_in_chunks(&mut engine, &tokens, &[tokens.len()]);
    let worst = max_difference(&got, &golden.f32("full.logits"));
    println!("largest difference {worst:e}");
    assert!(worst > 1e-3, "{worst}");
}

/// Which rows go through which format: in each layer those of positions, then compressed ones, and the indexer's.
#[test]
fn places() {
    let (_, model) = tiny();
    let mut loaded = minfer_model::load(&model).unwrap();
    let rounds = |graph: minfer_graph::Graph| -> Vec<(u32, RoundTrip)> {
        let of = |n: &minfer_graph::Node| match n.op {
            Op::RoundTrip(r) => Some((n.layer.unwrap(), r)),
            _ => None,
        };
        graph.nodes.iter().filter_map(of).collect()
    };
    assert_eq!(rounds(loaded.graph(&model, 4).unwrap()), [], "off in a model that was just loaded");
    loaded.round_officially(&model).unwrap();
    let keys = RoundTrip { group: 72, format: RoundFormat::Fp8 { block: 64, from: 0, len: 64 } };
    let index = RoundTrip { group: 32, format: RoundFormat::Fp4Hadamard { block: 32 } };
    let want = [(0, keys), (0, keys), (0, index), (0, index), (1, keys), (1, keys)];
    assert_eq!(rounds(loaded.graph(&model, 4).unwrap()), want);
}

/// Bits do not depend on chunks, threads or kernels; nor does what a snapshot brings back.
#[test]
fn rows_do_not_depend_on_the_batch() {
    let (golden, model) = tiny();
    let tokens = golden.ids("input_ids");
    let mut engine = open(&model, options(1, Isa::detect(), true));
    let want = bits(&logits_in_chunks(&mut engine, &tokens, &[tokens.len()]));
    for (threads, isa) in [(1, Isa::detect()), (2, Isa::Scalar)] {
        let mut engine = open(&model, options(threads, isa, true));
        for chunk in [1, 7, 64] {
            let got = bits(&logits_in_chunks(&mut engine, &tokens, &[chunk]));
            assert!(got == want, "{threads} threads, {isa:?}, chunks of {chunk}");
        }
    }
}

fn step(engine: &mut Engine, sequence: minfer_engine::SequenceId, tokens: &[u32]) -> Vec<Vec<u32>> {
    let chunk = Chunk { sequence, tokens, outs: Outs::All, window: false };
    let out = engine.step(&[chunk]).unwrap();
    bits(&(0..out.len()).map(|i| out.row(i).to_vec()).collect::<Vec<_>>())
}

/// What was cached with the round trips is of no use without them, and the other way round.
#[test]
fn snapshots_do_not_cross() {
    let (golden, model) = tiny();
    let tokens = golden.ids("input_ids");
    let mut with = open(&model, options(2, Isa::detect(), true));
    let mut without = open(&model, options(2, Isa::detect(), false));
    let sequence = with.new_sequence();
    step(&mut with, sequence, &tokens[..100]);
    let snapshot = with.snapshot(sequence).unwrap();
    let error = without.restore(&snapshot).unwrap_err().to_string();
    let of = model.fingerprint().unwrap();
    let want = format!(
        "the snapshot belongs to another model (deepseek4 with --official-rounding {of}; this one is deepseek4 {of}): \
         open the model that it was made with, or start anew"
    );
    assert_eq!(error, want);
    let other = without.new_sequence();
    step(&mut without, other, &tokens[..100]);
    assert!(with.restore(&without.snapshot(other).unwrap()).is_err());
    let mut again = open(&model, options(2, Isa::detect(), true));
    let restored = again.restore(&snapshot).unwrap();
    assert_eq!(step(&mut again, restored, &tokens[100..]), step(&mut with, sequence, &tokens[100..]));
}

/// Sizes that do not fit, and architectures that have no such rounding, by name.
#[test]
fn refusals() {
    let refusal = |family: &str, edit: &dyn Fn(&mut serde_json::Value)| {
        let (from, copy) = (data(&format!("oracle/{family}")), tempfile::tempdir().unwrap());
        std::fs::copy(from.join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
        let mut config: serde_json::Value =
            serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
        edit(&mut config);
        std::fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
        let model = Checkpoint::open(copy.path()).unwrap();
        let opened = Engine::open(&model, options(1, Isa::detect(), true), &mut |_, _| ());
        let error = opened.err().unwrap().to_string();
        error.replace(copy.path().to_str().unwrap(), "DIR")
    };
    let line = |why: &str| {
        format!(
            "DIR: --official-rounding is for deepseek_v4 with its published sizes, but {why}; leave it out"
        )
    };
    let head = line("24 of the 32 numbers of a head are not rotated, which are not whole blocks of 64");
    assert_eq!(refusal("deepseek_v4", &|_| ()), head);
    for (dim, what) in [(16, "16"), (96, "96")] {
        let index = format!(
            "the indexer's heads have {what} numbers, which is not a power of two in whole blocks of 32"
        );
        assert_eq!(refusal("deepseek_v4_official", &|c| c["index_head_dim"] = dim.into()), line(&index));
    }
    for (family, arch) in
        [("llama", "llama"), ("qwen3_moe", "qwen3moe"), ("glm5_next", "glm5-next"), ("qwen4_exp", "qwen4exp")]
    {
        assert_eq!(refusal(family, &|_| ()), line(&format!("this model is {arch}")));
    }
}
