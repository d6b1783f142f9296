//! Index keys of complete blocks by gates. A row that completes a block does the work for it.

use std::sync::Arc;

use minfer_graph::PoolGated;
use minfer_runtime::StateBuffer;

use super::sparse::{Completed, PageTables};
use super::{Loc, PerWorker, Run, Step};
use crate::pool::Worker;
use crate::state::PagedState;
use crate::weights::CpuWeight;

pub(crate) struct GatedStep {
    pub(super) pool: PoolGated,
    pub(super) weight: Arc<CpuWeight>,
    pub(super) state: Arc<dyn StateBuffer>,
    pub(super) tables: PageTables,
    pub(super) slots: Loc,
    pub(super) scratch: PerWorker<GatedScratch>,
}

/// Keys and gates of one block, `[block, width]`, two rows of sums, and its key.
pub(crate) struct GatedScratch {
    keys: Vec<f32>,
    gates: Vec<f32>,
    sums: Vec<f32>,
    key: Vec<f32>,
}

impl GatedScratch {
    pub(super) fn new(block: usize, width: usize) -> GatedScratch {
        GatedScratch {
            keys: vec![0.0; block * width],
            gates: vec![0.0; block * width],
            sums: vec![0.0; 2 * width],
            key: vec![0.0; width],
        }
    }
}

impl Step for GatedStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        let Some(state) = self.state.as_any().downcast_ref::<PagedState>() else { return };
        let CpuWeight::Vector(bias) = &*self.weight else { return };
        // SAFETY: the scratch is this worker's own.
        let scratch = unsafe { self.scratch.get(worker) };
        for row in worker.share(run.rows(&self.slots), 1) {
            // SAFETY: by the caller's promise.
            let completed = unsafe {
                self.tables.completed(
                    run,
                    row,
                    &self.slots,
                    state,
                    [self.pool.raw, self.pool.pooled],
                    self.pool.block,
                )
            };
            let Some(completed) = completed else { continue };
            // SAFETY: as above, and rows of different workers differ.
            unsafe { self.block(run, state, bias, &completed, scratch) }
        }
    }
}

impl GatedStep {
    /// # Safety
    /// As [`Step::run`], and this worker alone has the row that completes the block.
    unsafe fn block(
        &self,
        run: &Run<'_>,
        state: &PagedState,
        bias: &[f32],
        completed: &Completed<'_>,
        s: &mut GatedScratch,
    ) {
        let (k, width) = (run.kernels, s.key.len());
        // SAFETY: rows of this step were stored before the barrier, and this step writes another part.
        let (raw, gates) = unsafe { (state.rows(self.pool.raw), state.rows(self.pool.gates)) };
        let rows = s.keys.chunks_exact_mut(width).zip(s.gates.chunks_exact_mut(width));
        for (i, (key, gate)) in rows.enumerate() {
            let slot = completed.place.slot(completed.first + i);
            raw.load(k, state.row(self.pool.raw, slot), key);
            gates.load(k, state.row(self.pool.gates, slot), gate);
        }
        k.gated_key(&s.keys, &s.gates, bias, &mut s.sums, &mut s.key);
        // SAFETY: the slot exists, and the engine gives every row of a step a slot of its own.
        unsafe { state.slot_mut(self.pool.pooled, completed.slot).store(k, 0, &s.key) }
    }
}
