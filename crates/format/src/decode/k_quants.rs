//! Super-blocks of 256 numbers: groups of 16 or 32 with small integer scales, which are scaled in turn by
//! one half-precision number (and in Q2_K, Q4_K and Q5_K their minima by another).

use crate::block::BlockType;

use super::{each_block, half, high, low};

/// `d * scale * q - dmin * min`, groups of 16. Block: 16 bytes (scale in the low, minimum in the high
/// half), 64 bytes of two-bit numbers, d, dmin.
///
/// Each 32 bytes hold 128 numbers: number `32 s + i` is the bits `2 s` of byte `i`.
pub(super) fn q2_k(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::Q2_K;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let (scales, quants) = (&block[..16], &block[16..80]);
        let (d, dmin) = (half(block, 80), half(block, 82));
        for (g, group) in out.chunks_exact_mut(16).enumerate() {
            let scale = d * f32::from(low(scales[g]));
            let min = dmin * f32::from(high(scales[g]));
            for (i, x) in group.iter_mut().enumerate() {
                *x = scale * f32::from(two_bits(quants, 16 * g + i)) - min;
            }
        }
    });
}

/// `d * (scale - 32) * q`, groups of 16, `q` from -4 to 3. Block: 32 bytes of third bits, 64 bytes of low
/// two bits (as in Q2_K), 12 bytes of six-bit scales, d.
///
/// The third bit of number `32 s + i` is bit `s` of byte `i`; where it is clear, 4 is subtracted.
pub(super) fn q3_k(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::Q3_K;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let (third, quants) = (&block[..32], &block[32..96]);
        let scales = q3_k_scales(&block[96..108]);
        let d = half(block, 108);
        for (g, group) in out.chunks_exact_mut(16).enumerate() {
            let scale = d * f32::from(scales[g]);
            for (i, x) in group.iter_mut().enumerate() {
                let j = 16 * g + i;
                let offset = if third[j % 32] >> (j / 32) & 1 == 1 { 0 } else { 4 };
                *x = scale * f32::from(two_bits(quants, j) as i8 - offset);
            }
        }
    });
}

/// Sixteen six-bit scales, less 32: four low bits of number `j` in half `j / 8` of byte `j % 8`, two high
/// bits at `2 (j / 4)` of byte `8 + j % 4`.
fn q3_k_scales(packed: &[u8]) -> [i8; 16] {
    std::array::from_fn(|j| {
        let low = packed[j % 8] >> (4 * (j / 8)) & 0xf;
        let high = packed[8 + j % 4] >> (2 * (j / 4)) & 3;
        (low | high << 4) as i8 - 32
    })
}

/// `d * scale * q - dmin * min`, groups of 32. Block: d, dmin, 12 bytes of six-bit scales and minima, 128
/// bytes of four-bit numbers.
///
/// Each 32 bytes hold two groups: the low halves, then the high halves.
pub(super) fn q4_k(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::Q4_K;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let (d, dmin) = (half(block, 0), half(block, 2));
        let (scales, quants) = (&block[4..16], &block[16..]);
        for (g, group) in out.chunks_exact_mut(32).enumerate() {
            let (scale, min) = scale_and_min(scales, g);
            let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
            for (i, x) in group.iter_mut().enumerate() {
                *x = scale * f32::from(four_bits(quants, g, i)) - min;
            }
        }
    });
}

/// As Q4_K with a fifth bit. Block: d, dmin, 12 bytes of scales and minima, 32 bytes of fifth bits (group
/// `g` in bit `g`), 128 bytes of four-bit numbers.
pub(super) fn q5_k(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::Q5_K;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let (d, dmin) = (half(block, 0), half(block, 2));
        let (scales, fifth, quants) = (&block[4..16], &block[16..48], &block[48..]);
        for (g, group) in out.chunks_exact_mut(32).enumerate() {
            let (scale, min) = scale_and_min(scales, g);
            let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
            for (i, x) in group.iter_mut().enumerate() {
                let q = four_bits(quants, g, i) | (fifth[i] >> g & 1) << 4;
                *x = scale * f32::from(q) - min;
            }
        }
    });
}

/// `d * scale * (q - 32)`, groups of 16. Block: 128 bytes of low halves, 64 bytes of high two bits, 16
/// signed scales, d.
///
/// Half the block (128 numbers) takes 64 bytes of low halves and 32 of high bits: row `r` of its four rows
/// of 32 lies in half `r / 2` of the bytes `32 (r % 2)..`, and in the bits `2 r` of the high bytes.
pub(super) fn q6_k(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::Q6_K;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let (lows, highs, scales) = (&block[..128], &block[128..192], &block[192..208]);
        let d = half(block, 208);
        for (g, group) in out.chunks_exact_mut(16).enumerate() {
            let scale = d * f32::from(scales[g] as i8);
            for (i, x) in group.iter_mut().enumerate() {
                let j = 16 * g + i;
                let (half_block, row, column) = (j / 128, j / 32 % 4, j % 32);
                let low = lows[64 * half_block + 32 * (row % 2) + column] >> (4 * (row / 2)) & 0xf;
                let high = highs[32 * half_block + column] >> (2 * row) & 3;
                *x = scale * f32::from((low | high << 4) as i8 - 32);
            }
        }
    });
}

/// Number `j` of the 256 two-bit numbers in 64 bytes (see [`q2_k`]).
fn two_bits(quants: &[u8], j: usize) -> u8 {
    quants[32 * (j / 128) + j % 32] >> (2 * (j / 32 % 4)) & 3
}

/// Number `i` of group `g` of the 256 four-bit numbers in 128 bytes (see [`q4_k`]).
fn four_bits(quants: &[u8], g: usize, i: usize) -> u8 {
    quants[32 * (g / 2) + i] >> (4 * (g % 2)) & 0xf
}

/// Scale and minimum of group `g` of 8, six bits each, in 12 bytes: groups 0 to 3 have theirs in the low
/// six bits of bytes `g` and `4 + g`; groups 4 to 7 have the low four bits in the halves of byte `4 + g`
/// and the high two bits on top of bytes `g - 4` and `g`.
fn scale_and_min(packed: &[u8], g: usize) -> (u8, u8) {
    if g < 4 {
        (packed[g] & 0x3f, packed[4 + g] & 0x3f)
    } else {
        let both = packed[4 + g];
        (low(both) | packed[g - 4] >> 6 << 4, high(both) | packed[g] >> 6 << 4)
    }
}
