//! The same product with AMX tiles where 16 rows come together; bit for bit the scalar definition.
//!
//! A tile multiplies 16 activation rows with the 16 outputs of a group, 32 columns at a time, because these share a
//! scale: a packed block is the right operand as it lies once its codes are unpacked, and the activation rows are the
//! left one. The sums of a long row rest in the output between chunks of blocks. The integers go through memory to the vector registers, where scales and minima are the affair of
//! `quant`. Other numbers of rows take the AVX-512 kernel.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::quant::{add_dot, offset_dot, sums, weigh};
use super::unpack::{Scales, head, offset, unpack};
use super::{load_rows, quant_rows, store_rows};
use crate::matmul::Job;
use crate::matmul::tiles::{rows_together, tile_rows};
use crate::pack::Format;
use crate::pack::layout::*;
use crate::quantize::q8_row_bytes;

/// Activation rows of a tile, the most that the hardware has.
const ROWS: usize = 16;

/// Products with quantised weights. See [`crate::matmul::MatmulFn`].
///
/// # Safety
/// As [`crate::matmul::MatmulFn`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(in crate::matmul) unsafe fn quant<F: Format>(job: &Job<'_>, groups: Range<usize>) {
    let count = job.rows.len();
    if count < ROWS {
        // SAFETY: the caller's promise.
        return unsafe { super::quant::<F>(job, groups) };
    }
    let group_bytes = job.k / (BLOCK * F::BLOCKS_PER_HEAD) * F::BLOCK_BYTES;
    let tile_rows = tile_rows(q8_row_bytes(job.k), ROWS);
    // SAFETY: the caller's promise, and this function has the instruction sets that the rest uses.
    unsafe {
        configure(if F::SUB.is_pair() { BLOCK / 2 } else { BLOCK });
        for start in (0..count).step_by(tile_rows) {
            let end = count.min(start + tile_rows);
            let whole = start + (end - start) / ROWS * ROWS;
            for group in groups.clone() {
                let weights = job.weights.add(group * group_bytes);
                group_with_tiles::<F>(job, weights, group, start..whole);
                let mut row = whole;
                while row < end {
                    let rows = rows_together(end - row, 8);
                    match rows {
                        8 => quant_rows::<F, 8>(job, weights, group, row),
                        4 => quant_rows::<F, 4>(job, weights, group, row),
                        2 => quant_rows::<F, 2>(job, weights, group, row),
                        _ => quant_rows::<F, 1>(job, weights, group, row),
                    }
                    row += rows;
                }
            }
        }
        asm!("tilerelease", options(nostack, nomem));
    }
}

/// What `ldtilecfg` reads: palette 1 (Intel SDM, volume 1, chapter 18).
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Tiles 0 and 3: sums of 16 rows and 16 outputs; 1 and 4: `columns` codes of 16 activation rows; 2 and 5: those of the
/// weights, 4 columns of 16 outputs in a tile row.
///
/// # Safety
/// The machine has AMX, and the system allows its use.
unsafe fn configure(columns: usize) {
    let mut config =
        TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    for first in [0, 3] {
        config.row_bytes[first..first + 3].copy_from_slice(&[64, columns as u16, 64]);
        config.rows[first..first + 3].copy_from_slice(&[ROWS as u8, ROWS as u8, (columns / 4) as u8]);
    }
    // SAFETY: the configuration is 64 bytes and valid; nobody else uses tiles.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) }
}

/// Blocks of a group that are unpacked together and then used for all rows of a tile: 26 KiB. What a vector register
/// stores is ready for a tile only when it has reached the cache, so unpacking block by block would wait each time.
const CHUNK: usize = 32;

/// Blocks whose integers are under way: for the same reason the vector registers work on a block while tiles work on the
/// next ones.
const PENDING: usize = 4;

/// Integers of 16 outputs for each row.
type Dots = [__m512i; ROWS];

/// Unsigned codes of 32 columns, 4 columns of 16 outputs in each.
type Codes = [__m512i; 8];

