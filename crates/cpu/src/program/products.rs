//! Matrix products, dense, by head and by expert. Work is shared out in ranges of output groups, so that each worker
//! streams consecutive weights; rows are never split among workers within a group.

use std::sync::Arc;

use super::{Loc, PerWorker, Run, Step, for_each_chunk};
use crate::matmul::{Job, MatmulFn, RowPair, Rows, x_row_bytes};
use crate::pool::{ChunkCounter, Worker};
use crate::weights::{CpuWeight, Matrix};

/// Weight bytes that a worker claims at a time, at most: long enough to stream. 128 KiB cost Q8_0 12 % of its decode speed.
const STREAM_BYTES: usize = 512 * 1024;

/// Up to as many rows memory bounds the product.
const FEW_ROWS: usize = 8;

/// Groups per claim of a product of `total` groups with `rows` rows: a stream's worth, but no more than a part of each
/// worker's fair share. Where memory is the bound that part is large: whoever is last has all of it.
fn chunk_groups(w: &Matrix, total: usize, rows: usize, workers: usize) -> usize {
    let parts = if rows <= FEW_ROWS { 2 } else { 8 };
    let fair = total.div_ceil(parts * workers);
    (STREAM_BYTES / w.group_bytes().max(1)).clamp(1, fair.max(1))
}

/// Runs a kernel on some groups of a weight, wherever it lies.
///
/// # Safety
/// As [`MatmulFn`], for a job of this weight; called by the worker itself.
unsafe fn product(
    run: &Run<'_>,
    worker: &Worker<'_>,
    w: &Matrix,
    kernel: MatmulFn,
    job: &Job<'_>,
    groups: std::ops::Range<usize>,
) {
    // SAFETY: by the caller's promise; the borrow ends with the product.
    if let Err(why) = unsafe { w.product(kernel, job, groups, run.pack_scratch.get(worker)) } {
        run.fail(why);
    }
}

pub(crate) struct MatmulStep {
    pub(super) weight: Arc<CpuWeight>,
    pub(super) kernel: MatmulFn,
    pub(super) x: Loc,
    pub(super) y: Loc,
    pub(super) next: ChunkCounter,
}

impl Step for MatmulStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        let CpuWeight::Matrix(w) = &*self.weight else { return };
        // A row may have several parts, each a row of the product.
        let parts = self.y.row_bytes / (4 * w.n()).max(1);
        let rows = run.rows(&self.x) * parts;
        if rows == 0 {
            return;
        }
        let job = Job {
            k: w.k(),
            n: w.n(),
            weights: std::ptr::null(),
            x: run.at(&self.x, 0),
            x_stride: self.x.row_bytes / parts,
            y: run.at(&self.y, 0).cast(),
            y_stride: self.y.row_bytes / parts,
            rows: Rows::All(rows),
        };
        let chunk = chunk_groups(w, w.groups(), rows, worker.count);
        for_each_chunk(&self.next, w.groups(), chunk, |groups| {
            // SAFETY: the kernel was selected for this machine and this type; activations were written by the
            // quantiser; claimed groups are this worker's alone.
            unsafe { product(run, worker, w, self.kernel, &job, groups) }
        });
    }

    fn reset(&self) {
        self.next.reset();
    }
}

/// A matrix for each head, applied to its part of each row.
pub(crate) struct HeadsStep {
    pub(super) weight: Arc<CpuWeight>,
    pub(super) kernel: MatmulFn,
    pub(super) x: Loc,
    pub(super) y: Loc,
    pub(super) next: ChunkCounter,
}

impl Step for HeadsStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        let CpuWeight::Stack(heads) = &*self.weight else { return };
        let Some(first) = heads.first() else { return };
        let rows = run.rows(&self.x);
        let chunk = chunk_groups(first, heads.len() * first.groups(), rows, worker.count);
        if rows == 0 {
            return;
        }
        let per_head = first.groups().div_ceil(chunk);
        for_each_chunk(&self.next, heads.len() * per_head, 1, |task| {
            let (head, part) = (task.start / per_head, task.start % per_head);
            let w = &heads[head];
            let job = Job {
                k: w.k(),
                n: w.n(),
                weights: std::ptr::null(),
                x: run.at(&self.x, 0).wrapping_add(head * x_row_bytes(w.ty(), w.k())),
                x_stride: self.x.row_bytes,
                y: run.at(&self.y, 0).cast::<f32>().wrapping_add(head * w.n()),
                y_stride: self.y.row_bytes,
                rows: Rows::All(rows),
            };
            // SAFETY: as for the dense product; heads have different parts of an output row.
            unsafe {
                product(run, worker, w, self.kernel, &job, part * chunk..((part + 1) * chunk).min(w.groups()))
            }
        });
    }

    fn reset(&self) {
        self.next.reset();
    }
}

/// Rows grouped by the expert that they chose.
pub(crate) struct ExpertRows {
    /// `start[e]..start[e + 1]` are expert `e`'s pairs.
    start: Vec<usize>,
    pairs: Vec<RowPair>,
    /// Experts with rows.
    active: Vec<usize>,
}

