//! How a step's attention is shared out, and what is left of a range of positions until all ranges are merged.
//!
//! Memory is read fastest in order: many positions for all KV heads. So few rows are shared out by ranges of positions,
//! many by blocks of rows; KV heads are split only where that does not give enough tasks, or where a block has so many
//! queries that a copy of one head's rows pays.

use std::cell::UnsafeCell;
use std::ops::Range;

use super::{AttendShape, IN_PLACE, RANGE, Running};
use crate::Kernels;

/// Rows per task: enough to share tiles in prefill, few enough to spread.
pub const ROW_BLOCK: usize = 16;
/// Rows up to which a step is shared out by ranges of positions.
const SPLIT_ROWS: usize = 8;

/// The tasks of one step.
#[derive(Clone, Copy, Debug)]
pub struct Shares {
    rows: usize,
    kv_heads: usize,
    rows_each: usize,
    heads_each: usize,
    /// Ranges of positions that are tasks of their own; 0: none are.
    ranges: usize,
}

/// A part of a step: rows (of one or more sequences), KV heads, and perhaps only one range of positions.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Share {
    pub rows: Range<usize>,
    pub kv_heads: Range<usize>,
    pub range: Option<usize>,
}

impl Shares {
    /// For rows whose page lists begin at `table_at` (equal ones in succession are one sequence's) and whose last
    /// position is `last`; `partials` is the room that there is for ranges.
    pub fn new(
        shape: &AttendShape,
        table_at: &[i32],
        last: i32,
        threads: usize,
        partials: &Partials,
    ) -> Shares {
        let rows = table_at.len();
        let runs = 1 + table_at.windows(2).filter(|pair| pair[0] != pair[1]).count();
        let rows_each = rows.div_ceil(runs).clamp(1, ROW_BLOCK);
        let blocks = rows.div_ceil(rows_each);
        let ranges = usize::try_from(last).unwrap_or(0) / RANGE + 1;
        let split = threads > 1 && ranges > 1 && blocks < 4 * threads;
        let ranges = if split && rows <= partials.rows && ranges <= partials.ranges { ranges } else { 0 };
        let queries = rows_each * shape.group();
        let tasks = blocks * ranges.max(1);
        // As many heads as a scratch for a block of rows has room for, unless they are needed for more tasks.
        let most = if queries <= IN_PLACE { (Shares::queries(shape) / queries).max(1) } else { 1 };
        let heads_each = shape.kv_heads.div_ceil(threads.div_ceil(tasks.max(1))).clamp(1, most);
        Shares { rows, kv_heads: shape.kv_heads, rows_each, heads_each, ranges }
    }

    /// Query heads of one task, at most.
    pub(super) fn queries(shape: &AttendShape) -> usize {
        (ROW_BLOCK * shape.group()).max(shape.heads)
    }

    fn parts(&self) -> usize {
        self.kv_heads.div_ceil(self.heads_each)
    }

    /// Whether workers meet and [`Kernels::merge_ranges`] ends the step.
    pub fn is_split(&self) -> bool {
        self.ranges > 0
    }

    /// Number of tasks.
    pub fn tasks(&self) -> usize {
        self.rows.div_ceil(self.rows_each) * self.ranges.max(1) * self.parts()
    }

    /// Task `i`. Later rows see more keys and come first, so that workers finish together.
    pub fn task(&self, i: usize) -> Share {
        let (i, part) = (i / self.parts(), i % self.parts());
        let (block, range) = (i / self.ranges.max(1), i % self.ranges.max(1));
        let first = (self.rows.div_ceil(self.rows_each) - 1 - block) * self.rows_each;
        let head = part * self.heads_each;
        Share {
            rows: first..(first + self.rows_each).min(self.rows),
            kv_heads: head..(head + self.heads_each).min(self.kv_heads),
            range: self.is_split().then_some(range),
        }
    }
}

/// What ranges of positions gave each row and head, until they are merged: `[rows, ranges, heads]`.
pub struct Partials {
    rows: usize,
    ranges: usize,
    heads: usize,
    v_dim: usize,
    /// Maximum, sum, and weighted sum of values.
    numbers: Box<[UnsafeCell<f32>]>,
}

// SAFETY: tasks write parts of their own, and workers meet before anyone reads.
unsafe impl Sync for Partials {}

