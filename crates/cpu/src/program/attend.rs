//! Attention. A task is a block of rows and some KV heads; consecutive rows of one sequence share each tile
//! of keys and values.

use std::ops::Range;
use std::sync::Arc;

use minfer_graph::PAGE;
use minfer_runtime::StateBuffer;

use super::{Loc, PerWorker, Run, Step, for_each_chunk};
use crate::attention::{AttendShape, KvView, QueryRows, Scratch, heads_per_task};
use crate::pool::{ChunkCounter, Worker};
use crate::state::PagedState;

/// Rows per task: enough to share tiles in prefill, few enough to spread.
pub(super) const ROW_BLOCK: usize = 16;

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
    pub(super) next: ChunkCounter,
}

/// Rows `start..end`, all of one sequence.
struct Block<'a> {
    rows: Range<usize>,
    positions: &'a [i32],
    pages: &'a [i32],
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
        let blocks = rows.div_ceil(ROW_BLOCK);
        let each = heads_per_task(&self.shape, rows, worker.count);
        let parts = self.shape.kv_heads.div_ceil(each);
        // Later rows see more keys: start with them, so that workers finish together.
        for_each_chunk(&self.next, blocks * parts, 1, |task| {
            let (block, first_head) = (blocks - 1 - task.start / parts, task.start % parts * each);
            let kv_heads = first_head..(first_head + each).min(self.shape.kv_heads);
            let mut start = block * ROW_BLOCK;
            let end = (start + ROW_BLOCK).min(rows);
            while start < end {
                let same = table_at[start..end].iter().take_while(|&&t| t == table_at[start]).count();
                let range = start..start + same;
                let list = usize::try_from(table_at[start]).ok().and_then(|t| pages.get(t..));
                match list.filter(|list| covers(list, &positions[range.clone()], 0, &state.pages(0))) {
                    Some(pages) => {
                        let block = Block { positions: &positions[range.clone()], rows: range, pages };
                        // SAFETY: this task alone writes these rows' part of this head.
                        unsafe { self.block(run, &kv, block, kv_heads.clone(), scratch) }
                    }
                    None => run.fail("a row's page list does not cover its position".to_string()),
                }
                start += same;
            }
        });
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
    unsafe fn block(
        &self,
        run: &Run<'_>,
        kv: &KvView<'_>,
        b: Block<'_>,
        kv_heads: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let first = b.rows.start;
        // SAFETY: the rows exist and are complete.
        let q = unsafe { run.get(&self.q, first, b.rows.len()) };
        let rows = QueryRows { q, positions: b.positions, pages: b.pages };
        run.kernels.attend(&self.shape, kv, &rows, kv_heads, scratch, |i, kv_head, head_out| {
            let at = run.at(&self.out, first + i).cast::<f32>();
            let offset = kv_head * head_out.len();
            // SAFETY: the output row holds `kv_heads` parts of this length, and this part is this task's.
            unsafe { std::ptr::copy_nonoverlapping(head_out.as_ptr(), at.add(offset), head_out.len()) }
        });
    }
}
