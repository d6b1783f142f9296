//! What a model is made of, read off the graph of a step: kinds of layers, state, draft head, n-gram table.
//! No architecture is known by name here.

use std::collections::{BTreeMap, BTreeSet};

use minfer_engine::{Checkpoint, Hyper};
use minfer_graph::{Graph, Op, StateKind, WeightDecl, WeightUse};
use minfer_model::DraftHead;
use serde::Serialize;

#[derive(Serialize)]
pub(super) struct LayerKind {
    pub(super) kind: String,
    pub(super) layers: usize,
}

/// A table whose rows are chosen by the last few tokens.
#[derive(Serialize)]
pub(super) struct NgramTable {
    /// The tensor, or the pattern of its parts' names.
    pub(super) tensor: String,
    pub(super) rows: usize,
    pub(super) parameters: u64,
    pub(super) bytes: u64,
    /// Whether it stays there, its rows being read as tokens ask for them; a model inside of the binary is in memory.
    pub(super) on_disk: bool,
    /// Of its first part.
    pub(super) file: Option<String>,
}

/// How the op mixes tokens of a sequence with each other, if it is the one of its layer that does.
fn mixer(op: &Op) -> Option<String> {
    let kind = match op {
        Op::Attend(_) => "attention",
        Op::AttendBlocks(_) => "block-sparse attention",
        Op::AttendWindow(a) if a.ratio > 0 => {
            return Some(format!("windowed attention with rows of {}", a.ratio));
        }
        Op::AttendWindow(_) => "windowed attention",
        Op::DeltaRule(d) if d.per_channel => "Kimi delta attention",
        Op::DeltaRule(_) => "gated DeltaNet",
        _ => return None,
    };
    Some(kind.to_string())
}

/// How many layers mix tokens in each way, most first.
pub(super) fn layer_kinds(graph: &Graph) -> Vec<LayerKind> {
    let layers: BTreeMap<u32, String> =
        graph.nodes.iter().filter_map(|n| Some((n.layer?, mixer(&n.op)?))).collect();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
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

/// Layers with a mixture of experts.
pub(super) fn expert_layers(graph: &Graph) -> usize {
    let experts = graph.nodes.iter().filter(|n| matches!(n.op, Op::GroupedMatMul));
    experts.filter_map(|n| n.layer).collect::<BTreeSet<_>>().len()
}

/// Parameters that a token is computed with: all but looked-up rows, and of a layer's experts those it chooses.
pub(super) fn active_parameters(graph: &Graph, hyper: &Hyper) -> u64 {
    let uses = graph.weight_uses().into_iter().filter(|(_, how)| *how != WeightUse::Rows);
    let active = uses.map(|(w, how)| {
        let all = parameters(&graph.weights[w.index()].shape);
        match (how, &hyper.experts) {
            (WeightUse::Experts, Some(e)) => all / e.count.max(1) as u64 * e.used as u64,
            _ => all,
        }
    });
    active.sum()
}

/// Parameters that only the draft head uses.
pub(super) fn draft_parameters(graph: &Graph, head: Option<&DraftHead>) -> u64 {
    let own = head.into_iter().flat_map(DraftHead::weights).filter(|w| !graph.weights.contains(w));
    own.map(|w| parameters(&w.shape)).sum()
}

/// Numbers in a tensor.
pub(super) fn parameters(shape: &[usize]) -> u64 {
    shape.iter().map(|&d| d as u64).product()
}

/// What the draft head is, if there is one; one that cannot be used is told too.
pub(super) fn draft_kind(model: &Checkpoint, head: Option<&DraftHead>) -> Option<String> {
    match head {
        Some(DraftHead::Chain(_)) => Some("multi-token prediction, one token after another".to_string()),
        Some(DraftHead::Block(head)) => Some(format!("DSpark, {} tokens at once", head.size)),
        None => {
            let there = match model {
                Checkpoint::Gguf(g) => g.tensors().iter().any(|t| t.name.contains(".nextn.")),
                Checkpoint::Hf(d) => d.tensors().any(|t| t.name.starts_with("mtp.")),
                Checkpoint::Shape(_) => false,
            };
            there.then(|| "the file has one of a form that is not supported".to_string())
        }
    }
}

/// The model's n-gram table, if it has one.
pub(super) fn ngram_table(model: &Checkpoint, table: Option<&WeightDecl>) -> Option<NgramTable> {
    let table = table?;
    let bytes = table.bytes().unwrap_or(0) as u64;
    let first = table.tensors.first()?;
    let file = match model {
        Checkpoint::Gguf(g) => g.location(first).map(|(path, _)| path.display().to_string()),
        Checkpoint::Hf(d) => d.location(first).map(|(path, _)| path.display().to_string()),
        Checkpoint::Shape(_) => None,
    };
    let in_memory = file.is_none() && matches!(model, Checkpoint::Gguf(_));
    Some(NgramTable {
        tensor: table.name.clone(),
        rows: *table.shape.first()?,
        parameters: parameters(&table.shape),
        bytes,
        on_disk: !in_memory,
        file,
    })
}
