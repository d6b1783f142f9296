//! The formats with super-blocks of 256: what they consist of, and how their file blocks are read.
//!
//! Sources: ggml's block structures (`ggml-common.h`), checked against `minfer_format::decode`.
//! Scale factors of 6 bits, which files scatter over bytes, become a byte each.

use minfer_format::BlockType;

use super::formats::{IQ4_VALUES, read_nibbles};
use super::layout::{Codes, FileBlock, Format, Head, Sub, four, words};

/// Two bits of each column: 64 bytes; byte `l` of a 32-byte half holds columns `l`, `l + 32`, `l + 64`, `l + 96`
/// of that half's 128.
#[inline(always)]
fn read_two_bits(qs: &[u8], codes: &mut [u32; 64], put: impl Fn(&mut u32, u32)) {
    for (i, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let (half, j) = (i / 4, i % 4);
        let qs = words(&qs[32 * half..][..32]);
        codes.iter_mut().zip(qs).for_each(|(code, q)| put(code, q >> (2 * j) & four(3)));
    }
}

/// Four bits of each column: 128 bytes; low nibbles of `width` bytes are as many columns, high nibbles the next.
#[inline(always)]
fn read_four_bits(qs: &[u8], width: usize, codes: &mut [u32; 64]) {
    for (codes, qs) in codes.chunks_exact_mut(width / 2).zip(qs.chunks_exact(width)) {
        let (low, high) = codes.split_at_mut(width / 4);
        low.iter_mut().zip(words(qs)).for_each(|(code, q)| *code = q & four(15));
        high.iter_mut().zip(words(qs)).for_each(|(code, q)| *code = q >> 4 & four(15));
    }
}

/// One bit more of each column, at `bit`: bit `i` of 32 bytes is that of columns `32i..32i + 32`.
#[inline(always)]
fn add_bits(qh: &[u8], bit: usize, codes: &mut [u32; 64]) {
    for (i, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        codes.iter_mut().zip(words(&qh[..32])).for_each(|(code, q)| *code |= (q >> i & four(1)) << bit);
    }
}

/// The 8 scale and 8 minimum factors of Q4_K and Q5_K, 6 bits each in 12 bytes.
#[inline(always)]
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

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        for (i, sub) in out.sub.iter_mut().enumerate() {
            *sub = [b[2 * i], b[2 * i + 1]];
        }
        read_two_bits(&b[16..80], &mut out.codes, |code, q| *code = q);
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

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        let scales = &b[96..108];
        read_two_bits(&b[32..96], &mut out.codes, |code, q| *code = q);
        add_bits(&b[..32], 2, &mut out.codes);
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

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        out.scale[..2].copy_from_slice(&b[..2]);
        out.min[..2].copy_from_slice(&b[2..4]);
        read_scale_min_k4(&b[4..16], &mut out.sub);
        read_four_bits(&b[16..144], 32, &mut out.codes);
    }
}

pub(crate) struct Q5_K;
impl Format for Q5_K {
    const TYPE: BlockType = BlockType::Q5_K;
    const BITS: usize = 5;
    const CODES: Codes = Codes::Offset(0);
    const HEAD: Head = Head::ScaleMin;
    const SUB: Sub = Sub::ScaleMin;

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        out.scale[..2].copy_from_slice(&b[..2]);
        out.min[..2].copy_from_slice(&b[2..4]);
        read_scale_min_k4(&b[4..16], &mut out.sub);
        read_four_bits(&b[48..176], 32, &mut out.codes);
        add_bits(&b[16..48], 4, &mut out.codes);
    }
}

pub(crate) struct Q6_K;
impl Format for Q6_K {
    const TYPE: BlockType = BlockType::Q6_K;
    const BITS: usize = 6;
    const CODES: Codes = Codes::Offset(32);
    const HEAD: Head = Head::Scale;
    const SUB: Sub = Sub::Pair;

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        read_four_bits(&b[..128], 64, &mut out.codes);
        read_two_bits(&b[128..192], &mut out.codes, |code, q| *code |= q << 4);
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

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        out.scale[..2].copy_from_slice(&b[..2]);
        let high = u16::from_le_bytes([b[2], b[3]]);
        for i in 0..8 {
            let low = b[4 + i / 2] >> (4 * (i % 2)) & 15;
            let top = (high >> (2 * i) & 3) as u8;
            out.sub[i][0] = (low | top << 4).wrapping_sub(32);
            read_nibbles(&b[8 + 16 * i..], &mut out.codes[8 * i..]);
        }
    }
}
