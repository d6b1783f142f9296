//! Attention. Tasks are blocks of rows and some KV heads, or few rows and a range of positions (`Shares`); consecutive
//! rows of one sequence share what is read.

use std::ops::Range;
use std::sync::Arc;

use minfer_graph::PAGE;
use minfer_runtime::StateBuffer;

use super::{Loc, PerWorker, Run, Step, for_each_chunk};
use crate::attention::{AttendShape, KvView, Partials, QueryRows, Scratch, Share, Shares};
use crate::pool::{ChunkCounter, Worker};
use crate::state::PagedState;

pub(crate) struct AttendStep {
    pub(super) shape: AttendShape,
    pub(super) v_part: usize,
    pub(super) state: Arc<dyn StateBuffer>,
    pub(super) q: Loc,
    pub(super) positions: Loc,
    pub(super) table_at: Loc,
    pub(super) pages: Loc,
    pub(super) out: Loc,
    pub(super) scratch: PerWorker<Scratch>,
    pub(super) partials: Arc<Partials>,
    pub(super) next: ChunkCounter,
}

impl Step for AttendStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        let rows = run.rows(&self.q);
        let Some(state) = self.state.as_any().downcast_ref::<PagedState>() else { return };
        // SAFETY: inputs are complete by the caller's promise; `pages` is read up to what positions need,
        // which the engine has bound.
        let (positions, table_at, pages) = unsafe {
            (
                run.get::<i32>(&self.positions, 0, rows),
                run.get::<i32>(&self.table_at, 0, rows),
                run.get::<i32>(&self.pages, 0, run.rows(&self.pages)),
            )
        };
        // SAFETY: earlier steps stored this step's rows; nobody stores while attention runs.
        let kv = unsafe { state.view(self.v_part) };
        // SAFETY: the scratch is this worker's own.
        let scratch = unsafe { self.scratch.get(worker) };
        let last = positions.iter().copied().max().unwrap_or(0);
        let shares = Shares::new(&self.shape, table_at, last, worker.count, &self.partials);
        for_each_chunk(&self.next, shares.tasks(), 1, |task| {
            let share = shares.task(task.start);
            let (mut start, end) = (share.rows.start, share.rows.end);
            while start < end {
                let same = table_at[start..end].iter().take_while(|&&t| t == table_at[start]).count();
                let rows = start..start + same;
                let list = usize::try_from(table_at[start]).ok().and_then(|t| pages.get(t..));
                match list.filter(|list| covers(list, &positions[rows.clone()], 0, &state.pages(0))) {
                    Some(pages) => {
                        let positions = &positions[rows.clone()];
                        // SAFETY: this task alone has these rows' part of these heads and this range.
                        unsafe {
                            self.share(run, &kv, (positions, pages), Share { rows, ..share.clone() }, scratch)
                        }
                    }
                    None => run.fail("a row's page list does not cover its position".to_string()),
                }
                start += same;
            }
        });
        if shares.is_split() {
            worker.barrier();
            let heads = self.shape.heads;
            for i in worker.share(rows * heads, 1) {
                let position = usize::try_from(positions[i / heads]).unwrap_or(0);
                // SAFETY: the row is there, this worker alone writes this head of it, and all tasks are done.
                unsafe { self.merge(run, i / heads, position, i % heads) }
            }
        }
    }

    fn reset(&self) {
        self.next.reset();
    }
}

/// Whether a page list reaches the rows' positions, with pages inside of the cache, from the page of position
/// `first` on.
pub(super) fn covers(list: &[i32], positions: &[i32], first: usize, pages: &Range<usize>) -> bool {
    let last = positions.iter().copied().max().unwrap_or(-1);
    let lowest = positions.iter().copied().min().unwrap_or(-1);
    let needed = first / PAGE..usize::try_from(last).map_or(0, |p| p / PAGE + 1);
    let inside = |&page: &i32| usize::try_from(page).is_ok_and(|page| pages.contains(&page));
    lowest >= 0 && list.get(needed).is_some_and(|list| list.iter().all(inside))
}

impl AttendStep {
    /// Rows of one sequence, at these positions and with these pages.
    ///
    /// # Safety
    /// As [`Step::run`], and this task alone has the share.
    unsafe fn share(
        &self,
        run: &Run<'_>,
        kv: &KvView<'_>,
        (positions, pages): (&[i32], &[i32]),
        share: Share,
        scratch: &mut Scratch,
    ) {
        let first = share.rows.start;
        // SAFETY: the rows exist and are complete.
        let q = unsafe { run.get(&self.q, first, share.rows.len()) };
        let rows = QueryRows { q, positions, pages };
        if let Some(range) = share.range {
            let partials = (&*self.partials, first);
            // SAFETY: by the caller's promise.
            return unsafe {
                run.kernels.attend_range(&self.shape, kv, &rows, share.kv_heads, range, scratch, partials)
            };
        }
        run.kernels.attend(&self.shape, kv, &rows, share.kv_heads, scratch, |i, kv_head, head_out| {
            let at = run.at(&self.out, first + i).cast::<f32>();
            let offset = kv_head * head_out.len();
            // SAFETY: the output row holds `kv_heads` parts of this length, and this part is this task's.
            unsafe { std::ptr::copy_nonoverlapping(head_out.as_ptr(), at.add(offset), head_out.len()) }
        });
    }

    /// # Safety
    /// As [`Step::run`], after all tasks, and this worker alone has the head of the row.
    unsafe fn merge(&self, run: &Run<'_>, row: usize, position: usize, head: usize) {
        let dim = self.shape.v_dim;
        let out = run.at(&self.out, row).cast::<f32>().wrapping_add(head * dim);
        // SAFETY: the output row holds all heads, and this one is the worker's; nobody writes partials any more.
        unsafe {
            let out = std::slice::from_raw_parts_mut(out, dim);
            run.kernels.merge_ranges(&self.partials, row, position, head, out);
        }
    }
}
