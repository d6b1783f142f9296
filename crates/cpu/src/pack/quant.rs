//! Packing of quantised formats: one loop for all of them.

use super::layout::*;
use super::{Format, GROUP, prefetch};

/// Packs up to 16 rows (`raw`, `row_bytes` each); missing rows stay zero.
#[inline(always)]
pub(super) fn pack_group<F: Format>(raw: &[u8], row_bytes: usize, out: &mut [u8]) {
    if raw.len() < GROUP * row_bytes {
        out.fill(0);
    }
    let mut block = FileBlock::new();
    let file_bytes = F::TYPE.block_bytes();
    for (b, out) in out.chunks_exact_mut(F::BLOCK_BYTES).enumerate() {
        for (r, row) in raw.chunks_exact(row_bytes).enumerate() {
            let file_block = &row[b * file_bytes..][..file_bytes];
            prefetch(file_block, GROUP * row_bytes);
            F::read(file_block, &mut block);
            let (head, bodies) = out.split_at_mut(F::HEAD_BYTES);
            put_head::<F>(&block, r, head);
            for (i, body) in bodies.chunks_exact_mut(F::BODY_BYTES).enumerate() {
                let (sub, codes) = body.split_at_mut(F::SUB_BYTES);
                put_sub::<F>(block.sub[i], r, sub);
                put_codes::<F>(&block.codes.as_chunks().0[i], r, codes);
            }
        }
    }
}

#[inline(always)]
fn put_head<F: Format>(block: &FileBlock, r: usize, head: &mut [u8]) {
    match F::HEAD {
        Head::Exponent => head[r] = block.scale[0],
        Head::Scale => head[2 * r..][..2].copy_from_slice(&block.scale[..2]),
        Head::ScaleMin => {
            head[2 * r..][..2].copy_from_slice(&block.scale[..2]);
            head[2 * (GROUP + r)..][..2].copy_from_slice(&block.min[..2]);
        }
        Head::WideScaleMin => {
            head[4 * r..][..4].copy_from_slice(&block.scale);
            head[4 * (GROUP + r)..][..4].copy_from_slice(&block.min);
        }
    }
}

/// Factors of minima follow those of scales, so that 16 bytes are the factors of 16 rows; pairs stay together.
#[inline(always)]
fn put_sub<F: Format>(sub: [u8; 2], r: usize, out: &mut [u8]) {
    match F::SUB {
        Sub::None => {}
        Sub::Scale => out[r] = sub[0],
        Sub::ScaleMin => {
            out[r] = sub[0];
            out[GROUP + r] = sub[1];
        }
        Sub::Pair | Sub::PairMin => out[2 * r..][..2].copy_from_slice(&sub),
    }
}

#[inline(always)]
fn put_codes<F: Format>(codes: &[u32; BLOCK / 4], r: usize, out: &mut [u8]) {
    let low = F::LOW_BITS;
    let (high_plane, low_plane) = out.split_at_mut(F::HIGH_BYTES);
    put_plane(codes, low, 0, r, low_plane);
    if F::BITS > low {
        put_plane(codes, F::BITS - low, low, r, high_plane);
    }
}

/// Writes bits `from .. from + bits` of each code; four columns stay together.
#[inline(always)]
fn put_plane(codes: &[u32; BLOCK / 4], bits: usize, from: usize, r: usize, plane: &mut [u8]) {
    let mask = four(((1u16 << bits) - 1) as u8);
    let mut out = [0u32; BLOCK / 4];
    for (g, code) in codes.iter().enumerate() {
        let (vector, shift) = place(bits, g);
        out[vector] |= (code >> from & mask) << shift;
    }
    for (word, vector) in out.iter().zip(plane.chunks_exact_mut(VECTOR)) {
        vector[4 * r..][..4].copy_from_slice(&word.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pack::{group_bytes, with_format};
    use minfer_format::BlockType;

    /// A plane as the layout says it, code by code.
    fn plane_by_definition(codes: &[u8], bits: usize, from: usize, r: usize, plane: &mut [u8]) {
        let mask = ((1u16 << bits) - 1) as u8;
        for (column, code) in codes.iter().enumerate() {
            let (vector, shift) = place(bits, column / 4);
            plane[VECTOR * vector + 4 * r + column % 4] |= ((code >> from) & mask) << shift;
        }
    }

    proptest! {
        /// Reference: the definition above. Tolerance: none.
        #[test]
        fn planes_are_as_defined(codes in proptest::array::uniform32(any::<u8>()), r in 0..GROUP) {
            let mut fours = [0; 8];
            fours.iter_mut().zip(words(&codes)).for_each(|(to, word)| *to = word);
            for (bits, from) in [(8, 0), (4, 0), (2, 0), (2, 4), (1, 4), (1, 2)] {
                let (mut got, mut expected) = ([0; 8 * VECTOR], [0; 8 * VECTOR]);
                put_plane(&fours, bits, from, r, &mut got[..bits * VECTOR]);
                plane_by_definition(&codes, bits, from, r, &mut expected[..bits * VECTOR]);
                prop_assert_eq!(&got[..], &expected[..], "{} bits from {}", bits, from);
            }
        }
    }

    /// What memory held before does not matter, and missing rows are zero. Reference: packing into zeros.
    #[test]
    fn old_bytes_leave_no_trace() {
        for ty in BlockType::all() {
            let (k, rows) = (256, [GROUP, 5]);
            let row_bytes = ty.row_bytes(k).unwrap();
            for rows in rows {
                let raw: Vec<u8> = (0..rows * row_bytes).map(|i| (i * 37 + 11) as u8).collect();
                let [clean, dirty] = [0u8, 0xff].map(|old| {
                    let mut out = vec![old; group_bytes(ty, k).unwrap()];
                    with_format!(ty,
                        quant F => pack_group::<F>(&raw, row_bytes, &mut out),
                        float F => crate::pack::float::pack_group::<F>(&raw, row_bytes, &mut out));
                    out
                });
                assert_eq!(clean, dirty, "{ty}, {rows} rows");
            }
        }
    }
}