/// Some unpacked blocks.
struct Unpacked {
    codes: [MaybeUninit<Codes>; CHUNK],
    scales: [MaybeUninit<Scales>; CHUNK],
}

/// One group with rows `rows`, whole tiles of them.
///
/// # Safety
/// As [`crate::matmul::MatmulFn`]; rows and group exist; `weights` are the group's; the tiles are configured.
#[inline(always)]
unsafe fn group_with_tiles<F: Format>(job: &Job<'_>, weights: *const u8, group: usize, rows: Range<usize>) {
    let mut chunk =
        Unpacked { codes: [const { MaybeUninit::uninit() }; CHUNK], scales: [MaybeUninit::uninit(); CHUNK] };
    let (mut p, blocks) = (weights, job.k / BLOCK);
    for first in (0..blocks).step_by(CHUNK) {
        let blocks = first..blocks.min(first + CHUNK);
        // SAFETY: a chunk is whole heads, and the group has these blocks; the rest is the caller's promise.
        unsafe {
            p = unpack_chunk::<F>(p, blocks.len(), &mut chunk);
            for row in rows.clone().step_by(ROWS) {
                tile_of_rows::<F>(job, &chunk, blocks.clone(), group, row);
            }
        }
    }
}

/// Unpacks `count` blocks and returns where the next ones begin.
///
/// # Safety
/// `p` points to `count` packed blocks, which are whole heads.
#[inline(always)]
unsafe fn unpack_chunk<F: Format>(mut p: *const u8, count: usize, chunk: &mut Unpacked) -> *const u8 {
    // SAFETY: the caller's promise.
    unsafe {
        let mut scales = (_mm512_setzero_ps(), _mm512_setzero_ps());
        for b in 0..count {
            if b % F::BLOCKS_PER_HEAD == 0 {
                scales = head::<F>(p);
                p = p.add(F::HEAD_BYTES);
            }
            let block = unpack::<F>(scales, p);
            chunk.codes[b].write(block.codes);
            chunk.scales[b].write(block.scales);
            p = p.add(F::BODY_BYTES);
        }
    }
    p
}

/// Adds the products of blocks `blocks` to the outputs of 16 rows; the first blocks begin them.
///
/// # Safety
/// As [`group_with_tiles`]; the chunk holds these blocks.
#[inline(always)]
unsafe fn tile_of_rows<F: Format>(
    job: &Job<'_>,
    chunk: &Unpacked,
    blocks: Range<usize>,
    group: usize,
    row: usize,
) {
    // SAFETY: the loops stay within the blocks; the rest is the caller's promise.
    unsafe {
        let rows: [_; ROWS] = std::array::from_fn(|r| job.row(row + r));
        let x = rows.map(|(x, _)| x);
        let mut acc = match blocks.start {
            0 => [_mm512_setzero_ps(); ROWS],
            _ => load_rows(job, group, rows.map(|(_, y)| y)),
        };
        let mut gathered = MaybeUninit::<[[u8; BLOCK * CHUNK]; ROWS]>::uninit();
        let (left, step) = match even_step(&x) {
            Some(step) => (x[0].add(BLOCK * blocks.start), step),
            None => {
                for (r, x) in x.iter().enumerate() {
                    let to = gathered.as_mut_ptr().cast::<u8>().add(BLOCK * CHUNK * r);
                    std::ptr::copy_nonoverlapping(x.add(BLOCK * blocks.start), to, BLOCK * blocks.len());
                }
                (gathered.as_ptr().cast(), (BLOCK * CHUNK) as isize)
            }
        };
        let mut dots: [[MaybeUninit<Dots>; 2]; PENDING] =
            [const { [const { MaybeUninit::uninit() }; 2] }; PENDING];
        for b in 0..blocks.len() + PENDING - 1 {
            if b < blocks.len() {
                multiply::<F>(b, left.add(BLOCK * b), step, chunk.codes[b].as_ptr(), &mut dots[b % PENDING]);
            }
            if let Some(b) = b.checked_sub(PENDING - 1) {
                let (scales, dots) = (chunk.scales[b].assume_init_ref(), &dots[b % PENDING]);
                finish::<F>(scales, dots, &x, job.k, BLOCK * (blocks.start + b), &mut acc);
            }
        }
        store_rows(job, group, rows.map(|(_, y)| y), acc);
    }
}

