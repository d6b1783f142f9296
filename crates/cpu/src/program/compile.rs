//! From the nodes of a split to steps; `meetings` says where workers must meet.

mod compressed;

use std::cell::RefCell;
use std::sync::Arc;

use minfer_graph::{
    Attend, AttendBlocks, Conv1d, DeltaRule, Graph, IndexSelect, Node, Op, PAGE, PoolGated, PoolKeys, ValueId,
};
use minfer_runtime::{DeviceError, Program, ProgramSpec, Region, StateBuffer};

use super::attend::AttendStep;
use super::gated::{GatedScratch, GatedStep};
use super::meetings::Meetings;
use super::products::{ExpertRows, ExpertsStep, HeadsStep, MatmulStep};
use super::recurrent::{ConvScratch, ConvStep, DeltaScratch, DeltaStep, StateSlots};
use super::rows::{Extra, GatherStep, RowStep, scratch_len};
use super::sparse::{PageTables, PoolStep, SelectScratch, SelectStep, SharedScores, SparseStep};
use super::swiglu::SwiGluStep;
use super::{CpuProgram, Entry, Loc, PerWorker, Step};
use crate::attention::{AttendShape, Partials, Scratch};
use crate::device::Shared;
use crate::index::PoolScratch;
use crate::pool::ChunkCounter;
use crate::state::PagedState;
use crate::weights::CpuWeight;
use crate::{conv, matmul, quantize};

/// Compiles a split.
///
/// # Errors
/// When memory or handles that the nodes need are not in the specification.
pub(crate) fn compile(shared: Arc<Shared>, spec: &ProgramSpec<'_>) -> Result<Box<dyn Program>, DeviceError> {
    let compiler = Compiler { shared: &shared, spec, partials: RefCell::default() };
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
    /// What the last layer with attention was given, which the next ones use as well.
    partials: RefCell<Option<Arc<Partials>>>,
}

