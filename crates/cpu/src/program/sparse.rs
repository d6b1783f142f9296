//! Sparse attention: index keys of complete blocks, choice of blocks, attention over the chosen ones. Each
//! row is a task of its own.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use minfer_graph::{IndexSelect, PAGE, PoolKeys};
use minfer_runtime::StateBuffer;

use super::attend::covers;
use super::{Loc, PerWorker, Run, Step, for_each_chunk};
use crate::attention::{AttendShape, Scratch, SparseRow};
use crate::index::{PoolScratch, choose};
use crate::pool::{ChunkCounter, Worker};
use crate::state::PagedState;
use crate::weights::CpuWeight;

/// A sequence's positions and pages, row by row.
#[derive(Clone, Copy)]
pub(crate) struct PageTables {
    pub(super) positions: Loc,
    pub(super) table_at: Loc,
    pub(super) pages: Loc,
}

/// A row's position, and the pages that lead to it.
pub(super) struct Place<'a> {
    pub(super) position: usize,
    pub(super) pages: &'a [i32],
}

impl PageTables {
    /// `None` (and a reported failure) when the row's page list does not cover the last `window` positions up to
    /// its own with pages of the part.
    ///
    /// # Safety
    /// As [`Step::run`].
    pub(super) unsafe fn place<'a>(
        &self,
        run: &'a Run<'_>,
        row: usize,
        (state, part): (&PagedState, usize),
        window: usize,
    ) -> Option<Place<'a>> {
        // SAFETY: inputs are complete by the caller's promise.
        let (position, table_at, pages) = unsafe {
            (
                run.get::<i32>(&self.positions, row, 1),
                run.get::<i32>(&self.table_at, row, 1)[0],
                run.get::<i32>(&self.pages, 0, run.rows(&self.pages)),
            )
        };
        let list = usize::try_from(table_at).ok().and_then(|t| pages.get(t..));
        let first = (usize::try_from(position[0]).unwrap_or(0) + 1).saturating_sub(window);
        match list.filter(|list| covers(list, position, first, &state.pages(part))) {
            Some(pages) => Some(Place { position: position[0] as usize, pages }),
            None => {
                run.fail("a row's page list does not cover its position".to_string());
                None
            }
        }
    }
}

/// A block that a row completes.
pub(super) struct Completed<'a> {
    pub(super) place: Place<'a>,
    /// The row's slot, where the block's key belongs.
    pub(super) slot: usize,
    /// The block's first position.
    pub(super) first: usize,
}

impl PageTables {
    /// The block of `block` positions that a row completes, if it is one to be kept; `[raw, pooled]` are parts of
    /// the state.
    ///
    /// # Safety
    /// As [`Step::run`].
    pub(super) unsafe fn completed<'a>(
        &self,
        run: &'a Run<'_>,
        row: usize,
        slots: &Loc,
        state: &PagedState,
        [raw, pooled]: [usize; 2],
        block: usize,
    ) -> Option<Completed<'a>> {
        // SAFETY: inputs are complete by the caller's promise.
        let slot = usize::try_from(unsafe { run.get::<i32>(slots, row, 1)[0] }).ok()?;
        if !state.pages(pooled).contains(&(slot / PAGE)) {
            run.fail(format!("slot {slot} is outside of pages {:?}", state.pages(pooled)));
            return None;
        }
        // SAFETY: as above.
        let place = unsafe { self.place(run, row, (state, raw), block)? };
        let end = place.position + 1;
        end.is_multiple_of(block).then(|| Completed { place, slot, first: end - block })
    }
}

impl Place<'_> {
    pub(super) fn slot(&self, position: usize) -> usize {
        self.pages[position / PAGE] as usize * PAGE + position % PAGE
    }
}

pub(crate) struct PoolStep {
    pub(super) pool: PoolKeys,
    pub(super) weight: Arc<CpuWeight>,
    pub(super) state: Arc<dyn StateBuffer>,
    pub(super) tables: PageTables,
    pub(super) slots: Loc,
    pub(super) scratch: PerWorker<PoolScratch>,
}

