//! Steps along the sequence: convolution and the delta rule. Rows go one by one, in order; workers share
//! channels or columns of states, each with the state of its share in memory of its own from load to store.

use std::ops::Range;
use std::sync::Arc;

use minfer_graph::{Conv1d, DeltaRule, state_from};
use minfer_runtime::StateBuffer;

use super::{Loc, PerWorker, Run, Step, for_each_chunk};
use crate::conv::History;
use crate::delta_rule::{Decay, Token};
use crate::math::exp;
use crate::pool::{ChunkCounter, Worker};
use crate::state::SlotState;

/// Channels that are convolved together: whole cache lines, and sums that stay in the first cache.
pub(super) const CHANNELS: usize = 64;

/// Where rows' states come from and go to.
pub(crate) struct StateSlots {
    pub(super) state: Arc<dyn StateBuffer>,
    pub(super) from: Loc,
    pub(super) to: Loc,
}

/// Checked slots of one run.
pub(super) struct Flow<'a> {
    state: &'a SlotState,
    from: &'a [i32],
    to: &'a [i32],
}

impl StateSlots {
    /// `None` (and a reported failure) when a row names a slot that is not there, or continues nothing.
    ///
    /// # Safety
    /// As [`Step::run`].
    pub(super) unsafe fn flow<'a>(&'a self, run: &'a Run<'_>, rows: usize) -> Option<Flow<'a>> {
        let state = self.state.as_any().downcast_ref::<SlotState>()?;
        // SAFETY: inputs are complete by the caller's promise.
        let (from, to) = unsafe { (run.get::<i32>(&self.from, 0, rows), run.get::<i32>(&self.to, 0, rows)) };
        let beyond = |slot: i32| usize::try_from(slot).is_ok_and(|slot| slot >= state.slots());
        for (row, (&from, &to)) in from.iter().zip(to).enumerate() {
            if from < state_from::ZERO || (from == state_from::PREVIOUS_ROW && row == 0) {
                run.fail(format!("row {row} continues from state {from}, which is not there"));
                return None;
            }
            if beyond(from) || beyond(to) {
                let slots = state.slots();
                run.fail(format!("row {row} uses state slots {from} and {to} of {slots}"));
                return None;
            }
        }
        Some(Flow { state, from, to })
    }
}

impl Flow<'_> {
    /// Rows of one sequence each, in order.
    pub(super) fn sequences(&self) -> impl Iterator<Item = Range<usize>> {
        let mut start = 0;
        std::iter::from_fn(move || {
            let rest = self.from.get(start + 1..)?;
            let more = rest.iter().take_while(|&&from| from == state_from::PREVIOUS_ROW).count();
            let rows = start..start + 1 + more;
            start = rows.end;
            Some(rows)
        })
    }

    /// Copies numbers `at..` of the state from which `row` starts.
    ///
    /// # Safety
    /// Nobody else touches these numbers of any slot meanwhile.
    pub(super) unsafe fn load(&self, row: usize, at: usize, out: &mut [f32]) {
        match usize::try_from(self.from[row]) {
            // SAFETY: by the caller's promise.
            Ok(slot) => out.copy_from_slice(unsafe { self.state.get(slot, at, out.len()) }),
            Err(_) => out.fill(0.0),
        }
    }

    /// Numbers `at..at + len` of the slot that keeps the state after `row`.
    ///
    /// # Safety
    /// As [`Flow::load`], and earlier borrows have ended.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn kept(&self, row: usize, at: usize, len: usize) -> Option<&mut [f32]> {
        let slot = usize::try_from(self.to[row]).ok()?;
        // SAFETY: by the caller's promise.
        Some(unsafe { self.state.get_mut(slot, at, len) })
    }
}

impl Flow<'_> {
    /// [`Flow::kept`] with the state from which `row` starts already in it.
    ///
    /// # Safety
    /// As [`Flow::kept`].
    #[allow(clippy::mut_from_ref)]
    unsafe fn continued(&self, row: usize, at: usize, len: usize) -> Option<&mut [f32]> {
        // SAFETY: by the caller's promise.
        let kept = unsafe { self.kept(row, at, len) }?;
        if self.from[row] != self.to[row] {
            // SAFETY: as above; the other slot is not the one borrowed.
            unsafe { self.load(row, at, kept) }
        }
        Some(kept)
    }
}

