//! SwiGLU of gate and up, quantised at once. Its blocks stand alone, so workers share a single row as well: in decode
//! nobody waits for a row of several thousand exponentials.

use super::{Loc, PerWorker, Run, Step};
use crate::pool::Worker;
use crate::quantize::{Q8_BLOCK, q8_row_bytes};

/// Blocks that a worker takes at least: shorter shares would cost more than they save.
const UNIT: usize = 4;

pub(crate) struct SwiGluStep {
    pub(super) gate: Loc,
    pub(super) up: Loc,
    pub(super) out: Loc,
    /// Numbers of a quantised row; a row of the step may have several.
    pub(super) k: usize,
    /// `[k]`.
    pub(super) scratch: PerWorker<Vec<f32>>,
}

impl Step for SwiGluStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        let per_row = self.k / Q8_BLOCK;
        let rows = run.rows(&self.gate) * (self.gate.row_bytes / (4 * self.k).max(1));
        let mine = worker.share(rows * per_row, UNIT);
        // SAFETY: the scratch is this worker's own.
        let scratch = unsafe { self.scratch.get(worker) };
        let mut start = mine.start;
        while start < mine.end {
            let (row, block) = (start / per_row, start % per_row);
            let count = (mine.end - start).min(per_row - block);
            let scratch = &mut scratch[..Q8_BLOCK * count];
            // SAFETY: inputs are complete by the caller's promise; these blocks are this worker's alone, and the
            // quantiser was selected for this machine.
            unsafe {
                let at = Q8_BLOCK * start;
                let [gate, up] = [&self.gate, &self.up].map(|x| {
                    std::slice::from_raw_parts(run.at(x, 0).cast::<f32>().add(at), Q8_BLOCK * count)
                });
                run.kernels.swiglu(gate, up, scratch);
                let out = run.at(&self.out, 0).add(row * q8_row_bytes(self.k));
                (run.quantize)(scratch, block, self.k, out);
            }
            start += count;
        }
    }
}
