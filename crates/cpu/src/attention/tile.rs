//! What attention does with one tile of keys or values: scores, weights, weighted sum.
//!
//! A tile is read where it lies, in the format of the cache, or from an f32 copy; numbers are widened exactly, so both
//! give the same bits. Several queries are taken together, and each goes through the operations of its own.

use std::ops::Range;

use minfer_runtime::KvFormat;

use super::cache::{CacheRows, widen_number};

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;

/// `count` rows of one head: numbers `at..at + dim` of rows that lie `stride` bytes apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<'a> {
    format: KvFormat,
    data: &'a [u8],
    stride: usize,
    at: usize,
    dim: usize,
    count: usize,
}

/// `q, keys, scale, stride, scores`: of `n` queries `[n, dim]`; the scores of each begin `stride` numbers after those
/// of the one before.
pub(crate) type ScoreFn = unsafe fn(&[f32], Tile<'_>, f32, usize, &mut [f32]);
/// `weights, stride, values, keep, acc`: of `n` queries; weights lie like scores, `keep` is `[n]`, `acc` is `[n, dim]`.
pub(crate) type AccumulateFn = unsafe fn(&[f32], usize, Tile<'_>, &[f32], &mut [f32]);
/// `rows, stride, out`: rows as f32, `stride` numbers apart.
pub(crate) type WidenFn = unsafe fn(Tile<'_>, usize, &mut [f32]);

/// Bytes of a cache line.
const LINE: usize = 64;

impl<'a> Tile<'a> {
    /// # Panics
    /// When the rows do not lie within `data`; kernels rely on it.
    fn new(
        format: KvFormat,
        data: &'a [u8],
        stride: usize,
        (at, dim): (usize, usize),
        count: usize,
    ) -> Tile<'a> {
        let end = count.checked_sub(1).map_or(0, |last| last * stride + format.row_bytes(at + dim));
        assert!(end <= data.len() && dim > 0, "attend: {count} rows end at {end} of {}", data.len());
        Tile { format, data, stride, at, dim, count }
    }

    /// Rows of f32, `stride` numbers apart.
    ///
    /// # Panics
    /// As for all tiles, when the rows do not lie within `data`.
    pub(crate) fn of_numbers(data: &'a [f32], stride: usize, dim: usize, count: usize) -> Tile<'a> {
        Tile::new(KvFormat::F32, bytemuck::cast_slice(data), 4 * stride, (0, dim), count)
    }

    /// Numbers `at..at + dim` of `count` rows from `slot` on, of a cache with rows of `width` numbers.
    pub(super) fn of_cache(
        cache: CacheRows<'a>,
        width: usize,
        slot: usize,
        (at, dim): (usize, usize),
        count: usize,
    ) -> Tile<'a> {
        let (format, bytes) = cache.bytes();
        let stride = format.row_bytes(width);
        Tile::new(format, &bytes[slot * stride..], stride, (at, dim), count)
    }

    /// Some of these rows.
    pub(super) fn rows(self, rows: Range<usize>) -> Tile<'a> {
        debug_assert!(rows.start < rows.end && rows.end <= self.count);
        Tile { count: rows.len(), data: &self.data[rows.start * self.stride..], ..self }
    }

    /// Numbers `at..at + dim` of these rows.
    pub(super) fn part(self, at: usize, dim: usize) -> Tile<'a> {
        debug_assert!(at + dim <= self.dim);
        Tile { at: self.at + at, dim, ..self }
    }

    /// Asks the memory for rows, as far as there are any.
    #[inline(always)]
    pub(super) fn fetch(&self, rows: Range<usize>) {
        let (start, bytes) = (self.format.row_bytes(self.at), self.format.row_bytes(self.dim));
        for j in rows.start..rows.end.min(self.count) {
            let row = self.data.as_ptr().wrapping_add(j * self.stride + start);
            (0..bytes).step_by(LINE).for_each(|at| fetch_line(row.wrapping_add(at)));
        }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    pub(super) fn dim(&self) -> usize {
        self.dim
    }

    /// Whether kernels read it where it lies: they take whole registers of f16 and whole blocks of Q8_0.
    pub(super) fn is_direct(&self) -> bool {
        match self.format {
            KvFormat::F32 => true,
            KvFormat::F16 => self.dim.is_multiple_of(crate::math::LANES),
            KvFormat::Q8_0 => (self.at | self.dim).is_multiple_of(KvFormat::BLOCK),
        }
    }

    /// Number `i` of row `j`.
    #[inline(always)]
    fn number(&self, j: usize, i: usize) -> f32 {
        widen_number(self.format, &self.data[j * self.stride..], self.at + i)
    }
}

#[inline(always)]
fn fetch_line(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: asking for any address is harmless.
    unsafe {
        use std::arch::x86_64::*;
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

pub(crate) mod scalar {
    use super::Tile;
    use crate::math::{LANES, exp, sum_lanes};

    /// `scores[j] = dot(q, keys[j]) * scale`, for each query.
    pub(crate) fn score(q: &[f32], keys: Tile<'_>, scale: f32, stride: usize, scores: &mut [f32]) {
        for (q, scores) in q.chunks_exact(keys.dim).zip(scores.chunks_mut(stride)) {
            for (j, s) in scores[..keys.count].iter_mut().enumerate() {
                let mut lanes = [0.0f32; LANES];
                for (i, q) in q.iter().enumerate() {
                    lanes[i % LANES] = q.mul_add(keys.number(j, i), lanes[i % LANES]);
                }
                *s = sum_lanes(lanes) * scale;
            }
        }
    }

    /// Turns scores into `exp(score - max)` and returns their sum, in lanes.
    pub(crate) fn exp_and_sum(scores: &mut [f32], max: f32) -> f32 {
        let mut lanes = [0.0f32; LANES];
        for (j, s) in scores.iter_mut().enumerate() {
            *s = exp(*s - max);
            lanes[j % LANES] += *s;
        }
        sum_lanes(lanes)
    }

    /// `acc = acc * keep`, then `acc += weights[j] * values[j]` with FMA, `j` ascending, for each query.
    pub(crate) fn accumulate(
        weights: &[f32],
        stride: usize,
        values: Tile<'_>,
        keep: &[f32],
        acc: &mut [f32],
    ) {
        for ((weights, keep), acc) in weights.chunks(stride).zip(keep).zip(acc.chunks_exact_mut(values.dim)) {
            for (i, a) in acc.iter_mut().enumerate() {
                let products = weights[..values.count].iter().enumerate();
                *a = products.fold(*a * keep, |sum, (j, w)| w.mul_add(values.number(j, i), sum));
            }
        }
    }

    /// `all = all * keep + acc * weight`, the first product not rounded by itself.
    #[inline(always)]
    pub(crate) fn merge(acc: &[f32], weight: f32, keep: f32, all: &mut [f32]) {
        for (all, acc) in all.iter_mut().zip(acc) {
            *all = all.mul_add(keep, acc * weight);
        }
    }

    /// Rows as f32.
    pub(crate) fn widen(rows: Tile<'_>, stride: usize, out: &mut [f32]) {
        for (j, out) in out.chunks_mut(stride).take(rows.count).enumerate() {
            for (i, o) in out[..rows.dim].iter_mut().enumerate() {
                *o = rows.number(j, i);
            }
        }
    }
}
