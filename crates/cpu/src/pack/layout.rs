//! What a quantised format consists of, and where its parts lie in a packed stream.
//!
//! Every format is `value = scale * code - min`, with integer codes of 32 columns at a time. A format states
//! its parts as constants; packing, the scalar kernel and the vector kernels are generic over them.

use minfer_format::BlockType;

use super::GROUP;

/// Columns that share a scale, and that activations share one for.
pub(crate) const BLOCK: usize = 32;
/// Bytes that hold one to four column groups of all rows: see [`Format::LOW_BITS`].
pub(crate) const VECTOR: usize = 4 * GROUP;

/// How stored codes become the integers of the product.
#[derive(Clone, Copy)]
pub(crate) enum Codes {
    /// Bytes in two's complement.
    Signed,
    /// Bytes in two's complement, this much too small.
    SignedOffset(i16),
    /// Unsigned, this much too large.
    Offset(i16),
    /// Numbers of a table with 16 entries.
    SignedTable(&'static [i8; 16]),
    /// Numbers of a table of 16 unsigned entries, this much too large.
    OffsetTable(&'static [u8; 16], i16),
}

/// What a file block stores once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Head {
    /// `f16` scale.
    Scale,
    /// `f16` scale and `f16` minimum, which is subtracted.
    ScaleMin,
    /// `f32` scale and `f32` minimum, which is subtracted.
    WideScaleMin,
    /// A power of two as the exponent byte of MX formats, halved (codes are doubled).
    Exponent,
}

/// What is stored per 32 columns.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sub {
    /// Nothing.
    None,
    /// One `i8` factor of the scale.
    Scale,
    /// One `u8` factor of the scale and one of the minimum.
    ScaleMin,
    /// Two `i8` factors of the scale, one for each 16 columns.
    Pair,
    /// Two bytes, one for each 16 columns: low 4 bits scale factor, high 4 bits minimum factor.
    PairMin,
}

/// What has a minimum of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Minima {
    /// Nothing.
    None,
    /// 32 columns.
    Blocks,
    /// 16 columns: factors of a block's minimum.
    Halves,
}

impl Head {
    /// Bytes of a row.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Head::Scale => 2,
            Head::ScaleMin => 4,
            Head::WideScaleMin => 8,
            Head::Exponent => 1,
        }
    }
}

impl Sub {
    /// Bytes of a row.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Sub::None => 0,
            Sub::Scale => 1,
            Sub::ScaleMin | Sub::Pair | Sub::PairMin => 2,
        }
    }

    /// Bytes from one row's to the next one's; a second kind of factor follows the first of all rows.
    pub(crate) const fn stride(self) -> usize {
        match self {
            Sub::ScaleMin => 1,
            _ => self.bytes(),
        }
    }

    /// Whether the integer sums of 16 columns have factors of their own.
    pub(crate) const fn is_pair(self) -> bool {
        matches!(self, Sub::Pair | Sub::PairMin)
    }
}

/// A quantised weight format.
pub(crate) trait Format {
    /// Its storage type.
    const TYPE: BlockType;
    /// Bits of a stored code: 2, 3, 4, 5, 6 or 8.
    const BITS: usize;
    /// What a stored code stands for.
    const CODES: Codes;
    /// What a file block stores once.
    const HEAD: Head;
    /// What is stored per 32 columns.
    const SUB: Sub;

    /// Its minima.
    const MINIMA: Minima = match (Self::HEAD, Self::SUB) {
        (_, Sub::PairMin) => Minima::Halves,
        (Head::ScaleMin | Head::WideScaleMin, _) => Minima::Blocks,
        _ => Minima::None,
    };
    /// 32-column blocks in a file block.
    const BLOCKS_PER_HEAD: usize = Self::TYPE.block_len() / BLOCK;
    /// Bytes of the head of a group: all scales, then all minima.
    const HEAD_BYTES: usize = GROUP * Self::HEAD.bytes();
    /// Bytes of the sub-scales of a group for 32 columns.
    const SUB_BYTES: usize = GROUP * Self::SUB.bytes();
    /// Bits of the lower plane of codes.
    ///
    /// Codes are cut into planes of 8, 4, 2 or 1 bits: 6 = 2 + 4, 5 = 1 + 4, 3 = 1 + 2; the plane of the high bits
    /// comes first. In each plane, byte `4r + i` of a [`VECTOR`] belongs to row `r`, and to columns
    /// `4g + i`, `g = 0..8`: an 8-bit plane has a vector per `g`; in a 4-bit plane, vector `v` holds
    /// `g = v` and `v + 4`; in a 2-bit plane, `g = 4v .. 4v + 3`; a 1-bit plane has one vector; bits ascend with `g`.
    const LOW_BITS: usize = match Self::BITS {
        8 => 8,
        4..=6 => 4,
        _ => 2,
    };
    /// Bytes of the upper plane of a group for 32 columns (0 when there is none).
    const HIGH_BYTES: usize = GROUP * BLOCK * (Self::BITS - Self::LOW_BITS) / 8;
    /// Bytes of a group for 32 columns, without the head: sub-scales, then codes.
    const BODY_BYTES: usize = Self::SUB_BYTES + GROUP * BLOCK * Self::BITS / 8;
    /// Bytes of a group for one file block.
    const BLOCK_BYTES: usize = Self::HEAD_BYTES + Self::BLOCKS_PER_HEAD * Self::BODY_BYTES;

    /// Reads one file block of one row (`TYPE.block_bytes()` bytes).
    fn read(block: &[u8], out: &mut FileBlock);
}

/// One file block of one row, taken apart.
pub(crate) struct FileBlock {
    /// Stored codes in column order, `TYPE.block_len()` of them, four to a word: all are moved and cut four at a time.
    pub(crate) codes: [u32; 64],
    /// The scale as stored: four bytes for [`Head::WideScaleMin`], one for [`Head::Exponent`], else two.
    pub(crate) scale: [u8; 4],
    /// The minimum as stored, with the sign that makes it subtracted.
    pub(crate) min: [u8; 4],
    /// Sub-scales of each 32 columns, as [`Sub`] says.
    pub(crate) sub: [[u8; 2]; 8],
}

/// Bytes as words.
#[inline(always)]
pub(crate) fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks::<4>().0.iter().map(|&four| u32::from_le_bytes(four))
}

/// The same byte four times.
pub(crate) const fn four(byte: u8) -> u32 {
    0x0101_0101 * byte as u32
}

impl FileBlock {
    pub(crate) const fn new() -> FileBlock {
        FileBlock { codes: [0; 64], scale: [0; 4], min: [0; 4], sub: [[0; 2]; 8] }
    }
}

/// In a plane of `bits` bits: which [`VECTOR`] holds column group `g`, and at which bit.
pub(crate) const fn place(bits: usize, g: usize) -> (usize, usize) {
    match bits {
        8 => (g, 0),
        4 => (g % 4, 4 * (g / 4)),
        2 => (g / 4, 2 * (g % 4)),
        _ => (0, g),
    }
}