impl Compiler<'_> {
    fn step(&self, node: &Node) -> Result<Box<dyn Step>, DeviceError> {
        match &node.op {
            Op::MatMul => self.matmul(node),
            Op::SwiGluQuantize => self.swiglu(node),
            Op::GroupedMatMul => self.experts(node),
            Op::HeadMatMul => self.heads(node),
            Op::Attend(a) => self.attend(node, a),
            Op::AttendBlocks(a) => self.attend_blocks(node, a),
            Op::PoolKeys(p) => self.pool_keys(node, p),
            Op::PoolGated(p) => self.pool_gated(node, p),
            Op::IndexSelect(s) => self.index_select(node, s),
            Op::Compress(c) => self.compress(node, c),
            Op::AttendWindow(a) => self.attend_window(node, a),
            Op::Conv1d(c) => self.conv1d(node, c),
            Op::DeltaRule(d) => self.delta_rule(node, d),
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
            scratch: self.per_worker(|| vec![0.0; scratch]),
            op: node.op.clone(),
        }))
    }

    fn swiglu(&self, node: &Node) -> Result<Box<dyn Step>, DeviceError> {
        let k = self.graph().ty(node.inputs[0]).shape.last();
        Ok(Box::new(SwiGluStep {
            gate: self.loc(node.inputs[0])?,
            up: self.loc(node.inputs[1])?,
            out: self.loc(node.outputs[0])?,
            k,
            scratch: self.per_worker(|| vec![0.0; k]),
        }))
    }

    fn matmul(&self, node: &Node) -> Result<Box<dyn Step>, DeviceError> {
        let weight = self.weight(node)?;
        let CpuWeight::Matrix(w) = &*weight else { return Err(wrong_layout(node)) };
        let kernel = matmul::select(w.ty(), self.shared.isa);
        let (x, y) = (self.loc(node.inputs[0])?, self.loc(node.outputs[0])?);
        Ok(Box::new(MatmulStep { weight, kernel, x, y, next: ChunkCounter::new() }))
    }

    fn heads(&self, node: &Node) -> Result<Box<dyn Step>, DeviceError> {
        let weight = self.weight(node)?;
        let CpuWeight::Stack(w) = &*weight else { return Err(wrong_layout(node)) };
        let Some(first) = w.first() else { return Err(wrong_layout(node)) };
        let kernel = matmul::select(first.ty(), self.shared.isa);
        let (x, y) = (self.loc(node.inputs[0])?, self.loc(node.outputs[0])?);
        Ok(Box::new(HeadsStep { weight, kernel, x, y, next: ChunkCounter::new() }))
    }

    fn experts(&self, node: &Node) -> Result<Box<dyn Step>, DeviceError> {
        let weight = self.weight(node)?;
        let CpuWeight::Stack(w) = &*weight else { return Err(wrong_layout(node)) };
        let Some(first) = w.first() else { return Err(wrong_layout(node)) };
        let kernel = matmul::select(first.ty(), self.shared.isa);
        let (x, ids) = (node.inputs[0], node.inputs[1]);
        let top_k = self.graph().ty(ids).shape.width();
        let pairs = self.spec.bound.len(self.graph().ty(ids).shape.lead) * top_k;
        let sorted = self.per_worker(|| ExpertRows::new(w.len(), pairs));
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

    /// The shape of attention over a node's state.
    fn attend_shape(
        &self,
        node: &Node,
        state: &Arc<dyn StateBuffer>,
        a: &Attend,
    ) -> Result<AttendShape, DeviceError> {
        let [k_dim, v_dim] = [self.part_width(node, state, 0)?, self.part_width(node, state, a.v_part)?]
            .map(|w| w / a.kv_heads);
        Ok(AttendShape { heads: a.heads, kv_heads: a.kv_heads, k_dim, v_dim, scale: a.scale })
    }

    fn per_worker<T>(&self, make: impl Fn() -> T) -> PerWorker<T> {
        PerWorker::new(self.shared.pool.threads(), make)
    }

    fn attend(&self, node: &Node, a: &Attend) -> Result<Box<dyn Step>, DeviceError> {
        let state = self.state(node)?;
        let shape = self.attend_shape(node, &state, a)?;
        Ok(Box::new(AttendStep {
            shape,
            v_part: a.v_part,
            q: self.loc(node.inputs[0])?,
            positions: self.loc(node.inputs[1])?,
            table_at: self.loc(node.inputs[2])?,
            pages: self.loc(node.inputs[3])?,
            out: self.loc(node.outputs[0])?,
            scratch: self.per_worker(|| Scratch::new(&shape)),
            partials: self.partials(node, &shape),
            next: ChunkCounter::new(),
            state,
        }))
    }

    /// Room for ranges of positions as tasks, which one thread does not need. Layers run one after the other, so they
    /// share it.
    fn partials(&self, node: &Node, shape: &AttendShape) -> Arc<Partials> {
        let mut last = self.partials.borrow_mut();
        if let Some(partials) = last.as_ref().filter(|p| p.fits(shape)) {
            return partials.clone();
        }
        let bound = |input: usize| self.spec.bound.len(self.graph().ty(node.inputs[input]).shape.lead);
        let rows = if self.shared.pool.threads() > 1 { bound(0) } else { 0 };
        last.insert(Arc::new(Partials::new(shape, rows, bound(3) * PAGE))).clone()
    }

    /// The inputs `positions, table_at, pages` from `first` on.
    fn page_tables(&self, node: &Node, first: usize) -> Result<PageTables, DeviceError> {
        Ok(PageTables {
            positions: self.loc(node.inputs[first])?,
            table_at: self.loc(node.inputs[first + 1])?,
            pages: self.loc(node.inputs[first + 2])?,
        })
    }

    fn attend_blocks(&self, node: &Node, a: &AttendBlocks) -> Result<Box<dyn Step>, DeviceError> {
        let state = self.state(node)?;
        let shape = self.attend_shape(node, &state, &a.attend)?;
        Ok(Box::new(SparseStep {
            shape,
            v_part: a.attend.v_part,
            block: a.block,
            q: self.loc(node.inputs[0])?,
            tables: self.page_tables(node, 1)?,
            blocks: self.loc(node.inputs[4])?,
            out: self.loc(node.outputs[0])?,
            scratch: self.per_worker(|| Scratch::of_one_row(&shape)),
            next: ChunkCounter::new(),
            state,
        }))
    }

    /// The width of a part of a node's paged state.
    fn part_width(
        &self,
        node: &Node,
        state: &Arc<dyn StateBuffer>,
        part: usize,
    ) -> Result<usize, DeviceError> {
        let cache = state.as_any().downcast_ref::<PagedState>().filter(|s| part < s.parts());
        cache.map(|s| s.width(part)).ok_or_else(|| wrong_layout(node))
    }

    fn pool_keys(&self, node: &Node, p: &PoolKeys) -> Result<Box<dyn Step>, DeviceError> {
        let state = self.state(node)?;
        let width = self.part_width(node, &state, p.raw)?;
        if self.part_width(node, &state, p.pooled)? != width {
            return Err(wrong_layout(node));
        }
        Ok(Box::new(PoolStep {
            weight: self.weight(node)?,
            tables: self.page_tables(node, 0)?,
            slots: self.loc(node.inputs[3])?,
            scratch: self.per_worker(|| PoolScratch::new(width, 2 * p.inv_freq.len())),
            pool: p.clone(),
            state,
        }))
    }

    fn pool_gated(&self, node: &Node, p: &PoolGated) -> Result<Box<dyn Step>, DeviceError> {
        let state = self.state(node)?;
        let width = self.part_width(node, &state, p.raw)?;
        for part in [p.gates, p.pooled] {
            if self.part_width(node, &state, part)? != width {
                return Err(wrong_layout(node));
            }
        }
        Ok(Box::new(GatedStep {
            weight: self.weight(node)?,
            tables: self.page_tables(node, 0)?,
            slots: self.loc(node.inputs[3])?,
            scratch: self.per_worker(|| GatedScratch::new(p.block, width)),
            pool: *p,
            state,
        }))
    }

    fn index_select(&self, node: &Node, s: &IndexSelect) -> Result<Box<dyn Step>, DeviceError> {
        let state = self.state(node)?;
        let width = self.part_width(node, &state, s.pooled)?;
        let positions = self.spec.bound.len(self.graph().ty(node.inputs[3]).shape.lead) * PAGE;
        let blocks = positions / s.block;
        Ok(Box::new(SelectStep {
            select: *s,
            q: self.loc(node.inputs[0])?,
            weights: node.inputs.get(4).map(|&w| self.loc(w)).transpose()?,
            tables: self.page_tables(node, 1)?,
            out: self.loc(node.outputs[0])?,
            scratch: self.per_worker(|| SelectScratch::new(blocks, width)),
            scores: SharedScores::new(self.shared.pool.threads(), blocks),
            next: ChunkCounter::new(),
            state,
        }))
    }

    /// The inputs `state_from, state_to` from `first` on.
    fn state_slots(&self, node: &Node, first: usize) -> Result<StateSlots, DeviceError> {
        let (from, to) = (self.loc(node.inputs[first])?, self.loc(node.inputs[first + 1])?);
        Ok(StateSlots { state: self.state(node)?, from, to })
    }

    fn conv1d(&self, node: &Node, c: &Conv1d) -> Result<Box<dyn Step>, DeviceError> {
        let weight = self.weight(node)?;
        let CpuWeight::Vector(w) = &*weight else { return Err(wrong_layout(node)) };
        Ok(Box::new(ConvStep {
            conv: *c,
            taps: conv::by_tap(w, c.kernel),
            channels: self.graph().ty(node.inputs[0]).shape.width(),
            slots: self.state_slots(node, 1)?,
            x: self.loc(node.inputs[0])?,
            out: self.loc(node.outputs[0])?,
            scratch: self.per_worker(|| ConvScratch::new(c)),
        }))
    }

    fn delta_rule(&self, node: &Node, d: &DeltaRule) -> Result<Box<dyn Step>, DeviceError> {
        Ok(Box::new(DeltaStep {
            rule: *d,
            slots: self.state_slots(node, 3)?,
            qkv: self.loc(node.inputs[0])?,
            log_decay: self.loc(node.inputs[1])?,
            beta: self.loc(node.inputs[2])?,
            out: self.loc(node.outputs[0])?,
            scratch: self.per_worker(|| DeltaScratch::new(d)),
            next: ChunkCounter::new(),
        }))
    }
}

fn wrong_layout(node: &Node) -> DeviceError {
    DeviceError::Failed(format!("the weight or state of {} has another layout", node.op.name()))
}

pub(super) fn region(spec: &ProgramSpec<'_>, v: ValueId) -> Result<Region, DeviceError> {
    (spec.region)(v).ok_or_else(|| DeviceError::Failed(format!("value {} has no memory", v.0)))
}
