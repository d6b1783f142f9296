//! The matrix product in plain Rust: the definition that every other kernel equals bit for bit.

use std::ops::Range;

use half::f16;

use super::Job;
use crate::pack::layout::*;
use crate::pack::{FloatFormat, Format, GROUP};
use crate::quantize::q8_row_bytes;

/// 32 columns of one row of a quantised weight: `value = scale * factor * code - min * min_factor`.
struct RowBlock {
    codes: [i32; BLOCK],
    scale: f32,
    min: f32,
    /// Of the first and of the last 16 columns.
    factors: [i32; 2],
    min_factors: [i32; 2],
}

/// Products with quantised weights. See [`super::MatmulFn`].
///
/// # Safety
/// As [`super::MatmulFn`].
pub(super) unsafe fn quant<F: Format>(job: &Job<'_>, groups: Range<usize>) {
    let group_bytes = job.k / (BLOCK * F::BLOCKS_PER_HEAD) * F::BLOCK_BYTES;
    for group in groups {
        // SAFETY: the weight has this group.
        let weights =
            unsafe { std::slice::from_raw_parts(job.weights.add(group * group_bytes), group_bytes) };
        for i in 0..job.rows.len() {
            // SAFETY: the job has row `i`.
            let (x, y) = unsafe { job.row(i) };
            // SAFETY: an activation row has this many bytes.
            let x = unsafe { std::slice::from_raw_parts(x, q8_row_bytes(job.k)) };
            for r in 0..job.outputs(group) {
                // SAFETY: the output row has `n` numbers.
                unsafe { *y.add(GROUP * group + r) = quant_dot::<F>(weights, r, x, job.k) };
            }
        }
    }
}

/// Row `r` of a group times an activation row.
fn quant_dot<F: Format>(group: &[u8], r: usize, x: &[u8], k: usize) -> f32 {
    let (codes, rest) = x.split_at(k);
    let (scales, rest) = rest.split_at(k / 8);
    let (sums, scaled_sums) = rest.split_at(k / 8);
    let per_head = F::BLOCKS_PER_HEAD;
    let mut acc = 0f32;
    for b in 0..k / BLOCK {
        let block = &group[b / per_head * F::BLOCK_BYTES..][..F::BLOCK_BYTES];
        let w = row_block::<F>(block, b % per_head, r);
        let x_scale = native(scales, b);
        let (mut dot, mut min_dot) = (0, 0);
        for half in 0..2 {
            let columns = 16 * half..16 * half + 16;
            let products = columns.map(|c| w.codes[c] * i32::from(codes[BLOCK * b + c] as i8));
            dot += w.factors[half] * products.sum::<i32>();
            let sum = i16::from_ne_bytes([sums[4 * b + 2 * half], sums[4 * b + 2 * half + 1]]);
            min_dot += w.min_factors[half] * i32::from(sum);
        }
        acc = (w.scale * x_scale).mul_add(dot as f32, acc);
        match F::MINIMA {
            Minima::None => {}
            Minima::Blocks => acc = (-w.min).mul_add(native(scaled_sums, b), acc),
            Minima::Halves => acc = (-(w.min * x_scale)).mul_add(min_dot as f32, acc),
        }
    }
    acc
}

/// Takes apart the `i`-th 32 columns of row `r` in the group's bytes of one file block.
fn row_block<F: Format>(block: &[u8], i: usize, r: usize) -> RowBlock {
    let (head, bodies) = block.split_at(F::HEAD_BYTES);
    let (sub, codes) = bodies[F::BODY_BYTES * i..][..F::BODY_BYTES].split_at(F::SUB_BYTES);
    let half = |at: usize| f16::from_le_bytes([head[2 * at], head[2 * at + 1]]).to_f32();
    let (mut scale, mut min) = match F::HEAD {
        Head::Scale => (half(r), 0.0),
        Head::ScaleMin => (half(r), half(GROUP + r)),
        Head::WideScaleMin => (single(head, r), single(head, GROUP + r)),
        Head::Exponent => (half_exponent(head[r]), 0.0),
    };
    let (mut factors, mut min_factors) = ([1; 2], [1; 2]);
    match F::SUB {
        Sub::None => {}
        Sub::Scale => scale *= f32::from(sub[r] as i8),
        Sub::ScaleMin => {
            scale *= f32::from(sub[r]);
            min *= f32::from(sub[GROUP + r]);
        }
        Sub::Pair => factors = [i32::from(sub[2 * r] as i8), i32::from(sub[2 * r + 1] as i8)],
        Sub::PairMin => {
            factors = [i32::from(sub[2 * r] & 15), i32::from(sub[2 * r + 1] & 15)];
            min_factors = [i32::from(sub[2 * r] >> 4), i32::from(sub[2 * r + 1] >> 4)];
        }
    }
    let codes = std::array::from_fn(|c| code_value::<F>(stored_code::<F>(codes, r, c)));
    RowBlock { codes, scale, min, factors, min_factors }
}

