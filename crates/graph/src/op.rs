//! Operations. Their payloads are in `payload`, which operands each accepts in `operands`.

use crate::compressed::{AttendWindow, Compress, ExpertWeights, RoundTrip, StorePart};
use crate::graph::WeightDecl;
use crate::operands::{Operands, quantized};
use crate::payload::{
    Act, Attend, AttendBlocks, Clamp, Conv1d, DeltaRule, HyperMix, IndexSelect, Norm, PoolGated, PoolKeys,
    Rope, RopeTable, Router, Slice, Streams,
};
use crate::state::StateDecl;
use crate::types::ValueType;

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
    /// `x f32[L, ..], positions i32[L] -> f32[L, ..]`: rows at position 0 become zero.
    ZeroFirst,
    /// `x f32[L, w], positions i32[L], slots i32[L]; state -> ()`: rows whose position plus one is not a multiple
    /// of `every`, or whose slot is negative, are skipped.
    StorePart(StorePart),
    /// `q f32[L, heads * d], positions, table_at, window_pages, pages, [chosen i32[L, top]]; [heads]; state -> f32[L, heads * d]`:
    /// the weight is the sinks; without a choice, all complete compressed rows are seen.
    AttendWindow(AttendWindow),
    /// `ids i32[L]; [vocab, k] -> i32[L, k]`: rows of a table of whole numbers.
    GatherIds,
    /// `logits f32[L, experts], ids i32[L, top_k] -> f32[L, top_k]`.
    ExpertWeights(ExpertWeights),
    /// `x f32[L, .., w] -> f32[L, .., w]`: groups rounded to a small float format.
    RoundTrip(RoundTrip),
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
            Op::ZeroFirst => "zero_first",
            Op::StorePart(_) => "store_part",
            Op::AttendWindow(_) => "attend_window",
            Op::GatherIds => "gather_ids",
            Op::ExpertWeights(_) => "expert_weights",
            Op::RoundTrip(_) => "round_trip",
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
            Op::ZeroFirst => sig.zero_first(),
            Op::StorePart(s) => sig.store_part(s),
            Op::AttendWindow(a) => sig.attend_window(a),
            Op::GatherIds => sig.gather_ids(),
            Op::ExpertWeights(_) => sig.expert_weights(),
            Op::RoundTrip(r) => sig.round_trip(r),
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
            | Op::RoundTrip(_)
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
            | Op::ZeroFirst
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
