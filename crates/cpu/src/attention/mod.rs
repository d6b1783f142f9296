//! Causal grouped-query attention over paged keys and values, with an online softmax.
//!
//! In: query rows of one sequence, its page list, and the cache of one layer. Out: one output row per
//! query row, for one KV head at a time, so that a caller can spread (rows, KV head) over threads.
//! Which pages a sequence owns and when they are shared is the engine's affair.
//!
//! The definition, for one query head at position `p` (Milakov & Gimelshein 2018):
//!
//! ```text
//! max = -inf; sum = 0; acc = 0
//! for each page of keys up to p, in order:
//!     s[j]  = dot(q, k[j]) * scale               in lanes (`math`)
//!     new   = max(max, s[0], s[1], ..)
//!     w[j]  = exp(s[j] - new)
//!     keep  = exp(max - new)
//!     sum   = fma(sum, keep, w[0] + w[1] + ..)   in lanes
//!     acc  *= keep; acc[e] = fma(w[j], v[j][e], acc[e])   j ascending
//!     max   = new
//! out = acc / sum
//! ```
//!
//! Tiles are the pages, so they lie at fixed absolute positions, and a head's result depends on its own
//! query, its position and the keys before it: not on other rows, nor on where the pages lie.
//! f16 caches are widened tile by tile, exactly, and then take the same path.

mod blocks;
mod cache;
mod tile;
mod window;

use std::iter::Peekable;

use minfer_graph::PAGE;

use crate::Kernels;

pub use blocks::SparseRow;
pub use cache::{CacheRows, CacheRowsMut};
pub(crate) use tile::{AccumulateFn, ScoreFn, Tile};
pub use window::WindowRow;

/// The definitions of what this module's kernels do.
pub(crate) mod scalar {
    pub(crate) use super::cache::scalar::*;
    pub(crate) use super::tile::scalar::*;
}

