//! Floating-point numbers: plain ones, and E4M3 under a scale.

use half::{bf16 as Bf16, f16 as F16};

use crate::block::BlockType;

use super::{each_block, single};

pub(super) fn f32(bytes: &[u8], out: &mut [f32]) {
    for (stored, x) in bytes.as_chunks().0.iter().zip(out) {
        *x = f32::from_le_bytes(*stored);
    }
}

pub(super) fn f16(bytes: &[u8], out: &mut [f32]) {
    for (stored, x) in bytes.as_chunks().0.iter().zip(out) {
        *x = F16::from_le_bytes(*stored).to_f32();
    }
}

pub(super) fn bf16(bytes: &[u8], out: &mut [f32]) {
    for (stored, x) in bytes.as_chunks().0.iter().zip(out) {
        *x = Bf16::from_le_bytes(*stored).to_f32();
    }
}

/// `scale * value`, rounded to `f32`. Block of 32: scale (`f32`), 32 bytes.
pub(super) fn f8_e4m3(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::F8_E4M3;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let scale = single(block, 0);
        for (x, &byte) in out.iter_mut().zip(&block[4..]) {
            *x = scale * e4m3(byte);
        }
    });
}

/// The value of a float with a sign, four exponent bits (bias 7) and three mantissa bits, exactly. Source: OCP 8-bit
/// Floating Point Specification 1.0. It has no infinity; its NaNs (`0x7f`, `0xff`) read as 480 of their sign here,
/// so whoever takes bytes from a file refuses them first.
pub fn e4m3(byte: u8) -> f32 {
    /// From the bias of `f32` to that of E4M3: 2^(127 - 7). Subnormal numbers come out right too.
    const REBIAS: f32 = f32::from_bits((127 + 120) << 23);
    f32::from_bits(u32::from(byte & 0x80) << 24 | u32::from(byte & 0x7f) << 20) * REBIAS
}
