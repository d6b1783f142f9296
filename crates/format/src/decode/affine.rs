//! Codes under an `f32` scale, plus an `f32` bias: MLX's affine packs, 32 numbers at a time.
//!
//! `scale * code + bias`, each operation rounded to `f32` (for scales in half precision the product is exact). Codes are
//! unsigned; those of fewer bits than a type has are stored as they are.

use crate::block::BlockType;

use super::{each_block, high, low, single};

/// Block of 32: scale, bias, 16 bytes; byte `i` holds number `i` in its low and `16 + i` in its high half.
pub(super) fn affine4(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::AFFINE4;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let (scale, bias) = (single(block, 0), single(block, 4));
        let (first, second) = out.split_at_mut(16);
        for ((a, b), &byte) in first.iter_mut().zip(second).zip(&block[8..]) {
            *a = scale * f32::from(low(byte)) + bias;
            *b = scale * f32::from(high(byte)) + bias;
        }
    });
}

/// Block of 32: scale, bias, 32 bytes.
pub(super) fn affine8(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::AFFINE8;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let (scale, bias) = (single(block, 0), single(block, 4));
        for (x, &code) in out.iter_mut().zip(&block[8..]) {
            *x = scale * f32::from(code) + bias;
        }
    });
}