pub(crate) struct ConvStep {
    pub(super) conv: Conv1d,
    /// `[kernel, channels]`.
    pub(super) taps: Vec<f32>,
    pub(super) channels: usize,
    pub(super) slots: StateSlots,
    pub(super) x: Loc,
    pub(super) out: Loc,
    pub(super) scratch: PerWorker<ConvScratch>,
}

/// The tail before a sequence's rows, and a row of sums, for up to [`CHANNELS`] channels.
pub(crate) struct ConvScratch {
    tail: Vec<f32>,
    sum: Vec<f32>,
}

impl ConvScratch {
    pub(super) fn new(conv: &Conv1d) -> ConvScratch {
        ConvScratch { tail: vec![0.0; conv.tail() * CHANNELS], sum: vec![0.0; CHANNELS] }
    }
}

impl Step for ConvStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        let rows = run.rows(&self.x);
        // SAFETY: by the caller's promise; the scratch is this worker's own.
        let (flow, x, scratch) =
            unsafe { (self.slots.flow(run, rows), run.get(&self.x, 0, rows), self.scratch.get(worker)) };
        let Some(flow) = flow else { return };
        let share = worker.share(self.channels, CHANNELS);
        for first in share.clone().step_by(CHANNELS) {
            let channels = first..(first + CHANNELS).min(share.end);
            for sequence in flow.sequences() {
                // SAFETY: this worker alone has these channels, of the output and of every slot.
                unsafe { self.sequence(run, &flow, x, sequence, channels.clone(), scratch) }
            }
        }
    }
}

impl ConvStep {
    /// # Safety
    /// As [`Step::run`], and this worker alone has the channels.
    unsafe fn sequence(
        &self,
        run: &Run<'_>,
        flow: &Flow<'_>,
        x: &[f32],
        rows: Range<usize>,
        channels: Range<usize>,
        scratch: &mut ConvScratch,
    ) {
        let (count, tail_rows) = (channels.len(), self.conv.tail());
        let tail = &mut scratch.tail[..tail_rows * count];
        for (t, tail) in tail.chunks_exact_mut(count).enumerate() {
            // SAFETY: by the caller's promise.
            unsafe { flow.load(rows.start, t * self.channels + channels.start, tail) }
        }
        let (rows_x, stride) = (&x[rows.start * self.channels..rows.end * self.channels], self.channels);
        let history = History { tail, rows: rows_x, stride, first: channels.start, count };
        for row in rows.clone() {
            let i = row - rows.start;
            // SAFETY: this worker alone has these channels of the row.
            let out = unsafe {
                let at = run.at(&self.out, row).cast::<f32>().add(channels.start);
                std::slice::from_raw_parts_mut(at, count)
            };
            run.kernels.conv1d(&self.conv, &self.taps, &history, i, &mut scratch.sum[..count], out);
            for t in 0..tail_rows {
                // SAFETY: by the caller's promise; the tail was copied before anything is stored.
                let kept = unsafe { flow.kept(row, t * self.channels + channels.start, count) };
                let Some(kept) = kept else { break };
                kept.copy_from_slice(history.row(i, tail_rows - 1 - t));
            }
        }
    }
}

/// Columns of a head's state that are one task: 128 rows of them stay in the first cache for all rows of a step.
const COLUMNS: usize = 32;

pub(crate) struct DeltaStep {
    pub(super) rule: DeltaRule,
    pub(super) slots: StateSlots,
    pub(super) qkv: Loc,
    pub(super) log_decay: Loc,
    pub(super) beta: Loc,
    pub(super) out: Loc,
    pub(super) scratch: PerWorker<DeltaScratch>,
    pub(super) next: ChunkCounter,
}

/// Some columns of one head's state, or all, and what a token needs.
pub(crate) struct DeltaScratch {
    state: Vec<f32>,
    token: TokenScratch,
}

/// Query, key and decays of one head.
struct TokenScratch {
    q: Vec<f32>,
    k: Vec<f32>,
    decay: Vec<f32>,
}

impl DeltaScratch {
    pub(super) fn new(rule: &DeltaRule) -> DeltaScratch {
        let channels = || vec![0.0; rule.k_dim];
        DeltaScratch {
            state: vec![0.0; rule.k_dim * rule.v_dim],
            token: TokenScratch { q: channels(), k: channels(), decay: channels() },
        }
    }
}

