//! Causal grouped-query attention over paged keys and values, with an online softmax.
//!
//! In: query rows of one sequence, its page list, and the cache of one layer. Out: one output row per
//! query row, for some of the KV heads, so that a caller can spread (rows, KV heads) over threads.
//! Which pages a sequence owns and when they are shared is the engine's affair.
//!
//! The definition, for one query head at position `p` (Milakov & Gimelshein 2018):
//!
//! ```text
//! for each range of RANGE positions up to p, in order:
//!     max = -inf; sum = 0; acc = 0
//!     for each page of keys in it up to p, in order:
//!         s[j]  = dot(q, k[j]) * scale               in lanes (`math`)
//!         new   = max(max, s[0], s[1], ..)
//!         w[j]  = exp(s[j] - new)
//!         keep  = exp(max - new)
//!         sum   = fma(sum, keep, w[0] + w[1] + ..)   in lanes
//!         acc  *= keep; acc[e] = fma(w[j], v[j][e], acc[e])   j ascending
//!         max   = new
//!     new    = max(MAX, max)                         MAX = -inf; SUM = 0; ACC = 0 at first
//!     keep   = exp(MAX - new); w = exp(max - new)
//!     SUM    = fma(SUM, keep, sum * w)
//!     ACC[e] = fma(ACC[e], keep, acc[e] * w)
//!     MAX    = new
//! out = ACC / SUM
//! ```
//!
//! Ranges stand alone until they are merged, so that threads can share out the positions of a single row.
//! Both lie at fixed absolute positions, and a head's result depends on its own
//! query, its position and the keys before it: not on other rows, nor on where the pages lie.
//! Numbers of f16 and Q8_0 caches are widened exactly, in registers where few queries read a tile, and into a
//! copy of the tile where many do.

mod blocks;
mod cache;
mod fold;
mod q8;
mod shares;
mod tile;
mod window;

use std::iter::Peekable;
use std::ops::Range;

use minfer_graph::PAGE;

use crate::Kernels;

pub use blocks::SparseRow;
pub use cache::{CacheRows, CacheRowsMut};
pub use fold::Scratch;
use fold::{Folds, Room, Running};
pub use shares::{Partials, ROW_BLOCK, Share, Shares};
pub(crate) use tile::{AccumulateFn, ScoreFn, Tile, WidenFn};
pub use window::WindowRow;

/// The definitions of what this module's kernels do.
pub(crate) mod scalar {
    pub(crate) use super::cache::scalar::*;
    pub(crate) use super::q8::scalar::*;
    pub(crate) use super::tile::scalar::*;
}

/// The same for AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    pub(crate) use super::cache::avx2::*;
    pub(crate) use super::q8::avx2::*;
    pub(crate) use super::tile::avx2::*;
}

/// Sizes of an attention layer. `heads` is a multiple of `kv_heads`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttendShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; query head `h` reads KV head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Numbers per query and key head.
    pub k_dim: usize,
    /// Numbers per value and output head.
    pub v_dim: usize,
    /// Factor on the scores, usually `1/sqrt(k_dim)`.
    pub scale: f32,
}

impl AttendShape {
    /// Query heads per KV head.
    pub const fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Positions of a range; the order of sums depends on it. A whole number of pages.
pub const RANGE: usize = 8 * PAGE;

/// Keys and values of one layer: `k` is `[slots, kv_heads * k_dim]`, `v` is `[slots, kv_heads * v_dim]`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct KvView<'a> {
    pub k: CacheRows<'a>,
    pub v: CacheRows<'a>,
}

/// Query rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct QueryRows<'a> {
    /// `[rows, heads * k_dim]`.
    pub q: &'a [f32],
    /// Absolute position of each row, in any order; a row sees positions `0..=position`.
    pub positions: &'a [i32],
    /// The sequence's pages: position `j` lies in slot `pages[j / PAGE] * PAGE + j % PAGE`.
    pub pages: &'a [i32],
}

