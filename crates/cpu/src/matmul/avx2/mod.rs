//! The matrix product with AVX2, FMA and F16C; bit for bit the scalar definition.
//!
//! One loop serves every format and 1, 2 or 4 activation rows at a time: weights are unpacked once and used for
//! all of them. Each lane of a vector is one of the group's 8 outputs, so the number of rows cannot change
//! the order of operations of an output.
//!
//! The `inline(always)` functions here use vector instructions but do not enable them: they are only ever
//! inlined into [`quant`] and [`float`], which do.

mod float;
mod quant;
mod unpack;

use std::arch::x86_64::*;
use std::ops::Range;

use super::Job;
use crate::pack::layout::BLOCK;
use crate::pack::{Format, GROUP};
use crate::quantize::q8_row_bytes;
use float::FloatLoad;

/// Activations that stay in the L2 cache while the weights stream by once: half of a small L2 (512 KiB).
const TILE_BYTES: usize = 256 << 10;

/// Products with quantised weights. See [`super::MatmulFn`].
///
/// # Safety
/// As [`super::MatmulFn`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn quant<F: Format>(job: &Job<'_>, groups: Range<usize>) {
    let group_bytes = job.k / (BLOCK * F::BLOCKS_PER_HEAD) * F::BLOCK_BYTES;
    // SAFETY: the caller's promise, and this function has the instruction sets that the tiles use.
    unsafe {
        for_tiles(job, groups, q8_row_bytes(job.k), group_bytes, |weights, group, row, rows| match rows {
            4 => quant_rows::<F, 4>(job, weights, group, row),
            2 => quant_rows::<F, 2>(job, weights, group, row),
            _ => quant_rows::<F, 1>(job, weights, group, row),
        });
    }
}

/// Products with float weights. See [`super::MatmulFn`].
///
/// # Safety
/// As [`super::MatmulFn`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn float<F: FloatLoad>(job: &Job<'_>, groups: Range<usize>) {
    let group_bytes = job.k / F::BLOCK * F::BLOCK_BYTES;
    // SAFETY: as in `quant`.
    unsafe {
        for_tiles(job, groups, 4 * job.k, group_bytes, |weights, group, row, rows| match rows {
            4 => {
                // Four rows of four accumulators would leave no registers for operands.
                float_rows::<F, 2>(job, weights, group, row);
                float_rows::<F, 2>(job, weights, group, row + 2);
            }
            2 => float_rows::<F, 2>(job, weights, group, row),
            _ => float_rows::<F, 1>(job, weights, group, row),
        });
    }
}

/// Calls `tile(weights of the group, group, first row, 4 | 2 | 1)` for all groups and rows: row tiles outside,
/// so that weights stream once per row tile, and a group's weights stay in L1 over the rows of a tile.
///
/// # Safety
/// As [`super::MatmulFn`].
#[inline(always)]
unsafe fn for_tiles(
    job: &Job<'_>,
    groups: Range<usize>,
    x_bytes: usize,
    group_bytes: usize,
    tile: impl Fn(*const u8, usize, usize, usize),
) {
    let count = job.rows.len();
    let tile_rows = (TILE_BYTES / x_bytes.max(1)).max(4) / 4 * 4;
    let mut start = 0;
    while start < count {
        let end = count.min(start.saturating_add(tile_rows));
        for group in groups.clone() {
            // SAFETY: the weight has this group.
            let weights = unsafe { job.weights.add(group * group_bytes) };
            let mut row = start;
            while row < end {
                let rows = match end - row {
                    4.. => 4,
                    2..=3 => 2,
                    _ => 1,
                };
                tile(weights, group, row, rows);
                row += rows;
            }
        }
        start = end;
    }
}

/// # Safety
/// As [`super::MatmulFn`]; rows `row .. row + R` and the group exist; `weights` are the group's.
#[inline(always)]
unsafe fn quant_rows<F: Format, const R: usize>(job: &Job<'_>, weights: *const u8, group: usize, row: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let rows: [_; R] = std::array::from_fn(|r| job.row(row + r));
        let acc = quant::group_product::<F, R>(job.k, weights, rows.map(|(x, _)| x));
        for r in 0..R {
            store(rows[r].1.add(GROUP * group), acc[r], job.outputs(group));
        }
    }
}

/// # Safety
/// As [`quant_rows`].
#[inline(always)]
unsafe fn float_rows<F: FloatLoad, const R: usize>(
    job: &Job<'_>,
    weights: *const u8,
    group: usize,
    row: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let rows: [_; R] = std::array::from_fn(|r| job.row(row + r));
        let acc = float::group_product::<F, R>(job.k, weights, rows.map(|(x, _)| x.cast()));
        for r in 0..R {
            store(rows[r].1.add(GROUP * group), acc[r], job.outputs(group));
        }
    }
}

/// Writes the first `count` of 8 outputs.
///
/// # Safety
/// `y` is writable for `count` numbers, and the instruction sets are there.
#[inline(always)]
unsafe fn store(y: *mut f32, outputs: __m256, count: usize) {
    // SAFETY: the caller's promise; the array has 8 numbers, and `count` is at most 8.
    unsafe {
        if count == GROUP {
            _mm256_storeu_ps(y, outputs);
        } else {
            let mut all = [0f32; GROUP];
            _mm256_storeu_ps(all.as_mut_ptr(), outputs);
            std::ptr::copy_nonoverlapping(all.as_ptr(), y, count);
        }
    }
}