impl Step for PoolStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        let Some(state) = self.state.as_any().downcast_ref::<PagedState>() else { return };
        let CpuWeight::Vector(weight) = &*self.weight else { return };
        // SAFETY: the scratch is this worker's own.
        let scratch = unsafe { self.scratch.get(worker) };
        for row in worker.share(run.rows(&self.slots), 1) {
            // SAFETY: by the caller's promise, and rows of different workers differ.
            unsafe { self.row(run, state, weight, row, scratch) }
        }
    }
}

impl PoolStep {
    /// # Safety
    /// As [`Step::run`], and this worker alone has the row.
    unsafe fn row(
        &self,
        run: &Run<'_>,
        state: &PagedState,
        weight: &[f32],
        row: usize,
        scratch: &mut PoolScratch,
    ) {
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
        let Some(Completed { place, slot, first }) = completed else { return };
        let k = run.kernels;
        // SAFETY: rows of this step were stored before the barrier, and this step writes another part.
        let raw = unsafe { state.rows(self.pool.raw) };
        let load =
            |i: usize, out: &mut [f32]| raw.load(k, state.row(self.pool.raw, place.slot(first + i)), out);
        let key = k.pool_key(&self.pool, weight, first as i32, load, scratch);
        // SAFETY: the slot exists, and the engine gives every row of a step a slot of its own.
        unsafe { state.slot_mut(self.pool.pooled, slot).store(k, 0, key) }
    }
}

/// Blocks that are scored by one task when a row's blocks are shared.
const SCORED: usize = 32;

pub(crate) struct SelectStep {
    pub(super) select: IndexSelect,
    pub(super) state: Arc<dyn StateBuffer>,
    pub(super) q: Loc,
    /// Weights of heads, if rows have them.
    pub(super) weights: Option<Loc>,
    pub(super) tables: PageTables,
    pub(super) out: Loc,
    pub(super) scratch: PerWorker<SelectScratch>,
    pub(super) scores: SharedScores,
    pub(super) next: ChunkCounter,
}

/// Room for the blocks of the longest page list, and for the keys that are scored together.
pub(crate) struct SelectScratch {
    scores: Vec<f32>,
    order: Vec<i32>,
    keys: KeyScratch,
}

/// Up to [`SCORED`] keys of `width` numbers, and what a head makes of them.
struct KeyScratch {
    width: usize,
    keys: Vec<f32>,
    products: Vec<f32>,
}

impl SelectScratch {
    pub(super) fn new(blocks: usize, width: usize) -> SelectScratch {
        let keys = KeyScratch { width, keys: vec![0.0; SCORED * width], products: vec![0.0; SCORED] };
        SelectScratch { scores: vec![0.0; blocks], order: vec![0; blocks], keys }
    }
}

/// Scores that all workers write, as bits: `[rows, blocks]` for as many rows as there are workers.
pub(crate) struct SharedScores {
    blocks: usize,
    bits: Vec<AtomicU32>,
}

impl SharedScores {
    pub(super) fn new(workers: usize, blocks: usize) -> SharedScores {
        SharedScores { blocks, bits: (0..workers * blocks).map(|_| AtomicU32::new(0)).collect() }
    }

    fn of_row(&self, row: usize) -> &[AtomicU32] {
        &self.bits[row * self.blocks..][..self.blocks]
    }
}

impl Step for SelectStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        let Some(state) = self.state.as_any().downcast_ref::<PagedState>() else { return };
        // SAFETY: the scratch is this worker's own.
        let scratch = unsafe { self.scratch.get(worker) };
        let rows = run.rows(&self.q);
        // SAFETY: by the caller's promise; every worker takes the same branch.
        unsafe {
            if rows < worker.count {
                self.share_blocks(run, worker, state, rows, scratch);
            } else {
                self.share_rows(run, state, rows, scratch);
            }
        }
    }

    fn reset(&self) {
        self.next.reset();
    }
}