impl ExpertRows {
    pub(super) fn new(experts: usize, max_pairs: usize) -> ExpertRows {
        ExpertRows {
            start: vec![0; experts + 1],
            pairs: vec![RowPair { x: 0, y: 0 }; max_pairs],
            active: Vec::with_capacity(experts),
        }
    }

    /// Sorts pairs by expert, keeping their order. `ids` is `[rows, top_k]`; the activation row of a pair is
    /// its token's row, or the pair itself if each pair has its own.
    fn fill(&mut self, ids: &[i32], top_k: usize, own_rows: bool) -> Result<(), String> {
        let experts = self.start.len() - 1;
        self.start.fill(0);
        for &id in ids {
            match usize::try_from(id) {
                Ok(e) if e < experts => self.start[e + 1] += 1,
                _ => return Err(format!("expert id {id} of {experts} experts")),
            }
        }
        self.active.clear();
        self.active.extend((0..experts).filter(|&e| self.start[e + 1] > 0));
        for e in 0..experts {
            self.start[e + 1] += self.start[e];
        }
        // Fill from the back, so that `start` ends where each expert begins.
        for (i, &id) in ids.iter().enumerate().rev() {
            let at = &mut self.start[id as usize + 1];
            *at -= 1;
            let x = if own_rows { i } else { i / top_k };
            self.pairs[*at] = RowPair { x: x as u32, y: i as u32 };
        }
        self.start.rotate_left(1);
        self.start[experts] = ids.len();
        Ok(())
    }

    fn of(&self, expert: usize) -> &[RowPair] {
        &self.pairs[self.start[expert]..self.start[expert + 1]]
    }
}

pub(crate) struct ExpertsStep {
    pub(super) weight: Arc<CpuWeight>,
    pub(super) kernel: MatmulFn,
    pub(super) x: Loc,
    pub(super) ids: Loc,
    pub(super) y: Loc,
    pub(super) top_k: usize,
    /// Each (token, rank) pair has an activation row of its own.
    pub(super) own_rows: bool,
    /// Every worker sorts for itself: cheaper than meeting.
    pub(super) sorted: PerWorker<ExpertRows>,
    pub(super) next: ChunkCounter,
}

impl Step for ExpertsStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        let CpuWeight::Stack(experts) = &*self.weight else { return };
        // SAFETY: ids are complete by the caller's promise; the scratch is this worker's own.
        let (ids, sorted) =
            unsafe { (run.get::<i32>(&self.ids, 0, run.rows(&self.ids)), self.sorted.get(worker)) };
        if let Err(why) = sorted.fill(ids, self.top_k, self.own_rows) {
            return run.fail(why);
        }
        let Some(first) = experts.first() else { return };
        // Of each expert's rows on average.
        let rows = ids.len() / sorted.active.len().max(1);
        let total = sorted.active.len() * first.groups();
        let chunk = chunk_groups(first, total, rows, worker.count);
        let per_expert = first.groups().div_ceil(chunk);
        for_each_chunk(&self.next, sorted.active.len() * per_expert, 1, |task| {
            let (expert, part) = (sorted.active[task.start / per_expert], task.start % per_expert);
            let groups = part * chunk..((part + 1) * chunk).min(first.groups());
            // SAFETY: as for the dense product; pairs of one expert have different output rows.
            unsafe { self.product(run, worker, &experts[expert], sorted.of(expert), groups) }
        });
    }

    fn reset(&self) {
        self.next.reset();
    }
}

impl ExpertsStep {
    unsafe fn product(
        &self,
        run: &Run<'_>,
        worker: &Worker<'_>,
        w: &Matrix,
        pairs: &[RowPair],
        groups: std::ops::Range<usize>,
    ) {
        let job = Job {
            k: w.k(),
            n: w.n(),
            weights: std::ptr::null(),
            x: run.at(&self.x, 0),
            x_stride: x_row_bytes(w.ty(), w.k()),
            y: run.at(&self.y, 0).cast(),
            y_stride: 4 * w.n(),
            rows: Rows::Pairs(pairs),
        };
        // SAFETY: by the caller's promise.
        unsafe { product(run, worker, w, self.kernel, &job, groups) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_grouped_by_expert_in_order() {
        let mut sorted = ExpertRows::new(4, 6);
        sorted.fill(&[2, 0, 2, 3, 0, 2], 2, false).unwrap();
        assert_eq!(sorted.active, [0, 2, 3]);
        let pairs = |e| sorted.of(e).iter().map(|p| (p.x, p.y)).collect::<Vec<_>>();
        assert_eq!(pairs(0), [(0, 1), (2, 4)]);
        assert_eq!(pairs(1), []);
        assert_eq!(pairs(2), [(0, 0), (1, 2), (2, 5)]);
        assert_eq!(pairs(3), [(1, 3)]);
        assert!(sorted.fill(&[4], 1, true).is_err());
        assert!(sorted.fill(&[-1], 1, true).is_err());
    }
}
