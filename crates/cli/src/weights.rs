//! How many bytes of weights lie on a device and are read in a step.

use std::collections::BTreeSet;

use minfer_engine::Hyper;
use minfer_graph::{Graph, WeightDecl, WeightId, WeightUse};
use minfer_runtime::plan::Placed;

/// Bytes that a device's weights take in its memory, in its own layout. Rows of a mapped file take none.
pub(crate) fn resident(placed: &Placed, device: usize) -> u64 {
    let uses = placed.splits.iter().filter(|s| s.device == device).flat_map(|s| &s.nodes);
    let uses: BTreeSet<_> = uses.filter_map(|n| placed.graph.nodes[n.index()].weight_use()).collect();
    let bytes = |(w, how): (WeightId, WeightUse)| {
        placed.devices[device].weight_bytes(&placed.graph.weights[w.index()], how).unwrap_or(0)
    };
    uses.into_iter().map(bytes).sum()
}

/// Bytes of weights that every device reads to generate one token in each of `batch` sequences: all of them,
/// or of a layer with experts those that a token chooses. Which experts several tokens choose together depends
/// on the text, so there is no number then.
pub(crate) fn read_per_step(placed: &Placed, hyper: &Hyper, batch: usize) -> Option<f64> {
    let mut total = 0.0;
    let mut seen = BTreeSet::new();
    for split in &placed.splits {
        for node in &split.nodes {
            let Some((w, how)) = placed.graph.nodes[node.index()].weight_use() else { continue };
            if !seen.insert((split.device, w, how)) {
                continue;
            }
            let decl = &placed.graph.weights[w.index()];
            let bytes = match (how, placed.devices[split.device].weight_bytes(decl, how)?) {
                // A few rows of a table.
                (WeightUse::Rows, _) => 0,
                // It is read where it lies in the file.
                (_, 0) => decl.bytes()? as u64,
                (_, bytes) => bytes,
            } as f64;
            let share = match (how, &hyper.experts) {
                (WeightUse::Experts, Some(_)) if batch > 1 => return None,
                (WeightUse::Experts, Some(e)) => e.used as f64 / e.count.max(1) as f64,
                _ => 1.0,
            };
            total += bytes * share;
        }
    }
    Some(total)
}

/// Bytes of the model's weights in their own encoding.
pub(crate) fn encoded(graph: &Graph) -> u64 {
    graph.weights.iter().filter_map(WeightDecl::bytes).map(|n| n as u64).sum()
}
