//! Steps of compressed attention.

use minfer_graph::{AttendWindow, Compress, Node};
use minfer_runtime::DeviceError;

use super::{Compiler, wrong_layout};
use crate::attention::{AttendShape, Scratch};
use crate::pool::ChunkCounter;
use crate::program::Step;
use crate::program::compressed::{CompressScratch, CompressStep, WindowStep};
use crate::program::sparse::PageTables;
use crate::weights::CpuWeight;

impl Compiler<'_> {
    pub(super) fn compress(&self, node: &Node, c: &Compress) -> Result<Box<dyn Step>, DeviceError> {
        let bias = self.weight(node)?;
        let CpuWeight::Vector(_) = &*bias else { return Err(wrong_layout(node)) };
        Ok(Box::new(CompressStep {
            compress: *c,
            bias,
            width: self.graph().ty(node.inputs[0]).shape.width(),
            slots: self.state_slots(node, 3)?,
            kv: self.loc(node.inputs[0])?,
            gate: self.loc(node.inputs[1])?,
            positions: self.loc(node.inputs[2])?,
            out: self.loc(node.outputs[0])?,
            scratch: self.per_worker(|| CompressScratch::new(c)),
        }))
    }

    pub(super) fn attend_window(&self, node: &Node, a: &AttendWindow) -> Result<Box<dyn Step>, DeviceError> {
        let (state, sinks) = (self.state(node)?, self.weight(node)?);
        let CpuWeight::Vector(_) = &*sinks else { return Err(wrong_layout(node)) };
        let dim = self.part_width(node, &state, 0)?;
        if a.ratio > 0 && self.part_width(node, &state, 1)? != dim {
            return Err(wrong_layout(node));
        }
        let (heads, scale) = (a.attend.heads, a.attend.scale);
        let shape = AttendShape { heads, kv_heads: 1, k_dim: dim, v_dim: dim, scale };
        let tables = self.page_tables(node, 1)?;
        Ok(Box::new(WindowStep {
            shape,
            window: a.window,
            ratio: a.ratio,
            sinks,
            q: self.loc(node.inputs[0])?,
            compressed: match a.ratio {
                0 => None,
                _ => Some(PageTables { pages: self.loc(node.inputs[4])?, ..tables }),
            },
            tables,
            chosen: node.inputs.get(5).map(|&v| self.loc(v)).transpose()?,
            out: self.loc(node.outputs[0])?,
            scratch: self.per_worker(|| Scratch::of_one_row(&shape)),
            next: ChunkCounter::new(),
            state,
        }))
    }
}