impl SelectStep {
    /// A row is a task.
    ///
    /// # Safety
    /// As [`Step::run`].
    unsafe fn share_rows(&self, run: &Run<'_>, state: &PagedState, rows: usize, s: &mut SelectScratch) {
        for_each_chunk(&self.next, rows, 1, |task| {
            // Later rows see more blocks: start with them, so that workers finish together.
            let row = rows - 1 - task.start;
            // SAFETY: by the caller's promise, and a row is one task.
            unsafe {
                let Some(place) = self.tables.place(run, row, (state, self.select.pooled), usize::MAX) else {
                    return;
                };
                let blocks = (place.position + 1) / self.select.block;
                if blocks > self.select.top {
                    for (i, scores) in s.scores[..blocks].chunks_mut(SCORED).enumerate() {
                        self.score(run, state, &place, row, i * SCORED, &mut s.keys, scores);
                    }
                }
                self.choose(run, row, blocks, s);
            }
        });
    }

    /// Few rows: some blocks of a row are a task, and then workers meet.
    ///
    /// # Safety
    /// As [`Step::run`], and every worker calls it.
    unsafe fn share_blocks(
        &self,
        run: &Run<'_>,
        worker: &Worker<'_>,
        state: &PagedState,
        rows: usize,
        s: &mut SelectScratch,
    ) {
        let tasks = self.scores.blocks.div_ceil(SCORED);
        for_each_chunk(&self.next, rows * tasks, 1, |task| {
            let (row, first) = (task.start / tasks, task.start % tasks * SCORED);
            // SAFETY: inputs are complete by the caller's promise.
            unsafe {
                let Some(place) = self.tables.place(run, row, (state, self.select.pooled), usize::MAX) else {
                    return;
                };
                let blocks = (place.position + 1) / self.select.block;
                if blocks > self.select.top && first < blocks {
                    let scores = &mut s.scores[..SCORED.min(blocks - first)];
                    self.score(run, state, &place, row, first, &mut s.keys, scores);
                    for (shared, score) in self.scores.of_row(row)[first..].iter().zip(scores) {
                        shared.store(score.to_bits(), Ordering::Relaxed);
                    }
                }
            }
        });
        worker.barrier();
        for row in worker.share(rows, 1) {
            // SAFETY: as above, and this worker alone has the row.
            unsafe {
                let Some(place) = self.tables.place(run, row, (state, self.select.pooled), usize::MAX) else {
                    continue;
                };
                let blocks = (place.position + 1) / self.select.block;
                for (score, bits) in s.scores[..blocks].iter_mut().zip(self.scores.of_row(row)) {
                    *score = f32::from_bits(bits.load(Ordering::Relaxed));
                }
                self.choose(run, row, blocks, s);
            }
        }
    }

    /// Scores of the `out.len()` blocks from `first` on, at most [`SCORED`].
    ///
    /// # Safety
    /// As [`Step::run`].
    #[allow(clippy::too_many_arguments)]
    unsafe fn score(
        &self,
        run: &Run<'_>,
        state: &PagedState,
        place: &Place<'_>,
        row: usize,
        first: usize,
        s: &mut KeyScratch,
        out: &mut [f32],
    ) {
        let IndexSelect { block, pooled, scale, .. } = self.select;
        // SAFETY: inputs are complete, and nobody writes keys while blocks are chosen.
        let (q, weights, rows) = unsafe {
            let weights = self.weights.as_ref().map(|w| run.get::<f32>(w, row, 1));
            (run.get::<f32>(&self.q, row, 1), weights, state.rows(pooled))
        };
        let keys = &mut s.keys[..out.len() * s.width];
        for (b, key) in keys.chunks_exact_mut(s.width).enumerate() {
            let last = (first + b + 1) * block - 1;
            rows.load(run.kernels, state.row(pooled, place.slot(last)), key);
        }
        let products = &mut s.products[..out.len()];
        run.kernels.index_scores(q, keys, s.width, weights, scale, products, out);
    }

    /// # Safety
    /// As [`Step::run`], and this worker alone has the row.
    unsafe fn choose(&self, run: &Run<'_>, row: usize, blocks: usize, s: &mut SelectScratch) {
        // SAFETY: by the caller's promise.
        let out: &mut [i32] = unsafe { run.get_mut(&self.out, row) };
        choose(&s.scores[..blocks], &mut s.order, out);
    }
}

