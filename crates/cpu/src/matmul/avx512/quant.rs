//! 16 outputs of a quantised weight times some quantised rows.

use std::arch::x86_64::*;

use super::unpack::{Block, Scales, head, offset, unpack};
use crate::pack::Format;
use crate::pack::layout::*;

/// # Safety
/// `weights` is one packed group of `k` columns, each of `x` a quantised row of `k` numbers, and the code is
/// inlined into a function with AVX-512 F, BW and VNNI.
#[inline(always)]
pub(super) unsafe fn group_product<F: Format, const R: usize>(
    k: usize,
    weights: *const u8,
    x: [*const u8; R],
) -> [__m512; R] {
    // SAFETY: the loops stay within `k` columns; the rest is the caller's promise.
    unsafe {
        let mut acc = [_mm512_setzero_ps(); R];
        let mut p = weights;
        let mut column = 0;
        while column < k {
            let scales = head::<F>(p);
            p = p.add(F::HEAD_BYTES);
            for _ in 0..F::BLOCKS_PER_HEAD {
                let block = unpack::<F>(scales, p);
                for r in 0..R {
                    acc[r] = add_block::<F>(&block, x[r], k, column, acc[r]);
                }
                p = p.add(F::BODY_BYTES);
                column += BLOCK;
            }
        }
        acc
    }
}

/// Adds the product of 32 columns: the lines of the definition.
///
/// # Safety
/// As [`group_product`].
#[inline(always)]
unsafe fn add_block<F: Format>(block: &Block, x: *const u8, k: usize, column: usize, acc: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let sums = sums(x, k, column);
        let dot = integer_dot::<F>(block, x.add(column), sums);
        add_dot::<F>(&block.scales, dot, sums, x, k, column, acc)
    }
}

/// The sums of both 16 columns, in every lane.
///
/// # Safety
/// As [`group_product`].
#[inline(always)]
pub(super) unsafe fn sums(x: *const u8, k: usize, column: usize) -> __m512i {
    // SAFETY: see `add_dot`.
    unsafe { _mm512_set1_epi32(x.add(k + k / 8 + column / 8).cast::<i32>().read_unaligned()) }
}

/// Adds the integers of 32 columns, as scales and minima weigh them.
///
/// # Safety
/// As [`group_product`].
#[inline(always)]
pub(super) unsafe fn add_dot<F: Format>(
    scales: &Scales,
    dot: __m512i,
    sums: __m512i,
    x: *const u8,
    k: usize,
    column: usize,
    acc: __m512,
) -> __m512 {
    // SAFETY: a row is `k` codes, `k / 32` f32 scales, `k / 16` i16 sums, `k / 32` f32 scaled sums.
    unsafe {
        let x_scale = _mm512_set1_ps(x.add(k + column / 8).cast::<f32>().read_unaligned());
        let acc = _mm512_fmadd_ps(_mm512_mul_ps(scales.scale, x_scale), _mm512_cvtepi32_ps(dot), acc);
        match F::MINIMA {
            Minima::None => acc,
            Minima::Blocks => {
                let scaled = x.add(k + k / 4 + column / 8).cast::<f32>().read_unaligned();
                _mm512_fnmadd_ps(scales.min, _mm512_set1_ps(scaled), acc)
            }
            Minima::Halves => {
                let min_dot = _mm512_madd_epi16(sums, scales.min_factors);
                _mm512_fnmadd_ps(_mm512_mul_ps(scales.min, x_scale), _mm512_cvtepi32_ps(min_dot), acc)
            }
        }
    }
}

/// The integer of each output: codes times activations, times the factors of 16 columns, without offset.
///
/// # Safety
/// As [`group_product`]; `x` points to 32 codes.
#[inline(always)]
unsafe fn integer_dot<F: Format>(block: &Block, x: *const u8, sums: __m512i) -> __m512i {
    // SAFETY: 8 groups of 4 codes.
    unsafe {
        let four = |g: usize| _mm512_set1_epi32(x.add(4 * g).cast::<i32>().read_unaligned());
        let add = |dot, g: usize| _mm512_dpbusd_epi32(dot, block.codes[g], four(g));
        let offset = -offset::<F>();
        if !F::SUB.is_pair() {
            return (0..8).fold(offset_dot(sums, [offset; 2]), add);
        }
        let first = (0..4).fold(offset_dot(sums, [offset, 0]), add);
        let last = (4..8).fold(offset_dot(sums, [0, offset]), add);
        weigh(&block.scales, [first, last])
    }
}

/// The dots of both 16 columns times their factors.
///
/// # Safety
/// None beyond the instruction set.
#[inline(always)]
pub(super) unsafe fn weigh(scales: &Scales, [first, last]: [__m512i; 2]) -> __m512i {
    // SAFETY: no memory is accessed.
    unsafe {
        let [first_factor, last_factor] = scales.factors;
        _mm512_add_epi32(_mm512_mullo_epi32(first, first_factor), _mm512_mullo_epi32(last, last_factor))
    }
}

/// Both sums of 16 codes times numbers, added.
///
/// # Safety
/// None beyond the instruction set.
#[inline(always)]
pub(super) unsafe fn offset_dot(sums: __m512i, [first, last]: [i16; 2]) -> __m512i {
    // SAFETY: no memory is accessed.
    unsafe {
        if first == 0 && last == 0 {
            return _mm512_setzero_si512();
        }
        let both = i32::from(first) & 0xffff | i32::from(last) << 16;
        _mm512_madd_epi16(sums, _mm512_set1_epi32(both))
    }
}
