//! Laying out values in one arena per device by liveness.
//!
//! Time is the index of a split; within a split, of a node. A value lives on its producer's device from its
//! node to its last reader there (or the end of the split if it is sent, or the end of the step if it is a
//! result); a received copy lives from its producer's node, since a copy may arrive as soon as it is sent, to
//! its last reader; an input lives from the start of the step to its last reader on each device.

use std::sync::Arc;

use minfer_graph::{Bind, ValueId};

use super::place::Placed;
use crate::device::Region;
use crate::error::RuntimeError;

/// Start of every region: a cache line, and enough for any vector load.
const ALIGN: usize = 64;

/// Memory of one device under a plan.
#[derive(Clone, Debug, Default)]
pub struct DeviceMemory {
    /// Arena size in bytes.
    pub bytes: usize,
    regions: Vec<Option<Region>>,
}

impl DeviceMemory {
    /// Where a value lives on this device.
    pub fn region(&self, v: ValueId) -> Option<Region> {
        self.regions.get(v.index()).copied().flatten()
    }
}

/// Memory of every device for steps up to `bound`.
pub struct Plan {
    /// What is placed where.
    pub placed: Arc<Placed>,
    /// Largest step that the plan serves.
    pub bound: Bind,
    /// By device index.
    pub memory: Vec<DeviceMemory>,
}

impl Plan {
    /// Lays out memory for steps up to `bound`.
    ///
    /// # Errors
    /// [`RuntimeError::SizeOverflow`] when sizes do not fit the address space.
    pub fn new(placed: Arc<Placed>, bound: Bind) -> Result<Plan, RuntimeError> {
        let memory =
            (0..placed.devices.len()).map(|d| layout(&placed, bound, d)).collect::<Result<_, _>>()?;
        Ok(Plan { placed, bound, memory })
    }
}

/// A value's stay in an arena, in node indices, both ends included.
struct Stay {
    value: ValueId,
    from: usize,
    to: usize,
    bytes: usize,
}

fn layout(placed: &Placed, bound: Bind, device: usize) -> Result<DeviceMemory, RuntimeError> {
    let mut stays = stays(placed, bound, device)?;
    // Large values first, so that small ones fill the gaps; ties by age keep the layout deterministic.
    stays.sort_by_key(|s| (std::cmp::Reverse(s.bytes), s.from, s.value));
    let mut memory = DeviceMemory { bytes: 0, regions: vec![None; placed.graph.values.len()] };
    let mut placed_stays: Vec<(usize, usize, Region)> = Vec::new();
    for stay in &stays {
        let mut busy: Vec<Region> = placed_stays
            .iter()
            .filter(|(from, to, _)| *from <= stay.to && stay.from <= *to)
            .map(|p| p.2)
            .collect();
        busy.sort_by_key(|r| r.offset);
        let offset = first_gap(&busy, stay.bytes);
        let region = Region { offset, bytes: stay.bytes };
        memory.bytes = memory.bytes.max(offset.checked_add(stay.bytes).ok_or_else(overflow)?);
        memory.regions[stay.value.index()] = Some(region);
        placed_stays.push((stay.from, stay.to, region));
    }
    Ok(memory)
}

/// The lowest offset where `bytes` fit between busy regions sorted by offset.
fn first_gap(busy: &[Region], bytes: usize) -> usize {
    let mut offset = 0;
    for r in busy {
        // Busy regions end inside the address space, so only the difference is safe to take.
        if r.offset.saturating_sub(offset) >= bytes {
            break;
        }
        offset = offset.max(r.offset + r.bytes);
    }
    offset
}

fn overflow() -> RuntimeError {
    RuntimeError::SizeOverflow { what: "the step's values".to_string() }
}

fn stays(placed: &Placed, bound: Bind, device: usize) -> Result<Vec<Stay>, RuntimeError> {
    let graph = &placed.graph;
    let mut spans: Vec<Option<(usize, usize)>> = vec![None; graph.values.len()];
    let mut extend = |v: ValueId, from: usize, to: usize| {
        let span = spans[v.index()].get_or_insert((from, to));
        span.1 = span.1.max(to);
    };
    let end = graph.nodes.len();
    let mut born = vec![0; graph.values.len()];
    for (id, node) in graph.nodes() {
        node.outputs.iter().for_each(|v| born[v.index()] = id.index());
    }
    for split in placed.splits.iter().filter(|s| s.device == device) {
        let (first, last) = (split.nodes[0].index(), split.nodes[split.nodes.len() - 1].index());
        for id in &split.nodes {
            let node = &graph.nodes[id.index()];
            for &v in &node.outputs {
                extend(v, id.index(), if graph.is_output(v) { end } else { id.index() });
            }
            for &v in &node.inputs {
                extend(v, born[v.index()], id.index());
            }
        }
        for send in &split.sends {
            extend(send.value, first, last);
        }
    }
    let mut stays = Vec::new();
    for (i, span) in spans.iter().enumerate() {
        let Some((from, to)) = *span else { continue };
        let value = ValueId(i as u32);
        let ty = graph.ty(value);
        let bytes = ty.row_bytes().checked_mul(bound.len(ty.shape.lead)).ok_or_else(overflow)?;
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGN).ok_or_else(overflow)?;
        stays.push(Stay { value, from, to, bytes });
    }
    Ok(stays)
}
