//! Steps that compute each row from the same row of their inputs: norms, elementwise ops, rope, routing,
//! storing K and V; `streams` has those that rearrange a row. Worker `w` has the same rows in all of them, so chains of such steps need no barrier.

use minfer_format::{BlockType, TensorBytes};
use minfer_graph::{DType, ExpertWeights, Norm, Op, PAGE, Rope, RopeTable, Router, StorePart};

use super::{Loc, PerWorker, Run, Step};
use crate::embed::gather_row;
use crate::pool::Worker;
use crate::quantize::q8_row_bytes;
use crate::state::PagedState;
use crate::weights::CpuWeight;

/// What a row step needs beside its operands.
pub(crate) enum Extra {
    None,
    Weight(std::sync::Arc<CpuWeight>),
    State(std::sync::Arc<dyn minfer_runtime::StateBuffer>),
}

pub(crate) struct RowStep {
    pub(super) op: Op,
    pub(super) inputs: Vec<Loc>,
    pub(super) outputs: Vec<Loc>,
    pub(super) extra: Extra,
    /// Innermost dimension of the first input: the length that is quantised or combined at a time.
    pub(super) last: usize,
    /// A row of floats for fused steps.
    pub(super) scratch: PerWorker<Vec<f32>>,
}

/// One row of one step.
pub(super) struct Row<'a> {
    pub(super) step: &'a RowStep,
    pub(super) run: &'a Run<'a>,
    row: usize,
}

impl Step for RowStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        let lead = self.outputs.first().unwrap_or(&self.inputs[0]);
        for row in worker.share(run.rows(lead), 1) {
            let row = Row { step: self, run, row };
            // SAFETY: by the caller's promise, and rows of different workers differ.
            unsafe { row.compute(self.scratch.get(worker)) }
        }
    }
}

