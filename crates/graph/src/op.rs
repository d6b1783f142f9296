//! Operations and their payloads. Which operands each accepts is in `operands`.

use std::sync::Arc;

use crate::compressed::{AttendWindow, Compress, ExpertWeights, StorePart};
use crate::graph::WeightDecl;
use crate::operands::{Operands, quantized};
use crate::state::StateDecl;
use crate::types::ValueType;

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

/// An operation with its full payload. The comment gives `inputs; weight; state -> outputs`, with `L` for
/// any leading dimension.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `ids i32[L] or [L, m]; [vocab, k] -> f32[L, m * k]`: rows of a table, side by side.
    Embed,
    /// `x f32[L, w]; [group] or [w] -> f32[L, w]`.
    RmsNorm(Norm),
    /// `x f32[L, w] -> f32[L, w]`: RMS norm of groups without a weight.
    UnitNorm(Norm),
    /// `x f32[L, w]; [2 * group] (weight, bias) -> f32[L, w]`: groups less their mean, divided by their deviation
    /// (Ba et al. 2016).
    LayerNorm(Norm),
    /// `x f32[L, .., k] -> q8[L, .., k]`: blocks of 32 with their own scale.
    Quantize,
    /// `x f32|q8 [L, k]; [n, k] -> f32[L, n]`: q8 for quantised weights, f32 for the others. Of
    /// `x [L, m, k]` each of the `m` parts is multiplied.
    MatMul,
    /// `x [L, k] or [L, top_k, k], ids i32[L, top_k]; [experts, n, k] -> f32[L, top_k, n]`.
    GroupedMatMul,
    /// `x f32|q8 [L, heads, k]; [heads, n, k] -> f32[L, heads * n]`: each part with the matrix of its own.
    HeadMatMul,
    /// `x f32[L, n]; [n] -> f32[L, n]`.
    BiasAdd,
    /// `x f32[L, n]; [1] -> f32[L, n]`: the scale of a whole weight tensor, applied to its product.
    Scale,
    /// `y f32[L, top_k, n], ids i32[L, top_k]; [experts] -> f32[L, top_k, n]`: the scale of each expert.
    ExpertScale,
    /// `a, b -> a + b`, equal f32 types.
    Add,
    /// `a, b -> a * b`, equal f32 types.
    Mul,
    /// `x -> x / (1 + exp(-x))`.
    Silu,
    /// `positions i32[L] -> f32[L, 2 * pairs]`: cosines, then sines. Once per step for all layers.
    RopeTable(RopeTable),
    /// `x f32[L, heads * head_dim], table f32[L, dims] -> f32[L, heads * head_dim]`.
    Rope(Rope),
    /// `k f32[L, kw], v f32[L, vw], .. , slots i32[L]; state -> ()`: writes each row of each part at its slot
    /// (`page * PAGE + offset`); a negative slot is skipped.
    StoreKv,
    /// `q f32[L, heads * kd], positions i32[L], table_at i32[L], pages i32[cap]; state -> f32[L, heads * vd]`.
    /// Row `r` attends to positions `0..=positions[r]` of the page list that starts at `table_at[r]`.
    Attend(Attend),
    /// `logits f32[L, experts]; [experts] if biased -> ids i32[L, top_k], weights f32[L, top_k]`, in rank order.
    Router(Router),
    /// `y f32[L, top_k, n], weights f32[L, top_k] -> f32[L, n]`: summed in rank order.
    CombineExperts,
    /// `x f32[L, n], index i32[outs] -> f32[outs, n]`.
    GatherRows,
    /// `x f32[L, n] -> i32[L]`: index of the largest, lowest index among equals.
    ArgMax,
    /// `x f32[L, w] -> f32[L, w]`.
    Act(Act),
    /// `x f32[L, w] -> f32[L, w]`.
    Clamp(Clamp),
    /// `x f32[L, n]; [m] -> x * weight`: each number of the weight for `n / m` consecutive ones.
    ScaleVec,
    /// `x f32[L, .., w] -> f32[L, .., w / group * len]`.
    Slice(Slice),
    /// `x f32[L, ..] -> f32[L, inner]`: the same numbers under another shape.
    Reshape(Vec<usize>),
    /// `x f32[L, a], y f32[L, b], .. -> f32[L, a + b + ..]`.
    Concat,
    /// `x f32[L, w] -> f32[L, n * w]`: the row `n` times.
    Repeat(Streams),
    /// `x f32[L, n * w] -> f32[L, w]`: `scale * sum`, in stream order.
    StreamSum(Streams),
    /// `a, b f32[L, n * w] -> f32[L, n]`: `scale * dot` of each stream.
    StreamDot(Streams),
    /// `y f32[L, w], weights f32[L, n] -> f32[L, n * w]`: the row times each weight.
    StreamMul(Streams),
    /// `h f32[L, n * w], y f32[L, w], weights f32[L, n] -> f32[L, n * w]`: `h_s + weight_s * y`.
    StreamAdd(Streams),
    /// `x f32[L, n * w], weights f32[L, n] -> f32[L, w]`: the sum of `weight_s * x_s`, in stream order.
    StreamWeightedSum(Streams),
    /// `x f32[L, n * w], y f32[L, w], post f32[L, n], comb f32[L, n * n] -> f32[L, n * w]`:
    /// `out_k = post_k * y + sum_j comb[j, k] * x_j`, `j` ascending.
    StreamMix(Streams),
    /// `m f32[L, (2 + n) * n]; [(2 + n) * n + 3] -> pre f32[L, n], post f32[L, n], comb f32[L, n * n]`.
    HyperMix(HyperMix),
    /// `x f32[L, c], state_from i32[L], state_to i32[L]; [c, kernel]; state -> f32[L, c]`.
    Conv1d(Conv1d),
    /// `qkv f32[L, ..], g f32[L, v_heads or v_heads * k_dim], beta f32[L, v_heads], state_from, state_to; state -> f32[L, v_heads * v_dim]`.
    DeltaRule(DeltaRule),
    /// `positions, table_at, pages, slots; [w]; state -> ()`.
    PoolKeys(PoolKeys),
    /// `positions, table_at, pages, slots; [block * w]; state -> ()`.
    PoolGated(PoolGated),
    /// `q f32[L, heads * w], positions, table_at, pages, f32[L, heads] if weighted; state -> i32[L, top]`.
    IndexSelect(IndexSelect),
    /// As [`Op::Attend`], then `blocks i32[L, top]`.
    AttendBlocks(AttendBlocks),
    /// As [`Op::Rope`], but of each head's last dimensions.
    RopeTail(Rope),
    /// `kv f32[L, ..], gate f32[L, ..], positions, state_from, state_to; [ratio, ..]; state -> f32[L, w]`.
    Compress(Compress),
    /// `positions i32[L] -> i32[L]`: the position, rounded down to a multiple of this.
    WindowStart(usize),
    /// `x f32[L, w], positions i32[L], slots i32[L]; state -> ()`: rows whose position plus one is not a multiple
    /// of `every`, or whose slot is negative, are skipped.
    StorePart(StorePart),
    /// `q f32[L, heads * d], positions, table_at, pages, [chosen i32[L, top]]; [heads]; state -> f32[L, heads * d]`:
    /// the weight is the sinks; without a choice, all complete compressed rows are seen.
    AttendWindow(AttendWindow),
    /// `ids i32[L]; [vocab, k] -> i32[L, k]`: rows of a table of whole numbers.
    GatherIds,
    /// `logits f32[L, experts], ids i32[L, top_k] -> f32[L, top_k]`.
    ExpertWeights(ExpertWeights),
    /// Fused `Mul(Silu(gate), up)`.
    SwiGlu,
    /// Fused `Quantize(RmsNorm(x))`.
    RmsNormQuantize(Norm),
    /// Fused `Quantize(SwiGlu(gate, up))`.
    SwiGluQuantize,
    /// Fused `s = Add(a, b); RmsNorm(s)`: outputs `s` and the norm.
    AddRmsNorm(Norm),
}

