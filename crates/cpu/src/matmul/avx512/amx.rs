//! The same product with AMX tiles where 16 rows come together; bit for bit the scalar definition.
//!
//! A tile multiplies 16 activation rows with the 16 outputs of a group, 32 columns at a time, because these share a
//! scale: a packed block is the right operand as it lies once its codes are unpacked, and the activation rows are the
//! left one. The integers go through memory to the vector registers, where scales and minima are the affair of
//! `quant`. Other numbers of rows take the AVX-512 kernel.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::quant::{add_dot, offset_dot, sums, weigh};
use super::unpack::{Block, Scales, head, offset, unpack};
use super::{quant_rows, store_rows};
use crate::matmul::Job;
use crate::matmul::tiles::for_tiles;
use crate::pack::layout::*;
use crate::pack::{Format, GROUP};
use crate::quantize::q8_row_bytes;

/// Activation rows of a tile, the most that the hardware has.
const ROWS: usize = 16;

/// Products with quantised weights. See [`crate::matmul::MatmulFn`].
///
/// # Safety
/// As [`crate::matmul::MatmulFn`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(in crate::matmul) unsafe fn quant<F: Format>(job: &Job<'_>, groups: Range<usize>) {
    let group_bytes = job.k / (BLOCK * F::BLOCKS_PER_HEAD) * F::BLOCK_BYTES;
    let tiles = job.rows.len() >= ROWS;
    // SAFETY: the caller's promise, and this function has the instruction sets that the tiles use.
    unsafe {
        if tiles {
            configure(if F::SUB.is_pair() { BLOCK / 2 } else { BLOCK });
        }
        for_tiles(
            job,
            groups,
            ROWS,
            q8_row_bytes(job.k),
            group_bytes,
            |weights, group, row, rows| match rows {
                ROWS => tile_rows::<F>(job, weights, group, row),
                8 => quant_rows::<F, 8>(job, weights, group, row),
                4 => quant_rows::<F, 4>(job, weights, group, row),
                2 => quant_rows::<F, 2>(job, weights, group, row),
                _ => quant_rows::<F, 1>(job, weights, group, row),
            },
        );
        if tiles {
            asm!("tilerelease", options(nostack, nomem));
        }
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

/// Integers of 16 rows and 16 outputs.
#[repr(align(64))]
struct Dots([[i32; GROUP]; ROWS]);

/// Unsigned codes of 32 columns.
#[repr(align(64))]
struct Codes([[u8; VECTOR]; 8]);

/// Blocks whose integers are under way: the vector registers work on a block while tiles work on the next ones, since
/// what a tile stores is readable only some hundred cycles later.
const PENDING: usize = 4;

/// A block between the tiles and the vector registers.
struct Pending {
    codes: Codes,
    dots: [Dots; 2],
    scales: Scales,
}

/// # Safety
/// As [`crate::matmul::MatmulFn`]; rows `row .. row + 16` and the group exist; `weights` are the group's; the tiles are
/// configured.
#[inline(always)]
unsafe fn tile_rows<F: Format>(job: &Job<'_>, weights: *const u8, group: usize, row: usize) {
    // SAFETY: the loops stay within `k` columns; the rest is the caller's promise.
    unsafe {
        let rows: [_; ROWS] = std::array::from_fn(|r| job.row(row + r));
        let x = rows.map(|(x, _)| x);
        let step = even_step(&x);
        let mut acc = [_mm512_setzero_ps(); ROWS];
        let mut pending: [MaybeUninit<Pending>; PENDING] = [const { MaybeUninit::uninit() }; PENDING];
        let (mut p, blocks) = (weights, job.k / BLOCK);
        let mut scales = (_mm512_setzero_ps(), _mm512_setzero_ps());
        for b in 0..blocks + PENDING - 1 {
            if b < blocks {
                if b % F::BLOCKS_PER_HEAD == 0 {
                    scales = head::<F>(p);
                    p = p.add(F::HEAD_BYTES);
                }
                start::<F>(unpack::<F>(scales, p), &x, step, BLOCK * b, pending[b % PENDING].as_mut_ptr());
                p = p.add(F::BODY_BYTES);
            }
            if let Some(b) = b.checked_sub(PENDING - 1) {
                // Started PENDING - 1 turns ago, so every field is written.
                finish::<F>(pending[b % PENDING].as_ptr(), &x, job.k, BLOCK * b, &mut acc);
            }
        }
        store_rows(job, group, rows.map(|(_, y)| y), acc);
    }
}

/// Hands a block to the tiles.
///
/// # Safety
/// `x` are rows of at least `column + 32` codes, `step` bytes apart if there is one; the tiles are configured for `F`.
#[inline(always)]
unsafe fn start<F: Format>(
    block: Block,
    x: &[*const u8; ROWS],
    step: Option<isize>,
    column: usize,
    pending: *mut Pending,
) {
    // SAFETY: the caller's promise; only whole fields are written.
    unsafe {
        let codes = &raw mut (*pending).codes;
        for (g, block) in block.codes.iter().enumerate() {
            _mm512_store_si512((&raw mut (*codes).0[g]).cast(), *block);
        }
        (&raw mut (*pending).scales).write(block.scales);
        let dots = &raw mut (*pending).dots;
        match step {
            Some(step) => multiply::<F>(x[0].add(column), step, codes, dots),
            None => {
                let mut gathered = [[0u8; BLOCK]; ROWS];
                for (to, x) in gathered.iter_mut().zip(x) {
                    std::ptr::copy_nonoverlapping(x.add(column), to.as_mut_ptr(), BLOCK);
                }
                multiply::<F>(gathered.as_ptr().cast(), BLOCK as isize, codes, dots);
            }
        }
    }
}

/// Adds a block's integers to the sums of all rows.
///
/// # Safety
/// `pending` was started with the same rows and column.
#[inline(always)]
unsafe fn finish<F: Format>(
    pending: *const Pending,
    x: &[*const u8; ROWS],
    k: usize,
    column: usize,
    acc: &mut [__m512; ROWS],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let scales = &(*pending).scales;
        let offset = -offset::<F>();
        for r in 0..ROWS {
            let sums = sums(x[r], k, column);
            let dot = |d: usize| _mm512_load_si512((&raw const (*pending).dots[d].0[r]).cast());
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

/// Products of 32 columns: in one sum, or in two of 16 columns where these have factors of their own.
///
/// # Safety
/// `x` points to 16 rows of 32 codes, `step` bytes apart; `codes` may be read, `dots` written; the tiles are configured
/// for `F`.
#[inline(always)]
unsafe fn multiply<F: Format>(x: *const u8, step: isize, codes: *const Codes, dots: *mut [Dots; 2]) {
    // SAFETY: the caller's promise; codes and dots have the sizes that the tiles are configured for.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tileloadd tmm1, [{x} + {step}]",
            "tileloadd tmm2, [{codes} + {line}]",
            "tdpbsud tmm0, tmm1, tmm2",
            "tilestored [{dots} + {line}], tmm0",
            x = in(reg) x,
            step = in(reg) step,
            codes = in(reg) &raw const (*codes).0,
            line = in(reg) 64usize,
            dots = in(reg) &raw mut (*dots)[0],
            out("tmm0") _, out("tmm1") _, out("tmm2") _,
            options(nostack)
        );
        if F::SUB.is_pair() {
            asm!(
                "tilezero tmm3",
                "tileloadd tmm4, [{x} + {step}]",
                "tileloadd tmm5, [{codes} + {line}]",
                "tdpbsud tmm3, tmm4, tmm5",
                "tilestored [{dots} + {line}], tmm3",
                x = in(reg) x.add(BLOCK / 2),
                step = in(reg) step,
                codes = in(reg) &raw const (*codes).0[4],
                line = in(reg) 64usize,
                dots = in(reg) &raw mut (*dots)[1],
                out("tmm3") _, out("tmm4") _, out("tmm5") _,
                options(nostack)
            );
        }
    }
}
