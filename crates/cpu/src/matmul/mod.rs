//! Matrix products `y[row][o] = sum_c weight[o][c] * x[row][c]` from packed weights.
//!
//! In: a [`Job`] (packed weight, activation rows, output rows) and a range of 16-row groups of outputs. Out:
//! f32 outputs. Float weights take f32 rows, quantised weights take `Q8` rows (`quantize`). How groups are
//! shared among threads is the caller's business; packing is in `pack`.
//!
//! # The definition
//! Every output has ONE order of operations, whatever the number of rows, their order, the ranges of groups,
//! the thread or the instruction set, so results are equal bit for bit.
//!
//! *Quantised weights*, for each block of 32 columns in ascending order, with integers exact in i32
//! (all below 2^24, so their conversion to f32 is exact too):
//! ```text
//! acc = fma(scale_w * scale_x,  sum(factor_16 * code_w * code_x), acc)
//! acc = fma(-min_w, scale_x * sum(code_x), acc)                               formats with minima
//! acc = fma(-(min_w * scale_x), sum(min_factor_16 * sum_16(code_x)), acc)     those with a factor of 16 columns instead
//! ```
//! `scale_w` is the f32 product of the block's f16 scale and its factor (exact); factors of 16 columns
//! stay integers, inside of the sum; `min_w` likewise. The quantiser has rounded `scale_x * sum(code_x)` to f32.
//!
//! *Float weights*: two accumulators, column `c` goes to number `c % 2` by fma in ascending order; the output is
//! `a0 + a1`. Where blocks have a scale, a weight is its product with the scale, rounded to
//! f32: what `decode_row` gives.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::ops::Range;

use minfer_format::BlockType;

use crate::isa::Isa;
use crate::pack::{GROUP, with_format};
use crate::quantize::q8_row_bytes;

/// One row of a product: which activation row is read, which output row is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPair {
    /// Index of the activation row.
    pub x: u32,
    /// Index of the output row.
    pub y: u32,
}

/// The rows of a product.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// Activation row `i` gives output row `i`, for `0..count`.
    All(usize),
    /// These pairs: an expert's rows are gathered and its results scattered. Output rows differ.
    Pairs(&'a [RowPair]),
}

impl Rows<'_> {
    /// Number of rows.
    pub fn len(&self) -> usize {
        match self {
            Rows::All(count) => *count,
            Rows::Pairs(pairs) => pairs.len(),
        }
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline(always)]
    fn pair(&self, i: usize) -> (usize, usize) {
        match self {
            Rows::All(_) => (i, i),
            Rows::Pairs(pairs) => (pairs[i].x as usize, pairs[i].y as usize),
        }
    }
}

/// A product: one packed weight, some activation rows, the same number of output rows.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// Columns of the weight: numbers in an activation row.
    pub k: usize,
    /// Rows of the weight: numbers written to an output row.
    pub n: usize,
    /// Packed weight, group 0 (no alignment needed, 64 is best).
    pub weights: *const u8,
    /// Activation row 0: [`x_row_bytes`] bytes a row.
    pub x: *const u8,
    /// Bytes from one activation row to the next.
    pub x_stride: usize,
    /// Output row 0, aligned to 4.
    pub y: *mut f32,
    /// Bytes from one output row to the next, a multiple of 4.
    pub y_stride: usize,
    /// Which rows.
    pub rows: Rows<'a>,
}

// SAFETY: a job only describes memory; who calls a kernel with it promises that the memory may be used.
unsafe impl Send for Job<'_> {}
// SAFETY: as above.
unsafe impl Sync for Job<'_> {}

impl Job<'_> {
    /// Activation and output row of pair `i`.
    ///
    /// # Safety
    /// `i` is below the number of rows, and the job's pointers hold what its fields say.
    #[inline(always)]
    unsafe fn row(&self, i: usize) -> (*const u8, *mut f32) {
        let (x, y) = self.rows.pair(i);
        // SAFETY: both rows exist by the caller's promise.
        unsafe { (self.x.add(x * self.x_stride), self.y.byte_add(y * self.y_stride)) }
    }

    /// Outputs that group `group` has: 16, fewer in the last one.
    #[inline(always)]
    fn outputs(&self, group: usize) -> usize {
        GROUP.min(self.n - GROUP * group)
    }
}

/// Computes the outputs of 16-row groups `groups` (within `0..n.div_ceil(16)`) for all rows of the job.
///
/// # Safety
/// * The machine has the instruction set that the function was selected for.
/// * `weights` is a packed weight of `n` x `k` numbers of the type that the function was selected for.
/// * Every activation row of the job is readable, and quantised rows have codes in `-127..=127`, which is what
///   the quantiser writes; every output row is writable for `n` numbers, and nobody else uses the columns
///   `16 * groups.start .. 16 * groups.end` of these rows meanwhile.
pub type MatmulFn = unsafe fn(job: &Job<'_>, groups: Range<usize>);

/// Bytes of an activation row of `k` numbers for this type of weight.
pub const fn x_row_bytes(ty: BlockType, k: usize) -> usize {
    if ty.is_quantized() { q8_row_bytes(k) } else { 4 * k }
}

/// The kernel for weights of type `ty`; every instruction set gives the same bits.
pub fn select(ty: BlockType, isa: Isa) -> MatmulFn {
    match isa {
        Isa::Scalar => with_format!(ty, quant F => scalar::quant::<F>, float F => scalar::float::<F>),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => with_format!(ty, quant F => avx2::quant::<F>, float F => avx2::float::<F>),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => with_format!(ty, quant F => avx512::quant::<F>, float F => avx512::float::<F>),
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => with_format!(ty, quant F => avx512::amx::quant::<F>, float F => avx512::float::<F>),
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => select(ty, Isa::Scalar),
    }
}