impl QueryRows<'_> {
    fn check(&self, shape: &AttendShape, kv_heads: &Range<usize>, scratch: &Scratch) {
        let count = self.positions.len();
        let queries = count * shape.group() * kv_heads.len();
        assert!(queries <= scratch.queries, "attend: {queries} queries in scratch for {}", scratch.queries);
        assert_eq!(self.q.len(), count * shape.heads * shape.k_dim, "attend: query rows");
        assert!(kv_heads.end <= shape.kv_heads, "attend: KV heads {kv_heads:?} of {}", shape.kv_heads);
        assert!(self.positions.iter().all(|&p| p >= 0), "attend: a negative position");
    }

    /// Copies the queries of these KV heads together: `[KV heads, rows, group, k_dim]`.
    fn gather(&self, shape: &AttendShape, kv_heads: &Range<usize>, out: &mut [f32]) {
        let width = shape.group() * shape.k_dim;
        let rows = self.positions.len().max(1);
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let (kv_head, row) = (kv_heads.start + i / rows, i % rows);
            out.copy_from_slice(&self.q[(row * shape.kv_heads + kv_head) * width..][..width]);
        }
    }
}

/// One head of a key or value cache: `dim` numbers in each row of `heads * dim`.
#[derive(Clone, Copy)]
struct HeadRows<'a> {
    cache: CacheRows<'a>,
    head: usize,
    heads: usize,
    dim: usize,
}

impl<'a> HeadRows<'a> {
    /// `count` rows from `slot` on, where they lie.
    fn tile(&self, slot: usize, count: usize) -> Tile<'a> {
        Tile::of_cache(self.cache, self.heads * self.dim, slot, (self.head * self.dim, self.dim), count)
    }
}

/// Rows that follow each other in one of several caches.
#[derive(Clone, Copy, Debug)]
struct RowRun {
    cache: usize,
    slot: usize,
    count: usize,
}

/// Takes rows `(cache, slot)` for as long as `more` allows, given how many were taken, into `runs`.
fn take_runs<I: Iterator>(
    rows: &mut Peekable<I>,
    more: impl Fn(usize, &I::Item) -> bool,
    place: impl Fn(I::Item) -> (usize, usize),
    runs: &mut Vec<RowRun>,
) {
    runs.clear();
    let mut taken = 0;
    while let Some(row) = rows.next_if(|row| more(taken, row)) {
        taken += 1;
        let (cache, slot) = place(row);
        match runs.last_mut() {
            Some(run) if run.cache == cache && run.slot + run.count == slot => run.count += 1,
            _ => runs.push(RowRun { cache, slot, count: 1 }),
        }
    }
}

/// Queries up to which a tile is read where it lies. Rows in place are often a power of two apart and compete for few
/// sets of the cache, and are widened again for every few queries, so for more queries a copy is the faster one.
const IN_PLACE: usize = 4;

/// Rows of all heads that are read before the next ones: with what is fetched meanwhile they fit the nearest cache.
const STRIP: usize = 8;
/// The same for one head's rows that many queries read from a copy.
const COPIED_STRIP: usize = 16;

/// Numbers between the ends of copied rows and the starts of the next ones: an odd number of cache lines from row to
/// row, for the same reason.
const fn padded(dim: usize) -> usize {
    (dim.div_ceil(16) | 1) * 16
}

/// Rows of one sequence with some KV heads, as [`Kernels::attend`] takes them.
struct Attention<'a> {
    kernels: &'a Kernels,
    shape: &'a AttendShape,
    kv: &'a KvView<'a>,
    rows: &'a QueryRows<'a>,
    kv_heads: Range<usize>,
    /// Positions that any row sees.
    end: usize,
    /// `[KV heads, rows, group, k_dim]`.
    q: &'a [f32],
}

/// Keys, or values.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Keys,
    Values,
}

