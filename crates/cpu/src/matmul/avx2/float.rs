//! 16 outputs of a float weight, in two halves, times 1 to 3 rows of f32.

use std::arch::x86_64::*;

use super::unpack::HALF;
use crate::pack::types::{BF16, F8_E4M3, F16, F32};
use crate::pack::{FloatFormat, GROUP};

/// A float format that AVX2 can load.
pub(in crate::matmul) trait FloatLoad: FloatFormat {
    /// Rows at a time: three of two accumulators of two halves leave four registers for operands.
    const ROWS: usize = 3;

    /// Eight numbers as f32, exactly, without their scales.
    ///
    /// # Safety
    /// `p` points to eight numbers, and the code is inlined into a function with AVX2 and F16C.
    unsafe fn load(p: *const u8) -> __m256;
}

impl FloatLoad for F32 {
    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(p.cast()) }
    }
}

impl FloatLoad for F16 {
    /// The compiler converts ahead of use, and would spill accumulators of a third row for it.
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
}

impl FloatLoad for BF16 {
    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: the caller's promise. A bf16 is the upper half of an f32.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
}

impl FloatLoad for F8_E4M3 {
    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: the caller's promise. The exponent and mantissa of an E4M3 float lie in an f16 as they are, only the
        // bias differs by 8; unlike f32 arithmetic, the conversion is as fast for subnormal numbers. Of the two bits
        // that the sign becomes, the lower one would belong to the exponent.
        unsafe {
            let wide = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast())));
            let halves = _mm_and_si128(wide, _mm_set1_epi16(0xbf80u16 as i16));
            _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0))
        }
    }
}

/// # Safety
/// `weights` is one packed group of `k` columns, each of `x` a row of `k` f32 (any alignment), and the code is
/// inlined into a function with AVX2, FMA and F16C.
#[inline(always)]
pub(super) unsafe fn group_product<F: FloatLoad, const R: usize>(
    k: usize,
    weights: *const u8,
    x: [*const f32; R],
) -> [[__m256; 2]; R] {
    // SAFETY: the loops stay within `k` columns; the rest is the caller's promise.
    unsafe {
        let mut acc = [[[_mm256_setzero_ps(); 2]; R]; 2];
        let (mut p, mut column, mut scales) = (weights, 0, [_mm256_setzero_ps(); 2]);
        while column + 2 <= k {
            if F::SCALE_BYTES > 0 && column.is_multiple_of(F::BLOCK) {
                scales = std::array::from_fn(|half| _mm256_loadu_ps(p.add(4 * HALF * half).cast()));
                p = p.add(GROUP * F::SCALE_BYTES);
            }
            for acc in &mut acc {
                add_column::<F, R>(p, scales, x.map(|x| x.add(column)), acc);
                p = p.add(GROUP * F::BYTES);
                column += 1;
            }
        }
        // Only numbers without scales leave a rest.
        if column < k {
            add_column::<F, R>(p, scales, x.map(|x| x.add(column)), &mut acc[0]);
        }
        let sum = |r: usize, half: usize| _mm256_add_ps(acc[0][r][half], acc[1][r][half]);
        std::array::from_fn(|r| [sum(r, 0), sum(r, 1)])
    }
}

/// # Safety
/// As [`group_product`]; `column` points to the 16 numbers of one column, each of `x` to its activation.
#[inline(always)]
unsafe fn add_column<F: FloatLoad, const R: usize>(
    column: *const u8,
    scales: [__m256; 2],
    x: [*const f32; R],
    acc: &mut [[__m256; 2]; R],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let w: [_; 2] = std::array::from_fn(|half| {
            let w = F::load(column.add(F::BYTES * HALF * half));
            if F::SCALE_BYTES > 0 { _mm256_mul_ps(w, scales[half]) } else { w }
        });
        for (acc, x) in acc.iter_mut().zip(x) {
            let x = _mm256_set1_ps(x.read_unaligned());
            *acc = [_mm256_fmadd_ps(w[0], x, acc[0]), _mm256_fmadd_ps(w[1], x, acc[1])];
        }
    }
}
