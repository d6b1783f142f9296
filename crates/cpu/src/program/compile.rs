//! From the nodes of a split to steps, and where workers must meet.

use std::sync::Arc;

use minfer_graph::{Graph, Node, Op, ValueId};
use minfer_runtime::{DeviceError, Program, ProgramSpec, Region, StateBuffer};

use super::attend::{AttendStep, ROW_BLOCK};
use super::products::{ExpertRows, ExpertsStep, MatmulStep};
use super::rows::{Extra, GatherStep, RowStep, is_row_op, scratch_len};
use super::{CpuProgram, Entry, Loc, PerWorker, Step};
use crate::attention::{AttendShape, Scratch};
use crate::device::{CpuWeight, Shared};
use crate::memory::CpuState;
use crate::pool::ChunkCounter;
use crate::{matmul, quantize};

/// Compiles a split.
///
/// # Errors
/// When memory or handles that the nodes need are not in the specification.
pub(crate) fn compile(shared: Arc<Shared>, spec: &ProgramSpec<'_>) -> Result<Box<dyn Program>, DeviceError> {
    let compiler = Compiler { shared: &shared, spec };
    let mut meetings = Meetings::default();
    let mut entries = Vec::with_capacity(spec.nodes.len());
    for id in spec.nodes {
        let node = &spec.graph.nodes[id.index()];
        let barrier = meetings.needed_before(spec, node)?;
        entries.push(Entry { step: compiler.step(node)?, barrier });
    }
    let quantize = quantize::select(shared.isa);
    Ok(Box::new(CpuProgram { shared, entries, quantize }))
}

struct Compiler<'a> {
    shared: &'a Arc<Shared>,
    spec: &'a ProgramSpec<'a>,
}

impl Compiler<'_> {
    fn step(&self, node: &Node) -> Result<Box<dyn Step>, DeviceError> {
        match &node.op {
            Op::MatMul => self.matmul(node),
            Op::GroupedMatMul => self.experts(node),
            Op::Attend(a) => self.attend(node, a),
            Op::GatherRows => Ok(Box::new(GatherStep {
                x: self.loc(node.inputs[0])?,
                index: self.loc(node.inputs[1])?,
                out: self.loc(node.outputs[0])?,
            })),
            _ => self.row_step(node),
        }
    }

    fn graph(&self) -> &Graph {
        self.spec.graph
    }

    fn loc(&self, v: ValueId) -> Result<Loc, DeviceError> {
        let ty = self.graph().ty(v);
        let region = region(self.spec, v)?;
        Ok(Loc { offset: region.offset, row_bytes: ty.row_bytes(), lead: ty.shape.lead })
    }

    fn locs(&self, values: &[ValueId]) -> Result<Vec<Loc>, DeviceError> {
        values.iter().map(|&v| self.loc(v)).collect()
    }

    fn weight(&self, node: &Node) -> Result<Arc<CpuWeight>, DeviceError> {
        let missing = || DeviceError::Failed(format!("the weight of {} is not loaded", node.op.name()));
        let (id, how) = node.weight_use().ok_or_else(missing)?;
        (self.spec.weight)(id, how).and_then(|w| w.downcast().ok()).ok_or_else(missing)
    }

    fn state(&self, node: &Node) -> Result<Arc<dyn StateBuffer>, DeviceError> {
        let missing = || DeviceError::Failed(format!("the state of {} is not there", node.op.name()));
        node.state.and_then(|s| (self.spec.state)(s)).ok_or_else(missing)
    }

    fn row_step(&self, node: &Node) -> Result<Box<dyn Step>, DeviceError> {
        let extra = match (node.weight, node.state) {
            (Some(_), _) => Extra::Weight(self.weight(node)?),
            (None, Some(_)) => Extra::State(self.state(node)?),
            (None, None) => Extra::None,
        };
        let first = &self.graph().ty(node.inputs[0]).shape;
        let scratch = scratch_len(&node.op, first.width());
        Ok(Box::new(RowStep {
            inputs: self.locs(&node.inputs)?,
            outputs: self.locs(&node.outputs)?,
            extra,
            last: first.last(),
            scratch: PerWorker::new(self.shared.pool.threads(), || vec![0.0; scratch]),
            op: node.op.clone(),
        }))
    }

    fn matmul(&self, node: &Node) -> Result<Box<dyn Step>, DeviceError> {
        let weight = self.weight(node)?;
        let CpuWeight::Matrix(w) = &*weight else { return Err(wrong_layout(node)) };
        let kernel = matmul::select(w.ty(), self.shared.isa);
        let (x, y) = (self.loc(node.inputs[0])?, self.loc(node.outputs[0])?);
        Ok(Box::new(MatmulStep { weight, kernel, x, y, next: ChunkCounter::new() }))
    }

    fn experts(&self, node: &Node) -> Result<Box<dyn Step>, DeviceError> {
        let weight = self.weight(node)?;
        let CpuWeight::Experts(w) = &*weight else { return Err(wrong_layout(node)) };
        let Some(first) = w.first() else { return Err(wrong_layout(node)) };
        let kernel = matmul::select(first.ty(), self.shared.isa);
        let (x, ids) = (node.inputs[0], node.inputs[1]);
        let top_k = self.graph().ty(ids).shape.width();
        let pairs = self.spec.bound.len(self.graph().ty(ids).shape.lead) * top_k;
        let sorted = PerWorker::new(self.shared.pool.threads(), || ExpertRows::new(w.len(), pairs));
        Ok(Box::new(ExpertsStep {
            kernel,
            x: self.loc(x)?,
            ids: self.loc(ids)?,
            y: self.loc(node.outputs[0])?,
            top_k,
            own_rows: self.graph().ty(x).shape.inner.len() == 2,
            sorted,
            next: ChunkCounter::new(),
            weight: weight.clone(),
        }))
    }

    fn attend(&self, node: &Node, a: &minfer_graph::Attend) -> Result<Box<dyn Step>, DeviceError> {
        let state = self.state(node)?;
        let Some(cache) = state.as_any().downcast_ref::<CpuState>() else { return Err(wrong_layout(node)) };
        let [k_dim, v_dim] = cache.widths.map(|w| w / a.kv_heads);
        let shape = AttendShape { heads: a.heads, kv_heads: a.kv_heads, k_dim, v_dim, scale: a.scale };
        Ok(Box::new(AttendStep {
            shape,
            q: self.loc(node.inputs[0])?,
            positions: self.loc(node.inputs[1])?,
            table_at: self.loc(node.inputs[2])?,
            pages: self.loc(node.inputs[3])?,
            out: self.loc(node.outputs[0])?,
            scratch: PerWorker::new(self.shared.pool.threads(), || Scratch::new(&shape, ROW_BLOCK)),
            next: ChunkCounter::new(),
            state,
        }))
    }
}