impl Attention<'_> {
    /// Queries per KV head.
    fn queries(&self) -> usize {
        self.rows.positions.len() * self.shape.group()
    }

    /// The rows of a page that begins at position `start`, of all KV heads of the task.
    fn page(&self, part: Part, start: usize) -> Tile<'_> {
        let slot = self.rows.pages[start / PAGE] as usize * PAGE;
        let (cache, dim) = match part {
            Part::Keys => (self.kv.k, self.shape.k_dim),
            Part::Values => (self.kv.v, self.shape.v_dim),
        };
        let (at, width) = (self.kv_heads.start * dim, self.shape.kv_heads * dim);
        let count = (self.end - start).min(PAGE);
        Tile::of_cache(cache, width, slot, (at, self.kv_heads.len() * dim), count)
    }

    /// What is read after a page of a part.
    fn next(&self, part: Part, start: usize) -> Option<Tile<'_>> {
        match part {
            Part::Keys => Some(self.page(Part::Values, start)),
            Part::Values => (start + PAGE < self.end).then(|| self.page(Part::Keys, start + PAGE)),
        }
    }

    /// Reads all rows of a page in strips: each for one head after the other, so that memory is read in order, and
    /// rows of the next strip are asked for meanwhile.
    fn strips(
        &self,
        part: Part,
        start: usize,
        room: &mut [f32],
        mut body: impl FnMut(usize, Tile<'_>, usize),
    ) {
        let (heads, queries) = (self.kv_heads.len(), self.queries());
        let (page, next) = (self.page(part, start), self.next(part, start));
        let dim = page.dim() / heads;
        let strip = if queries <= IN_PLACE { STRIP } else { COPIED_STRIP };
        for at in (0..page.count()).step_by(strip) {
            let rows = page.rows(at..(at + strip).min(page.count()));
            let ahead = match at + strip < page.count() {
                true => Some(page.rows(at + strip..page.count())),
                false => next,
            };
            for i in 0..heads {
                if let Some(ahead) = ahead {
                    ahead.fetch(i * strip / heads..(i + 1) * strip / heads);
                }
                body(i, self.kernels.copy(rows.part(i * dim, dim), queries, room), at);
            }
        }
    }

    /// Rows that see a position, with how many positions they see from there on.
    fn rows_that_see(&self, position: usize) -> impl Iterator<Item = (usize, usize)> {
        let seen = move |(row, &p): (usize, &i32)| (row, (p as usize + 1).saturating_sub(position));
        self.rows.positions.iter().enumerate().map(seen).filter(|(_, seen)| *seen > 0)
    }

    /// A range of positions for all heads.
    fn fold_range(&self, range: usize, room: &mut Room, fold: &mut Folds) {
        fold.begin_range();
        let end = self.end.min((range + 1) * RANGE);
        (range * RANGE..end).step_by(PAGE).for_each(|start| self.fold_page(start, room, fold));
    }

    /// One page for all heads.
    fn fold_page(&self, start: usize, room: &mut Room, fold: &mut Folds) {
        let (queries, group, k_dim) = (self.queries(), self.shape.group(), self.shape.k_dim);
        self.strips(Part::Keys, start, &mut room.k, |i, keys, at| {
            let q = &self.q[i * queries * k_dim..][..queries * k_dim];
            fold.score(self.kernels, q, i * queries, keys, at, self.shape.scale);
        });
        for i in 0..self.kv_heads.len() {
            for (row, seen) in self.rows_that_see(start) {
                let first = i * queries + row * group;
                fold.weigh(self.kernels, first..first + group, seen.min(PAGE));
            }
        }
        let first = self.rows.positions.iter().min().map_or(0, |&first| first as usize);
        self.strips(Part::Values, start, &mut room.v, |i, values, at| {
            if start + at + values.count() <= first + 1 {
                return fold.accumulate(self.kernels, i * queries..(i + 1) * queries, values, at);
            }
            for (row, seen) in self.rows_that_see(start + at) {
                let first = i * queries + row * group;
                let values = values.rows(0..seen.min(values.count()));
                fold.accumulate(self.kernels, first..first + group, values, at);
            }
        });
    }
}

impl Kernels {
    /// Attention of all query heads of KV heads `kv_heads`, for rows of one sequence.
    ///
    /// `write` receives each row's index and a KV head's output, `[heads / kv_heads, v_dim]`, which belongs at
    /// `kv_head * heads / kv_heads * v_dim` of that row: `(row, kv_head, output)`. Every tile of keys and values
    /// is read from memory once for all rows; the bits are those of a call with one row and one head.
    ///
    /// A head whose scores are all `-inf`, or one of them NaN or `+inf`, gives NaN.
    ///
    /// # Panics
    /// When `scratch` is too small, a slice does not have the shape's size, or the page list does not
    /// cover a position or names a slot outside the cache. The caller validates positions and pages.
    pub fn attend(
        &self,
        shape: &AttendShape,
        kv: &KvView<'_>,
        rows: &QueryRows<'_>,
        kv_heads: Range<usize>,
        scratch: &mut Scratch,
        mut write: impl FnMut(usize, usize, &[f32]),
    ) {
        rows.check(shape, &kv_heads, scratch);
        let Scratch { q, room, fold, .. } = scratch;
        let end = rows.positions.iter().max().map_or(0, |&last| last as usize + 1);
        let queries = rows.positions.len() * shape.group();
        let q = &mut q[..queries * kv_heads.len() * shape.k_dim];
        rows.gather(shape, &kv_heads, q);
        let attention = Attention { kernels: self, shape, kv, rows, kv_heads: kv_heads.clone(), end, q };
        fold.begin();
        for range in 0..end.div_ceil(RANGE) {
            attention.fold_range(range, room, fold);
            for i in 0..kv_heads.len() {
                for (row, _) in attention.rows_that_see(range * RANGE) {
                    let first = i * queries + row * shape.group();
                    fold.end_range(self, first..first + shape.group(), shape.v_dim);
                }
            }
        }
        for (i, kv_head) in kv_heads.enumerate() {
            let out = fold.end(i * queries..(i + 1) * queries, shape.v_dim);
            let rows = out.chunks_exact(shape.group() * shape.v_dim);
            rows.enumerate().for_each(|(row, out)| write(row, kv_head, out));
        }
    }

