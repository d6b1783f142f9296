//! GLM-5.3-Flash: the f32 path against transformers, every logit and the outputs of each layer's parts within 1e-4,
//! chosen experts and chosen blocks equal; and row invariance.
//! Fixture: `tests-data/oracle/glm5_next`, made as `tests-data/oracle/README.md` says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::BTreeSet;

use common::parts::{Inputs, executor, integers, nodes, rows_stand_alone, tap};
use common::{Golden, data, logits_in_chunks, max_difference, open, options};
use minfer_engine::Checkpoint;
use minfer_graph::{Bind, Graph, Op};

/// Largest difference that a number of the f32 path may have.
const TOLERANCE: f32 = 1e-4;
/// Layers that attend; the others are linear.
const ATTENDS: [u32; 2] = [1, 3];
/// Positions per block, and blocks that the indexer keeps.
const BLOCK: usize = 4;
const TOP: usize = 2;

fn tiny() -> (Golden, Checkpoint) {
    let dir = data("oracle/glm5_next");
    (Golden::open(&dir.join("golden.safetensors")), Checkpoint::open(&dir).unwrap())
}

/// Full, prefill and then token by token (the last 10), and in chunks of 13.
#[test]
fn logits() {
    let (golden, model) = tiny();
    let tokens = golden.ids("input_ids");
    for threads in [1, 2] {
        let mut engine = open(&model, options(threads));
        for (run, name) in [
            (vec![tokens.len()], "full.logits"),
            (vec![tokens.len() - 10, 1], "decode.logits"),
            (vec![13], "chunked.logits"),
        ] {
            let got = logits_in_chunks(&mut engine, &tokens, &run);
            let worst = max_difference(&got, &golden.f32(name));
            println!("{threads} threads, {name}: largest difference {worst:e}");
            assert!(worst <= TOLERANCE, "{name}: {worst}");
        }
        assert_eq!(engine.counters(), Default::default(), "a CPU-only engine copies nothing");
    }
}

/// Names the parts of every layer, as transformers names its modules.
fn tap_all(graph: &mut Graph) {
    let mut taps = Vec::new();
    for layer in 0..5 {
        let of = |is: fn(&Op) -> bool| nodes(graph, Some(layer), is);
        let name = |part: &str| format!("full/model.language_model.layers.{layer}{part}");
        let mixes = of(|op| matches!(op, Op::HyperMix(_)));
        let writes = of(|op| matches!(op, Op::StreamMix(_)));
        assert_eq!((mixes.len(), writes.len()), (2, 2), "layer {layer}");
        taps.push((name(".attn_hc.0"), mixes[0].outputs[1]));
        taps.push((name(".attn_hc.1"), mixes[0].outputs[2]));
        let attends = ATTENDS.contains(&layer);
        taps.push((name(if attends { ".self_attn.0" } else { ".self_attn" }), writes[0].inputs[1]));
        taps.push((name(".mlp"), writes[1].inputs[1]));
        if attends {
            taps.push((name(".self_attn.indexer"), of(|op| matches!(op, Op::IndexSelect(_)))[0].outputs[0]));
        }
        let router = of(|op| matches!(op, Op::Router(_)));
        assert_eq!(router.is_empty(), layer == 0, "layer {layer}");
        if let Some(router) = router.first() {
            taps.push((name(".mlp.gate.0"), router.inputs[0]));
            taps.push((name(".mlp.gate.1"), router.outputs[1]));
            taps.push((name(".mlp.gate.2"), router.outputs[0]));
        }
    }
    let last = nodes(graph, None, |op| matches!(op, Op::RmsNorm(_)))[0].outputs[0];
    taps.push(("full/model.language_model.norm".to_string(), last));
    taps.into_iter().for_each(|(name, value)| tap(graph, name, value));
}

/// Outputs of every part, chosen experts and chosen blocks, read out of the graph itself. The smallest gaps between
/// a chosen and a refused score are 3.0e-4 (experts) and 1.1e-3 (blocks), in `report.json`.
#[test]
fn parts_of_every_layer() {
    let (golden, model) = tiny();
    let tokens = golden.ids("input_ids");
    let mut graph = minfer_model::load(&model).unwrap().graph(&model, 8).unwrap();
    tap_all(&mut graph);
    let names: Vec<&str> = graph.outputs.iter().map(|o| o.name).filter(|n| *n != "logits").collect();
    let mut executor = executor(&model, graph);
    let (rows, inputs) = (tokens.len(), Inputs::new(&tokens));
    let outputs = executor.execute(Bind { rows, outs: rows }, &inputs.by_name(&[0, 1])).unwrap();
    for name in names {
        let got = integers(outputs.bytes(name).unwrap());
        if name.ends_with(".mlp.gate.2") {
            let got: Vec<u32> = got.iter().map(|&i| i as u32).collect();
            assert_eq!(got, golden.ids(name), "{name}");
        } else if name.ends_with(".indexer") {
            same_choice(&got, &golden.i32s(name), rows);
        } else {
            let want = golden.f32(name);
            let numbers: Vec<f32> = got.iter().map(|&i| f32::from_bits(i as u32)).collect();
            let got: Vec<Vec<f32>> = numbers.chunks(want[0].len()).map(<[f32]>::to_vec).collect();
            let worst = max_difference(&got, &want);
            println!("{name}: largest difference {worst:e}");
            assert!(worst <= TOLERANCE, "{name}: {worst}");
        }
    }
}

/// The reference lists the positions that a row sees, in any order, padded with -1.
fn same_choice(blocks: &[i32], positions: &[i32], rows: usize) {
    let listed = positions.len() / rows;
    for (row, (blocks, positions)) in blocks.chunks(TOP).zip(positions.chunks(listed)).enumerate() {
        let block = |b: usize| b * BLOCK..(b + 1) * BLOCK;
        let chosen = blocks.iter().filter_map(|&b| usize::try_from(b).ok()).flat_map(block);
        let got: BTreeSet<usize> = chosen.chain((row + 1) / BLOCK * BLOCK..row + 1).collect();
        let want: BTreeSet<usize> = positions.iter().filter_map(|&p| usize::try_from(p).ok()).collect();
        assert_eq!(got, want, "row {row}");
        assert!(row < 12 || want.len() < row + 1, "the choice binds");
    }
}

#[test]
fn rows_do_not_depend_on_the_batch() {
    rows_stand_alone(&tiny().1);
}
