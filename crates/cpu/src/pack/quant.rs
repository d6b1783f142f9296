//! Packing of quantised formats: one loop for all of them.

use super::layout::*;
use super::{Format, GROUP};

/// Packs up to 16 rows (`raw`, `row_bytes` each); missing rows stay zero.
pub(super) fn pack_group<F: Format>(raw: &[u8], row_bytes: usize, out: &mut [u8]) {
    out.fill(0);
    let mut block = FileBlock::new();
    let file_bytes = F::TYPE.block_bytes();
    for (b, out) in out.chunks_exact_mut(F::BLOCK_BYTES).enumerate() {
        for (r, row) in raw.chunks_exact(row_bytes).enumerate() {
            F::read(&row[b * file_bytes..][..file_bytes], &mut block);
            let (head, bodies) = out.split_at_mut(F::HEAD_BYTES);
            put_head::<F>(&block, r, head);
            for (i, body) in bodies.chunks_exact_mut(F::BODY_BYTES).enumerate() {
                let (sub, codes) = body.split_at_mut(F::SUB_BYTES);
                put_sub::<F>(block.sub[i], r, sub);
                put_codes::<F>(&block.codes[BLOCK * i..][..BLOCK], r, codes);
            }
        }
    }
}

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

fn put_codes<F: Format>(codes: &[u8], r: usize, out: &mut [u8]) {
    let low = F::LOW_BITS;
    let (high_plane, low_plane) = out.split_at_mut(F::HIGH_BYTES);
    put_plane(codes, low, 0, r, low_plane);
    if F::BITS > low {
        put_plane(codes, F::BITS - low, low, r, high_plane);
    }
}

/// Writes bits `from .. from + bits` of each code.
#[inline(always)]
fn put_plane(codes: &[u8], bits: usize, from: usize, r: usize, plane: &mut [u8]) {
    let mask = ((1u16 << bits) - 1) as u8;
    for (g, four) in codes.chunks_exact(4).enumerate() {
        let (vector, shift) = place(bits, g);
        let to = &mut plane[VECTOR * vector + 4 * r..][..4];
        for (to, code) in to.iter_mut().zip(four) {
            *to |= ((code >> from) & mask) << shift;
        }
    }
}
