//! Which device runs which node: the most preferred allowed device that supports it; nodes that share state
//! stay together; then islands whose copies cost more than they gain move to their surroundings.

use std::sync::Arc;

use minfer_graph::{Bind, DeviceKind, Graph, Node, StateId};

use super::place::describe;
use crate::device::{Device, KvFormat};
use crate::error::RuntimeError;

/// What the user wants beyond the fence.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Format of K and V; a device that cannot read it gets no attention node.
    pub kv_format: KvFormat,
    /// How many leading layers may leave the CPU. Nodes outside layers (embedding, head) leave it only if
    /// every layer may. `None`: all.
    pub gpu_layers: Option<u32>,
    /// If not empty, a node on a device of another kind is an error (`--require-device`).
    pub require: Vec<DeviceKind>,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy { kv_format: KvFormat::F16, gpu_layers: None, require: Vec::new() }
    }
}

pub(super) struct Assigner<'a> {
    devices: &'a [Arc<dyn Device>],
    policy: &'a Policy,
    layers: u32,
}

impl<'a> Assigner<'a> {
    pub(super) fn new(devices: &'a [Arc<dyn Device>], policy: &'a Policy, graph: &Graph) -> Assigner<'a> {
        let layers = graph.nodes.iter().filter_map(|n| n.layer).max().map_or(0, |l| l + 1);
        Assigner { devices, policy, layers }
    }

    /// Whether a fused node may replace its parts: the device that would run each part takes the fused one.
    pub(super) fn takes_fused(&self, graph: &Graph, parts: [&Node; 2], fused: &Node) -> bool {
        let part_devices = parts.map(|n| self.preferred(graph, n));
        part_devices[0].is_some()
            && part_devices[0] == part_devices[1]
            && part_devices[0] == self.preferred(graph, fused)
    }

    /// The device index of every node.
    pub(super) fn assign(&self, graph: &Graph) -> Result<Vec<usize>, RuntimeError> {
        let pinned = self.pin_states(graph)?;
        let mut places = Vec::with_capacity(graph.nodes.len());
        for node in &graph.nodes {
            let place = match node.state {
                Some(s) => pinned[s.index()],
                None => self.preferred(graph, node),
            };
            places.push(place.ok_or_else(|| self.unsupported(graph, node))?);
        }
        self.remove_islands(graph, &mut places);
        self.check_required(graph, &places)?;
        Ok(places)
    }

    fn preferred(&self, graph: &Graph, node: &Node) -> Option<usize> {
        (0..self.devices.len()).find(|&d| self.takes(d, graph, node))
    }

    fn takes(&self, device: usize, graph: &Graph, node: &Node) -> bool {
        let device = &self.devices[device];
        self.may_leave_cpu(device.id().kind, node)
            && (node.state.is_none() || device.reads_kv(self.policy.kv_format))
            && device.supports(graph, node)
    }

    fn may_leave_cpu(&self, kind: DeviceKind, node: &Node) -> bool {
        match self.policy.gpu_layers {
            Some(n) if kind != DeviceKind::Cpu => node.layer.map_or(n >= self.layers, |l| l < n),
            _ => true,
        }
    }

    /// For each state, the most preferred device that takes all its nodes.
    fn pin_states(&self, graph: &Graph) -> Result<Vec<Option<usize>>, RuntimeError> {
        let users = |s: usize| graph.nodes.iter().filter(move |n| n.state == Some(StateId(s as u32)));
        (0..graph.states.len())
            .map(|s| {
                let found = (0..self.devices.len()).find(|&d| users(s).all(|n| self.takes(d, graph, n)));
                match (found, users(s).next()) {
                    (None, Some(node)) => Err(self.unsupported(graph, node)),
                    (found, _) => Ok(found),
                }
            })
            .collect()
    }

    fn unsupported(&self, graph: &Graph, node: &Node) -> RuntimeError {
        let asked: Vec<_> = self.devices.iter().map(|d| d.id().to_string()).collect();
        let mut text = describe(graph, node);
        if node.state.is_some() {
            text.push_str(&format!(" with {} KV", self.policy.kv_format.name()));
        }
        RuntimeError::Unsupported { node: text, asked: asked.join(", ") }
    }

    fn check_required(&self, graph: &Graph, places: &[usize]) -> Result<(), RuntimeError> {
        if self.policy.require.is_empty() {
            return Ok(());
        }
        for (node, &p) in graph.nodes.iter().zip(places) {
            let placed = self.devices[p].id();
            if !self.policy.require.contains(&placed.kind) {
                let required = self.policy.require.iter().map(|k| k.name()).collect::<Vec<_>>().join(", ");
                return Err(RuntimeError::NotOnRequired { node: describe(graph, node), placed, required });
            }
        }
        Ok(())
    }

    /// Moves runs of nodes to a neighbour's device while that lowers the estimated cost of a one-row step.
    /// Each move merges a run with a neighbour, so the number of runs falls and the loop ends.
    fn remove_islands(&self, graph: &Graph, places: &mut [usize]) {
        while let Some((run, target)) = self.find_island(graph, places) {
            places[run].fill(target);
        }
    }

    fn find_island(&self, graph: &Graph, places: &[usize]) -> Option<(std::ops::Range<usize>, usize)> {
        let runs = runs(places);
        for (i, run) in runs.iter().enumerate() {
            let before = i.checked_sub(1).map(|j| places[runs[j].start]);
            let after = runs.get(i + 1).map(|r| places[r.start]);
            let surrounding = match (before, after) {
                (Some(b), Some(a)) if b == a => b,
                (Some(d), None) | (None, Some(d)) => d,
                _ => continue,
            };
            let movable = run
                .clone()
                .all(|n| graph.nodes[n].state.is_none() && self.takes(surrounding, graph, &graph.nodes[n]));
            if movable && self.gain_of_moving(graph, places, run, surrounding) > 0.0 {
                return Some((run.clone(), surrounding));
            }
        }
        None
    }

    /// Seconds saved by running `run` on `target` instead of where it is.
    fn gain_of_moving(
        &self,
        graph: &Graph,
        places: &[usize],
        run: &std::ops::Range<usize>,
        target: usize,
    ) -> f64 {
        let here = places[run.start];
        let compute = |device: usize| -> f64 {
            let bytes: usize = run.clone().map(|n| node_bytes(graph, &graph.nodes[n])).sum();
            bytes as f64 / self.devices[device].speed().bytes_per_second
        };
        let mut moved = places.to_vec();
        moved[run.clone()].fill(target);
        let copies = self.copy_seconds(graph, places) - self.copy_seconds(graph, &moved);
        compute(here) - compute(target) + copies
    }

    /// Estimated seconds of all copies in a one-row step.
    fn copy_seconds(&self, graph: &Graph, places: &[usize]) -> f64 {
        super::split::copies(graph, places)
            .into_iter()
            .map(|(value, from, to)| {
                let bytes = graph.ty(value).bytes(&ONE_ROW) as f64;
                [from, to]
                    .into_iter()
                    .map(|d| self.devices[d].speed())
                    .filter(|s| s.copy_latency > 0.0)
                    .map(|s| s.copy_latency + bytes / s.copy_bytes_per_second)
                    .sum::<f64>()
            })
            .sum()
    }
}

const ONE_ROW: Bind = Bind { rows: 1, outs: 1 };

/// Bytes that a one-row step moves through a node: the weight and the operands.
fn node_bytes(graph: &Graph, node: &Node) -> usize {
    let weight = node.weight.and_then(|w| match node.op {
        minfer_graph::Op::Embed | minfer_graph::Op::GatherIds => Some(0),
        _ => graph.weights[w.index()].bytes(),
    });
    let values = node.inputs.iter().chain(&node.outputs);
    weight.unwrap_or(0) + values.map(|&v| graph.ty(v).bytes(&ONE_ROW)).sum::<usize>()
}

/// Maximal ranges of equal places.
pub(super) fn runs(places: &[usize]) -> Vec<std::ops::Range<usize>> {
    let mut start = 0;
    places
        .chunk_by(|a, b| a == b)
        .map(|c| {
            start += c.len();
            start - c.len()..start
        })
        .collect()
}
