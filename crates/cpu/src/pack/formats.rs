//! The formats with blocks of 32: what they consist of, and how their file blocks are read.
//!
//! Sources: ggml's block structures (`ggml-common.h`), checked against `minfer_format::decode`.

use minfer_format::BlockType;

use super::layout::{Codes, FileBlock, Format, Head, Sub, four, words};

/// Values of IQ4_NL and IQ4_XS codes.
pub(super) const IQ4_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Doubled E2M1 values, plus 12 so that they are unsigned.
const MXFP4_VALUES: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// Low nibbles are columns 0..16, high nibbles 16..32.
#[inline(always)]
pub(super) fn read_nibbles(qs: &[u8], codes: &mut [u32]) {
    let (low, high) = codes[..8].split_at_mut(4);
    for ((q, low), high) in words(&qs[..16]).zip(low).zip(high) {
        (*low, *high) = (q & four(15), q >> 4 & four(15));
    }
}

/// Bit `j` of a little-endian word is the fifth bit of column `j`.
#[inline(always)]
fn add_fifth_bits(qh: &[u8], codes: &mut [u32]) {
    let bits = u32::from_le_bytes([qh[0], qh[1], qh[2], qh[3]]);
    for (g, code) in codes[..8].iter_mut().enumerate() {
        // The product has four copies of the four bits, 7 apart, so that bit `i` of them is also bit `8i`.
        let spread = ((bits >> (4 * g) & 15) * 0x0020_4081) & four(1);
        *code |= spread << 4;
    }
}

/// An f16 that the file adds, as one that is subtracted: only the sign changes.
#[inline(always)]
fn negated(f16: &[u8]) -> [u8; 2] {
    [f16[0], f16[1] ^ 0x80]
}

pub(crate) struct Q4_0;
impl Format for Q4_0 {
    const TYPE: BlockType = BlockType::Q4_0;
    const BITS: usize = 4;
    const CODES: Codes = Codes::Offset(8);
    const HEAD: Head = Head::Scale;
    const SUB: Sub = Sub::None;

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        out.scale[..2].copy_from_slice(&b[..2]);
        read_nibbles(&b[2..], &mut out.codes);
    }
}

pub(crate) struct Q4_1;
impl Format for Q4_1 {
    const TYPE: BlockType = BlockType::Q4_1;
    const BITS: usize = 4;
    const CODES: Codes = Codes::Offset(0);
    const HEAD: Head = Head::ScaleMin;
    const SUB: Sub = Sub::None;

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        out.scale[..2].copy_from_slice(&b[..2]);
        out.min[..2].copy_from_slice(&negated(&b[2..4]));
        read_nibbles(&b[4..], &mut out.codes);
    }
}

pub(crate) struct Q5_0;
impl Format for Q5_0 {
    const TYPE: BlockType = BlockType::Q5_0;
    const BITS: usize = 5;
    const CODES: Codes = Codes::Offset(16);
    const HEAD: Head = Head::Scale;
    const SUB: Sub = Sub::None;

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        out.scale[..2].copy_from_slice(&b[..2]);
        read_nibbles(&b[6..], &mut out.codes);
        add_fifth_bits(&b[2..6], &mut out.codes);
    }
}

pub(crate) struct Q5_1;
impl Format for Q5_1 {
    const TYPE: BlockType = BlockType::Q5_1;
    const BITS: usize = 5;
    const CODES: Codes = Codes::Offset(0);
    const HEAD: Head = Head::ScaleMin;
    const SUB: Sub = Sub::None;

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        out.scale[..2].copy_from_slice(&b[..2]);
        out.min[..2].copy_from_slice(&negated(&b[2..4]));
        read_nibbles(&b[8..], &mut out.codes);
        add_fifth_bits(&b[4..8], &mut out.codes);
    }
}

pub(crate) struct Q8_0;
impl Format for Q8_0 {
    const TYPE: BlockType = BlockType::Q8_0;
    const BITS: usize = 8;
    const CODES: Codes = Codes::Signed;
    const HEAD: Head = Head::Scale;
    const SUB: Sub = Sub::None;

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        out.scale[..2].copy_from_slice(&b[..2]);
        out.codes.iter_mut().zip(words(&b[2..34])).for_each(|(code, q)| *code = q);
    }
}

pub(crate) struct IQ4_NL;
impl Format for IQ4_NL {
    const TYPE: BlockType = BlockType::IQ4_NL;
    const BITS: usize = 4;
    const CODES: Codes = Codes::SignedTable(&IQ4_VALUES);
    const HEAD: Head = Head::Scale;
    const SUB: Sub = Sub::None;

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        out.scale[..2].copy_from_slice(&b[..2]);
        read_nibbles(&b[2..], &mut out.codes);
    }
}

pub(crate) struct MXFP4;
impl Format for MXFP4 {
    const TYPE: BlockType = BlockType::MXFP4;
    const BITS: usize = 4;
    const CODES: Codes = Codes::OffsetTable(&MXFP4_VALUES, 12);
    const HEAD: Head = Head::Exponent;
    const SUB: Sub = Sub::None;

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        out.scale[0] = b[0];
        read_nibbles(&b[1..], &mut out.codes);
    }
}

/// The scale and the bias, which is added: a minimum of the other sign.
#[inline(always)]
fn read_wide(b: &[u8], out: &mut FileBlock) {
    out.scale.copy_from_slice(&b[..4]);
    out.min.copy_from_slice(&b[4..8]);
    out.min[3] ^= 0x80;
}

pub(crate) struct AFFINE4;
impl Format for AFFINE4 {
    const TYPE: BlockType = BlockType::AFFINE4;
    const BITS: usize = 4;
    const CODES: Codes = Codes::Offset(0);
    const HEAD: Head = Head::WideScaleMin;
    const SUB: Sub = Sub::None;

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        read_wide(b, out);
        read_nibbles(&b[8..], &mut out.codes);
    }
}

/// Codes of 0..=255 times activations would overflow the i16 sums of the vector kernel, so they are kept less 128.
pub(crate) struct AFFINE8;
impl Format for AFFINE8 {
    const TYPE: BlockType = BlockType::AFFINE8;
    const BITS: usize = 8;
    const CODES: Codes = Codes::SignedOffset(128);
    const HEAD: Head = Head::WideScaleMin;
    const SUB: Sub = Sub::None;

    #[inline(always)]
    fn read(b: &[u8], out: &mut FileBlock) {
        read_wide(b, out);
        out.codes.iter_mut().zip(words(&b[8..40])).for_each(|(code, q)| *code = q ^ four(0x80));
    }
}
