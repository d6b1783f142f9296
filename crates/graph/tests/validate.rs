//! Graphs that do not hold together, and the words for each; the builder's part in it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{f32s, i32s, kv, weight};
use minfer_format::BlockType::{F32, Q4_0, Q8_0};
use minfer_graph::{
    Attend, Dim, Graph, GraphBuilder, GraphError, NodeId, Op, StateId, ValueId, ValueType, WeightId,
    WeightUse,
};

/// `embed, silu, mul` over 32 numbers: values 0 ids, 1 embed, 2 silu, 3 product.
fn small() -> Graph {
    let mut b = GraphBuilder::new();
    let ids = b.input("ids", i32s(&[]));
    let table = weight(&mut b, "table", F32, &[100, 32]);
    let x = b.embed(ids, table);
    b.set_layer(Some(3));
    let gate = b.silu(x);
    let y = b.mul(gate, x);
    b.output("y", y);
    b.finish().unwrap()
}

fn broken(change: impl FnOnce(&mut Graph)) -> (GraphError, String) {
    let mut graph = small();
    change(&mut graph);
    let error = graph.validate().unwrap_err();
    let text = error.to_string();
    (error, text)
}

#[test]
fn a_good_graph_is_accepted() {
    let graph = small();
    graph.validate().unwrap();
    Graph::default().validate().unwrap();
    assert_eq!(graph.readers(), [vec![NodeId(0)], vec![NodeId(1), NodeId(2)], vec![NodeId(2)], vec![]]);
    assert!(graph.is_output(ValueId(3)) && !graph.is_output(ValueId(2)));
    assert_eq!(graph.weight_uses(), [(WeightId(0), WeightUse::Rows)]);
}

#[test]
fn operands_that_do_not_fit() {
    let (error, text) = broken(|g| g.values[1].ty = f32s(&[16]));
    assert!(matches!(error, GraphError::Operands { node: 0, op: "embed", layer: None, .. }));
    assert_eq!(text, "node 0 (embed): outputs are declared as f32[rows, 16] but are f32[rows, 32]");
    let (error, text) = broken(|g| g.values[2].ty = f32s(&[16]));
    assert!(matches!(error, GraphError::Operands { node: 1, op: "silu", layer: Some(3), .. }));
    assert_eq!(text, "node 1 (silu, layer 3): outputs are declared as f32[rows, 16] but are f32[rows, 32]");
    let (_, text) = broken(|g| g.nodes[1].outputs.push(ValueId(3)));
    let expected =
        "node 1 (silu, layer 3): outputs are declared as f32[rows, 32], f32[rows, 32] but are f32[rows, 32]";
    assert_eq!(text, expected);
    let (_, text) = broken(|g| g.nodes[2].inputs[0] = ValueId(0));
    assert_eq!(text, "node 2 (mul, layer 3): input 0 is i32[rows], not f32");
}

#[test]
fn use_before_definition() {
    let (error, text) = broken(|g| g.nodes.swap(1, 2));
    assert_eq!(error, GraphError::Undefined { node: 1, op: "mul", value: 2 });
    assert_eq!(text, "node 1 (mul) reads value 2, which is not defined before it");
    let (error, _) = broken(|g| g.nodes[1].inputs[0] = ValueId(2));
    assert_eq!(error, GraphError::Undefined { node: 1, op: "silu", value: 2 }, "its own output");
    let (error, _) = broken(|g| g.nodes[1].inputs[0] = ValueId(99));
    assert_eq!(error, GraphError::Undefined { node: 1, op: "silu", value: 99 }, "outside the table");
}

#[test]
fn second_definition() {
    let (error, text) = broken(|g| g.nodes[2].outputs[0] = ValueId(2));
    assert_eq!(error, GraphError::Redefined { node: 2, op: "mul", value: 2 });
    assert_eq!(text, "node 2 (mul) defines value 2 a second time");
    let (error, _) = broken(|g| g.nodes[0].outputs[0] = ValueId(0));
    assert_eq!(error, GraphError::Redefined { node: 0, op: "embed", value: 0 }, "an input");
}

#[test]
fn outputs_that_nothing_defines() {
    let text = "graph output 'y' refers to value 3, which nothing defines";
    let (error, found) = broken(|g| drop(g.nodes.pop()));
    assert_eq!(error, GraphError::DanglingOutput { name: "y".to_string(), value: 3 });
    assert_eq!(found, text);
    assert!(broken(|g| g.outputs[0].value = ValueId(77)).1.contains("value 77, which nothing defines"));
}

#[test]
fn inputs_without_a_value_of_their_own() {
    let (error, text) = broken(|g| g.inputs[0].value = ValueId(50));
    assert_eq!(error, GraphError::BadInput { name: "ids".to_string(), value: 50 });
    assert_eq!(text, "graph input 'ids' refers to value 50, which does not exist or is another input's");
    let (error, _) = broken(|g| {
        let mut twin = g.inputs[0].clone();
        twin.name = "twin";
        g.inputs.push(twin);
    });
    assert_eq!(error, GraphError::BadInput { name: "twin".to_string(), value: 0 });
}

#[test]
fn names_that_occur_twice() {
    let (error, text) = broken(|g| g.inputs.push(g.inputs[0].clone()));
    assert_eq!(error, GraphError::DuplicateName { what: "input", name: "ids".to_string() });
    assert_eq!(text, "graph input 'ids' is declared twice");
    assert_eq!(broken(|g| g.outputs.push(g.outputs[0].clone())).1, "graph output 'y' is declared twice");
}

