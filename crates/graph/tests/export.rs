//! DOT and JSON of a small placed graph, whole.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{i32s, kv, weight};
use minfer_format::BlockType::{F32, Q4_0};
use minfer_graph::{Attend, DeviceId, DeviceKind, Dim, Graph, GraphBuilder, RopeStyle, RopeTable, ValueType};
use serde_json::json;

fn graph() -> Graph {
    let mut b = GraphBuilder::new();
    let ids = b.input("ids", i32s(&[]));
    let table = weight(&mut b, "a \"quoted\" \\ name", Q4_0, &[100, 32]);
    let norm = weight(&mut b, "norm", F32, &[32]);
    let x = b.embed(ids, table);
    b.set_layer(Some(1));
    let n = b.rms_norm(x, norm, 0.5);
    b.output("n", n);
    let mut graph = b.finish().unwrap();
    graph.nodes[1].place = Some(DeviceId::new(DeviceKind::Cuda, 1));
    graph
}

#[test]
fn dot() {
    let expected = r#"digraph minfer {
  rankdir=TB; node [shape=box, fontname="monospace"];
  v0 [shape=ellipse, label="ids\ni32[rows]"];
  n0 [label="0 embed\na \"quoted\" \\ name Q4_0 [100, 32]"];
  v0 -> n0 [label="i32[rows]"];
  n1 [label="1 rms_norm @1\nnorm F32 [32]\non cuda:1"];
  n0 -> n1 [label="f32[rows, 32]"];
  o0 [shape=ellipse, label="n"];
  n1 -> o0;
}
"#;
    assert_eq!(graph().to_dot(), expected);
}

#[test]
fn json() {
    let expected = json!({
        "format": "minfer-graph",
        "version": 1,
        "inputs": [{"name": "ids", "value": 0, "type": "i32[rows]"}],
        "outputs": [{"name": "n", "value": 2, "type": "f32[rows, 32]"}],
        "weights": [
            {
                "name": "a \"quoted\" \\ name", "type": "Q4_0", "shape": [100, 32],
                "tensors": ["a \"quoted\" \\ name"],
            },
            {"name": "norm", "type": "F32", "shape": [32], "tensors": ["norm"]},
        ],
        "states": [],
        "nodes": [
            {
                "id": 0, "op": "embed", "payload": null,
                "inputs": [{"value": 0, "name": "ids", "type": "i32[rows]"}],
                "outputs": [{"value": 1, "name": "embed", "type": "f32[rows, 32]"}],
                "weight": 0, "state": null, "layer": null, "place": null,
            },
            {
                "id": 1, "op": "rms_norm", "payload": {"eps": 0.5, "group": 32},
                "inputs": [{"value": 1, "name": "embed", "type": "f32[rows, 32]"}],
                "outputs": [{"value": 2, "name": "norm", "type": "f32[rows, 32]"}],
                "weight": 1, "state": null, "layer": 1,
                "place": {"device": "cuda:1", "kind": 2, "ordinal": 1},
            },
        ],
    });
    assert_eq!(graph().to_json(), expected);
}

/// Payloads and states are in the export; a value without a reader and a node without outputs do no harm.
#[test]
fn payloads_and_states() {
    let mut b = GraphBuilder::new();
    let x = b.input("x", common::f32s(&[8]));
    let rows = ["positions", "slots", "table_at"].map(|n| b.input(n, i32s(&[])));
    let pages = b.input("pages", ValueType::i32(Dim::Const(4), []));
    let state = b.state(kv(0, &[8, 8]));
    let table = b.rope_table(rows[0], RopeTable { inv_freq: vec![1.0, 0.25].into(), attention_factor: 2.0 });
    let q = b.rope(x, table, RopeStyle::HalfSplit, 4);
    b.store_kv(&[q, x], rows[1], state);
    let attend = Attend { heads: 2, kv_heads: 2, scale: 0.5, v_part: 1 };
    let y = b.attend(q, [rows[0], rows[2], pages], state, attend);
    let best = b.argmax(y);
    b.output("best", best);
    let graph = b.finish().unwrap();
    let json = graph.to_json();
    let payloads: Vec<_> = json["nodes"].as_array().unwrap().iter().map(|n| n["payload"].clone()).collect();
    assert_eq!(
        payloads,
        [
            json!({"inv_freq": [1.0, 0.25], "attention_factor": 2.0}),
            json!({"style": "HalfSplit", "head_dim": 4}),
            json!(null),
            json!({"heads": 2, "kv_heads": 2, "scale": 0.5, "v_part": 1}),
            json!(null),
        ]
    );
    assert_eq!(json["states"], json!([{"name": "kv0", "layer": 0, "kind": "rows of 8 and 8"}]));
    assert_eq!(json["nodes"][2]["outputs"], json!([]));
    let dot = graph.to_dot();
    assert!(dot.contains("  n2 [label=\"2 store_kv\\nstate kv0\"];\n  n1 -> n2 [label=\"f32[rows, 8]\"];\n"));
    assert!(dot.contains("  v4 [shape=ellipse, label=\"pages\\ni32[4]\"];\n"));
}
