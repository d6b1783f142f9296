//! Blocks of 32 numbers with one scale, and in the `_1` formats one minimum, in half precision.
//!
//! Four-bit halves: byte `i` of a block's 16 holds number `i` in its low and number `16 + i` in its high
//! four bits. The five-bit formats keep bit 4 of number `j` in bit `j` of a 32-bit word.

use crate::block::BlockType;

use super::{each_block, half, high, low};

/// `scale * (q - 8)`. Block: scale, 16 bytes of halves.
pub(super) fn q4_0(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::Q4_0;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let d = half(block, 0);
        halves(&block[2..], |j, q| out[j] = d * f32::from(q as i8 - 8));
    });
}

/// `scale * q + minimum`. Block: scale, minimum, 16 bytes of halves.
pub(super) fn q4_1(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::Q4_1;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let (d, m) = (half(block, 0), half(block, 2));
        halves(&block[4..], |j, q| out[j] = d * f32::from(q) + m);
    });
}

/// `scale * (q - 16)`. Block: scale, word of high bits, 16 bytes of halves.
pub(super) fn q5_0(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::Q5_0;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let d = half(block, 0);
        let fifth = fifth_bits(block, 2);
        halves(&block[6..], |j, q| out[j] = d * f32::from((q | fifth(j)) as i8 - 16));
    });
}

/// `scale * q + minimum`. Block: scale, minimum, word of high bits, 16 bytes of halves.
pub(super) fn q5_1(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::Q5_1;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let (d, m) = (half(block, 0), half(block, 2));
        let fifth = fifth_bits(block, 4);
        halves(&block[8..], |j, q| out[j] = d * f32::from(q | fifth(j)) + m);
    });
}

/// `scale * q`. Block: scale, 32 signed bytes.
pub(super) fn q8_0(bytes: &[u8], out: &mut [f32]) {
    const TY: BlockType = BlockType::Q8_0;
    each_block::<{ TY.block_bytes() }, { TY.block_len() }>(bytes, out, |block, out| {
        let d = half(block, 0);
        for (x, &q) in out.iter_mut().zip(&block[2..]) {
            *x = f32::from(q as i8) * d;
        }
    });
}

/// Calls `put(j, q)` for each of the 32 four-bit numbers in 16 bytes.
fn halves(bytes: &[u8], mut put: impl FnMut(usize, u8)) {
    for (i, &byte) in bytes.iter().enumerate() {
        put(i, low(byte));
        put(16 + i, high(byte));
    }
}

/// Bit 4 of number `j`, from the word at `at`.
fn fifth_bits(block: &[u8], at: usize) -> impl Fn(usize) -> u8 {
    let word = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    move |j| ((word >> j & 1) << 4) as u8
}
