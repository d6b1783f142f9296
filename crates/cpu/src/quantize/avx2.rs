//! Quantising blocks with AVX2; the same bytes as the scalar definition.

use std::arch::x86_64::*;

use super::{Q8_BLOCK, put_scales, scale_of};

/// [`super::blocks`] with AVX2.
///
/// # Safety
/// As [`super::QuantizeFn`].
#[target_feature(enable = "avx2")]
pub(super) unsafe fn blocks(x: &[f32], first: usize, k: usize, out: *mut u8) {
    for (b, block) in x.chunks_exact(Q8_BLOCK).enumerate() {
        let p = block.as_ptr();
        // SAFETY: the block has 32 numbers.
        let v: [__m256; 4] = unsafe { std::array::from_fn(|i| _mm256_loadu_ps(p.add(8 * i))) };
        let (scale, inverse) = scale_of(amax_bits(v));
        let q = if inverse == 0.0 { _mm256_setzero_si256() } else { quantize(v, inverse) };
        // Codes -> sums of 2 -> sums of 4 -> one sum of 16 in every 32-bit lane of a half.
        let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
        let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        let eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32::<0b10_11_00_01>(fours));
        let all = _mm256_add_epi32(eights, _mm256_shuffle_epi32::<0b01_00_11_10>(eights));
        let sums = [_mm256_extract_epi32::<0>(all) as i16, _mm256_extract_epi32::<4>(all) as i16];
        // SAFETY: the caller's promise.
        unsafe {
            _mm256_storeu_si256(out.add(Q8_BLOCK * (first + b)).cast(), q);
            put_scales(scale, sums, first + b, k, out);
        }
    }
}

/// The largest magnitude as bits, as the scalar one.
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn amax_bits(v: [__m256; 4]) -> u32 {
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    let bits = v.map(|x| _mm256_and_si256(_mm256_castps_si256(x), magnitude));
    // Without the sign bit, signed and unsigned order agree.
    let m = _mm256_max_epi32(_mm256_max_epi32(bits[0], bits[1]), _mm256_max_epi32(bits[2], bits[3]));
    let m = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m));
    let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b01_00_11_10>(m));
    let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b10_11_00_01>(m));
    _mm_cvtsi128_si32(m) as u32
}

/// 32 codes in order. `cvtps` rounds to nearest, ties to even, which is how threads start.
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn quantize(v: [__m256; 4], inverse: f32) -> __m256i {
    let i = v.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, _mm256_set1_ps(inverse))));
    let bytes = _mm256_packs_epi16(_mm256_packs_epi32(i[0], i[1]), _mm256_packs_epi32(i[2], i[3]));
    // Packing works per 128-bit half: put the groups of four back in order.
    _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}
