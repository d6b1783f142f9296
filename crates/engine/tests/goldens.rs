//! The f32 path against transformers: every logit within 1e-4, expert ids equal.
//! Fixtures and the commands that make them: `tests-data/oracle/README.md`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Golden, data, logits_in_chunks, max_difference, open, options};
use minfer_engine::{Checkpoint, EngineOptions, KvFormat};
use minfer_graph::{Bind, Op, Output};
use minfer_runtime::plan::{Placed, Policy};
use minfer_runtime::{Executor, ExecutorOptions, SourceError, StateSpec, WeightSource};

/// Largest difference that a logit of the f32 path may have.
const TOLERANCE: f32 = 1e-4;

/// Full, prefill and then token by token (the last 8), and in chunks of 13.
fn check_family(family: &str) {
    let dir = data("oracle").join(family);
    let golden = Golden::open(&dir.join("golden.safetensors"));
    let tokens = golden.ids("input_ids");
    let model = Checkpoint::open(&dir).unwrap();
    for threads in [1, 2] {
        let mut engine = open(&model, options(threads));
        let prefill = tokens.len() - 8;
        for (run, name) in [
            (vec![tokens.len()], "full.logits"),
            (vec![prefill, 1], "decode.logits"),
            (vec![13], "chunked.logits"),
        ] {
            let got = logits_in_chunks(&mut engine, &tokens, &run);
            let worst = max_difference(&got, &golden.f32(name));
            println!("{family}, {threads} threads, {name}: largest difference {worst:e}");
            assert!(worst <= TOLERANCE, "{family} {name}: {worst}");
        }
        assert_eq!(engine.counters(), Default::default(), "a CPU-only engine copies nothing");
    }
}

#[test]
fn llama_with_llama3_rope_scaling() {
    check_family("llama");
}

#[test]
fn llama_tied_without_scaling() {
    check_family("llama_plain");
}

#[test]
fn qwen2() {
    check_family("qwen2");
}

#[test]
fn qwen3() {
    check_family("qwen3");
}

#[test]
fn qwen3_moe() {
    check_family("qwen3_moe");
}

/// What rounding keys and values does to logits, against f32 KV: largest and mean difference over the mean magnitude of
/// the f32 logits. Tolerances: f16 5e-3 and 1e-3, q8_0 0.1 and 0.01; with experts, of which rounding may choose others,
/// 1 and 0.03.
#[test]
fn rounded_kv_stays_close_to_f32() {
    for family in ["llama", "llama_plain", "qwen2", "qwen3", "qwen3_moe"] {
        let dir = data("oracle").join(family);
        let tokens = Golden::open(&dir.join("golden.safetensors")).ids("input_ids");
        let model = Checkpoint::open(&dir).unwrap();
        let run = |kv_format| {
            let mut engine = open(&model, EngineOptions { kv_format, ..options(2) });
            logits_in_chunks(&mut engine, &tokens, &[tokens.len()]).concat()
        };
        let exact = run(KvFormat::F32);
        let q8 = if family == "qwen3_moe" { (1.0, 0.03) } else { (0.1, 0.01) };
        let mean = |x: &[f32]| x.iter().map(|x| x.abs()).sum::<f32>() / x.len() as f32;
        for (format, most, average) in [(KvFormat::F16, 5e-3, 1e-3), (KvFormat::Q8_0, q8.0, q8.1)] {
            let off: Vec<f32> = run(format).iter().zip(&exact).map(|(a, b)| a - b).collect();
            let worst = off.iter().fold(0.0f32, |m, x| m.max(x.abs())) / mean(&exact);
            let got = mean(&off) / mean(&exact);
            println!("{family}, {} KV: at most {worst:e}, mean {got:e} of the mean logit", format.name());
            assert!(got > 0.0 && got <= average && worst <= most, "{family} {}", format.name());
        }
    }
}

/// Configurations as published before transformers 5 (`rope_theta`, `rope_scaling`, `num_experts`) mean the same.
#[test]
fn legacy_configurations() {
    for family in ["llama", "llama_plain", "qwen2", "qwen3", "qwen3_moe"] {
        let dir = data("oracle").join(family);
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(dir.join("config.legacy.json"), copy.path().join("config.json")).unwrap();
        std::fs::copy(dir.join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
        let golden = Golden::open(&dir.join("golden.safetensors"));
        let model = Checkpoint::open(copy.path()).unwrap();
        let got = logits_in_chunks(&mut open(&model, options(1)), &golden.ids("input_ids"), &[128]);
        let worst = max_difference(&got, &golden.f32("full.logits"));
        assert!(worst <= TOLERANCE, "{family}: {worst}");
    }
}

struct Source<'a>(&'a Checkpoint);

impl WeightSource for Source<'_> {
    fn load(&self, decl: &minfer_graph::WeightDecl) -> Result<minfer_format::TensorBytes, SourceError> {
        self.0.load(decl).map_err(|e| SourceError(e.to_string()))
    }
}

/// The router's ids are read out of the graph itself and equal transformers' in rank order.
#[test]
fn expert_ids_equal_the_reference() {
    let dir = data("oracle/qwen3_moe");
    let golden = Golden::open(&dir.join("golden.safetensors"));
    let tokens: Vec<i32> = golden.ids("input_ids").iter().map(|&t| t as i32).collect();
    let model = Checkpoint::open(&dir).unwrap();
    let mut graph = minfer_model::load(&model).unwrap().graph(&model, 8).unwrap();
    let names = ["ids0", "ids1", "ids2", "ids3"];
    let routers: Vec<_> = graph
        .nodes
        .iter()
        .filter(|n| matches!(n.op, Op::Router(_)))
        .map(|n| (n.layer.unwrap() as usize, n.outputs[0]))
        .collect();
    assert_eq!(routers.iter().map(|r| r.0).collect::<Vec<_>>(), [0, 2, 3], "layer 1 is dense");
    for &(layer, value) in &routers {
        graph.outputs.push(Output { name: names[layer], value });
    }
    let states: Vec<_> = graph
        .states
        .iter()
        .map(|decl| StateSpec { decl: decl.clone(), format: KvFormat::F32, pages: 8, window_pages: 0 })
        .collect();
    let devices = common::cpu(2, minfer_cpu::Isa::detect());
    let placed = Placed::new(graph, devices, &Policy::default()).unwrap();
    let rows = tokens.len();
    let executor_options = ExecutorOptions {
        max: Bind { rows: 64, outs: 64 },
        wait_timeout: std::time::Duration::from_secs(1),
        sync_copies: false,
    };
    let mut executor =
        Executor::open(placed, &states, &Source(&model), executor_options, &mut |_, _| ()).unwrap();
    let positions: Vec<i32> = (0..rows as i32).collect();
    let zeros = vec![0; rows];
    // The last layer's router sees only the rows whose logits are wanted: all of them.
    let inputs: [(&str, &[i32]); 6] = [
        ("tokens", &tokens),
        ("positions", &positions),
        ("slots", &positions),
        ("table_at", &zeros),
        ("pages", &[0]),
        ("out_rows", &positions),
    ];
    let outputs = executor.execute(Bind { rows, outs: rows }, &inputs).unwrap();
    for (layer, _) in routers {
        let bytes = outputs.bytes(names[layer]).unwrap();
        let got: Vec<u32> =
            bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(got, golden.ids(&format!("full/model.layers.{layer}.mlp.gate.2")), "layer {layer}");
    }
}
