//! Formats that store every number by itself: packing is a transposition of 8 rows.

use half::{bf16, f16};

use super::GROUP;

/// A storage format of single numbers.
pub(crate) trait FloatFormat {
    /// Bytes of a number.
    const BYTES: usize;

    /// The number at the start of `bytes` (little endian), exactly.
    fn value(bytes: &[u8]) -> f32;
}

pub(crate) struct F32;
pub(crate) struct F16;
pub(crate) struct BF16;

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

/// Packs up to 8 rows (`raw`, `row_bytes` each) into `[k][8]`; missing rows stay zero.
pub(super) fn pack_group<F: FloatFormat>(raw: &[u8], row_bytes: usize, out: &mut [u8]) {
    out.fill(0);
    for (r, row) in raw.chunks_exact(row_bytes).enumerate() {
        for (number, to) in row.chunks_exact(F::BYTES).zip(out.chunks_exact_mut(GROUP * F::BYTES)) {
            to[r * F::BYTES..][..F::BYTES].copy_from_slice(number);
        }
    }
}
