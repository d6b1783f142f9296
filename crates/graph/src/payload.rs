//! Payloads of operations: everything that an op needs beside its operands, with the maths and its source.

use std::sync::Arc;

/// Root-mean-square normalisation of groups of `group` numbers: `x / sqrt(mean(x^2) + eps) * weight`
/// (Zhang & Sennrich 2019). A group of the whole row is the layer norm of LLaMA; a group of one head is
/// the q/k norm of Qwen3.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Norm {
    pub eps: f32,
    pub group: usize,
}

/// Frequencies of rotary position embedding (Su et al. 2021). Scalings (linear, llama3, YaRN) are
/// already applied: a model computes them once, so that devices know one form only.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Radians per position for each rotated pair.
    pub inv_freq: Arc<[f32]>,
    /// Factor on cosine and sine (YaRN's attention factor; 1 otherwise).
    pub attention_factor: f32,
}

/// Which two elements form a rotated pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// `(i, i + dims/2)`, as Hugging Face stores q and k.
    HalfSplit,
    /// `(2i, 2i + 1)`, as GGUF files of the llama architecture store them.
    Interleaved,
}

/// Rotation of each head's first `dims` elements, where the table holds `dims` numbers per row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Rope {
    pub style: RopeStyle,
    pub head_dim: usize,
}

/// Causal grouped-query attention over a sequence's pages.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Attend {
    pub heads: usize,
    pub kv_heads: usize,
    /// Factor on the scores, usually `1/sqrt(head_dim)`.
    pub scale: f32,
    /// The part of the state with the values; keys are part 0, which may serve as values too (0).
    pub v_part: usize,
}

/// How expert scores are computed from router logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// `1 / (1 + exp(-x))` of each expert.
    Sigmoid,
    /// `sqrt(log(1 + exp(x)))` of each.
    SqrtSoftplus,
}

/// Choice of `top_k` experts per row: higher score first, then lower index.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Router {
    pub scoring: Scoring,
    pub top_k: usize,
    /// Whether the chosen scores are divided by their sum.
    pub renormalise: bool,
    /// Whether a weight is added to the scores for the choice alone (DeepSeek-V3's balancing without a loss).
    pub biased: bool,
    /// Factor on the chosen scores.
    pub scale: f32,
}

/// A function on each number: `post * f(pre * x)`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Act {
    pub kind: ActKind,
    pub pre: f32,
    pub post: f32,
}

/// The function of an [`Act`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActKind {
    /// `x / (1 + exp(-x))`.
    Silu,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `log(1 + exp(x))`.
    Softplus,
    /// `sign(x) * sqrt(max(|x|, 1e-6))`, 0 at 0.
    SignedSqrt,
}

/// Numbers below `low` become `low`, those above `high` become `high`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Clamp {
    pub low: f32,
    pub high: f32,
}

/// Part of each group of `group` numbers of a row: `from..from + len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Slice {
    pub group: usize,
    pub from: usize,
    pub len: usize,
}

/// A row seen as `n` residual streams of equal width, one after the other (hyper-connections, Zhu et al. 2024).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Streams {
    /// Number of streams.
    pub n: usize,
    /// Factor on sums and dot products.
    pub scale: f32,
}

/// Weights by which a sublayer reads `n` residual streams (`pre`), writes them (`post`) and mixes them (`comb`), as in
/// manifold-constrained hyper-connections (Xie et al. 2025). From a row `m` and the weight `base | scale [3]`:
/// `pre = sigmoid(m * scale_0 + base) + eps`; `post = 2 sigmoid(m * scale_1 + base)`; `comb` is the softmax of
/// `m * scale_2 + base` over its last index plus `eps`, its columns divided by their sums plus `eps`, and then
/// `iterations - 1` times its rows and its columns likewise (Sinkhorn & Knopp 1967).
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct HyperMix {
    pub n: usize,
    pub iterations: usize,
    pub eps: f32,
}

impl HyperMix {
    /// Numbers in a row of `m`.
    pub const fn width(&self) -> usize {
        (2 + self.n) * self.n
    }
}

/// Causal depthwise convolution along the sequence: `y_t = silu(sum_j w[:, j] * x_{t - (kernel - 1 - j) * dilation})`,
/// zeros before the sequence. Its state is the last [`Conv1d::tail`] rows, oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Conv1d {
    pub kernel: usize,
    pub dilation: usize,
}

impl Conv1d {
    /// Rows before the current one that it sees.
    pub const fn tail(&self) -> usize {
        (self.kernel - 1) * self.dilation
    }
}

/// Gated delta rule (Yang et al. 2024). Input rows are `q [k_heads, k_dim] | k [k_heads, k_dim] |
/// v [v_heads, v_dim]`; q and k are normalised to unit length (`x / sqrt(sum x^2 + 1e-6)`), q is scaled by
/// `1/sqrt(k_dim)`. Per token and value head, with log-decay `g` and rate `beta`:
/// `S *= exp(g); S += k (beta (v - k^T S))^T; out = q^T S`. State: `[v_heads, k_dim, v_dim]`.
/// A decay is one number per head, or one per row of `S` (Kimi delta attention, Kimi Team 2025).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct DeltaRule {
    pub k_heads: usize,
    pub v_heads: usize,
    pub k_dim: usize,
    pub v_dim: usize,
    /// Value head `j` reads key head `j % k_heads` if true (GGUF's order), else `j / (v_heads / k_heads)`.
    pub tiled: bool,
    /// Whether each key channel has a decay of its own.
    pub per_channel: bool,
}

impl DeltaRule {
    /// Log-decays in a row.
    pub const fn decays(&self) -> usize {
        if self.per_channel { self.v_heads * self.k_dim } else { self.v_heads }
    }

    /// Numbers in a row of q, k and v.
    pub const fn input_width(&self) -> usize {
        2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim
    }
}

/// Index keys of complete blocks: where a row completes a block of `block` positions, the mean of the block's
/// rows in part `raw` of the state is RMS-normalised, rotated (half-split) at the block's first position, and
/// written to part `pooled` at the row's slot.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct PoolKeys {
    pub block: usize,
    pub raw: usize,
    pub pooled: usize,
    pub eps: f32,
    pub inv_freq: Arc<[f32]>,
}

/// Index keys of complete blocks by gates: where a row completes a block of `block` positions, each channel of the
/// block's rows in part `raw` is averaged with weights `softmax(gate_j + bias_j)` over the block's positions `j`,
/// gates being rows of part `gates`, and written to part `pooled` at the row's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PoolGated {
    pub block: usize,
    pub raw: usize,
    pub gates: usize,
    pub pooled: usize,
}

/// Choice of blocks for sparse attention: `score_b = sum_h w_h * relu(q_h . pooled_b) * scale` over the complete
/// blocks that a row sees, `w_h` being 1 or the row's own; the `top` best, higher score first, then lower index, in ascending order, padded with -1.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct IndexSelect {
    pub heads: usize,
    pub block: usize,
    pub top: usize,
    pub pooled: usize,
    pub scale: f32,
    /// Whether rows bring a weight for each head.
    pub weighted: bool,
}

/// Attention over chosen blocks of positions and the row's incomplete last block.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct AttendBlocks {
    pub attend: Attend,
    pub block: usize,
}
