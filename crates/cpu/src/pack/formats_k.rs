//! The formats with super-blocks of 256: what they consist of, and how their file blocks are read.
//!
//! Sources: ggml's block structures (`ggml-common.h`), checked against `minfer_format::decode`.
//! Scale factors of 6 bits, which files scatter over bytes, become a byte each.

use minfer_format::BlockType;

use super::formats::{IQ4_VALUES, read_nibbles};
use super::layout::{Codes, FileBlock, Format, Head, Sub};

/// Two bits of each column: 64 bytes; byte `l` of a 32-byte half holds columns `l`, `l + 32`, `l + 64`, `l + 96`
/// of that half's 128.
fn read_two_bits(qs: &[u8], mut put: impl FnMut(usize, u8)) {
    for (i, q) in qs[..64].iter().enumerate() {
        let (half, l) = (i / 32, i % 32);
        for j in 0..4 {
            put(128 * half + 32 * j + l, q >> (2 * j) & 3);
        }
    }
}

/// Four bits of each column: 128 bytes; low nibbles of 32 bytes are one block of 32, high nibbles the next.
fn read_four_bits(qs: &[u8], codes: &mut [u8; 256]) {
    for (i, q) in qs[..128].iter().enumerate() {
        let (c, l) = (i / 32, i % 32);
        codes[64 * c + l] = q & 15;
        codes[64 * c + 32 + l] = q >> 4;
    }
}

/// The 8 scale and 8 minimum factors of Q4_K and Q5_K, 6 bits each in 12 bytes.
fn read_scale_min_k4(q: &[u8], sub: &mut [[u8; 2]; 8]) {
    for j in 0..4 {
        sub[j] = [q[j] & 63, q[j + 4] & 63];
        sub[j + 4] = [q[j + 8] & 15 | (q[j] >> 6) << 4, q[j + 8] >> 4 | (q[j + 4] >> 6) << 4];
    }
}

pub(crate) struct Q2_K;
impl Format for Q2_K {
    const TYPE: BlockType = BlockType::Q2_K;
    const BITS: usize = 2;
    const CODES: Codes = Codes::Offset(0);
    const HEAD: Head = Head::ScaleMin;
    const SUB: Sub = Sub::PairMin;

    fn read(b: &[u8], out: &mut FileBlock) {
        for (i, sub) in out.sub.iter_mut().enumerate() {
            *sub = [b[2 * i], b[2 * i + 1]];
        }
        read_two_bits(&b[16..80], |column, q| out.codes[column] = q);
        out.scale[..2].copy_from_slice(&b[80..82]);
        out.min[..2].copy_from_slice(&b[82..84]);
    }
}

pub(crate) struct Q3_K;
impl Format for Q3_K {
    const TYPE: BlockType = BlockType::Q3_K;
    const BITS: usize = 3;
    const CODES: Codes = Codes::Offset(4);
    const HEAD: Head = Head::Scale;
    const SUB: Sub = Sub::Pair;

    fn read(b: &[u8], out: &mut FileBlock) {
        let (high, scales) = (&b[..32], &b[96..108]);
        read_two_bits(&b[32..96], |column, q| {
            out.codes[column] = q | (high[column % 32] >> (column / 32) & 1) << 2;
        });
        for i in 0..16 {
            let low = if i < 8 { scales[i] & 15 } else { scales[i - 8] >> 4 };
            let top = scales[8 + i % 4] >> (2 * (i / 4)) & 3;
            out.sub[i / 2][i % 2] = (low | top << 4).wrapping_sub(32);
        }
        out.scale[..2].copy_from_slice(&b[108..110]);
    }
}

pub(crate) struct Q4_K;
impl Format for Q4_K {
    const TYPE: BlockType = BlockType::Q4_K;
    const BITS: usize = 4;
    const CODES: Codes = Codes::Offset(0);
    const HEAD: Head = Head::ScaleMin;
    const SUB: Sub = Sub::ScaleMin;

    fn read(b: &[u8], out: &mut FileBlock) {
        out.scale[..2].copy_from_slice(&b[..2]);
        out.min[..2].copy_from_slice(&b[2..4]);
        read_scale_min_k4(&b[4..16], &mut out.sub);
        read_four_bits(&b[16..144], &mut out.codes);
    }
}

pub(crate) struct Q5_K;
impl Format for Q5_K {
    const TYPE: BlockType = BlockType::Q5_K;
    const BITS: usize = 5;
    const CODES: Codes = Codes::Offset(0);
    const HEAD: Head = Head::ScaleMin;
    const SUB: Sub = Sub::ScaleMin;

    fn read(b: &[u8], out: &mut FileBlock) {
        out.scale[..2].copy_from_slice(&b[..2]);
        out.min[..2].copy_from_slice(&b[2..4]);
        read_scale_min_k4(&b[4..16], &mut out.sub);
        read_four_bits(&b[48..176], &mut out.codes);
        for (column, code) in out.codes.iter_mut().enumerate() {
            *code |= (b[16 + column % 32] >> (column / 32) & 1) << 4;
        }
    }
}

pub(crate) struct Q6_K;
impl Format for Q6_K {
    const TYPE: BlockType = BlockType::Q6_K;
    const BITS: usize = 6;
    const CODES: Codes = Codes::Offset(32);
    const HEAD: Head = Head::Scale;
    const SUB: Sub = Sub::Pair;

    fn read(b: &[u8], out: &mut FileBlock) {
        // Of 64 low bytes for 128 columns, low nibbles are columns 0..64, high nibbles 64..128.
        for (i, q) in b[..128].iter().enumerate() {
            let column = 128 * (i / 64) + i % 64;
            out.codes[column] = q & 15;
            out.codes[column + 64] = q >> 4;
        }
        read_two_bits(&b[128..192], |column, q| out.codes[column] |= q << 4);
        for (i, scale) in b[192..208].iter().enumerate() {
            out.sub[i / 2][i % 2] = *scale;
        }
        out.scale[..2].copy_from_slice(&b[208..210]);
    }
}

pub(crate) struct IQ4_XS;
impl Format for IQ4_XS {
    const TYPE: BlockType = BlockType::IQ4_XS;
    const BITS: usize = 4;
    const CODES: Codes = Codes::SignedTable(&IQ4_VALUES);
    const HEAD: Head = Head::Scale;
    const SUB: Sub = Sub::Scale;

    fn read(b: &[u8], out: &mut FileBlock) {
        out.scale[..2].copy_from_slice(&b[..2]);
        let high = u16::from_le_bytes([b[2], b[3]]);
        for i in 0..8 {
            let low = b[4 + i / 2] >> (4 * (i % 2)) & 15;
            let top = (high >> (2 * i) & 3) as u8;
            out.sub[i][0] = (low | top << 4).wrapping_sub(32);
            read_nibbles(&b[8 + 16 * i..], &mut out.codes[32 * i..]);
        }
    }
}
