//! The fusion table: pattern, condition, fused op.
//!
//! A fusion replaces a chain of nodes by one node that produces the same values. It is applied only where
//! the device that will run it takes the fused op, and the fused result equals the unfused one bit for bit
//! on that device (each device crate tests this per row of the table).

use crate::graph::{Graph, Node, NodeId, ValueId};
use crate::op::Op;

/// One row of the table.
pub struct Fusion {
    /// Name in messages, tests and docs.
    pub name: &'static str,
    /// Tries to match with the given node as the last one of the chain.
    matches: fn(&Match<'_>, NodeId) -> Option<Rewrite>,
}

/// Every fusion, applied in this order, so that later rows can build on earlier ones.
pub const FUSIONS: [Fusion; 4] = [
    Fusion { name: "swiglu", matches: swiglu },
    Fusion { name: "swiglu_quantize", matches: swiglu_quantize },
    Fusion { name: "rms_norm_quantize", matches: rms_norm_quantize },
    Fusion { name: "add_rms_norm", matches: add_rms_norm },
];

/// A graph with the tables that patterns need.
struct Match<'a> {
    graph: &'a Graph,
    readers: Vec<Vec<NodeId>>,
    producer: Vec<Option<NodeId>>,
}

/// `node` takes the place of `at`; `removed` disappears.
struct Rewrite {
    at: NodeId,
    removed: NodeId,
    node: Node,
}

/// Decides whether a fused node may replace its parts: `(graph, parts, fused)`.
pub type Takes<'a> = &'a dyn Fn(&Graph, [&Node; 2], &Node) -> bool;

/// Applies the table to `graph` wherever `takes` accepts the fused node. Values keep their ids.
pub fn fuse(graph: Graph, takes: Takes<'_>) -> Graph {
    FUSIONS.iter().fold(graph, |g, fusion| apply(g, fusion, takes))
}

fn apply(graph: Graph, fusion: &Fusion, takes: Takes<'_>) -> Graph {
    let m = Match::new(&graph);
    let rewrites: Vec<Rewrite> = (0..graph.nodes.len() as u32)
        .filter_map(|i| (fusion.matches)(&m, NodeId(i)))
        .filter(|r| takes(&graph, [m.node(r.removed), m.node(r.at)], &r.node))
        .collect();
    let mut slots: Vec<Option<Node>> = graph.nodes.iter().cloned().map(Some).collect();
    let mut used = vec![false; slots.len()];
    for r in rewrites {
        // A node takes part in one rewrite of a row: of two norms of one sum, the first is fused.
        let parts = [r.at.index(), r.removed.index()];
        if parts.iter().any(|&i| used[i]) {
            continue;
        }
        parts.iter().for_each(|&i| used[i] = true);
        slots[r.removed.index()] = None;
        slots[r.at.index()] = Some(r.node);
    }
    Graph { nodes: slots.into_iter().flatten().collect(), ..graph }
}

impl Match<'_> {
    fn new(graph: &Graph) -> Match<'_> {
        let mut producer = vec![None; graph.values.len()];
        for (id, node) in graph.nodes() {
            for v in &node.outputs {
                producer[v.index()] = Some(id);
            }
        }
        Match { graph, readers: graph.readers(), producer }
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.graph.nodes[id.index()]
    }

    fn producer(&self, v: ValueId) -> Option<(NodeId, &Node)> {
        self.producer[v.index()].map(|id| (id, self.node(id)))
    }

    /// The producer of `v`, if `v` has this one reader and is no result of the graph.
    fn private_producer(&self, v: ValueId) -> Option<(NodeId, &Node)> {
        let private = self.readers[v.index()].len() == 1 && !self.graph.is_output(v);
        if private { self.producer(v) } else { None }
    }
}

/// `Mul(Silu(gate), up)`.
fn swiglu(m: &Match<'_>, at: NodeId) -> Option<Rewrite> {
    let mul = m.node(at);
    if mul.op != Op::Mul {
        return None;
    }
    let (removed, silu) = m.private_producer(mul.inputs[0]).filter(|(_, n)| n.op == Op::Silu)?;
    let inputs = vec![silu.inputs[0], mul.inputs[1]];
    Some(Rewrite { at, removed, node: Node { op: Op::SwiGlu, inputs, ..mul.clone() } })
}

/// `Quantize(SwiGlu(gate, up))`.
fn swiglu_quantize(m: &Match<'_>, at: NodeId) -> Option<Rewrite> {
    let quantize = m.node(at);
    if quantize.op != Op::Quantize {
        return None;
    }
    let (removed, swiglu) = m.private_producer(quantize.inputs[0]).filter(|(_, n)| n.op == Op::SwiGlu)?;
    let node = Node { op: Op::SwiGluQuantize, inputs: swiglu.inputs.clone(), ..quantize.clone() };
    Some(Rewrite { at, removed, node })
}

/// `Quantize(RmsNorm(x))`.
fn rms_norm_quantize(m: &Match<'_>, at: NodeId) -> Option<Rewrite> {
    let quantize = m.node(at);
    if quantize.op != Op::Quantize {
        return None;
    }
    let (removed, norm) = m.private_producer(quantize.inputs[0])?;
    let Op::RmsNorm(payload) = norm.op else { return None };
    let node = Node {
        op: Op::RmsNormQuantize(payload),
        inputs: norm.inputs.clone(),
        weight: norm.weight,
        ..quantize.clone()
    };
    Some(Rewrite { at, removed, node })
}

/// `s = Add(a, b); RmsNorm(s)`, placed at the sum, which others read too.
fn add_rms_norm(m: &Match<'_>, norm_id: NodeId) -> Option<Rewrite> {
    let norm = m.node(norm_id);
    let Op::RmsNorm(payload) = norm.op else { return None };
    let (at, add) = m.producer(norm.inputs[0]).filter(|(_, n)| n.op == Op::Add)?;
    let node = Node {
        op: Op::AddRmsNorm(payload),
        outputs: vec![add.outputs[0], norm.outputs[0]],
        weight: norm.weight,
        ..add.clone()
    };
    Some(Rewrite { at, removed: norm_id, node })
}
