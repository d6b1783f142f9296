//! Weights as the matrix kernels read them: groups of 16 output rows, interleaved into one sequential stream.
//!
//! In: the bytes of a weight as they stand in a file (`n` rows of `k` numbers). Out: the same integers and
//! scales in another order, so that one 512-bit load holds 4 consecutive columns of 16 rows (two of 256 bits hold 8 rows
//! each), activations are broadcast 4 at a time, and no horizontal sums are needed. Nothing is requantised. The products are in
//! `matmul`; where the bytes come from and who packs in parallel is the caller's business.
//!
//! A stream of one group, for `k` numbers a row (the sizes are in `layout`):
//! * float formats: `[k][16 rows]` numbers as in the file; those with scales, per file block `[scales of 16 rows]` first;
//! * quantised formats: per file block `[head of 16 rows]`, then per 32 columns `[sub-scales of 16 rows][codes]`.
//!
//! Rows past `n` in the last group are all zero bytes.

mod buffer;
#[allow(non_camel_case_types)]
mod float;
#[allow(non_camel_case_types)]
mod formats;
#[allow(non_camel_case_types)]
mod formats_k;
pub(crate) mod layout;
mod quant;

use std::ops::Range;

use minfer_format::BlockType;

pub use buffer::AlignedBytes;
pub(crate) use buffer::Region;
pub(crate) use float::FloatFormat;
pub(crate) use layout::Format;

/// Output rows that are interleaved.
pub const GROUP: usize = 16;

/// Evaluates one of two expressions with the format's type bound to a name: the one table from
/// [`BlockType`] to code. A new format is a line here and an `impl`.
macro_rules! with_format {
    ($ty:expr, quant $F:ident => $quant:expr, float $G:ident => $float:expr) => {
        $crate::pack::with_format!(@match $ty, $F, $quant, $G, $float;
            quant: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 AFFINE4 AFFINE8;
            float: F32 F16 BF16 F8_E4M3)
    };
    (@match $ty:expr, $F:ident, $quant:expr, $G:ident, $float:expr; quant: $($q:ident)*; float: $($f:ident)*) => {
        match $ty {
            $(minfer_format::BlockType::$q => { type $F = $crate::pack::types::$q; $quant })*
            $(minfer_format::BlockType::$f => { type $G = $crate::pack::types::$f; $float })*
        }
    };
}
pub(crate) use with_format;

/// The types that stand for formats, named as the formats are.
pub(crate) mod types {
    pub(crate) use super::float::{BF16, F8_E4M3, F16, F32};
    pub(crate) use super::formats::{AFFINE4, AFFINE8, IQ4_NL, MXFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
    pub(crate) use super::formats_k::{IQ4_XS, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K};
}

/// Why a weight cannot be packed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// The row length is not whole blocks, or a size does not fit into memory addresses.
    #[error("a {ty} weight of {n} rows x {k} numbers cannot be packed: rows are whole blocks of {}", .ty.block_len())]
    Shape {
        /// Storage type.
        ty: BlockType,
        /// Rows.
        n: usize,
        /// Numbers in a row.
        k: usize,
    },
    /// The bytes given are not the bytes of the shape.
    #[error("a {ty} weight has {got} bytes of {what} where its shape needs {needed}")]
    Length {
        /// Storage type.
        ty: BlockType,
        /// Which bytes: the file's or the packed ones.
        what: &'static str,
        /// Bytes given.
        got: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// Groups outside of the matrix.
    #[error("groups {start}..{end} are outside of a weight with {groups} groups of 16 rows")]
    Groups {
        /// First group asked for.
        start: usize,
        /// One past the last group asked for.
        end: usize,
        /// Groups that exist.
        groups: usize,
    },
    /// The memory was refused.
    #[error("out of memory: {bytes} bytes for a packed weight")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
    },
}

/// Bytes of one group of 16 rows; `None` when `k` is not whole blocks or the size overflows.
pub fn group_bytes(ty: BlockType, k: usize) -> Option<usize> {
    if !k.is_multiple_of(ty.block_len()) {
        return None;
    }
    let per_block = with_format!(ty,
        quant F => F::BLOCK_BYTES,
        float F => F::BLOCK_BYTES);
    (k / ty.block_len()).checked_mul(per_block)
}

