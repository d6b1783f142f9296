//! Every row of the fusion table: where it applies, and where it must not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{f32s, weight};
use minfer_format::BlockType::{F32, Q4_0};
use minfer_graph::{FUSIONS, Graph, GraphBuilder, Node, Op, ValueId, WeightId, fuse};

struct Make {
    b: GraphBuilder,
    x: ValueId,
    y: ValueId,
    norm: WeightId,
    packed: WeightId,
}

/// A graph over `x` and `y`, 32 numbers wide; `body` returns its results.
fn graph(body: impl FnOnce(&mut Make) -> Vec<ValueId>) -> Graph {
    let mut b = GraphBuilder::new();
    let (x, y) = (b.input("x", f32s(&[32])), b.input("y", f32s(&[32])));
    let norm = weight(&mut b, "norm", F32, &[32]);
    let packed = weight(&mut b, "packed", Q4_0, &[32, 32]);
    let mut make = Make { b, x, y, norm, packed };
    let results = body(&mut make);
    for (name, value) in ["a", "b", "c"].into_iter().zip(results) {
        make.b.output(name, value);
    }
    make.b.finish().unwrap()
}

fn fused(graph: &Graph, takes: impl Fn(&Node) -> bool) -> Graph {
    let fused = fuse(graph.clone(), &|_, _, node| takes(node));
    fused.validate().unwrap();
    assert_eq!(fused.values, graph.values, "values keep their ids");
    assert_eq!(fused.outputs, graph.outputs);
    fused
}

fn names(graph: &Graph) -> Vec<&'static str> {
    graph.nodes.iter().map(|n| n.op.name()).collect()
}

fn ops(graph: &Graph) -> Vec<&'static str> {
    names(&fused(graph, |_| true))
}

#[test]
fn the_table() {
    let names: Vec<_> = FUSIONS.iter().map(|f| f.name).collect();
    assert_eq!(names, ["swiglu", "swiglu_quantize", "rms_norm_quantize", "add_rms_norm"]);
}

#[test]
fn swiglu() {
    let g = graph(|m| {
        m.b.set_layer(Some(5));
        let gate = m.b.silu(m.x);
        vec![m.b.mul(gate, m.y)]
    });
    let f = fused(&g, |_| true);
    assert_eq!(names(&f), ["swiglu"]);
    assert_eq!(f.nodes[0].inputs, [ValueId(0), ValueId(1)], "gate, up");
    assert_eq!(f.nodes[0].outputs, g.nodes[1].outputs);
    assert_eq!(f.nodes[0].layer, Some(5));
    assert_eq!(names(&fused(&g, |_| false)), ["silu", "mul"], "the device does not take it");
}

#[test]
fn swiglu_does_not_apply() {
    let other_reader = graph(|m| {
        let gate = m.b.silu(m.x);
        let act = m.b.mul(gate, m.y);
        vec![m.b.add(gate, act)]
    });
    assert_eq!(ops(&other_reader), ["silu", "mul", "add"]);
    let result = graph(|m| {
        let gate = m.b.silu(m.x);
        vec![m.b.mul(gate, m.y), gate]
    });
    assert_eq!(ops(&result), ["silu", "mul"]);
    let square = graph(|m| {
        let gate = m.b.silu(m.x);
        vec![m.b.mul(gate, gate)]
    });
    assert_eq!(ops(&square), ["silu", "mul"], "the product reads it twice");
    let plain = graph(|m| vec![m.b.mul(m.x, m.y)]);
    assert_eq!(ops(&plain), ["mul"]);
    let add = graph(|m| {
        let gate = m.b.silu(m.x);
        vec![m.b.add(gate, m.y)]
    });
    assert_eq!(ops(&add), ["silu", "add"]);
}

fn ffn() -> Graph {
    graph(|m| {
        let gate = m.b.silu(m.x);
        let act = m.b.mul(gate, m.y);
        vec![m.b.matmul(act, m.packed, "down")]
    })
}

#[test]
fn swiglu_quantize() {
    let f = fused(&ffn(), |_| true);
    assert_eq!(names(&f), ["swiglu_quantize", "matmul"]);
    assert_eq!(f.nodes[0].inputs, [ValueId(0), ValueId(1)]);
    assert_eq!(f.nodes[0].outputs, f.nodes[1].inputs);
    assert_eq!(names(&fused(&ffn(), |n| n.op == Op::SwiGlu)), ["swiglu", "quantize", "matmul"]);
    assert_eq!(
        names(&fused(&ffn(), |n| n.op == Op::SwiGluQuantize)),
        ["silu", "mul", "quantize", "matmul"],
        "it builds on swiglu"
    );
}

#[test]
fn swiglu_quantize_does_not_apply() {
    let build = |result: bool| {
        graph(|m| {
            let gate = m.b.silu(m.x);
            let act = m.b.mul(gate, m.y);
            let down = m.b.matmul(act, m.packed, "down");
            vec![if result { act } else { m.b.add(act, down) }, down]
        })
    };
    assert_eq!(ops(&build(true)), ["swiglu", "quantize", "matmul"], "the product is a result");
    assert_eq!(ops(&build(false)), ["swiglu", "quantize", "matmul", "add"], "the product has another reader");
}

