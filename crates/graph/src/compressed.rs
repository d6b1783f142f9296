//! Payloads of attention over a window of rows and compressed rows (DeepSeek V4): compression of windows,
//! and attention with a sink per head; of its routing; and of the rounding of its rows. The operations are in `op`.

use crate::payload::{Attend, Scoring};

/// Compression of whole windows of `ratio` rows into one: per channel the sum of the rows weighted by the
/// softmax of their gates, to which a bias per place in the window is added. A row that completes a window
/// (its position plus one is a multiple of `ratio`) gives the compressed row, every other one zeros.
///
/// With `overlap`, rows have two halves: a window takes the second halves of its own rows and the first
/// halves of the rows of the window before it, of which the first window has none.
///
/// State: the last [`Compress::tail`] rows as `kv | gate`, oldest first; those older than the open window
/// (and with `overlap` the one before) are not kept, and what their place holds is never read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Compress {
    pub ratio: usize,
    pub overlap: bool,
}

impl Compress {
    /// Rows before the current one that a window may take.
    pub const fn tail(&self) -> usize {
        self.ratio * self.parts() - 1
    }

    /// Parts of equal width in a row of kv or gates.
    pub const fn parts(&self) -> usize {
        if self.overlap { 2 } else { 1 }
    }
}

/// Part `part` of paged state, one row for each `every` positions, which belongs to the last of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct StorePart {
    pub part: usize,
    pub every: usize,
}

/// Attention to the last `window` positions and to compressed rows, in one softmax whose sum also has the
/// exponential of the head's sink. Keys are also the values: part 0 of the state, and part 1 for compressed
/// rows. Compressed row `i` belongs to position `(i + 1) * ratio - 1`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttendWindow {
    /// One KV head.
    pub attend: Attend,
    /// Positions, the row's own included.
    pub window: usize,
    /// Positions per compressed row; 0: there are none.
    pub ratio: usize,
}

/// Weights of experts that were chosen otherwise: their scores, divided by their sum and multiplied by `scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct ExpertWeights {
    pub scoring: Scoring,
    pub scale: f32,
}

/// The rounding that DeepSeek's own graph applies to rows before they are cached or compared, as its weights were trained
/// with: each group of `group` numbers goes through a small float format and back. A group with an infinity or a NaN
/// becomes NaN where it is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundTrip {
    /// Numbers in a group, such as those of a head.
    pub group: usize,
    /// What happens to a group.
    pub format: RoundFormat,
}

/// A format of [`RoundTrip`]. In both, a block of `block` numbers has a scale `s` that is a power of two, and each
/// number `x` becomes `s * round(x / s)`: nearest, ties to the even mantissa, clamped to the largest value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundFormat {
    /// E4M3 with `s = 2^ceil(log2(max(amax, 1e-4) / 448))`, of the numbers `from..from + len`; the others stay.
    #[allow(missing_docs)]
    Fp8 { block: usize, from: usize, len: usize },
    /// The group is multiplied by the orthonormal Hadamard matrix (Sylvester's order), and stays so; then E2M1 with
    /// `s = 2^ceil(log2(max(amax, 6 * 2^-126) / 6))`.
    #[allow(missing_docs)]
    Fp4Hadamard { block: usize },
}
