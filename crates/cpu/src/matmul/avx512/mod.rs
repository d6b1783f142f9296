//! The matrix product with AVX-512 and VNNI; bit for bit the scalar definition.
//!
//! A vector holds 4 columns of all 16 outputs of a group. Codes become unsigned (signed ones plus 128), because
//! `vpdpbusd` multiplies unsigned with signed bytes; it adds four products to an i32 without saturation, so the
//! integers of the definition come out whatever the order. One loop serves every format and several numbers of
//! activation rows: weights are unpacked once and used for all of them.
//!
//! The `inline(always)` functions here use vector instructions but do not enable them: they are only ever
//! inlined into [`quant`] and [`float`], which do.

pub(super) mod amx;
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

/// Products with quantised weights. See [`super::MatmulFn`].
///
/// # Safety
/// As [`super::MatmulFn`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn quant<F: Format>(job: &Job<'_>, groups: Range<usize>) {
    let group_bytes = job.k / (BLOCK * F::BLOCKS_PER_HEAD) * F::BLOCK_BYTES;
    // SAFETY: the caller's promise, and this function has the instruction sets that the tiles use.
    unsafe {
        for_tiles(job, groups, 8, q8_row_bytes(job.k), group_bytes, |weights, group, row, rows| match rows {
            8 => quant_rows::<F, 8>(job, weights, group, row),
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
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn float<F: FloatLoad>(job: &Job<'_>, groups: Range<usize>) {
    let group_bytes = job.k / F::BLOCK * F::BLOCK_BYTES;
    // SAFETY: as in `quant`.
    unsafe {
        // More rows would leave no general registers for their addresses.
        for_tiles(job, groups, 6, 4 * job.k, group_bytes, |weights, group, row, rows| match rows {
            6 => float_rows::<F, 6>(job, weights, group, row),
            4 => float_rows::<F, 4>(job, weights, group, row),
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

/// A bit for each output that the group has.
#[inline(always)]
fn output_mask(job: &Job<'_>, group: usize) -> __mmask16 {
    ((1u32 << job.outputs(group)) - 1) as __mmask16
}

/// What the group's outputs of each row are so far.
///
/// # Safety
/// As [`store_rows`], and they have been written.
#[inline(always)]
unsafe fn load_rows<const R: usize>(job: &Job<'_>, group: usize, y: [*mut f32; R]) -> [__m512; R] {
    let mask = output_mask(job, group);
    // SAFETY: the row has as many outputs of this group as the mask has bits.
    y.map(|y| unsafe { _mm512_maskz_loadu_ps(mask, y.add(GROUP * group)) })
}

/// Writes the group's outputs of each row.
///
/// # Safety
/// As [`quant_rows`]; `y` are the output rows.
#[inline(always)]
unsafe fn store_rows<const R: usize>(job: &Job<'_>, group: usize, y: [*mut f32; R], outputs: [__m512; R]) {
    let mask = output_mask(job, group);
    for (y, outputs) in y.into_iter().zip(outputs) {
        // SAFETY: the row has as many outputs of this group as the mask has bits.
        unsafe { _mm512_mask_storeu_ps(y.add(GROUP * group), mask, outputs) }
    }
}