impl Op {
    /// Snake-case name for messages and exports.
    pub const fn name(&self) -> &'static str {
        match self {
            Op::Embed => "embed",
            Op::RmsNorm(_) => "rms_norm",
            Op::UnitNorm(_) => "unit_norm",
            Op::LayerNorm(_) => "layer_norm",
            Op::Quantize => "quantize",
            Op::MatMul => "matmul",
            Op::GroupedMatMul => "grouped_matmul",
            Op::HeadMatMul => "head_matmul",
            Op::BiasAdd => "bias_add",
            Op::Scale => "scale",
            Op::ExpertScale => "expert_scale",
            Op::Add => "add",
            Op::Mul => "mul",
            Op::Silu => "silu",
            Op::RopeTable(_) => "rope_table",
            Op::Rope(_) => "rope",
            Op::StoreKv => "store_kv",
            Op::Attend(_) => "attend",
            Op::Router(_) => "router",
            Op::CombineExperts => "combine_experts",
            Op::GatherRows => "gather_rows",
            Op::ArgMax => "argmax",
            Op::Act(_) => "act",
            Op::Clamp(_) => "clamp",
            Op::ScaleVec => "scale_vec",
            Op::Slice(_) => "slice",
            Op::Reshape(_) => "reshape",
            Op::Concat => "concat",
            Op::Repeat(_) => "repeat",
            Op::StreamSum(_) => "stream_sum",
            Op::StreamDot(_) => "stream_dot",
            Op::StreamMul(_) => "stream_mul",
            Op::StreamAdd(_) => "stream_add",
            Op::StreamWeightedSum(_) => "stream_weighted_sum",
            Op::StreamMix(_) => "stream_mix",
            Op::HyperMix(_) => "hyper_mix",
            Op::Conv1d(_) => "conv1d",
            Op::DeltaRule(_) => "delta_rule",
            Op::PoolKeys(_) => "pool_keys",
            Op::PoolGated(_) => "pool_gated",
            Op::IndexSelect(_) => "index_select",
            Op::AttendBlocks(_) => "attend_blocks",
            Op::RopeTail(_) => "rope_tail",
            Op::Compress(_) => "compress",
            Op::WindowStart(_) => "window_start",
            Op::StorePart(_) => "store_part",
            Op::AttendWindow(_) => "attend_window",
            Op::GatherIds => "gather_ids",
            Op::ExpertWeights(_) => "expert_weights",
            Op::SwiGlu => "swiglu",
            Op::RmsNormQuantize(_) => "rms_norm_quantize",
            Op::SwiGluQuantize => "swiglu_quantize",
            Op::AddRmsNorm(_) => "add_rms_norm",
        }
    }

    /// Whether this op exists only as the result of a fusion.
    pub const fn is_fused(&self) -> bool {
        matches!(self, Op::SwiGlu | Op::RmsNormQuantize(_) | Op::SwiGluQuantize | Op::AddRmsNorm(_))
    }

    /// The output types for these operands, or why they do not fit.
    pub fn infer(
        &self,
        inputs: &[&ValueType],
        weight: Option<&WeightDecl>,
        state: Option<&StateDecl>,
    ) -> Result<Vec<ValueType>, String> {
        let sig = Operands { inputs, weight, state };
        sig.counts(self)?;
        match self {
            Op::Embed => sig.embed(),
            Op::RmsNorm(n) => sig.norm(0, n).map(|t| vec![t]),
            Op::UnitNorm(n) => sig.unit_norm(n),
            Op::LayerNorm(n) => sig.layer_norm(n),
            Op::Quantize => Ok(vec![quantized(sig.float(0)?)?]),
            Op::MatMul => sig.matmul(),
            Op::GroupedMatMul => sig.grouped_matmul(),
            Op::HeadMatMul => sig.head_matmul(),
            Op::BiasAdd => {
                let x = sig.float(0)?;
                sig.weight_is(&[x.shape.width()])?;
                Ok(vec![x.clone()])
            }
            Op::Scale => {
                sig.weight_is(&[1])?;
                Ok(vec![sig.float(0)?.clone()])
            }
            Op::ExpertScale => sig.expert_scale(),
            Op::Add | Op::Mul | Op::SwiGlu => Ok(vec![sig.equal_floats()?.clone()]),
            Op::Silu => Ok(vec![sig.float(0)?.clone()]),
            Op::RopeTable(t) => {
                let lead = sig.indices(0)?;
                Ok(vec![ValueType::f32(lead, [2 * t.inv_freq.len()])])
            }
            Op::Rope(r) => sig.rope(r),
            Op::StoreKv => sig.store_kv(),
            Op::Attend(a) => sig.attend(a),
            Op::Router(r) => sig.router(r),
            Op::CombineExperts => sig.combine(),
            Op::GatherRows => {
                let (x, lead) = (sig.float(0)?, sig.indices(1)?);
                Ok(vec![ValueType::f32(lead, x.shape.inner.clone())])
            }
            Op::ArgMax => Ok(vec![ValueType::i32(sig.float(0)?.shape.lead, [])]),
            Op::Act(_) => Ok(vec![sig.float(0)?.clone()]),
            Op::Clamp(c) => sig.clamp(c),
            Op::ScaleVec => sig.scale_vec(),
            Op::Slice(s) => sig.slice(s),
            Op::Reshape(inner) => sig.reshape(inner),
            Op::Concat => sig.concat(),
            Op::Repeat(s) => sig.repeat(s),
            Op::StreamSum(s) => sig.stream_sum(s),
            Op::StreamDot(s) => sig.stream_dot(s),
            Op::StreamMul(s) => sig.stream_mul(s),
            Op::StreamAdd(s) => sig.stream_add(s),
            Op::StreamWeightedSum(s) => sig.stream_weighted_sum(s),
            Op::StreamMix(s) => sig.stream_mix(s),
            Op::HyperMix(h) => sig.hyper_mix(h),
            Op::Conv1d(c) => sig.conv1d(c),
            Op::DeltaRule(d) => sig.delta_rule(d),
            Op::PoolKeys(p) => sig.pool_keys(p),
            Op::PoolGated(p) => sig.pool_gated(p),
            Op::IndexSelect(s) => sig.index_select(s),
            Op::AttendBlocks(a) => sig.attend_blocks(a),
            Op::RopeTail(r) => sig.rope(r),
            Op::Compress(c) => sig.compress(c),
            Op::WindowStart(ratio) => sig.window_start(*ratio),
            Op::StorePart(s) => sig.store_part(s),
            Op::AttendWindow(a) => sig.attend_window(a),
            Op::GatherIds => sig.gather_ids(),
            Op::ExpertWeights(_) => sig.expert_weights(),
            Op::RmsNormQuantize(n) => Ok(vec![quantized(&sig.norm(0, n)?)?]),
            Op::SwiGluQuantize => Ok(vec![quantized(sig.equal_floats()?)?]),
            Op::AddRmsNorm(n) => {
                let sum = sig.equal_floats()?.clone();
                Ok(vec![sum, sig.norm(0, n)?])
            }
        }
    }

    /// How many inputs (`None`: checked with the state), and whether a weight and a state are named.
    pub(crate) const fn arity(&self) -> (Option<usize>, bool, bool) {
        match self {
            Op::Embed
            | Op::RmsNorm(_)
            | Op::MatMul
            | Op::BiasAdd
            | Op::Scale
            | Op::ScaleVec
            | Op::LayerNorm(_)
            | Op::HeadMatMul
            | Op::HyperMix(_)
            | Op::GatherIds
            | Op::RmsNormQuantize(_) => (Some(1), true, false),
            Op::Router(r) => (Some(1), r.biased, false),
            Op::GroupedMatMul | Op::ExpertScale | Op::AddRmsNorm(_) => (Some(2), true, false),
            Op::Quantize
            | Op::Silu
            | Op::RopeTable(_)
            | Op::UnitNorm(_)
            | Op::ArgMax
            | Op::Act(_)
            | Op::Clamp(_)
            | Op::Slice(_)
            | Op::Reshape(_)
            | Op::Repeat(_)
            | Op::WindowStart(_)
            | Op::StreamSum(_) => (Some(1), false, false),
            Op::Add
            | Op::Mul
            | Op::Rope(_)
            | Op::CombineExperts
            | Op::GatherRows
            | Op::SwiGlu
            | Op::SwiGluQuantize
            | Op::StreamDot(_)
            | Op::StreamMul(_)
            | Op::StreamWeightedSum(_)
            | Op::RopeTail(_)
            | Op::ExpertWeights(_) => (Some(2), false, false),
            Op::StreamAdd(_) => (Some(3), false, false),
            Op::StreamMix(_) => (Some(4), false, false),
            Op::Concat => (None, false, false),
            Op::StorePart(_) => (Some(3), false, true),
            Op::Compress(_) => (Some(5), true, true),
            Op::AttendWindow(_) => (None, true, true),
            Op::StoreKv => (None, false, true),
            Op::Attend(_) => (Some(4), false, true),
            Op::IndexSelect(s) => (Some(if s.weighted { 5 } else { 4 }), false, true),
            Op::AttendBlocks(_) => (Some(5), false, true),
            Op::Conv1d(_) => (Some(3), true, true),
            Op::DeltaRule(_) => (Some(5), false, true),
            Op::PoolKeys(_) | Op::PoolGated(_) => (Some(4), true, true),
        }
    }
}