#[test]
fn rms_norm_quantize() {
    let g = graph(|m| {
        let n = m.b.rms_norm(m.x, m.norm, 1e-6);
        vec![m.b.matmul(n, m.packed, "q"), m.b.matmul(n, m.packed, "k")]
    });
    let f = fused(&g, |_| true);
    assert_eq!(names(&f), ["rms_norm_quantize", "matmul", "matmul"]);
    assert_eq!(f.nodes[0].weight, Some(WeightId(0)));
    assert!(matches!(f.nodes[0].op, Op::RmsNormQuantize(n) if n.group == 32 && n.eps == 1e-6));
    assert_eq!(names(&fused(&g, |_| false)), ["rms_norm", "quantize", "matmul", "matmul"]);
}

#[test]
fn rms_norm_quantize_does_not_apply() {
    let other_reader = graph(|m| {
        let n = m.b.rms_norm(m.x, m.norm, 1e-6);
        let q = m.b.matmul(n, m.packed, "q");
        vec![m.b.add(n, q)]
    });
    assert_eq!(ops(&other_reader), ["rms_norm", "quantize", "matmul", "add"]);
    let result = graph(|m| {
        let n = m.b.rms_norm(m.x, m.norm, 1e-6);
        vec![n, m.b.matmul(n, m.packed, "q")]
    });
    assert_eq!(ops(&result), ["rms_norm", "quantize", "matmul"]);
    let input = graph(|m| vec![m.b.matmul(m.x, m.packed, "q")]);
    assert_eq!(ops(&input), ["quantize", "matmul"], "an input has no producer");
}

#[test]
fn add_rms_norm() {
    let g = graph(|m| {
        m.b.set_layer(Some(1));
        let sum = m.b.add(m.x, m.y);
        let between = m.b.silu(sum);
        m.b.set_layer(Some(2));
        let n = m.b.rms_norm(sum, m.norm, 1e-5);
        vec![sum, m.b.mul(n, between)]
    });
    let f = fused(&g, |n| matches!(n.op, Op::AddRmsNorm(_)));
    assert_eq!(
        names(&f),
        ["add_rms_norm", "silu", "mul"],
        "at the sum, which others read and which is a result"
    );
    assert_eq!(f.nodes[0].outputs, [g.nodes[0].outputs[0], g.nodes[2].outputs[0]]);
    assert_eq!((f.nodes[0].weight, f.nodes[0].layer), (Some(WeightId(0)), Some(1)));
    assert_eq!(names(&fused(&g, |_| false)), ["add", "silu", "rms_norm", "mul"]);
}

#[test]
fn add_rms_norm_does_not_apply() {
    let product = graph(|m| {
        let p = m.b.mul(m.x, m.y);
        vec![m.b.rms_norm(p, m.norm, 1e-5)]
    });
    assert_eq!(ops(&product), ["mul", "rms_norm"]);
    let quantised = graph(|m| {
        let sum = m.b.add(m.x, m.y);
        let n = m.b.rms_norm(sum, m.norm, 1e-5);
        vec![sum, m.b.matmul(n, m.packed, "q")]
    });
    assert_eq!(ops(&quantised), ["add", "rms_norm_quantize", "matmul"], "the earlier row took the norm");
}

/// Two norms of one sum: one of them is fused, and the other keeps its node and its value.
#[test]
fn two_norms_of_one_sum() {
    let g = graph(|m| {
        let sum = m.b.add(m.x, m.y);
        let other = weight(&mut m.b, "other", F32, &[32]);
        vec![m.b.rms_norm(sum, m.norm, 1e-5), m.b.rms_norm(sum, other, 1e-5)]
    });
    let f = fused(&g, |_| true);
    assert_eq!(names(&f), ["add_rms_norm", "rms_norm"]);
    assert_eq!(f.nodes[0].outputs[1], g.outputs[0].value);
    assert_eq!(f.nodes[1].outputs[0], g.outputs[1].value);
}

/// The decision sees the parts in order and the fused node.
#[test]
fn takes_sees_the_parts() {
    let seen = std::cell::RefCell::new(Vec::new());
    fuse(ffn(), &|_, parts, node| {
        seen.borrow_mut().push((parts.map(|p| p.op.name()), node.op.name()));
        true
    });
    assert_eq!(*seen.borrow(), [(["silu", "mul"], "swiglu"), (["swiglu", "quantize"], "swiglu_quantize")]);
}

/// Every match of a row is applied, in one pass.
#[test]
fn several_matches() {
    let g = graph(|m| {
        let mut x = m.x;
        for _ in 0..3 {
            let gate = m.b.silu(x);
            x = m.b.mul(gate, m.y);
        }
        vec![x]
    });
    assert_eq!(ops(&g), ["swiglu"; 3]);
}