pub(crate) struct SparseStep {
    pub(super) shape: AttendShape,
    pub(super) v_part: usize,
    pub(super) block: usize,
    pub(super) state: Arc<dyn StateBuffer>,
    pub(super) q: Loc,
    pub(super) tables: PageTables,
    pub(super) blocks: Loc,
    pub(super) out: Loc,
    pub(super) scratch: PerWorker<Scratch>,
    pub(super) next: ChunkCounter,
}

impl Step for SparseStep {
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>) {
        let Some(state) = self.state.as_any().downcast_ref::<PagedState>() else { return };
        // SAFETY: the scratch is this worker's own.
        let scratch = unsafe { self.scratch.get(worker) };
        let rows = run.rows(&self.q);
        // Heads of one KV head share gathered rows; with few rows, more workers are worth more than that.
        let (group, few) = (self.shape.group(), (rows * self.shape.kv_heads).max(1));
        let each = group.div_ceil(worker.count.div_ceil(few).min(group));
        let parts = group.div_ceil(each);
        let per_row = self.shape.kv_heads * parts;
        for_each_chunk(&self.next, rows * per_row, 1, |task| {
            let (row, task) = (rows - 1 - task.start / per_row, task.start % per_row);
            let first = task / parts * group;
            let heads = first + task % parts * each..first + (task % parts * each + each).min(group);
            // SAFETY: by the caller's promise, and this task alone has the heads of the row.
            unsafe { self.heads(run, state, row, heads, scratch) }
        });
    }

    fn reset(&self) {
        self.next.reset();
    }
}

impl SparseStep {
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
        // SAFETY: by the caller's promise.
        let Some(place) = (unsafe { self.tables.place(run, row, (state, 0), usize::MAX) }) else { return };
        // SAFETY: inputs are complete, and nobody stores while attention runs.
        let (q, blocks, kv) = unsafe {
            (run.get::<f32>(&self.q, row, 1), run.get::<i32>(&self.blocks, row, 1), state.view(self.v_part))
        };
        let Place { position, pages } = place;
        let Some(blocks) = chosen(blocks, (position + 1) / self.block) else {
            run.fail(format!("the blocks of a row at position {position} are not complete and ascending"));
            return;
        };
        if blocks.is_empty() && (position + 1).is_multiple_of(self.block) {
            run.fail(format!("a row at position {position} attends to nothing: no block is chosen"));
            return;
        }
        let query = SparseRow { q, position, pages, blocks, block: self.block };
        let at = heads.start * self.shape.v_dim;
        let out = run.kernels.attend_blocks(&self.shape, &kv, &query, heads, s);
        let row = run.at(&self.out, row).cast::<f32>();
        // SAFETY: the output row holds all heads, and these are this task's.
        unsafe { std::ptr::copy_nonoverlapping(out.as_ptr(), row.add(at), out.len()) }
    }
}

/// The list without its padding, if what is left is ascending and below `complete`.
pub(super) fn chosen(blocks: &[i32], complete: usize) -> Option<&[i32]> {
    let count = blocks.iter().take_while(|&&b| b >= 0).count();
    let (chosen, padding) = blocks.split_at(count);
    let fits = chosen.windows(2).all(|w| w[0] < w[1])
        && chosen.last().is_none_or(|&b| (b as usize) < complete)
        && padding.iter().all(|&b| b < 0);
    fits.then_some(chosen)
}

#[cfg(test)]
mod tests {
    use super::chosen;

    #[test]
    fn only_ascending_complete_blocks_are_taken() {
        assert_eq!(chosen(&[0, 2, 5, -1, -1], 6), Some(&[0, 2, 5][..]));
        assert_eq!(chosen(&[-1], 0), Some(&[][..]));
        for bad in [&[0, 6][..], &[2, 1], &[1, 1], &[-1, 1]] {
            assert_eq!(chosen(bad, 6), None, "{bad:?}");
        }
    }
}