    /// The same for the positions of one range only; what it gives goes to `partials`, as rows `first_row..` of the
    /// step, and [`Kernels::merge_ranges`] ends the work.
    ///
    /// # Safety
    /// This task alone has these rows and heads of the range.
    ///
    /// # Panics
    /// As [`Kernels::attend`].
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn attend_range(
        &self,
        shape: &AttendShape,
        kv: &KvView<'_>,
        rows: &QueryRows<'_>,
        kv_heads: Range<usize>,
        range: usize,
        scratch: &mut Scratch,
        (partials, first_row): (&Partials, usize),
    ) {
        rows.check(shape, &kv_heads, scratch);
        let Scratch { q, room, fold, .. } = scratch;
        let end = rows.positions.iter().max().map_or(0, |&last| last as usize + 1);
        let (group, queries) = (shape.group(), rows.positions.len() * shape.group());
        let q = &mut q[..queries * kv_heads.len() * shape.k_dim];
        rows.gather(shape, &kv_heads, q);
        let attention = Attention { kernels: self, shape, kv, rows, kv_heads: kv_heads.clone(), end, q };
        attention.fold_range(range, room, fold);
        for (i, kv_head) in kv_heads.enumerate() {
            for (row, _) in attention.rows_that_see(range * RANGE) {
                for h in 0..group {
                    let query = i * queries + row * group + h;
                    let acc = &fold.acc[query * shape.v_dim..][..shape.v_dim];
                    let at = (first_row + row, kv_head * group + h);
                    // SAFETY: by the caller's promise.
                    unsafe { partials.put(at.0, range, at.1, fold.running[query], acc) }
                }
            }
        }
    }

    /// Rows as f32 in `room`; or in place, where they are read by few queries.
    fn copy<'a>(&self, rows: Tile<'a>, queries: usize, room: &'a mut [f32]) -> Tile<'a> {
        if queries <= IN_PLACE && rows.is_direct() {
            return rows;
        }
        let (dim, count) = (rows.dim(), rows.count());
        // SAFETY: `Kernels` holds only what this machine can run.
        unsafe { (self.widen)(rows, padded(dim), room) }
        Tile::of_numbers(room, padded(dim), dim, count)
    }

    /// One tile of rows that lie in several places, in the order of `runs`; as [`Kernels::copy`] where it is one.
    fn tile_of_runs<'a>(
        &self,
        heads: &[HeadRows<'a>],
        runs: &[RowRun],
        queries: usize,
        room: &'a mut [f32],
    ) -> Tile<'a> {
        let tile = |run: &RowRun| heads[run.cache].tile(run.slot, run.count);
        if let [run] = runs {
            return self.copy(tile(run), queries, room);
        }
        let (dim, mut count) = (heads[0].dim, 0);
        let stride = padded(dim);
        for (i, run) in runs.iter().enumerate() {
            if let Some(next) = runs.get(i + 1) {
                tile(next).fetch(0..next.count);
            }
            // SAFETY: `Kernels` holds only what this machine can run.
            unsafe { (self.widen)(tile(run), stride, &mut room[count * stride..][..run.count * stride]) }
            count += run.count;
        }
        Tile::of_numbers(room, stride, dim, count)
    }
}

#[cfg(test)]
mod tests;
