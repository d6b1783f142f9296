//! Steps of compressed attention: compression along the sequence, attention to a window and compressed rows.
//! Compression shares channels among workers; attention makes each row a task, or some heads of it.

use std::ops::Range;
use std::sync::Arc;

use minfer_graph::Compress;
use minfer_runtime::StateBuffer;

use super::recurrent::{CHANNELS, Flow, StateSlots};
use super::sparse::{PageTables, Place, chosen};
use super::{Loc, PerWorker, Run, Step, for_each_chunk};
use crate::attention::{AttendShape, Scratch, WindowRow};
use crate::compress::{Part, rows_before};
use crate::conv::History;
use crate::pool::{ChunkCounter, Worker};
use crate::state::PagedState;
use crate::weights::CpuWeight;

pub(crate) struct CompressStep {
    pub(super) compress: Compress,
    /// Bias of the gates, `[ratio, width]`.
    pub(super) bias: Arc<CpuWeight>,
    /// Numbers per row of kv.
    pub(super) width: usize,
    pub(super) slots: StateSlots,
    pub(super) kv: Loc,
    pub(super) gate: Loc,
    pub(super) positions: Loc,
    pub(super) out: Loc,
    pub(super) scratch: PerWorker<CompressScratch>,
}

/// Rows before a sequence's rows (kv, then gates, for each part), and two rows of sums, for up to [`CHANNELS`]
/// channels.
pub(crate) struct CompressScratch {
    tails: Vec<[Vec<f32>; 2]>,
    max: Vec<f32>,
    sum: Vec<f32>,
}

impl CompressScratch {
    pub(super) fn new(c: &Compress) -> CompressScratch {
        let tail = || vec![0.0; c.tail() * CHANNELS];
        let tails = (0..c.parts()).map(|_| [tail(), tail()]).collect();
        CompressScratch { tails, max: vec![0.0; CHANNELS], sum: vec![0.0; CHANNELS] }
    }
}

/// All rows of a step, as compression reads them.
struct StepRows<'a> {
    kv: &'a [f32],
    gate: &'a [f32],
    positions: &'a [i32],
}

impl Step for CompressStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        let rows = run.rows(&self.kv);
        // SAFETY: by the caller's promise; the scratch is this worker's own.
        let (flow, step, scratch) = unsafe {
            let step = StepRows {
                kv: run.get(&self.kv, 0, rows),
                gate: run.get(&self.gate, 0, rows),
                positions: run.get(&self.positions, 0, rows),
            };
            (self.slots.flow(run, rows), step, self.scratch.get(worker))
        };
        let Some(flow) = flow else { return };
        for rows in flow.sequences() {
            let positions = &step.positions[rows];
            if positions[0] < 0 || positions.windows(2).any(|p| p[0].checked_add(1) != Some(p[1])) {
                return run.fail("positions of one sequence do not follow each other".to_string());
            }
        }
        let share = worker.share(self.width / self.compress.parts(), CHANNELS);
        for first in share.clone().step_by(CHANNELS) {
            let channels = first..(first + CHANNELS).min(share.end);
            for sequence in flow.sequences() {
                // SAFETY: this worker alone has these channels, of the output and of every slot.
                unsafe { self.sequence(run, &flow, &step, sequence, channels.clone(), scratch) }
            }
        }
    }
}

impl CompressStep {
    /// Numbers of the state that hold channels `first..` of kv (0) or gates (1), `lag` rows before the end.
    fn at(&self, lag: usize, which: usize, first: usize) -> usize {
        ((self.compress.tail() - lag) * 2 + which) * self.width + first
    }