/// The `i`-th f32 of a weight.
fn single(bytes: &[u8], i: usize) -> f32 {
    f32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
}

/// The `i`-th f32 of an activation row.
fn native(bytes: &[u8], i: usize) -> f32 {
    f32::from_ne_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
}

/// The bits of column `c`'s code, gathered from the planes.
fn stored_code<F: Format>(codes: &[u8], r: usize, c: usize) -> u8 {
    let low = F::LOW_BITS;
    let (high_plane, low_plane) = codes.split_at(F::HIGH_BYTES);
    let field = |plane: &[u8], bits: usize| {
        let (vector, shift) = place(bits, c / 4);
        (plane[VECTOR * vector + 4 * r + c % 4] >> shift) & ((1u16 << bits) - 1) as u8
    };
    let mut code = field(low_plane, low);
    if F::BITS > low {
        code |= field(high_plane, F::BITS - low) << low;
    }
    code
}

fn code_value<F: Format>(code: u8) -> i32 {
    match F::CODES {
        Codes::Signed => i32::from(code as i8),
        Codes::SignedOffset(offset) => i32::from(code as i8) + i32::from(offset),
        Codes::Offset(offset) => i32::from(code) - i32::from(offset),
        Codes::SignedTable(table) => i32::from(table[usize::from(code)]),
        Codes::OffsetTable(table, offset) => i32::from(table[usize::from(code)]) - i32::from(offset),
    }
}

/// `2^(e - 128)` as f32 for an E8M0 exponent; the two smallest are subnormal.
pub(super) fn half_exponent(e: u8) -> f32 {
    let bits = if e < 2 { 0x0020_0000 << e } else { (u32::from(e) - 1) << 23 };
    f32::from_bits(bits)
}

/// Products with float weights. See [`super::MatmulFn`].
///
/// # Safety
/// As [`super::MatmulFn`].
pub(super) unsafe fn float<F: FloatFormat>(job: &Job<'_>, groups: Range<usize>) {
    let group_bytes = job.k / F::BLOCK * F::BLOCK_BYTES;
    for group in groups {
        // SAFETY: the weight has this group.
        let weights =
            unsafe { std::slice::from_raw_parts(job.weights.add(group * group_bytes), group_bytes) };
        for i in 0..job.rows.len() {
            // SAFETY: the job has row `i`.
            let (x, y) = unsafe { job.row(i) };
            // SAFETY: an activation row has this many bytes.
            let x = unsafe { std::slice::from_raw_parts(x, 4 * job.k) };
            for r in 0..job.outputs(group) {
                // SAFETY: the output row has `n` numbers.
                unsafe { *y.add(GROUP * group + r) = float_dot::<F>(weights, r, x) };
            }
        }
    }
}

/// Row `r` of a group times an activation row.
fn float_dot<F: FloatFormat>(group: &[u8], r: usize, x: &[u8]) -> f32 {
    let mut acc = [0f32; 2];
    let blocks = group.chunks_exact(F::BLOCK_BYTES).zip(x.chunks_exact(4 * F::BLOCK));
    for (b, (block, x)) in blocks.enumerate() {
        let (scales, columns) = block.split_at(GROUP * F::SCALE_BYTES);
        for (c, (column, x)) in columns.chunks_exact(GROUP * F::BYTES).zip(x.chunks_exact(4)).enumerate() {
            let (c, x) = (F::BLOCK * b + c, f32::from_ne_bytes([x[0], x[1], x[2], x[3]]));
            let mut w = F::value(&column[F::BYTES * r..]);
            if F::SCALE_BYTES > 0 {
                w *= single(scales, r);
            }
            acc[c % 2] = w.mul_add(x, acc[c % 2]);
        }
    }
    acc[0] + acc[1]
}