fn wrong_layout(node: &Node) -> DeviceError {
    DeviceError::Failed(format!("the weight or state of {} has another layout", node.op.name()))
}

fn region(spec: &ProgramSpec<'_>, v: ValueId) -> Result<Region, DeviceError> {
    (spec.region)(v).ok_or_else(|| DeviceError::Failed(format!("value {} has no memory", v.0)))
}

/// What was touched since the workers last met.
#[derive(Default)]
struct Meetings {
    touched: Vec<Touch>,
}

struct Touch {
    value: ValueId,
    region: Region,
    written: bool,
    by_row: bool,
}

impl Meetings {
    /// Whether workers must meet before `node`; remembers what it touches.
    fn needed_before(&mut self, spec: &ProgramSpec<'_>, node: &Node) -> Result<bool, DeviceError> {
        let by_row = is_row_op(&node.op);
        let mut touches = Vec::new();
        for (values, written) in [(&node.inputs, false), (&node.outputs, true)] {
            for &value in values {
                touches.push(Touch { value, region: region(spec, value)?, written, by_row });
            }
        }
        // K and V are read across rows, whatever was stored just before.
        let barrier = matches!(node.op, Op::Attend(_))
            || touches.iter().any(|t| self.touched.iter().any(|earlier| conflict(earlier, t)));
        if barrier {
            self.touched.clear();
        }
        self.touched.extend(touches);
        Ok(barrier)
    }
}

/// Two touches of the same bytes, one of them a write, by workers that may differ. Row steps give a worker
/// the same rows of a value each time.
fn conflict(a: &Touch, b: &Touch) -> bool {
    let same_rows = a.value == b.value && a.by_row && b.by_row;
    (a.written || b.written) && a.region.overlaps(&b.region) && !same_rows
}