/// Packs the 16-row groups `groups` of a weight of `n` rows x `k` numbers from `raw` (the whole weight, as in
/// the file) into `out` (these groups only). Ranges may be packed in parallel.
///
/// # Errors
/// When `k`, a length or a group does not fit.
pub fn pack_into(
    ty: BlockType,
    n: usize,
    k: usize,
    raw: &[u8],
    groups: Range<usize>,
    out: &mut [u8],
) -> Result<(), PackError> {
    let shape = PackError::Shape { ty, n, k };
    let (Some(row_bytes), Some(group_bytes)) = (ty.row_bytes(k), group_bytes(ty, k)) else {
        return Err(shape);
    };
    check_length(ty, "file data", raw.len(), row_bytes.checked_mul(n).ok_or(shape.clone())?)?;
    let total = n.div_ceil(GROUP);
    if groups.start > groups.end || groups.end > total {
        return Err(PackError::Groups { start: groups.start, end: groups.end, groups: total });
    }
    check_length(ty, "packed data", out.len(), group_bytes.checked_mul(groups.len()).ok_or(shape)?)?;
    if out.is_empty() {
        return Ok(());
    }
    for (group, out) in groups.zip(out.chunks_exact_mut(group_bytes)) {
        let rows = GROUP.min(n - GROUP * group);
        let raw = &raw[GROUP * group * row_bytes..][..rows * row_bytes];
        pack_group(ty, raw, row_bytes, out);
    }
    Ok(())
}

/// Packs up to 16 rows. The code is one, compiled for what the machine has; bytes are only moved, so all give the same.
fn pack_group(ty: BlockType, raw: &[u8], row_bytes: usize, out: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn with_avx2(ty: BlockType, raw: &[u8], row_bytes: usize, out: &mut [u8]) {
            pack_group_on_any(ty, raw, row_bytes, out)
        }
        // SAFETY: the machine has AVX2.
        return unsafe { with_avx2(ty, raw, row_bytes, out) };
    }
    pack_group_on_any(ty, raw, row_bytes, out)
}

#[inline(always)]
fn pack_group_on_any(ty: BlockType, raw: &[u8], row_bytes: usize, out: &mut [u8]) {
    with_format!(ty,
        quant F => quant::pack_group::<F>(raw, row_bytes, out),
        float F => float::pack_group::<F>(raw, row_bytes, out))
}

/// Asks for the bytes that lie `ahead` of these, if there are any. Sixteen rows are read a few lines at a time in turn,
/// which no stream of the hardware follows: with this, a packer is two to three times as fast.
#[inline(always)]
fn prefetch(bytes: &[u8], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch does not fail, whatever is at the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(ahead).cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (bytes, ahead);
}

fn check_length(ty: BlockType, what: &'static str, got: usize, needed: usize) -> Result<(), PackError> {
    if got == needed { Ok(()) } else { Err(PackError::Length { ty, what, got, needed }) }
}

/// A packed weight in memory of its own.
#[derive(Debug)]
pub struct PackedMatrix {
    ty: BlockType,
    n: usize,
    k: usize,
    data: AlignedBytes,
}

impl PackedMatrix {
    /// Bytes of the packed form of `n` rows x `k` numbers; `None` when `k` is not whole blocks or it overflows.
    pub fn packed_bytes(ty: BlockType, n: usize, k: usize) -> Option<usize> {
        group_bytes(ty, k)?.checked_mul(n.div_ceil(GROUP))
    }

    /// Memory for a weight, all zero: fill [`PackedMatrix::bytes_mut`] with [`pack_into`].
    ///
    /// # Errors
    /// When the shape does not fit the type, or memory is refused.
    pub fn zeroed(ty: BlockType, n: usize, k: usize) -> Result<PackedMatrix, PackError> {
        let bytes = PackedMatrix::packed_bytes(ty, n, k).ok_or(PackError::Shape { ty, n, k })?;
        let data = AlignedBytes::zeroed(bytes).ok_or(PackError::Memory { bytes })?;
        Ok(PackedMatrix { ty, n, k, data })
    }

    /// A weight in this memory, which is as long as [`PackedMatrix::packed_bytes`] says: fill it with [`pack_into`].
    ///
    /// # Errors
    /// When the shape does not fit the type or the memory.
    pub(crate) fn in_memory(
        ty: BlockType,
        n: usize,
        k: usize,
        data: AlignedBytes,
    ) -> Result<PackedMatrix, PackError> {
        let bytes = PackedMatrix::packed_bytes(ty, n, k).ok_or(PackError::Shape { ty, n, k })?;
        check_length(ty, "packed data", data.as_slice().len(), bytes)?;
        Ok(PackedMatrix { ty, n, k, data })
    }

    /// Packs a whole weight on the calling thread.
    ///
    /// # Errors
    /// As [`PackedMatrix::zeroed`] and [`pack_into`].
    pub fn pack(ty: BlockType, n: usize, k: usize, raw: &[u8]) -> Result<PackedMatrix, PackError> {
        let mut packed = PackedMatrix::zeroed(ty, n, k)?;
        pack_into(ty, n, k, raw, 0..n.div_ceil(GROUP), packed.data.as_mut_slice())?;
        Ok(packed)
    }

    /// Storage type of the weight in its file.
    pub fn ty(&self) -> BlockType {
        self.ty
    }

    /// Output rows, without padding.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Numbers in a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Number of 16-row groups.
    pub fn groups(&self) -> usize {
        self.n.div_ceil(GROUP)
    }

    /// The packed bytes, aligned to 64.
    pub fn bytes(&self) -> &[u8] {
        self.data.as_slice()
    }

    /// The packed bytes, for filling.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.data.as_mut_slice()
    }
}
