//! Formats that store every number as a float: packing is a transposition of 16 rows.

use half::{bf16, f16};
use minfer_format::decode::e4m3;

use super::{GROUP, prefetch};

/// A storage format of floats.
pub(crate) trait FloatFormat {
    /// Bytes of a number.
    const BYTES: usize;
    /// Columns of a file block, which is one `f32` scale and then the numbers; 1 for numbers without a scale.
    const BLOCK: usize = 1;
    /// Bytes of a row's scale.
    const SCALE_BYTES: usize = if Self::BLOCK > 1 { 4 } else { 0 };
    /// Bytes of a group for one file block: 16 scales, then the numbers.
    const BLOCK_BYTES: usize = GROUP * (Self::SCALE_BYTES + Self::BLOCK * Self::BYTES);

    /// The number at the start of `bytes` (little endian), exactly, without its scale.
    fn value(bytes: &[u8]) -> f32;
}

pub(crate) struct F32;
pub(crate) struct F16;
pub(crate) struct BF16;
pub(crate) struct F8_E4M3;

impl FloatFormat for F32 {
    const BYTES: usize = 4;
    fn value(b: &[u8]) -> f32 {
        f32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }
}

impl FloatFormat for F16 {
    const BYTES: usize = 2;
    fn value(b: &[u8]) -> f32 {
        f16::from_le_bytes([b[0], b[1]]).to_f32()
    }
}

impl FloatFormat for BF16 {
    const BYTES: usize = 2;
    fn value(b: &[u8]) -> f32 {
        bf16::from_le_bytes([b[0], b[1]]).to_f32()
    }
}

impl FloatFormat for F8_E4M3 {
    const BYTES: usize = 1;
    const BLOCK: usize = 32;
    fn value(b: &[u8]) -> f32 {
        e4m3(b[0])
    }
}

/// Packs up to 16 rows (`raw`, `row_bytes` each) into blocks of `[16 scales][columns][16]`; missing rows stay zero.
#[inline(always)]
pub(super) fn pack_group<F: FloatFormat>(raw: &[u8], row_bytes: usize, out: &mut [u8]) {
    if raw.len() < GROUP * row_bytes {
        out.fill(0);
    }
    let file_bytes = F::SCALE_BYTES + F::BLOCK * F::BYTES;
    // Few enough columns at a time that all their rows stay in the nearest cache.
    let tile = (32 / F::BLOCK).max(1);
    for (t, out) in out.chunks_mut(tile * F::BLOCK_BYTES).enumerate() {
        let bytes = out.len() / F::BLOCK_BYTES * file_bytes;
        for (r, row) in raw.chunks_exact(row_bytes).enumerate() {
            let blocks = &row[t * tile * file_bytes..][..bytes];
            prefetch(blocks, GROUP * row_bytes);
            pack_row::<F>(blocks, r, out);
        }
    }
}

/// Some blocks of row `r`.
#[inline(always)]
fn pack_row<F: FloatFormat>(blocks: &[u8], r: usize, out: &mut [u8]) {
    let file_bytes = F::SCALE_BYTES + F::BLOCK * F::BYTES;
    for (block, out) in blocks.chunks_exact(file_bytes).zip(out.chunks_exact_mut(F::BLOCK_BYTES)) {
        let (scale, numbers) = block.split_at(F::SCALE_BYTES);
        let (scales, columns) = out.split_at_mut(GROUP * F::SCALE_BYTES);
        scales[r * F::SCALE_BYTES..][..F::SCALE_BYTES].copy_from_slice(scale);
        for (number, to) in numbers.chunks_exact(F::BYTES).zip(columns.chunks_exact_mut(GROUP * F::BYTES)) {
            to[r * F::BYTES..][..F::BYTES].copy_from_slice(number);
        }
    }
}