#[test]
fn references_outside_their_tables() {
    let (error, text) = broken(|g| g.nodes[0].weight = Some(WeightId(1)));
    assert_eq!(error, GraphError::BadReference { node: 0, op: "embed", what: "weight", index: 1, count: 1 });
    assert_eq!(text, "node 0 (embed) refers to weight 1, but only 1 are declared");
    let (_, text) = broken(|g| g.nodes[2].state = Some(StateId(4)));
    assert_eq!(text, "node 2 (mul) refers to state 4, but only 0 are declared");
    let (_, text) = broken(|g| g.nodes[2].outputs[0] = ValueId(9));
    assert_eq!(text, "node 2 (mul) refers to value 9, but only 4 are declared");
}

#[test]
fn the_builder_keeps_the_first_error() {
    let mut b = GraphBuilder::new();
    let ids = b.input("ids", i32s(&[]));
    let table = weight(&mut b, "table", F32, &[100, 32]);
    let wide = weight(&mut b, "wide", F32, &[8, 64]);
    let x = b.embed(ids, table);
    b.set_layer(Some(7));
    let y = b.matmul(x, wide, "y");
    // Errors that follow from the first one, and one of its own, do not replace it.
    let z = b.mul(y, x);
    let (experts, _) = b.router(
        z,
        None,
        minfer_graph::Router {
            scoring: minfer_graph::Scoring::Softmax,
            top_k: 99,
            renormalise: false,
            biased: false,
            scale: 1.0,
        },
    );
    b.add(experts, ids);
    b.output("z", z);
    assert_eq!(
        b.finish().unwrap_err().to_string(),
        "node 1 (matmul, layer 7): f32[rows, 32] times weight 'wide' of shape [8, 64] ([n, k])"
    );
}

#[test]
fn the_builder_validates_what_it_hands_out() {
    let mut b = GraphBuilder::new();
    let ids = b.input("ids", i32s(&[]));
    b.input("ids", i32s(&[]));
    b.output("ids", ids);
    assert_eq!(b.finish().unwrap_err().to_string(), "graph input 'ids' is declared twice");
}

fn names(graph: &Graph) -> Vec<&'static str> {
    graph.nodes.iter().map(|n| n.op.name()).collect()
}

#[test]
fn a_value_is_quantised_once_for_all_its_products() {
    let mut b = GraphBuilder::new();
    let ids = b.input("ids", i32s(&[]));
    let table = weight(&mut b, "table", Q8_0, &[100, 32]);
    let [q, k, v] = ["q", "k", "v"].map(|n| weight(&mut b, n, Q4_0, &[32, 32]));
    let plain = weight(&mut b, "plain", F32, &[32, 32]);
    let x = b.embed(ids, table);
    let (a, c, d, e) =
        (b.matmul(x, q, "a"), b.matmul(x, k, "c"), b.matmul(x, plain, "d"), b.matmul(x, v, "e"));
    let sums = [b.add(a, c), b.add(d, e)];
    let other = b.matmul(sums[0], q, "other");
    b.output("other", other);
    b.output("sum", sums[1]);
    let graph = b.finish().unwrap();
    assert_eq!(
        names(&graph),
        ["embed", "quantize", "matmul", "matmul", "matmul", "matmul", "add", "add", "quantize", "matmul"]
    );
    let read: Vec<_> = [2, 3, 4, 5].map(|n: usize| graph.ty(graph.nodes[n].inputs[0]).to_string()).into();
    assert_eq!(read, ["q8[rows, 32]", "q8[rows, 32]", "f32[rows, 32]", "q8[rows, 32]"]);
    let uses = graph.weight_uses();
    assert_eq!(uses[0], (WeightId(0), WeightUse::Rows));
    assert_eq!(uses[1..], [1, 2, 4, 3].map(|w| (WeightId(w), WeightUse::Matrix)));
}

#[test]
fn a_value_that_is_quantised_already_stays_as_it_is() {
    let mut b = GraphBuilder::new();
    let x = b.input("x", common::q8s(&[32]));
    let w = weight(&mut b, "w", Q4_0, &[8, 32]);
    let y = b.matmul(x, w, "y");
    b.output("y", y);
    assert_eq!(names(&b.finish().unwrap()), ["matmul"]);
}

/// Nodes carry the layer that was set, the payload, and their state.
#[test]
fn a_whole_layer() {
    let mut b = GraphBuilder::new();
    let x = b.input("x", f32s(&[64]));
    let rows = ["slots", "positions", "table_at"].map(|n| b.input(n, i32s(&[])));
    let pages = b.input("pages", ValueType::i32(Dim::Const(16), []));
    let norm = weight(&mut b, "norm", F32, &[16]);
    b.set_layer(Some(2));
    let state = b.state(kv(2, &[64, 64]));
    let n = b.rms_norm(x, norm, 1e-6);
    b.store_kv(&[n, x], rows[0], state);
    let attend = Attend { heads: 4, kv_heads: 4, scale: 0.25, v_part: 1 };
    let y = b.attend(n, [rows[1], rows[2], pages], state, attend);
    b.output("y", y);
    let graph = b.finish().unwrap();
    assert_eq!(names(&graph), ["rms_norm", "store_kv", "attend"]);
    assert!(graph.nodes.iter().all(|n| n.layer == Some(2) && n.place.is_none()));
    assert!(matches!(graph.nodes[0].op, Op::RmsNorm(n) if n.group == 16 && n.eps == 1e-6));
    assert_eq!(graph.nodes[1].outputs, []);
    assert_eq!(graph.nodes[2].state, Some(state));
}