impl Partials {
    /// Room for up to `rows` rows (of which few are enough, see [`Shares`]) at up to `positions` positions.
    pub fn new(shape: &AttendShape, rows: usize, positions: usize) -> Partials {
        let (rows, ranges) = (rows.min(SPLIT_ROWS), positions.div_ceil(RANGE));
        let len = rows * ranges * shape.heads * (2 + shape.v_dim);
        // Zeros of the system, which take memory only where a range is written.
        let zeros: *mut [f32] = Box::into_raw(vec![0.0f32; len].into_boxed_slice());
        // SAFETY: a cell is as its number, and the box was given up.
        let numbers = unsafe { Box::from_raw(zeros as *mut [UnsafeCell<f32>]) };
        Partials { rows, ranges, heads: shape.heads, v_dim: shape.v_dim, numbers }
    }

    /// Whether it serves a layer of this shape as well.
    pub fn fits(&self, shape: &AttendShape) -> bool {
        self.heads == shape.heads && self.v_dim == shape.v_dim
    }

    fn at(&self, row: usize, range: usize, head: usize) -> Option<&[UnsafeCell<f32>]> {
        let each = 2 + self.v_dim;
        let inside = row < self.rows && range < self.ranges && head < self.heads;
        let index = ((row * self.ranges + range) * self.heads + head) * each;
        inside.then(|| &self.numbers[index..index + each])
    }

    /// # Safety
    /// Nobody else uses this part meanwhile.
    pub(super) unsafe fn put(&self, row: usize, range: usize, head: usize, running: Running, acc: &[f32]) {
        let Some(cells) = self.at(row, range, head) else { return };
        let numbers = [running.max, running.sum];
        for (cell, number) in cells.iter().zip(numbers.iter().chain(acc)) {
            // SAFETY: by the caller's promise.
            unsafe { *cell.get() = *number }
        }
    }

    /// # Safety
    /// Nobody writes this part meanwhile.
    unsafe fn get(&self, row: usize, range: usize, head: usize) -> Option<(Running, &[f32])> {
        let cells = self.at(row, range, head)?;
        // SAFETY: a cell is as its number; by the caller's promise.
        let numbers = unsafe { std::slice::from_raw_parts(cells.as_ptr().cast::<f32>(), cells.len()) };
        Some((Running { max: numbers[0], sum: numbers[1] }, &numbers[2..]))
    }
}

impl Kernels {
    /// Ends the attention of one head of a row at a position: merges its ranges, in order, into `out`, `[v_dim]`.
    ///
    /// # Safety
    /// All tasks of the step are done, and nobody writes to `partials`.
    pub unsafe fn merge_ranges(
        &self,
        partials: &Partials,
        row: usize,
        position: usize,
        head: usize,
        out: &mut [f32],
    ) {
        let mut total = Running::EMPTY;
        out.fill(0.0);
        for range in 0..position / RANGE + 1 {
            // SAFETY: by the caller's promise.
            if let Some((running, acc)) = unsafe { partials.get(row, range, head) } {
                total.merge(self, running, acc, out);
            }
        }
        out.iter_mut().for_each(|o| *o /= total.sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every row, head and range belongs to one task, for one and several sequences.
    #[test]
    fn tasks_cover_a_step_once() {
        let shape = AttendShape { heads: 12, kv_heads: 6, k_dim: 8, v_dim: 8, scale: 1.0 };
        let partials = Partials::new(&shape, 64, 40 * RANGE);
        for rows in [1, 2, 3, 8, 9, 33, 100] {
            for sequences in [1, 2, 8] {
                for (threads, last) in [(1, 0), (2, 5 * RANGE as i32), (7, 511), (64, 39 * RANGE as i32)] {
                    let table_at: Vec<i32> = (0..rows).map(|r| (r * sequences / rows) as i32).collect();
                    let shares = Shares::new(&shape, &table_at, last, threads, &partials);
                    let ranges = if shares.is_split() { last as usize / RANGE + 1 } else { 1 };
                    let mut seen = vec![0; rows * shape.kv_heads * ranges];
                    for task in (0..shares.tasks()).map(|i| shares.task(i)) {
                        let queries = task.rows.len() * task.kv_heads.len() * shape.group();
                        assert!(queries > 0 && queries <= Shares::queries(&shape));
                        for row in task.rows {
                            for head in task.kv_heads.clone() {
                                seen[(row * shape.kv_heads + head) * ranges + task.range.unwrap_or(0)] += 1;
                            }
                        }
                    }
                    assert!(
                        seen.iter().all(|&n| n == 1),
                        "{rows} rows, {sequences} sequences, {threads} threads"
                    );
                    let positions_are_shared = threads > 1 && rows == 1 && last >= RANGE as i32;
                    assert!(!positions_are_shared || shares.is_split());
                }
            }
        }
    }
}
