//! Cutting a placed graph into splits, and the copies between them.

use std::collections::BTreeSet;

use minfer_graph::{Graph, NodeId, ValueId};

use super::assign::runs;

/// A maximal run of nodes on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Index of the device.
    pub device: usize,
    /// Its nodes, in order.
    pub nodes: Vec<NodeId>,
    /// Values from other devices that this split reads.
    pub receives: Vec<ValueId>,
    /// Values of this split that other devices read, to be sent when it has run.
    pub sends: Vec<Send>,
}

/// A value and the device that needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub struct Send {
    pub value: ValueId,
    pub to: usize,
}

/// Every value that crosses devices, once per destination: `(value, from, to)`, in order of the
/// consumers' first reads.
pub(super) fn copies(graph: &Graph, places: &[usize]) -> Vec<(ValueId, usize, usize)> {
    let mut producer = vec![None; graph.values.len()];
    let mut seen = BTreeSet::new();
    let mut copies = Vec::new();
    for (node, &place) in graph.nodes.iter().zip(places) {
        for &v in &node.inputs {
            match producer[v.index()] {
                Some(from) if from != place && seen.insert((v, place)) => copies.push((v, from, place)),
                _ => {}
            }
        }
        for v in &node.outputs {
            producer[v.index()] = Some(place);
        }
    }
    copies
}

pub(super) fn split(graph: &Graph, places: &[usize]) -> Vec<Split> {
    let copies = copies(graph, places);
    runs(places)
        .into_iter()
        .map(|run| {
            let device = places[run.start];
            let nodes: Vec<_> = run.map(|n| NodeId(n as u32)).collect();
            let of_split = |pick: fn(&minfer_graph::Node) -> &Vec<ValueId>| -> BTreeSet<ValueId> {
                nodes.iter().flat_map(|n| pick(&graph.nodes[n.index()]).iter().copied()).collect()
            };
            let (reads, writes) = (of_split(|n| &n.inputs), of_split(|n| &n.outputs));
            let receives = copies.iter().filter(|(v, _, to)| *to == device && reads.contains(v));
            let sends = copies.iter().filter(|(v, _, _)| writes.contains(v));
            Split {
                device,
                receives: receives.map(|c| c.0).collect(),
                sends: sends.map(|&(value, _, to)| Send { value, to }).collect(),
                nodes,
            }
        })
        .collect()
}
