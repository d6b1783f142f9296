//! What a model is made of, read off the graph of a step: kinds of layers, state, draft head, n-gram table.
//! No architecture is known by name here.

use std::collections::BTreeMap;

use minfer_graph::{Graph, Op, StateKind, WeightDecl};
use serde::Serialize;

#[derive(Serialize)]
pub(super) struct LayerKind {
    pub(super) kind: &'static str,
    pub(super) layers: usize,
}

/// A table whose rows are chosen by the last few tokens.
#[derive(Serialize)]
pub(super) struct NgramTable {
    /// The tensor, or the pattern of its parts' names.
    pub(super) tensor: String,
    pub(super) rows: usize,
    pub(super) bytes: u64,
}

/// How the op mixes tokens of a sequence with each other, if it is the one of its layer that does.
fn mixer(op: &Op) -> Option<&'static str> {
    match op {
        Op::Attend(_) => Some("attention"),
        Op::AttendBlocks(_) => Some("block-sparse attention"),
        Op::AttendWindow(_) => Some("attention to a window and compressed rows"),
        Op::DeltaRule(d) if d.per_channel => Some("Kimi delta attention"),
        Op::DeltaRule(_) => Some("gated DeltaNet"),
        _ => None,
    }
}

/// How many layers mix tokens in each way, most first.
pub(super) fn layer_kinds(graph: &Graph) -> Vec<LayerKind> {
    let layers: BTreeMap<u32, &str> =
        graph.nodes.iter().filter_map(|n| Some((n.layer?, mixer(&n.op)?))).collect();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for kind in layers.into_values() {
        *counts.entry(kind).or_default() += 1;
    }
    let mut kinds: Vec<_> = counts.into_iter().map(|(kind, layers)| LayerKind { kind, layers }).collect();
    kinds.sort_by_key(|k| std::cmp::Reverse(k.layers));
    kinds
}

/// Bytes of a sequence's recurrent state, which does not grow with its length.
pub(super) fn recurrent_bytes(graph: &Graph) -> u64 {
    let widths = graph.states.iter().map(|state| match state.kind {
        StateKind::Recurrent { width } => width as u64 * size_of::<f32>() as u64,
        _ => 0,
    });
    widths.sum()
}

/// The model's n-gram table, if it has one.
pub(super) fn ngram_table(table: Option<&WeightDecl>) -> Option<NgramTable> {
    let table = table?;
    let bytes = table.bytes().unwrap_or(0) as u64;
    Some(NgramTable { tensor: table.name.clone(), rows: *table.shape.first()?, bytes })
}
