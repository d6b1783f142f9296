//! A graph with every node on a device, cut into splits.

use std::sync::Arc;

use minfer_graph::{Graph, Node, fuse};

use super::assign::{Assigner, Policy};
use super::split::{Split, split};
use crate::device::Device;
use crate::error::RuntimeError;

/// The part of planning that does not depend on the size of a step. `Split::device` and all other device
/// indices point into `devices`, which is in order of preference.
pub struct Placed {
    /// Fused graph with places filled.
    pub graph: Graph,
    /// Maximal runs of nodes on one device, in execution order.
    pub splits: Vec<Split>,
    /// The devices that take part in the decision, most preferred first.
    pub devices: Vec<Arc<dyn Device>>,
}

impl Placed {
    /// Fuses, assigns and splits.
    ///
    /// # Errors
    /// An invalid graph, a node that no device takes, or one that lands off the required devices.
    pub fn new(graph: Graph, devices: Vec<Arc<dyn Device>>, policy: &Policy) -> Result<Placed, RuntimeError> {
        graph.validate()?;
        let mut graph = {
            let assigner = Assigner::new(&devices, policy, &graph);
            fuse(graph.clone(), &|g, parts, fused| assigner.takes_fused(g, parts, fused))
        };
        let places = Assigner::new(&devices, policy, &graph).assign(&graph)?;
        for (node, &device) in graph.nodes.iter_mut().zip(&places) {
            node.place = Some(devices[device].id());
        }
        let splits = split(&graph, &places);
        Ok(Placed { graph, splits, devices })
    }
}

/// A node in a sentence: `matmul 'blk.0.attn_q.weight' (Q8_0) of layer 0`.
pub(crate) fn describe(graph: &Graph, node: &Node) -> String {
    let mut text = node.op.name().to_string();
    if let Some(w) = node.weight.map(|w| &graph.weights[w.index()]) {
        text.push_str(&format!(" '{}' ({})", w.name, w.ty));
    }
    if let Some(layer) = node.layer {
        text.push_str(&format!(" of layer {layer}"));
    }
    text
}