    /// # Safety
    /// As [`Step::run`], and this worker alone has the channels.
    unsafe fn sequence(
        &self,
        run: &Run<'_>,
        flow: &Flow<'_>,
        step: &StepRows<'_>,
        rows: Range<usize>,
        channels: Range<usize>,
        s: &mut CompressScratch,
    ) {
        let (c, count, width) = (&self.compress, channels.len(), self.width);
        let first_of = |part: usize| part * width / c.parts() + channels.start;
        let kept = rows_before(c, step.positions[rows.start] as usize);
        for (part, tails) in s.tails.iter_mut().enumerate() {
            for (which, tail) in tails.iter_mut().enumerate() {
                for (t, tail) in tail.chunks_exact_mut(count).take(kept).enumerate() {
                    // SAFETY: by the caller's promise.
                    unsafe { flow.load(rows.start, self.at(kept - t, which, first_of(part)), tail) }
                }
            }
        }
        let of_sequence = rows.start * width..rows.end * width;
        let (kv, gate) = (&step.kv[of_sequence.clone()], &step.gate[of_sequence]);
        let history = |part: usize, which: usize, rows| {
            let tail = &s.tails[part][which][..kept * count];
            History { tail, rows, stride: width, first: first_of(part), count }
        };
        let parts = [0, c.parts() - 1].map(|p| Part { kv: history(p, 0, kv), gate: history(p, 1, gate) });
        let parts = &parts[..c.parts()];
        for row in rows.clone() {
            let (i, position) = (row - rows.start, step.positions[row] as usize);
            // SAFETY: this worker alone has these channels of the row.
            let out = unsafe {
                let at = run.at(&self.out, row).cast::<f32>().add(channels.start);
                std::slice::from_raw_parts_mut(at, count)
            };
            match (&*self.bias, (position + 1).is_multiple_of(c.ratio)) {
                (CpuWeight::Vector(bias), true) => {
                    let (max, sum) = (&mut s.max[..count], &mut s.sum[..count]);
                    run.kernels.compress(c, parts, bias, (i, position), max, sum, out);
                }
                _ => out.fill(0.0),
            }
            for lag in 0..rows_before(c, position + 1) {
                for (part, which) in (0..parts.len()).flat_map(|part| [(part, 0), (part, 1)]) {
                    // SAFETY: by the caller's promise; the tails were copied before anything is stored.
                    let kept = unsafe { flow.kept(row, self.at(lag + 1, which, first_of(part)), count) };
                    let Some(kept) = kept else { break };
                    let from = if which == 0 { &parts[part].kv } else { &parts[part].gate };
                    kept.copy_from_slice(from.row(i, lag));
                }
            }
        }
    }
}

pub(crate) struct WindowStep {
    pub(super) shape: AttendShape,
    pub(super) window: usize,
    pub(super) ratio: usize,
    pub(super) sinks: Arc<CpuWeight>,
    pub(super) state: Arc<dyn StateBuffer>,
    pub(super) q: Loc,
    pub(super) tables: PageTables,
    /// Where compressed rows lie, if there are any.
    pub(super) compressed: Option<PageTables>,
    pub(super) chosen: Option<Loc>,
    pub(super) out: Loc,
    pub(super) scratch: PerWorker<Scratch>,
    pub(super) next: ChunkCounter,
}

impl Step for WindowStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        let Some(state) = self.state.as_any().downcast_ref::<PagedState>() else { return };
        // SAFETY: the scratch is this worker's own.
        let scratch = unsafe { self.scratch.get(worker) };
        let (rows, heads) = (run.rows(&self.q), self.shape.heads);
        // Heads share gathered rows; with few rows, more workers are worth more than that.
        let each = heads.div_ceil(worker.count.div_ceil(rows.max(1)).min(heads));
        let parts = heads.div_ceil(each);
        for_each_chunk(&self.next, rows * parts, 1, |task| {
            let (row, first) = (rows - 1 - task.start / parts, task.start % parts * each);
            // SAFETY: by the caller's promise, and this task alone has the heads of the row.
            unsafe { self.heads(run, state, row, first..(first + each).min(heads), scratch) }
        });
    }

    fn reset(&self) {
        self.next.reset();
    }
}

impl WindowStep {
    /// # Safety
    /// As [`Step::run`], and this task alone has these heads of the row.
    unsafe fn heads(
        &self,
        run: &Run<'_>,
        state: &PagedState,
        row: usize,
        heads: Range<usize>,
        s: &mut Scratch,
    ) {
        let CpuWeight::Vector(sinks) = &*self.sinks else { return };
        // SAFETY: by the caller's promise; nobody stores while attention runs.
        let (places, q, listed, caches) = unsafe {
            let window = self.tables.place(run, row, (state, 0), self.window);
            let compressed = match &self.compressed {
                Some(tables) => tables.place(run, row, (state, 1), usize::MAX).map(|place| place.pages),
                None => Some(&[][..]),
            };
            (
                window.zip(compressed),
                run.get::<f32>(&self.q, row, 1),
                self.chosen.map(|loc| run.get::<i32>(&loc, row, 1)),
                [state.rows(0), state.rows(usize::from(self.compressed.is_some()))],
            )
        };
        let Some((Place { position, pages: window_pages }, pages)) = places else { return };
        let listed = match listed {
            Some(list) => match chosen(list, (position + 1) / self.ratio) {
                Some(list) => Some(list),
                None => {
                    let why = "are not complete and ascending";
                    return run.fail(format!("the compressed rows of a row at position {position} {why}"));
                }
            },
            None => None,
        };
        let row_of = WindowRow {
            q,
            position,
            window: self.window,
            window_pages,
            first_page: state.pages(0).start,
            pages,
            ratio: self.ratio,
            chosen: listed,
        };
        let at = heads.start * self.shape.v_dim;
        let out = run.kernels.attend_window(&self.shape, caches, sinks, &row_of, heads, s);
        let row = run.at(&self.out, row).cast::<f32>();
        // SAFETY: the output row holds all heads, and these are this task's.
        unsafe { std::ptr::copy_nonoverlapping(out.as_ptr(), row.add(at), out.len()) }
    }
}