impl<'a> Row<'a> {
    /// # Safety
    /// As `compute`, with an input of this type; so do the next two.
    pub(super) unsafe fn f32(&self, input: usize) -> &'a [f32] {
        // SAFETY: inputs are complete (`Step::run`), and graph validation fixed the type.
        unsafe { self.run.get(&self.step.inputs[input], self.row, 1) }
    }

    pub(super) unsafe fn i32(&self, input: usize) -> &'a [i32] {
        // SAFETY: as in `f32`.
        unsafe { self.run.get(&self.step.inputs[input], self.row, 1) }
    }

    pub(super) unsafe fn out<T: Copy>(&self, output: usize) -> &'a mut [T] {
        // SAFETY: this worker alone has this row.
        unsafe { self.run.get_mut(&self.step.outputs[output], self.row) }
    }

    pub(super) fn vector(&self) -> &'a [f32] {
        match &self.step.extra {
            Extra::Weight(w) => match &**w {
                CpuWeight::Vector(v) => v,
                _ => &[],
            },
            _ => &[],
        }
    }

    /// # Safety
    /// As [`Step::run`], for this row.
    unsafe fn compute(&self, scratch: &mut [f32]) {
        let k = self.run.kernels;
        // SAFETY: every access below is to this row of the step's operands, with the types that graph
        // validation has checked.
        unsafe {
            match &self.step.op {
                Op::Embed => self.embed(),
                Op::RmsNorm(n) => k.rms_norm(self.f32(0), n.group, self.vector(), n.eps, self.out(0)),
                Op::UnitNorm(n) => k.unit_norm(self.f32(0), n.group, n.eps, self.out(0)),
                Op::LayerNorm(n) => k.layer_norm(self.f32(0), self.vector(), n.eps, self.out(0)),
                Op::RmsNormQuantize(n) => self.norm_quantize(n, scratch),
                Op::AddRmsNorm(n) => {
                    let sum: &mut [f32] = self.out(0);
                    k.add(self.f32(0), self.f32(1), sum);
                    k.rms_norm(sum, n.group, self.vector(), n.eps, self.out(1));
                }
                Op::Quantize => self.quantize(self.f32(0)),
                Op::Reshape(_) => self.out::<f32>(0).copy_from_slice(self.f32(0)),
                Op::Concat => self.concat(),
                Op::BiasAdd => k.add(self.f32(0), self.vector(), self.out(0)),
                Op::Scale => self.scale(self.vector().first().copied().unwrap_or(1.0)),
                Op::ExpertScale => self.expert_scale(),
                Op::Add => k.add(self.f32(0), self.f32(1), self.out(0)),
                Op::Mul => k.mul(self.f32(0), self.f32(1), self.out(0)),
                Op::Silu => k.silu(self.f32(0), self.out(0)),
                Op::SwiGlu => k.swiglu(self.f32(0), self.f32(1), self.out(0)),
                Op::RopeTable(t) => self.rope_table(t),
                Op::Rope(r) => self.rope(r),
                Op::StoreKv => self.store_kv(),
                Op::Router(r) => self.route(r, scratch),
                Op::ExpertWeights(w) => self.weigh(w, scratch),
                Op::GatherIds => self.gather_ids(),
                Op::WindowStart(ratio) => {
                    let position = self.i32(0)[0];
                    self.out(0)[0] = position - position.rem_euclid(*ratio as i32);
                }
                Op::ZeroFirst => {
                    let keep = self.i32(1)[0] != 0;
                    let out: &mut [f32] = self.out(0);
                    if keep { out.copy_from_slice(self.f32(0)) } else { out.fill(0.0) }
                }
                Op::StorePart(s) => self.store_part(s),
                Op::CombineExperts => k.combine(self.f32(0), self.f32(1), self.out(0)),
                Op::ArgMax => self.out(0)[0] = k.argmax(self.f32(0)) as i32,
                Op::Act(_)
                | Op::Clamp(_)
                | Op::ScaleVec
                | Op::Slice(_)
                | Op::Repeat(_)
                | Op::StreamSum(_)
                | Op::RopeTail(_)
                | Op::RoundTrip(_)
                | Op::StreamDot(_)
                | Op::StreamMul(_)
                | Op::StreamAdd(_)
                | Op::StreamWeightedSum(_)
                | Op::StreamMix(_)
                | Op::HyperMix(_) => self.rearrange(),
                Op::MatMul
                | Op::SwiGluQuantize
                | Op::GroupedMatMul
                | Op::HeadMatMul
                | Op::Attend(_)
                | Op::AttendBlocks(_)
                | Op::PoolKeys(_)
                | Op::PoolGated(_)
                | Op::IndexSelect(_)
                | Op::Compress(_)
                | Op::AttendWindow(_)
                | Op::Conv1d(_)
                | Op::DeltaRule(_)
                | Op::GatherRows => {
                    self.run.fail(format!("{} is not a row step", self.step.op.name()));
                }
            }
        }
    }

    unsafe fn embed(&self) {
        // SAFETY: as in `compute`.
        let (ids, out) = unsafe { (self.i32(0), self.out::<f32>(0)) };
        let Extra::Weight(w) = &self.step.extra else { return };
        let CpuWeight::Rows { ty, bytes } = &**w else { return };
        let width = (out.len() / ids.len().max(1)).max(1);
        for (&id, out) in ids.iter().zip(out.chunks_exact_mut(width)) {
            let result = match usize::try_from(id) {
                Ok(id) => embed_row(*ty, bytes, id, out),
                Err(_) => Err(format!("token id {id} is negative")),
            };
            if let Err(why) = result {
                out.fill(0.0);
                self.run.fail(why);
            }
        }
    }

    unsafe fn norm_quantize(&self, n: &Norm, scratch: &mut [f32]) {
        // SAFETY: as in `compute`.
        unsafe {
            let x = self.f32(0);
            let normed = &mut scratch[..x.len()];
            self.run.kernels.rms_norm(x, n.group, self.vector(), n.eps, normed);
            self.quantize(normed);
        }
    }

    /// Each innermost run of numbers becomes a quantised row of its own.
    unsafe fn quantize(&self, x: &[f32]) {
        let last = self.step.last;
        // SAFETY: as in `compute`; the function was selected for this machine.
        unsafe {
            let out: &mut [u8] = self.out(0);
            for (x, out) in x.chunks_exact(last).zip(out.chunks_exact_mut(q8_row_bytes(last))) {
                (self.run.quantize)(x, 0, last, out.as_mut_ptr());
            }
        }
    }

    unsafe fn concat(&self) {
        // SAFETY: as in `compute`.
        let mut rest = unsafe { self.out::<f32>(0) };
        for input in 0..self.step.inputs.len() {
            // SAFETY: as in `compute`.
            let x = unsafe { self.f32(input) };
            let (part, tail) = rest.split_at_mut(x.len());
            part.copy_from_slice(x);
            rest = tail;
        }
    }

    unsafe fn scale(&self, factor: f32) {
        // SAFETY: as in `compute`.
        let (x, out) = unsafe { (self.f32(0), self.out::<f32>(0)) };
        out.iter_mut().zip(x).for_each(|(o, x)| *o = x * factor);
    }

    unsafe fn expert_scale(&self) {
        // SAFETY: as in `compute`.
        let (y, ids, out) = unsafe { (self.f32(0), self.i32(1), self.out::<f32>(0)) };
        let (n, scales) = (self.step.last, self.vector());
        for ((y, out), &id) in y.chunks_exact(n).zip(out.chunks_exact_mut(n)).zip(ids) {
            let factor = scales.get(id as usize).copied().unwrap_or(f32::NAN);
            out.iter_mut().zip(y).for_each(|(o, y)| *o = y * factor);
        }
    }

    unsafe fn rope_table(&self, t: &RopeTable) {
        // SAFETY: as in `compute`.
        let (position, out) = unsafe { (self.i32(0)[0], self.out(0)) };
        crate::rope::table(&t.inv_freq, t.attention_factor, position, out);
    }

    unsafe fn rope(&self, r: &Rope) {
        // SAFETY: as in `compute`.
        unsafe { self.run.kernels.rope(r.style, self.f32(0), r.head_dim, self.f32(1), self.out(0)) }
    }

    unsafe fn store_part(&self, s: &StorePart) {
        // SAFETY: as in `compute`.
        let (position, slot) = unsafe { (self.i32(1)[0], self.i32(2)[0]) };
        if position.wrapping_add(1) % s.every as i32 == 0 {
            // SAFETY: as above.
            unsafe { self.store(slot, std::iter::once((s.part, 0))) }
        }
    }

    unsafe fn store_kv(&self) {
        // The last input names the slot, those before it are rows of the first parts.
        let rows = self.step.inputs.len() - 1;
        // SAFETY: as in `compute`.
        unsafe { self.store(self.i32(rows)[0], (0..rows).map(|part| (part, part))) }
    }

    /// Writes inputs into parts of the state, as `(part, input)` lists them; a negative slot is skipped.
    unsafe fn store(&self, slot: i32, parts: impl Iterator<Item = (usize, usize)>) {
        let Extra::State(state) = &self.step.extra else { return };
        let Some(state) = state.as_any().downcast_ref::<PagedState>() else { return };
        let Ok(slot) = usize::try_from(slot) else { return };
        for (part, input) in parts {
            if !state.pages(part).contains(&(slot / PAGE)) {
                return self.run.fail(format!("slot {slot} is outside of pages {:?}", state.pages(part)));
            }
            // SAFETY: the slot exists, and the engine gives every row of a step a slot of its own.
            unsafe { state.slot_mut(part, slot).store(self.run.kernels, 0, self.f32(input)) }
        }
    }

    unsafe fn route(&self, r: &Router, scratch: &mut [f32]) {
        // SAFETY: as in `compute`.
        unsafe {
            let logits = self.f32(0);
            self.run.kernels.route(r, logits, self.vector(), scratch, self.out(0), self.out(1));
        }
    }
}

