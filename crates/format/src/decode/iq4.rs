//! Four-bit numbers that index a table of 16 values: IQ4_NL, IQ4_XS and MXFP4.
//!
//! As in the older formats, byte `i` of 16 holds number `i` in its low and `16 + i` in its high half.

use crate::block::BlockType;

use super::{each_block, half, high, low};

/// The non-linear grid of IQ4_NL and IQ4_XS (ggml's `kvalues_iq4nl`).
const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The values of a four-bit float (sign, two exponent bits, one mantissa bit), doubled to be integers.
/// Minus zero decodes as zero. Source: OCP Microscaling Formats 1.0, section 5.3.3.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `d * value`. Block of 32: d, 16 bytes of indices.
pub(super) fn iq4_nl(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::IQ4_NL;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        look_up(half(block, 0), &IQ4_VALUES, &block[2..], out);
    });
}

/// `d * (scale - 32) * value`, groups of 32. Block of 256: d, the high two bits of eight scales (a 16-bit
/// word), their low four bits (4 bytes), 128 bytes of indices.
pub(super) fn iq4_xs(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::IQ4_XS;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let d = half(block, 0);
        let scales_high = u16::from_le_bytes([block[2], block[3]]);
        let (scales_low, indices) = (&block[4..8], &block[8..]);
        for (g, group) in out.chunks_exact_mut(32).enumerate() {
            let low = scales_low[g / 2] >> (4 * (g % 2)) & 0xf;
            let high = (scales_high >> (2 * g) & 3) as u8;
            let scale = (low | high << 4) as i8 - 32;
            look_up(d * f32::from(scale), &IQ4_VALUES, &indices[16 * g..16 * g + 16], group);
        }
    });
}

/// `2^(e - 127) * value`, the values in halves. Block of 32: e, 16 bytes of indices.
pub(super) fn mxfp4(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::MXFP4;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        look_up(half_power(block[0]), &E2M1_DOUBLED, &block[1..], out);
    });
}

/// `2^(e - 128)`, exact; the two smallest are subnormal.
fn half_power(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 })
}

/// The 32 numbers of 16 bytes of indices.
fn look_up(scale: f32, values: &[i8; 16], indices: &[u8], out: &mut [f32]) {
    let (first, second) = out.split_at_mut(16);
    for ((a, b), &byte) in first.iter_mut().zip(second).zip(indices) {
        *a = scale * f32::from(values[usize::from(low(byte))]);
        *b = scale * f32::from(values[usize::from(high(byte))]);
    }
}
