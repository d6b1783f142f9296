//! Rows of Q8_0: blocks of 32 numbers, each an f16 scale and int8 codes, as in GGUF. The last block of a row that is not
//! whole blocks wide has fewer codes.
//!
//! A number is `scale * code`, exact in f32 (11 and 7 bits), so attention over such a cache is that over the widened
//! numbers. Quantising a block looks at nothing but its numbers:
//!
//! ```text
//! scale = f16(max |x| / 127)
//! code  = round_ties_even(x * (1 / scale)), within -127..=127
//! ```
//!
//! The divisor is the scale as stored, so that its own rounding is not added to that of the codes. A block whose scale
//! rounds to zero (all its numbers below 4e-6) is zero. A block that holds an infinity or a NaN, or numbers beyond 8e6
//! whose scale f16 does not have, gets a NaN scale, so that every output that it touches is NaN.

use half::f16;
use minfer_runtime::KvFormat;

const BLOCK: usize = KvFormat::BLOCK;
const BLOCK_BYTES: usize = KvFormat::Q8_0.row_bytes(BLOCK);

/// Number `i` of a row.
#[inline(always)]
pub(super) fn number(row: &[u8], i: usize) -> f32 {
    let block = &row[i / BLOCK * BLOCK_BYTES..];
    f16::from_ne_bytes([block[0], block[1]]).to_f32_const() * f32::from(block[2 + i % BLOCK] as i8)
}

/// The scale of a block and the factor that turns its numbers into codes (0 when its codes are all 0), from its
/// largest magnitude as bits: with the sign cleared, the order of floats is the order of their bits.
fn scale_of(amax_bits: u32) -> (f16, f32) {
    let scale = f16::from_f32_const(f32::from_bits(amax_bits) / 127.0);
    if !scale.is_finite() {
        return (f16::NAN, 0.0);
    }
    if scale == f16::ZERO { (scale, 0.0) } else { (scale, 1.0 / scale.to_f32_const()) }
}

pub(crate) mod scalar {
    use half::f16;

    use super::{BLOCK, BLOCK_BYTES, scale_of};

    /// Quantises a row; `out` is as long as the row needs.
    pub(crate) fn narrow_q8(x: &[f32], out: &mut [u8]) {
        for (x, out) in x.chunks(BLOCK).zip(out.chunks_mut(BLOCK_BYTES)) {
            let amax = x.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
            let (scale, inverse) = scale_of(amax);
            put(scale, out);
            for (code, v) in out[2..].iter_mut().zip(x) {
                // A zero inverse marks a block without codes; its numbers may be NaN.
                let q = if inverse == 0.0 { 0.0 } else { (v * inverse).round_ties_even() };
                *code = q.clamp(-127.0, 127.0) as i8 as u8;
            }
        }
    }

    #[inline(always)]
    pub(super) fn put(scale: f16, block: &mut [u8]) {
        block[..2].copy_from_slice(&scale.to_ne_bytes());
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use std::arch::x86_64::*;

    use super::{BLOCK, BLOCK_BYTES, scalar, scale_of};
    use crate::math::{LANES, avx2::load};
    use crate::quantize::avx2::{amax_bits, quantize};

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn narrow_q8(x: &[f32], out: &mut [u8]) {
        let (blocks, tail) = x.as_chunks::<BLOCK>();
        let (out_blocks, out_tail) = out.split_at_mut(blocks.len() * BLOCK_BYTES);
        for (x, out) in blocks.iter().zip(out_blocks.as_chunks_mut::<BLOCK_BYTES>().0) {
            let x: [__m256; 4] = std::array::from_fn(|i| load(&x.as_chunks::<LANES>().0[i]));
            let (scale, inverse) = scale_of(amax_bits(x));
            scalar::put(scale, out);
            let codes = if inverse == 0.0 { _mm256_setzero_si256() } else { codes_of(x, inverse) };
            // SAFETY: a block has 32 bytes of codes behind its scale; the store needs no alignment.
            unsafe { _mm256_storeu_si256(out[2..].as_mut_ptr().cast(), codes) }
        }
        scalar::narrow_q8(tail, out_tail);
    }

    /// 32 codes in order, none of them -128: with a rounded scale the largest number may lie just beyond 127.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn codes_of(x: [__m256; 4], inverse: f32) -> __m256i {
        _mm256_max_epi8(quantize(x, inverse), _mm256_set1_epi8(-127))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Kernels;
    use crate::attention::{CacheRows, CacheRowsMut};
    use crate::testing::{Rng, with_edge_cases};

    fn stored(kernels: &Kernels, x: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0xAA; KvFormat::Q8_0.row_bytes(x.len())];
        CacheRowsMut::Q8_0(&mut bytes).store(kernels, 0, x);
        bytes
    }

