//! What a GGUF file says about one tensor.

use std::ops::Range;

use crate::block::BlockType;

/// Name, type, shape and place of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name in the file, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// How its numbers are stored.
    pub ty: BlockType,
    /// Outermost dimension first: `[rows, k]` for a matrix whose rows are stored one after another
    /// (ggml's `ne`, reversed). Empty for a scalar.
    pub shape: Vec<usize>,
    /// Whether these are whole numbers (I32), such as ids: never weights. `ty` has their size, no more.
    pub(super) integers: bool,
    /// Which part of a split model holds it.
    pub(super) part: u32,
    /// First byte in that part.
    pub(super) start: usize,
    pub(super) bytes: usize,
}

impl TensorInfo {
    /// How many numbers it holds.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Length of a row: the innermost dimension.
    pub fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows: the product of all dimensions but the innermost.
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Bytes in the file.
    pub fn n_bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn range(&self) -> Range<usize> {
        self.start..self.start + self.bytes
    }
}
