//! The matrix product with AVX2, FMA and F16C; bit for bit the scalar definition.
//!
//! One loop serves every format and 1, 2 or 4 activation rows at a time: weights are unpacked once and used for
//! all of them. Each lane of a vector is one of the group's 16 outputs, half of them in a vector, so the number of
//! rows cannot change the order of operations of an output.
//!
//! The `inline(always)` functions here use vector instructions but do not enable them: they are only ever
//! inlined into [`quant`] and [`float`], which do.

mod float;
mod quant;
mod unpack;

use std::arch::x86_64::*;
use std::ops::Range;

use super::Job;
use super::tiles::for_tiles;
use crate::pack::layout::BLOCK;
use crate::pack::{Format, GROUP};
use crate::quantize::q8_row_bytes;
use float::FloatLoad;
use unpack::HALF;

/// Products with quantised weights. See [`super::MatmulFn`].
///
/// # Safety
/// As [`super::MatmulFn`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn quant<F: Format>(job: &Job<'_>, groups: Range<usize>) {
    let group_bytes = job.k / (BLOCK * F::BLOCKS_PER_HEAD) * F::BLOCK_BYTES;
    // SAFETY: the caller's promise, and this function has the instruction sets that the tiles use.
    unsafe {
        for_tiles(job, groups, 4, q8_row_bytes(job.k), group_bytes, |weights, group, row, rows| match rows {
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
        for_tiles(job, groups, F::ROWS, 4 * job.k, group_bytes, |weights, group, row, rows| match rows {
            3 => float_rows::<F, 3>(job, weights, group, row),
            2 => float_rows::<F, 2>(job, weights, group, row),
            _ => float_rows::<F, 1>(job, weights, group, row),
        });
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
        store_rows(job, group, rows.map(|(_, y)| y), acc);
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
        store_rows(job, group, rows.map(|(_, y)| y), acc);
    }
}

/// Writes the group's outputs of each row.
///
/// # Safety
/// As [`quant_rows`]; `y` are the output rows.
#[inline(always)]
unsafe fn store_rows<const R: usize>(
    job: &Job<'_>,
    group: usize,
    y: [*mut f32; R],
    outputs: [[__m256; 2]; R],
) {
    let count = job.outputs(group);
    for (y, [low, high]) in y.into_iter().zip(outputs) {
        let y = y.wrapping_add(GROUP * group);
        // SAFETY: the caller's promise.
        unsafe {
            store(y, low, count);
            store(y.wrapping_add(HALF), high, count.saturating_sub(HALF));
        }
    }
}

/// Writes the first `count` of 8 outputs, all of them if there are more.
///
/// # Safety
/// `y` is writable for `count` numbers, and the instruction sets are there.
#[inline(always)]
unsafe fn store(y: *mut f32, outputs: __m256, count: usize) {
    // SAFETY: the caller's promise; the array has 8 numbers, and `count` is below 8 where it is copied from.
    unsafe {
        if count >= HALF {
            _mm256_storeu_ps(y, outputs);
        } else {
            let mut all = [0f32; HALF];
            _mm256_storeu_ps(all.as_mut_ptr(), outputs);
            std::ptr::copy_nonoverlapping(all.as_ptr(), y, count);
        }
    }
}