    fn loaded(kernels: &Kernels, bytes: &[u8], width: usize) -> Vec<f32> {
        let mut row = vec![0.0; width];
        CacheRows::Q8_0(bytes).load(kernels, 0, &mut row);
        row
    }

    /// Off by at most half a code, and what the scale lost: of a block's largest number 1/254 + 2^-11, for magnitudes
    /// down to where scales are subnormal (127 * 2^-14 = 0.0078).
    #[test]
    fn numbers_come_back_within_half_a_code() {
        let mut rng = Rng::new(40);
        for range in [0.008, 1.0, 300.0, 8e6] {
            for width in [1, 31, 32, 33, 64, 100, 128] {
                let x = rng.floats(width, range);
                let got = loaded(&Kernels::detect(), &stored(&Kernels::detect(), &x), width);
                for (x, got) in x.chunks(BLOCK).zip(got.chunks(BLOCK)) {
                    let amax = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                    for (x, got) in x.iter().zip(got) {
                        let bound = amax * (1.0 / 254.0 + 2f32.powi(-11)) + 2f32.powi(-25) * 127.0;
                        assert!((x - got).abs() <= bound, "{x} {got}, largest {amax}");
                    }
                }
            }
        }
    }

    /// Numbers that have a code come back as they are.
    #[test]
    fn codes_are_kept() {
        let codes = [-127.0, 127.0, 0.0, 1.0, -64.0, 3.0];
        for scale in [1.0, 0.125, 2f32.powi(-24), 40000.0] {
            let x = codes.map(|c| c * scale);
            assert_eq!(loaded(&Kernels::detect(), &stored(&Kernels::detect(), &x), 6), x);
        }
    }

    /// Ties: 0.5 and 1.5 codes, with a scale of one.
    #[test]
    fn ties_go_to_even() {
        let x = [127.0, 0.5, 1.5, -0.5, -2.5];
        assert_eq!(
            loaded(&Kernels::detect(), &stored(&Kernels::detect(), &x), 5),
            [127.0, 0.0, 2.0, 0.0, -2.0]
        );
    }

    #[test]
    fn every_isa_stores_and_loads_the_same() {
        let mut rng = Rng::new(41);
        for range in [1e-7, 3e-6, 1e-3, 1.0, 1e5, 2e7] {
            for width in [5, 32, 80, 96, 128, 257] {
                let plain = rng.floats(width, range);
                for x in [with_edge_cases(plain.clone()), plain] {
                    let bytes = stored(&Kernels::scalar(), &x);
                    for isa in crate::Isa::ALL {
                        let Some(kernels) = Kernels::for_isa(isa) else { continue };
                        assert_eq!(stored(&kernels, &x), bytes, "{} {width} {range}", isa.name());
                        let (got, want) =
                            (loaded(&kernels, &bytes, width), loaded(&Kernels::scalar(), &bytes, width));
                        crate::testing::assert_same_bits(&got, &want);
                    }
                }
            }
        }
    }

    /// A block with an infinity, a NaN or a number too large is NaN as a whole; its neighbours are not touched.
    #[test]
    fn damage_shows() {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e7] {
            let mut x = [1.0; 96];
            x[40] = bad;
            let got = loaded(&Kernels::detect(), &stored(&Kernels::detect(), &x), 96);
            assert!(got[32..64].iter().all(|v| v.is_nan()));
            assert!(got[..32].iter().chain(&got[64..]).all(|&v| (v - 1.0).abs() < 0.001));
        }
    }

    /// The block is that of GGUF: `minfer-format` decodes it to the same numbers.
    #[test]
    fn blocks_are_those_of_gguf() {
        let x = Rng::new(42).floats(64, 2.0);
        let bytes = stored(&Kernels::detect(), &x);
        let mut want = vec![0.0; 64];
        minfer_format::decode_row(minfer_format::BlockType::Q8_0, &bytes, &mut want).unwrap();
        crate::testing::assert_same_bits(&loaded(&Kernels::detect(), &bytes, 64), &want);
    }
}