/// Adds a block's integers to the sums of all rows.
///
/// # Safety
/// The integers are those of the same rows and column.
#[inline(always)]
unsafe fn finish<F: Format>(
    scales: &Scales,
    dots: &[MaybeUninit<Dots>; 2],
    x: &[*const u8; ROWS],
    k: usize,
    column: usize,
    acc: &mut [__m512; ROWS],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let offset = -offset::<F>();
        for r in 0..ROWS {
            let sums = sums(x[r], k, column);
            let dot = |d: usize| dots[d].as_ptr().cast::<__m512i>().add(r).read();
            let dot = if F::SUB.is_pair() {
                let first = _mm512_add_epi32(dot(0), offset_dot(sums, [offset, 0]));
                let last = _mm512_add_epi32(dot(1), offset_dot(sums, [0, offset]));
                weigh(scales, [first, last])
            } else {
                _mm512_add_epi32(dot(0), offset_dot(sums, [offset; 2]))
            };
            acc[r] = add_dot::<F>(scales, dot, sums, x[r], k, column, acc[r]);
        }
    }
}

/// Bytes from each row to the next, where these are the same.
fn even_step(x: &[*const u8; ROWS]) -> Option<isize> {
    let step = (x[1] as isize).wrapping_sub(x[0] as isize);
    let even = x.windows(2).all(|x| (x[1] as isize).wrapping_sub(x[0] as isize) == step);
    even.then_some(step)
}

/// `dots = x codes` with three tiles of the configuration.
macro_rules! tile_product {
    ($sums:tt, $left:tt, $right:tt, $x:expr, $step:expr, $codes:expr, $dots:expr) => {
        asm!(
            concat!("tilezero ", $sums),
            concat!("tileloadd ", $left, ", [{x} + {step}]"),
            concat!("tileloadd ", $right, ", [{codes} + {line}]"),
            concat!("tdpbsud ", $sums, ", ", $left, ", ", $right),
            concat!("tilestored [{dots} + {line}], ", $sums),
            x = in(reg) $x,
            step = in(reg) $step,
            codes = in(reg) $codes,
            line = in(reg) 64usize,
            dots = in(reg) $dots,
            out($sums) _, out($left) _, out($right) _,
            options(nostack)
        )
    };
}

/// Products of 32 columns, the `b`-th of a row: in one sum, or in two of 16 columns where these have factors of their
/// own. Neighbouring products use different tiles, so that they do not wait for each other.
///
/// # Safety
/// `x` points to 16 rows of 32 codes, `step` bytes apart; `codes` may be read; the tiles are configured
/// for `F`.
#[inline(always)]
unsafe fn multiply<F: Format>(
    b: usize,
    x: *const u8,
    step: isize,
    codes: *const Codes,
    dots: &mut [MaybeUninit<Dots>; 2],
) {
    let [first, last] = dots.each_mut().map(MaybeUninit::as_mut_ptr);
    // SAFETY: the caller's promise; codes and dots have the sizes that the tiles are configured for.
    unsafe {
        if F::SUB.is_pair() {
            tile_product!("tmm0", "tmm1", "tmm2", x, step, codes, first);
            let (x, codes) = (x.add(BLOCK / 2), &raw const (*codes)[4]);
            tile_product!("tmm3", "tmm4", "tmm5", x, step, codes, last);
        } else if b.is_multiple_of(2) {
            tile_product!("tmm0", "tmm1", "tmm2", x, step, codes, first);
        } else {
            tile_product!("tmm3", "tmm4", "tmm5", x, step, codes, first);
        }
    }
}
