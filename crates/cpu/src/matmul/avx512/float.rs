//! 16 outputs of a float weight times some rows of f32.

use std::arch::x86_64::*;

use crate::pack::types::{BF16, F8_E4M3, F16, F32};
use crate::pack::{FloatFormat, GROUP};

/// A float format that AVX-512 can load.
pub(in crate::matmul) trait FloatLoad: FloatFormat {
    /// Sixteen numbers as f32, exactly, without their scales.
    ///
    /// # Safety
    /// `p` points to sixteen numbers, and the code is inlined into a function with AVX-512 F and BW.
    unsafe fn load(p: *const u8) -> __m512;
}

impl FloatLoad for F32 {
    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(p.cast()) }
    }
}

impl FloatLoad for F16 {
    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
}

impl FloatLoad for BF16 {
    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512 {
        // SAFETY: the caller's promise. A bf16 is the upper half of an f32.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
}

impl FloatLoad for F8_E4M3 {
    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512 {
        // SAFETY: the caller's promise. The bits lie in an f16 as in the AVX2 kernel's `load`.
        unsafe {
            let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())));
            let halves = _mm256_and_si256(wide, _mm256_set1_epi16(0xbf80u16 as i16));
            _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0))
        }
    }
}

/// # Safety
/// `weights` is one packed group of `k` columns, each of `x` a row of `k` f32 (any alignment), and the code is
/// inlined into a function with AVX-512 F and BW.
#[inline(always)]
pub(super) unsafe fn group_product<F: FloatLoad, const R: usize>(
    k: usize,
    weights: *const u8,
    x: [*const f32; R],
) -> [__m512; R] {
    // SAFETY: the loops stay within `k` columns; the rest is the caller's promise.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); R]; 2];
        let (mut p, mut column, mut scale) = (weights, 0, _mm512_setzero_ps());
        while column + 2 <= k {
            if F::SCALE_BYTES > 0 && column.is_multiple_of(F::BLOCK) {
                scale = _mm512_loadu_ps(p.cast());
                p = p.add(GROUP * F::SCALE_BYTES);
            }
            for acc in &mut acc {
                add_column::<F, R>(p, scale, x.map(|x| x.add(column)), acc);
                p = p.add(GROUP * F::BYTES);
                column += 1;
            }
        }
        // Only numbers without scales leave a rest.
        if column < k {
            add_column::<F, R>(p, scale, x.map(|x| x.add(column)), &mut acc[0]);
        }
        std::array::from_fn(|r| _mm512_add_ps(acc[0][r], acc[1][r]))
    }
}

/// # Safety
/// As [`group_product`]; `column` points to the 16 numbers of one column, each of `x` to its activation.
#[inline(always)]
unsafe fn add_column<F: FloatLoad, const R: usize>(
    column: *const u8,
    scale: __m512,
    x: [*const f32; R],
    acc: &mut [__m512; R],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut w = F::load(column);
        if F::SCALE_BYTES > 0 {
            w = _mm512_mul_ps(w, scale);
        }
        for (acc, x) in acc.iter_mut().zip(x) {
            *acc = _mm512_fmadd_ps(w, _mm512_set1_ps(x.read_unaligned()), *acc);
        }
    }
}