impl Step for DeltaStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        // SAFETY: by the caller's promise; the scratch is this worker's own.
        let (flow, scratch) =
            unsafe { (self.slots.flow(run, run.rows(&self.qkv)), self.scratch.get(worker)) };
        let Some(flow) = flow else { return };
        let DeltaRule { v_heads, v_dim, .. } = self.rule;
        // A state that only one row changes leaves the first cache in any case; a whole head of it lies together.
        let whole = v_heads >= worker.count && flow.sequences().all(|rows| rows.len() == 1);
        let columns = if whole { v_dim } else { COLUMNS };
        let parts = v_dim.div_ceil(columns);
        for_each_chunk(&self.next, v_heads * parts, 1, |task| {
            let (head, first) = (task.start / parts, task.start % parts * columns);
            let part = HeadPart { head, columns: first..(first + columns).min(v_dim) };
            for sequence in flow.sequences() {
                // SAFETY: this task alone has these columns, of the output and of every slot.
                unsafe { self.sequence(run, &flow, sequence, &part, scratch) }
            }
        });
    }

    fn reset(&self) {
        self.next.reset();
    }
}

/// Some columns of a value head.
struct HeadPart {
    head: usize,
    columns: Range<usize>,
}

impl DeltaStep {
    /// # Safety
    /// As [`Step::run`], and this task alone has the columns.
    unsafe fn sequence(
        &self,
        run: &Run<'_>,
        flow: &Flow<'_>,
        rows: Range<usize>,
        part: &HeadPart,
        s: &mut DeltaScratch,
    ) {
        let DeltaRule { k_dim, v_dim, .. } = self.rule;
        let count = part.columns.len();
        // Rows of the state, or all of it where they lie together.
        let run_len = if count == v_dim { k_dim } else { 1 };
        let at = |run: usize| (part.head * k_dim + run * run_len) * v_dim + part.columns.start;
        if rows.len() == 1 && run_len == k_dim {
            // SAFETY: by the caller's promise.
            if let Some(state) = unsafe { flow.continued(rows.start, at(0), k_dim * count) } {
                // SAFETY: as below.
                return unsafe { self.token(run, rows.start, part, state, &mut s.token) };
            }
        }
        let DeltaScratch { state, token } = s;
        let state = &mut state[..k_dim * count];
        for (i, state) in state.chunks_exact_mut(run_len * count).enumerate() {
            // SAFETY: by the caller's promise.
            unsafe { flow.load(rows.start, at(i), state) }
        }
        for row in rows {
            // SAFETY: the row exists and is complete; these columns of the output are this task's.
            unsafe { self.token(run, row, part, state, token) }
            for (i, state) in state.chunks_exact(run_len * count).enumerate() {
                // SAFETY: by the caller's promise.
                let Some(kept) = (unsafe { flow.kept(row, at(i), run_len * count) }) else { break };
                kept.copy_from_slice(state);
            }
        }
    }

    /// # Safety
    /// As [`DeltaStep::sequence`], for one row.
    unsafe fn token(
        &self,
        run: &Run<'_>,
        row: usize,
        part: &HeadPart,
        state: &mut [f32],
        s: &mut TokenScratch,
    ) {
        let DeltaRule { k_heads, v_heads, k_dim, v_dim, tiled, per_channel } = self.rule;
        let (head, count) = (part.head, part.columns.len());
        // SAFETY: by the caller's promise.
        let (qkv, log_decay, beta) = unsafe {
            (
                run.get::<f32>(&self.qkv, row, 1),
                run.get::<f32>(&self.log_decay, row, 1),
                run.get::<f32>(&self.beta, row, 1)[head],
            )
        };
        let k_head = if tiled { head % k_heads } else { head / (v_heads / k_heads) };
        let (keys, values) = (k_heads * k_dim, 2 * k_heads * k_dim);
        run.kernels.unit(&qkv[k_head * k_dim..][..k_dim], 1.0 / (k_dim as f32).sqrt(), &mut s.q);
        run.kernels.unit(&qkv[keys + k_head * k_dim..][..k_dim], 1.0, &mut s.k);
        let at = head * v_dim + part.columns.start;
        let v = &qkv[values + at..][..count];
        let decay = if per_channel {
            run.kernels.exps(&log_decay[head * k_dim..][..k_dim], &mut s.decay);
            Decay::Channels(&s.decay)
        } else {
            Decay::Head(exp(log_decay[head]))
        };
        let token = Token { q: &s.q, k: &s.k, v, decay, beta };
        // SAFETY: this task alone has these columns of the row.
        let out = unsafe {
            let at = run.at(&self.out, row).cast::<f32>().add(at);
            std::slice::from_raw_parts_mut(at, count)
        };
        run.kernels.delta_step(state, &token, out);
    }
}