impl Row<'_> {
    /// Weights of experts that were chosen before.
    unsafe fn weigh(&self, w: &ExpertWeights, scratch: &mut [f32]) {
        // SAFETY: as in `compute`.
        let (logits, ids, out) = unsafe { (self.f32(0), self.i32(1), self.out(0)) };
        let scores = &mut scratch[..logits.len()];
        self.run.kernels.expert_weights((w.scoring, w.scale), logits, scores, ids, out);
    }

    unsafe fn gather_ids(&self) {
        // SAFETY: as in `compute`.
        let (id, out) = unsafe { (self.i32(0)[0], self.out::<i32>(0)) };
        let Extra::Weight(w) = &self.step.extra else { return };
        let CpuWeight::Rows { bytes, .. } = &**w else { return };
        // The loader gives whole numbers as F32.
        let row_bytes = 4 * out.len();
        let row = usize::try_from(id).ok().and_then(|id| bytes.get(id * row_bytes..(id + 1) * row_bytes));
        match row {
            Some(row) => out
                .iter_mut()
                .zip(row.as_chunks::<4>().0)
                .for_each(|(o, b)| *o = f32::from_le_bytes(*b) as i32),
            None => {
                out.fill(0);
                self.run.fail(format!("row {id} of a table of ids that is shorter"));
            }
        }
    }
}

