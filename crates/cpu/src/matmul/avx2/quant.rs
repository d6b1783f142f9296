//! 16 outputs of a quantised weight, in two halves, times 1, 2 or 4 quantised rows.

use std::arch::x86_64::*;

use super::unpack::{Block, head, unpack};

use crate::pack::Format;
use crate::pack::layout::*;

/// # Safety
/// `weights` is one packed group of `k` columns, each of `x` a quantised row of `k` numbers, and the code is
/// inlined into a function with AVX2, FMA and F16C.
#[inline(always)]
pub(super) unsafe fn group_product<F: Format, const R: usize>(
    k: usize,
    weights: *const u8,
    x: [*const u8; R],
) -> [[__m256; 2]; R] {
    // SAFETY: the loops stay within `k` columns; the rest is the caller's promise.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); 2]; R];
        let mut p = weights;
        let mut column = 0;
        while column < k {
            let scales = [head::<F>(p, 0), head::<F>(p, 1)];
            p = p.add(F::HEAD_BYTES);
            for _ in 0..F::BLOCKS_PER_HEAD {
                for half in 0..2 {
                    let block = unpack::<F>(scales[half], p, half);
                    for r in 0..R {
                        acc[r][half] = add_block::<F>(&block, x[r], k, column, acc[r][half]);
                    }
                }
                p = p.add(F::BODY_BYTES);
                column += BLOCK;
            }
        }
        acc
    }
}

/// Adds the product of 32 columns: the two lines of the definition.
///
/// # Safety
/// As [`group_product`].
#[inline(always)]
unsafe fn add_block<F: Format>(block: &Block, x: *const u8, k: usize, column: usize, acc: __m256) -> __m256 {
    // SAFETY: a row is `k` codes, `k / 32` f32 scales, `k / 16` i16 sums, `k / 32` f32 scaled sums.
    unsafe {
        let x_scale = _mm256_set1_ps(x.add(k + column / 8).cast::<f32>().read_unaligned());
        // The sums of both 16 columns, in every lane.
        let sums = _mm256_set1_epi32(x.add(k + k / 8 + column / 8).cast::<i32>().read_unaligned());
        let dot = integer_dot::<F>(block, x.add(column), sums);
        let acc = _mm256_fmadd_ps(_mm256_mul_ps(block.scale, x_scale), _mm256_cvtepi32_ps(dot), acc);
        match F::MINIMA {
            Minima::None => acc,
            Minima::Blocks => {
                let scaled = x.add(k + k / 4 + column / 8).cast::<f32>().read_unaligned();
                _mm256_fnmadd_ps(block.min, _mm256_set1_ps(scaled), acc)
            }
            Minima::Halves => {
                let min_dot = _mm256_madd_epi16(sums, block.min_factors);
                _mm256_fnmadd_ps(_mm256_mul_ps(block.min, x_scale), _mm256_cvtepi32_ps(min_dot), acc)
            }
        }
    }
}

/// The integer of each output: codes times activations, times the factors of 16 columns, without offset.
///
/// `maddubs` adds two products into i16, so unsigned codes up to 128 times activations in -127..=127 cannot
/// saturate; [`sums_in_i16`] says how many of these still fit when added.
///
/// # Safety
/// As [`group_product`]; `x` points to 32 codes.
#[inline(always)]
unsafe fn integer_dot<F: Format>(block: &Block, x: *const u8, sums: __m256i) -> __m256i {
    // SAFETY: 8 groups of 4 codes.
    unsafe {
        let mut total = offset_correction::<F>(block, sums);
        let mut g = 0;
        while g < 8 {
            let mut wide = _mm256_setzero_si256();
            for _ in 0..const { sums_in_i16::<F>() } {
                let four = _mm256_set1_epi32(x.add(4 * g).cast::<i32>().read_unaligned());
                wide = _mm256_add_epi16(wide, products::<F>(block.codes[g], four));
                g += 1;
            }
            total = _mm256_add_epi32(total, _mm256_madd_epi16(wide, block.factors[(g - 1) / 4]));
        }
        total
    }
}

/// Sums of two neighbouring products, as i16.
///
/// # Safety
/// None beyond the instruction set.
#[inline(always)]
unsafe fn products<F: Format>(codes: __m256i, x: __m256i) -> __m256i {
    // SAFETY: no memory is accessed.
    unsafe {
        if is_signed::<F>() {
            // |code| is at most 128 as an unsigned byte; its sign moves to the activation.
            _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
        } else {
            _mm256_maddubs_epi16(codes, x)
        }
    }
}

/// `-offset * sum(x)`, with the factors of 16 columns where the format has them.
///
/// # Safety
/// None beyond the instruction set.
#[inline(always)]
unsafe fn offset_correction<F: Format>(block: &Block, sums: __m256i) -> __m256i {
    // SAFETY: no memory is accessed.
    unsafe {
        match F::CODES {
            Codes::Signed | Codes::SignedTable(_) | Codes::Offset(0) => _mm256_setzero_si256(),
            Codes::Offset(offset) | Codes::OffsetTable(_, offset) if F::SUB.is_pair() => {
                let sum = _mm256_madd_epi16(sums, block.factor_pairs);
                _mm256_mullo_epi32(sum, _mm256_set1_epi32(-i32::from(offset)))
            }
            Codes::Offset(offset) | Codes::OffsetTable(_, offset) => {
                _mm256_madd_epi16(sums, _mm256_set1_epi16(-offset))
            }
            Codes::SignedOffset(offset) => _mm256_madd_epi16(sums, _mm256_set1_epi16(offset)),
        }
    }
}

const fn is_signed<F: Format>() -> bool {
    matches!(F::CODES, Codes::Signed | Codes::SignedOffset(_) | Codes::SignedTable(_))
}

/// How many results of `maddubs` fit into i16 when added: a power of two, 4 at most where 16 columns have a
/// factor of their own.
const fn sums_in_i16<F: Format>() -> usize {
    let largest: usize = match F::CODES {
        Codes::Signed | Codes::SignedOffset(_) | Codes::SignedTable(_) => 128,
        Codes::Offset(_) => (1 << F::BITS) - 1,
        Codes::OffsetTable(table, _) => {
            let (mut i, mut largest) = (0, 0);
            while i < 16 {
                if table[i] > largest {
                    largest = table[i];
                }
                i += 1;
            }
            largest as usize
        }
    };
    let mut count = if F::SUB.is_pair() { 4 } else { 8 };
    while 2 * largest * 127 * count > i16::MAX as usize {
        count /= 2;
    }
    count
}