/// The same for AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    pub(crate) use super::cache::avx2::*;
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
    fn check(&self, shape: &AttendShape, kv_head: usize, scratch: &Scratch) {
        let count = self.positions.len();
        assert!(count <= scratch.max_rows, "attend: {count} rows in scratch for {}", scratch.max_rows);
        assert_eq!(self.q.len(), count * shape.heads * shape.k_dim, "attend: query rows");
        assert!(kv_head < shape.kv_heads, "attend: KV head {kv_head} of {}", shape.kv_heads);
        assert!(self.positions.iter().all(|&p| p >= 0), "attend: a negative position");
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

/// Queries up to which an f32 tile is read where it lies. Rows in place are often a power of two apart
/// and compete for few sets of the cache, so for more queries a copy is the faster one.
const IN_PLACE: usize = 2;

/// Running maximum and sum of one query head's softmax.
#[derive(Clone, Copy, Debug)]
struct Running {
    max: f32,
    sum: f32,
}

impl Running {
    const EMPTY: Running = Running { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// Working memory of [`Kernels::attend`], one per thread, so that a call allocates nothing.
#[derive(Debug)]
pub struct Scratch {
    max_rows: usize,
    /// Widened keys and values of one tile: `[PAGE, dim]`.
    k: Vec<f32>,
    v: Vec<f32>,
    /// `[rows, group]`.
    running: Vec<Running>,
    /// `[rows, group, v_dim]`.
    acc: Vec<f32>,
    /// Where the rows of one tile lie, at most [`PAGE`] places.
    runs: Vec<RowRun>,
}

impl Scratch {
    /// Room for up to `max_rows` query rows per call in a layer of this shape.
    pub fn new(shape: &AttendShape, max_rows: usize) -> Scratch {
        let queries = max_rows * shape.group();
        Scratch {
            max_rows,
            k: vec![0.0; PAGE * shape.k_dim],
            v: vec![0.0; PAGE * shape.v_dim],
            running: vec![Running::EMPTY; queries],
            acc: vec![0.0; queries * shape.v_dim],
            runs: Vec::with_capacity(PAGE),
        }
    }
}

impl Kernels {
    /// Attention of all query heads of KV head `kv_head`, for rows of one sequence.
    ///
    /// `write` receives each row's index and its output, `[heads / kv_heads, v_dim]`, which belongs at
    /// `kv_head * heads / kv_heads * v_dim` of that row. Every tile of keys and values is read from
    /// memory once for all rows; the bits are those of a call with one row.
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
        kv_head: usize,
        scratch: &mut Scratch,
        mut write: impl FnMut(usize, &[f32]),
    ) {
        let queries = rows.positions.len() * shape.group();
        rows.check(shape, kv_head, scratch);
        let Scratch { k, v, running, acc, .. } = scratch;
        let (running, acc) = (&mut running[..queries], &mut acc[..queries * shape.v_dim]);
        running.fill(Running::EMPTY);
        acc.fill(0.0);

        let k_head = HeadRows { cache: kv.k, head: kv_head, heads: shape.kv_heads, dim: shape.k_dim };
        let v_head = HeadRows { cache: kv.v, dim: shape.v_dim, ..k_head };
        let end = rows.positions.iter().max().map_or(0, |&last| last as usize + 1);
        for start in (0..end).step_by(PAGE) {
            let slot = rows.pages[start / PAGE] as usize * PAGE;
            let count = (end - start).min(PAGE);
            let keys = self.tile(k_head, slot, count, queries, k);
            let values = self.tile(v_head, slot, count, queries, v);
            for query in 0..queries {
                let (row, head) = (query / shape.group(), kv_head * shape.group() + query % shape.group());
                let seen = (rows.positions[row] as usize + 1).saturating_sub(start).min(PAGE);
                if seen > 0 {
                    let q = &rows.q[(row * shape.heads + head) * shape.k_dim..][..shape.k_dim];
                    let acc = &mut acc[query * shape.v_dim..][..shape.v_dim];
                    let (keys, values) = (keys.first(seen), values.first(seen));
                    self.fold_tile(q, keys, values, shape.scale, &mut running[query], acc);
                }
            }
        }
        for (out, running) in acc.chunks_exact_mut(shape.v_dim).zip(running) {
            out.iter_mut().for_each(|o| *o /= running.sum);
        }
        acc.chunks_exact(shape.group() * shape.v_dim).enumerate().for_each(|(row, out)| write(row, out));
    }

    /// `count` rows of a head from `slot` on, as f32 in `room`; or in place, where they are f32 and read
    /// by few queries.
    fn tile<'a>(
        &self,
        rows: HeadRows<'a>,
        slot: usize,
        count: usize,
        queries: usize,
        room: &'a mut [f32],
    ) -> Tile<'a> {
        let HeadRows { cache, head, heads, dim } = rows;
        let stride = heads * dim;
        let first = slot * stride + head * dim;
        match cache {
            CacheRows::F32(rows) if queries <= IN_PLACE => Tile::new(&rows[first..], stride, dim, count),
            _ => {
                self.gather(rows, slot, PAGE, &mut room[..count * dim]);
                Tile::new(room, dim, dim, count)
            }
        }
    }

    /// Fills `out` with rows of a head from `slot` on, as f32. Up to `ahead` rows behind them may be fetched early.
    fn gather(&self, rows: HeadRows<'_>, slot: usize, ahead: usize, out: &mut [f32]) {
        let HeadRows { cache, head, heads, dim } = rows;
        let stride = heads * dim;
        let first = slot * stride + head * dim;
        match cache {
            CacheRows::F32(rows) => {
                for (j, out) in out.chunks_exact_mut(dim).enumerate() {
                    out.copy_from_slice(&rows[first + j * stride..][..dim]);
                }
            }
            CacheRows::F16(rows) => {
                let end = (slot + out.len() / dim + ahead) * stride;
                // SAFETY: `Kernels` holds only what this machine can run.
                unsafe { (self.widen_rows)(&rows[first..end.min(rows.len())], stride, dim, out) }
            }
        }
    }

    /// One tile of rows that lie in several places, in the order of `runs`; as [`Kernels::tile`] where it is one.
    fn tile_of_runs<'a>(
        &self,
        heads: &[HeadRows<'a>],
        runs: &[RowRun],
        queries: usize,
        room: &'a mut [f32],
    ) -> Tile<'a> {
        if let [run] = runs {
            return self.tile(heads[run.cache], run.slot, run.count, queries, room);
        }
        let (dim, mut count) = (heads[0].dim, 0);
        for run in runs {
            self.gather(heads[run.cache], run.slot, 0, &mut room[count * dim..][..run.count * dim]);
            count += run.count;
        }
        Tile::new(room, dim, dim, count)
    }

    /// One step of the online softmax: the keys and values of one tile for one query head.
    fn fold_tile(
        &self,
        q: &[f32],
        keys: Tile<'_>,
        values: Tile<'_>,
        scale: f32,
        running: &mut Running,
        acc: &mut [f32],
    ) {
        let mut weights = [0.0f32; PAGE];
        let weights = &mut weights[..keys.count()];
        // SAFETY: `Kernels` holds only what this machine can run.
        let max = unsafe {
            (self.score)(q, keys, scale, weights);
            (self.max)(weights)
        };
        let max = if max > running.max { max } else { running.max };
        // SAFETY: as above.
        let sum = unsafe { (self.exp_and_sum)(weights, max) };
        let keep = crate::math::exp(running.max - max);
        *running = Running { max, sum: running.sum.mul_add(keep, sum) };
        // SAFETY: as above.
        unsafe { (self.accumulate)(weights, values, keep, acc) }
    }
}

#[cfg(test)]
mod tests;