/// A row of a table that may lie in a file.
fn embed_row(ty: BlockType, table: &TensorBytes, row: usize, out: &mut [f32]) -> Result<(), String> {
    let bytes = ty.row_bytes(out.len()).unwrap_or(0);
    let range = row.saturating_mul(bytes)..row.saturating_add(1).saturating_mul(bytes);
    match table.fetch(range).map_err(|e| format!("row {row} of the embedding table: {e}"))? {
        Some(encoded) if bytes > 0 => gather_row(ty, &encoded, 0, out).map_err(|e| e.to_string()),
        // The whole table, for the error.
        _ => gather_row(ty, table, row, out).map_err(|e| e.to_string()),
    }
}

/// Rows picked by index: reads other rows than it writes, so it is not a row step.
pub(crate) struct GatherStep {
    pub(super) x: Loc,
    pub(super) index: Loc,
    pub(super) out: Loc,
}

impl Step for GatherStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        for row in worker.share(run.rows(&self.out), 1) {
            // SAFETY: by the caller's promise; the source row is checked.
            unsafe {
                let from = run.get::<i32>(&self.index, row, 1)[0];
                match usize::try_from(from) {
                    Ok(from) if from < run.rows(&self.x) => {
                        run.get_mut::<f32>(&self.out, row).copy_from_slice(run.get(&self.x, from, 1));
                    }
                    _ => run.fail(format!("output row {from} of {} rows", run.rows(&self.x))),
                }
            }
        }
    }
}

/// Whether an op's rows depend only on the same rows of its inputs.
pub(super) fn is_row_op(op: &Op) -> bool {
    !matches!(
        op,
        Op::MatMul
            | Op::SwiGluQuantize
            | Op::GroupedMatMul
            | Op::HeadMatMul
            | Op::Attend(_)
            | Op::AttendBlocks(_)
            | Op::PoolKeys(_)
            | Op::PoolGated(_)
            | Op::IndexSelect(_)
            | Op::Compress(_)
            | Op::AttendWindow(_)
            | Op::Conv1d(_)
            | Op::DeltaRule(_)
            | Op::GatherRows
    )
}

/// Floats of scratch that a row of this op takes.
pub(super) fn scratch_len(op: &Op, width: usize) -> usize {
    match op {
        Op::RmsNormQuantize(_) | Op::ExpertWeights(_) => width,
        Op::Router(_) => 2 * width,
        _ => 0,
    }
}

const _: () = assert!(DType::Q8.row_bytes(64) == q8_row_bytes(64));
