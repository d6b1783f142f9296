//! Qwen4-Exp (Qwen3.8-Flash-Next): a decoder of gated DeltaNet layers (Yang et al. 2024) with block-sparse
//! attention in every fourth, both under hyper-connections (Zhu et al. 2024) in place of norms and plain
//! residuals; a mixture of experts with a shared one in each layer; and one layer into which hashed n-grams
//! of the prompt are embedded. Hugging Face names and formulas as transformers 5.24 has them; GGUF names as
//! llama.cpp writes them, where norm weights have their one added, decay rates are `-exp(A_log)`, and value
//! heads are in tiled order.

mod draft;
mod sizes;

use std::sync::Arc;

use minfer_graph::{
    Act, ActKind, Attend, AttendBlocks, Conv1d, Dim, Graph, IndexSelect, Norm, Op, PagedPart, PoolKeys,
    RopeStyle, Slice, Streams, ValueId, ValueType, WeightDecl, WeightId, WeightMap,
};

use crate::checkpoint::{Checkpoint, Names};
use crate::decoder::EMBED;
use crate::error::ModelError;
use crate::hyper::{Experts, Hyper, text_config};
use crate::ngram::Ngram;
use crate::parts::{Parts, SIGMOID};
use crate::rope;
use crate::{DraftHead, Model};
use sizes::{Ple, Sizes};

const ARCH: &str = "qwen4exp";

/// The four weights of a hyper-connection's read and write.
struct Mixer {
    norm: Names,
    down: Names,
    up: Names,
    /// Absent in the one before the head, which only reads.
    inject: Names,
}

const ATTN_MIXER: Mixer = Mixer {
    norm: ("hc_attn_norm", "attn_hyper_connection.hc_norm"),
    down: ("hc_attn_down", "attn_hyper_connection.input_mix_weight_down"),
    up: ("hc_attn_up", "attn_hyper_connection.input_mix_weight_up"),
    inject: ("hc_attn_inject", "attn_hyper_connection.block_inject_weight"),
};
const FFN_MIXER: Mixer = Mixer {
    norm: ("hc_ffn_norm", "mlp_hyper_connection.hc_norm"),
    down: ("hc_ffn_down", "mlp_hyper_connection.input_mix_weight_down"),
    up: ("hc_ffn_up", "mlp_hyper_connection.input_mix_weight_up"),
    inject: ("hc_ffn_inject", "mlp_hyper_connection.block_inject_weight"),
};
const OUTPUT_MIXER: Mixer = Mixer {
    norm: ("output_hc_norm", "model.hyper_connection_mixer.hc_norm"),
    down: ("output_hc_down", "model.hyper_connection_mixer.input_mix_weight_down"),
    up: ("output_hc_up", "model.hyper_connection_mixer.input_mix_weight_up"),
    inject: ("", ""),
};
const OUTPUT: Names = ("output", "lm_head");

const DELTA_QKV: Names = ("attn_qkv", "linear_attn.in_proj_qkv");
const DELTA_Z: Names = ("attn_gate", "linear_attn.in_proj_z");
const DELTA_BETA: Names = ("ssm_beta", "linear_attn.in_proj_b");
const DELTA_ALPHA: Names = ("ssm_alpha", "linear_attn.in_proj_a");
const DELTA_CONV: Names = ("ssm_conv1d", "linear_attn.conv1d");
const DELTA_DT: Names = ("ssm_dt.bias", "linear_attn.dt_bias");
const DELTA_DECAY: Names = ("ssm_a", "linear_attn.A_log");
const DELTA_NORM: Names = ("ssm_norm", "linear_attn.norm");
const DELTA_OUT: Names = ("ssm_out", "linear_attn.out_proj");

const Q: Names = ("attn_q", "self_attn.q_proj");
const K: Names = ("attn_k", "self_attn.k_proj");
const V: Names = ("attn_v", "self_attn.v_proj");
const O: Names = ("attn_output", "self_attn.o_proj");
const Q_NORM: Names = ("attn_q_norm", "self_attn.q_norm");
const K_NORM: Names = ("attn_k_norm", "self_attn.k_norm");
/// One tensor in Hugging Face directories, query heads first; two in GGUF files.
const INDEX_QK: Names = ("", "self_attn.indexer.index_qk_proj");
const INDEX_Q: Names = ("indexer.q_proj", "");
const INDEX_K: Names = ("indexer.k_proj", "");
const INDEX_Q_NORM: Names = ("indexer.q_norm", "self_attn.indexer.q_layernorm");
const INDEX_K_NORM: Names = ("indexer.k_norm", "self_attn.indexer.k_layernorm");

const ROUTER: Names = ("ffn_gate_inp", "mlp.gate");
const GATE_EXPERTS: Names = ("ffn_gate_exps", "mlp.experts.{}.gate_proj");
const UP_EXPERTS: Names = ("ffn_up_exps", "mlp.experts.{}.up_proj");
const DOWN_EXPERTS: Names = ("ffn_down_exps", "mlp.experts.{}.down_proj");
/// All experts in one tensor, gate rows before up rows.
const GATE_UP_PACKED: Names = ("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj");
const DOWN_PACKED: Names = ("ffn_down_exps.weight", "mlp.experts.down_proj");
const SHARED_SWITCH: Names = ("ffn_gate_inp_shexp", "mlp.shared_expert_gate");
const SHARED_GATE: Names = ("ffn_gate_shexp", "mlp.shared_expert.gate_proj");
const SHARED_UP: Names = ("ffn_up_shexp", "mlp.shared_expert.up_proj");
const SHARED_DOWN: Names = ("ffn_down_shexp", "mlp.shared_expert.down_proj");

const PLE_TABLE: Names = ("per_layer_token_embd", "ple.ple_embedding.ngram_embedding.shard_{}");
const PLE_KEY: Names = ("ple_key", "ple.key_proj");
const PLE_VALUE: Names = ("ple_value", "ple.value_proj");
const PLE_NORM_KEY: Names = ("ple_norm_key", "ple.norm_key");
const PLE_NORM_QUERY: Names = ("ple_norm_query", "ple.norm_query");
const PLE_NORM_CONV: Names = ("ple_norm_conv", "ple.norm_conv");
const PLE_CONV: Names = ("ple_conv1d", "ple.conv1d");

struct Qwen4Exp {
    hyper: Hyper,
    experts: Experts,
    sizes: Sizes,
    ngram: Option<Ngram>,
}

pub(crate) fn load(ck: &Checkpoint) -> Result<Box<dyn Model>, ModelError> {
    let model = match ck {
        Checkpoint::Gguf(g) => Qwen4Exp::from_gguf(ck, g.metadata())?,
        Checkpoint::Hf(d) => Qwen4Exp::from_hf(ck, text_config(d.config()))?,
        Checkpoint::Shape(s) => Qwen4Exp::from_hf(ck, s.config())?,
    };
    Ok(Box::new(model))
}

impl Model for Qwen4Exp {
    fn hyper(&self) -> &Hyper {
        &self.hyper
    }

    fn ngram(&self) -> Option<&Ngram> {
        self.ngram.as_ref()
    }

    fn ngram_table(&self, ck: &Checkpoint) -> Result<Option<WeightDecl>, ModelError> {
        self.sizes.ple.map(|p| ck.table(PLE_TABLE, p.layer, p.width)).transpose()
    }

    fn graph(&self, ck: &Checkpoint, page_table: usize) -> Result<Graph, ModelError> {
        self.trunk(ck, page_table, false)
    }

    fn graph_with_streams(&self, ck: &Checkpoint, page_table: usize) -> Result<Graph, ModelError> {
        self.trunk(ck, page_table, true)
    }

    fn draft_head(&self, ck: &Checkpoint, page_table: usize) -> Result<Option<DraftHead>, ModelError> {
        Ok(draft::graph(self, ck, page_table)?.map(DraftHead::Chain))
    }
}

impl Qwen4Exp {
    /// The decoder; with `streams`, its residual streams of all rows are a result too.
    fn trunk(&self, ck: &Checkpoint, page_table: usize, streams: bool) -> Result<Graph, ModelError> {
        let (mut step, mut h) = Step::start(ck, self, page_table)?;
        for layer in 0..self.hyper.layers {
            step.p.enter(layer);
            if let Some(ple) = self.sizes.ple.filter(|p| p.layer == layer) {
                h = step.ngrams(h, ple)?;
            }
            let (x, inject) = step.read(h, &ATTN_MIXER)?;
            let y = if self.sizes.attends[layer] { step.attention(x)? } else { step.delta_net(x)? };
            h = step.write(h, y, &ATTN_MIXER, inject)?;
            let (x, inject) = step.read(h, &FFN_MIXER)?;
            let y = step.moe(x)?;
            h = step.write(h, y, &FFN_MIXER, inject)?;
        }
        if streams {
            step.p.b.output("streams", h);
        }
        step.p.leave();
        let h = step.p.b.gather_rows(h, step.p.out_rows);
        step.finish(h, &OUTPUT_MIXER)
    }
}

/// The graph of a step under construction.
struct Step<'a> {
    p: Parts<'a>,
    m: &'a Qwen4Exp,
    ngrams: Option<ValueId>,
    rope: ValueId,
    inv_freq: Arc<[f32]>,
}

impl<'a> Step<'a> {
    /// Declares the inputs and embeds the tokens; returns the residual streams `[rows, streams * hidden]`.
    fn start(
        ck: &'a Checkpoint,
        m: &'a Qwen4Exp,
        page_table: usize,
    ) -> Result<(Step<'a>, ValueId), ModelError> {
        let (mut step, x) = Step::inputs(ck, m, page_table)?;
        let b = &mut step.p.b;
        let ngrams = |p: Ple| b.input("ngrams", ValueType::f32(Dim::Rows, [p.heads * p.width]));
        step.ngrams = m.sizes.ple.map(ngrams);
        let streams = Streams { n: m.sizes.streams, scale: 1.0 };
        let x = step.p.b.streams(Op::Repeat, streams, &[x], "streams");
        Ok((step, x))
    }

    /// The inputs that the model and its draft head share; returns the embedded tokens `[rows, hidden]`.
    fn inputs(
        ck: &'a Checkpoint,
        m: &'a Qwen4Exp,
        page_table: usize,
    ) -> Result<(Step<'a>, ValueId), ModelError> {
        let h = &m.hyper;
        let mut p = Parts::new(ck, h, page_table);
        let (x, _) = p.embed(EMBED, h)?;
        let table = rope::table(h.rope_theta, h.rope_dims, &h.scaling);
        let inv_freq = table.inv_freq.clone();
        let rope = p.b.rope_table(p.positions(), table);
        Ok((Step { p, m, ngrams: None, rope, inv_freq }, x))
    }

    /// What a sublayer sees of the streams `h`: their norms, each element gated, averaged. Also returns the
    /// norms.
    fn read(&mut self, h: ValueId, mixer: &Mixer) -> Result<(ValueId, ValueId), ModelError> {
        let (n, rank) = (self.m.sizes.streams, self.m.sizes.rank);
        let width = n * self.m.hyper.hidden;
        let u = self.stream_norm(h, mixer.norm)?;
        let low = self.p.linear(u, mixer.down, [rank, width], "mix_down")?;
        let low = self.p.b.act(low, Act { kind: ActKind::Silu, pre: 1.0 / n as f32, post: 1.0 });
        let gate = self.p.linear(low, mixer.up, [width, rank], "mix_up")?;
        let gate = self.p.b.act(gate, SIGMOID);
        let gated = self.p.b.mul(gate, u);
        let mean = Streams { n, scale: 1.0 / n as f32 };
        Ok((self.p.b.streams(Op::StreamSum, mean, &[gated], "mixed"), u))
    }

    /// Adds a sublayer's result `y` to each stream of `h`, weighted by the normed streams `u`.
    fn write(&mut self, h: ValueId, y: ValueId, mixer: &Mixer, u: ValueId) -> Result<ValueId, ModelError> {
        let n = self.m.sizes.streams;
        let weights = self.p.linear(u, mixer.inject, [n, n * self.m.hyper.hidden], "inject")?;
        let act = Act { kind: ActKind::Sigmoid, pre: 1.0 / n as f32, post: 2.0 };
        let weights = self.p.b.act(weights, act);
        Ok(self.p.b.streams(Op::StreamAdd, Streams { n, scale: 1.0 }, &[h, y, weights], "streams"))
    }

    /// Gated DeltaNet of `x [rows, hidden]`.
    fn delta_net(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let (rule, hidden) = (self.m.sizes.delta, self.m.hyper.hidden);
        let (channels, width) = (rule.input_width(), rule.v_heads * rule.v_dim);
        let qkv = self.p.linear(x, DELTA_QKV, [channels, hidden], "qkv")?;
        let z = self.p.linear(x, DELTA_Z, [width, hidden], "z")?;
        let beta = self.p.linear(x, DELTA_BETA, [rule.v_heads, hidden], "beta")?;
        let alpha = self.p.linear(x, DELTA_ALPHA, [rule.v_heads, hidden], "alpha")?;
        let conv = Conv1d { kernel: self.m.sizes.delta_conv, dilation: 1 };
        let qkv = self.conv(qkv, DELTA_CONV, channels, conv, "conv")?;
        let beta = self.p.b.act(beta, SIGMOID);
        let g = self.decay(alpha, rule.v_heads)?;
        let state = self.p.recurrent("delta", rule.v_heads * rule.k_dim * rule.v_dim);
        let slots = self.p.state_slots();
        let y = self.p.b.delta_rule([qkv, g, beta], slots, state, rule);
        let norm = self.p.weight(DELTA_NORM, "weight", &[rule.v_dim])?;
        let y = self.p.b.rms_norm(y, norm, self.m.hyper.norm_eps);
        let z = self.p.b.act(z, Act { kind: self.m.sizes.delta_gate, pre: 1.0, post: 1.0 });
        let y = self.p.b.mul(y, z);
        self.p.linear(y, DELTA_OUT, [hidden, width], "delta_out")
    }

    /// Log-decay per value head: `-exp(A_log) * softplus(alpha + dt_bias)`.
    fn decay(&mut self, alpha: ValueId, v_heads: usize) -> Result<ValueId, ModelError> {
        let dt = self.p.weight(DELTA_DT, "", &[v_heads])?;
        let alpha = self.p.b.bias_add(alpha, dt);
        let alpha = self.p.b.act(alpha, Act { kind: ActKind::Softplus, pre: 1.0, post: 1.0 });
        let map = if self.p.ck.is_hf() { WeightMap::NegExp } else { WeightMap::None };
        let rate = self.p.ck.mapped(DELTA_DECAY, self.p.layer(), "", &[v_heads], map)?;
        let rate = self.p.b.weight(rate);
        Ok(self.p.b.scale_vec(alpha, rate))
    }

    /// Attention of `x [rows, hidden]` to the blocks of keys that an indexer chooses, with gated output.
    fn attention(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let (h, s) = (&self.m.hyper, &self.m.sizes);
        let (width, kv_width, dim) = (h.heads * h.head_dim, h.kv_heads * h.head_dim, h.head_dim);
        let q_gate = self.p.linear(x, Q, [2 * width, h.hidden], "q_gate")?;
        let q = self.p.b.slice(q_gate, Slice { group: 2 * dim, from: 0, len: dim }, "q");
        let gate = self.p.b.slice(q_gate, Slice { group: 2 * dim, from: dim, len: dim }, "gate");
        let k = self.p.linear(x, K, [kv_width, h.hidden], "k")?;
        let v = self.p.linear(x, V, [kv_width, h.hidden], "v")?;
        let (q, k) = (self.rotated(q, Q_NORM, dim)?, self.rotated(k, K_NORM, dim)?);
        let (index_q, index_k) = self.index_qk(x)?;
        let index_q = self.rotated(index_q, INDEX_Q_NORM, s.index_dim)?;
        let index = PagedPart::each(s.index_dim);
        // Keys of positions are needed until their block is complete.
        let (kv, raw, pooled) = (PagedPart::each(kv_width), index.window(s.block), index.every(s.block));
        let state = self.p.paged("kv", vec![kv, kv, raw, pooled]);
        self.p.b.store_kv(&[k, v], self.p.slots, state);
        self.p.store_windowed(index_k, state, 2);
        let norm = self.centred(INDEX_K_NORM, s.index_dim)?;
        let inv_freq = self.inv_freq.clone();
        let pool = PoolKeys { block: s.block, raw: 2, pooled: 3, eps: h.norm_eps, inv_freq };
        let tables = self.p.window_tables();
        self.p.b.pool_keys(tables, self.p.slots, norm, state, pool);
        let scale = 1.0 / (s.index_dim as f32).sqrt();
        let (heads, top, block) = (s.index_heads, s.top, s.block);
        let select = IndexSelect { heads, block, top, pooled: 3, scale, weighted: false };
        let blocks = self.p.b.index_select(index_q, self.p.tables, None, state, select);
        let scale = 1.0 / (dim as f32).sqrt();
        let attend = Attend { heads: h.heads, kv_heads: h.kv_heads, scale, v_part: 1 };
        let attend = AttendBlocks { attend, block: s.block };
        let attended = self.p.b.attend_blocks(q, self.p.tables, blocks, state, attend);
        let gate = self.p.b.act(gate, SIGMOID);
        let y = self.p.b.mul(attended, gate);
        self.p.linear(y, O, [h.hidden, width], "attn_out")
    }

    /// The indexer's query heads and its key, neither normed nor rotated.
    fn index_qk(&mut self, x: ValueId) -> Result<(ValueId, ValueId), ModelError> {
        let (hidden, s) = (self.m.hyper.hidden, &self.m.sizes);
        let (q_width, dim) = (s.index_heads * s.index_dim, s.index_dim);
        if !self.p.ck.is_hf() {
            let q = self.p.linear(x, INDEX_Q, [q_width, hidden], "index_q")?;
            return Ok((q, self.p.linear(x, INDEX_K, [dim, hidden], "index_k")?));
        }
        let group = q_width + dim;
        let qk = self.p.linear(x, INDEX_QK, [group, hidden], "index_qk")?;
        let q = self.p.b.slice(qk, Slice { group, from: 0, len: q_width }, "index_q");
        Ok((q, self.p.b.slice(qk, Slice { group, from: q_width, len: dim }, "index_k")))
    }

    /// Heads of `x`, normed and with their first dimensions rotated.
    fn rotated(&mut self, x: ValueId, norm: Names, head_dim: usize) -> Result<ValueId, ModelError> {
        let norm = self.centred(norm, head_dim)?;
        let x = self.p.b.rms_norm(x, norm, self.m.hyper.norm_eps);
        Ok(self.p.b.rope(x, self.rope, RopeStyle::HalfSplit, head_dim))
    }

    /// Mixture of experts, and a shared expert behind a gate of its own.
    fn moe(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let (e, hidden) = (&self.m.experts, self.m.hyper.hidden);
        let logits = self.p.linear(x, ROUTER, [e.count, hidden], "router_logits")?;
        let (ids, weights) = self.p.b.router(logits, None, e.softmax_router());
        let (gate, up) = self.gate_up(x, ids)?;
        let inner = self.p.swiglu(gate, up);
        let down = self.experts(inner, ids, DOWN_EXPERTS, DOWN_PACKED, [e.count, hidden, e.ffn], "down")?;
        let chosen = self.p.b.combine_experts(down, weights);
        let shared = self.shared_expert(x)?;
        let switch = self.p.linear(x, SHARED_SWITCH, [1, hidden], "shared_switch")?;
        let switch = self.p.b.act(switch, SIGMOID);
        let one = Streams { n: 1, scale: 1.0 };
        Ok(self.p.b.streams(Op::StreamAdd, one, &[chosen, shared, switch], "ffn_out"))
    }

    fn gate_up(&mut self, x: ValueId, ids: ValueId) -> Result<(ValueId, ValueId), ModelError> {
        let (e, hidden) = (&self.m.experts, self.m.hyper.hidden);
        let packed = [e.count, 2 * e.ffn, hidden];
        if let Some(decl) = self.p.ck.optional(GATE_UP_PACKED, self.p.layer(), "", &packed)? {
            let w = self.p.b.weight(decl);
            let both = self.p.b.grouped_matmul(x, ids, w, "gate_up");
            let gate = self.p.b.slice(both, Slice { group: 2 * e.ffn, from: 0, len: e.ffn }, "gate");
            return Ok((
                gate,
                self.p.b.slice(both, Slice { group: 2 * e.ffn, from: e.ffn, len: e.ffn }, "up"),
            ));
        }
        let shape = [e.count, e.ffn, hidden];
        let gate = self.experts(x, ids, GATE_EXPERTS, GATE_UP_PACKED, shape, "gate")?;
        Ok((gate, self.experts(x, ids, UP_EXPERTS, GATE_UP_PACKED, shape, "up")?))
    }

    /// Products with each row's experts, from one tensor (`packed`) where the source has that, and scales
    /// where it has those.
    fn experts(
        &mut self,
        x: ValueId,
        ids: ValueId,
        names: Names,
        packed: Names,
        shape: [usize; 3],
        name: &str,
    ) -> Result<ValueId, ModelError> {
        if !self.p.ck.has(packed, self.p.layer(), "")? {
            return self.p.experts(x, ids, names, shape, name);
        }
        let w = self.p.weight(packed, "", &shape)?;
        let y = self.p.b.grouped_matmul(x, ids, w, name);
        self.p.expert_scaled(y, ids, names, shape[0])
    }

    fn shared_expert(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let (hidden, ffn) = (self.m.hyper.hidden, self.m.sizes.shared_ffn);
        let gate = self.p.linear(x, SHARED_GATE, [ffn, hidden], "shared_gate")?;
        let up = self.p.linear(x, SHARED_UP, [ffn, hidden], "shared_up")?;
        let inner = self.p.swiglu(gate, up);
        self.p.linear(inner, SHARED_DOWN, [hidden, ffn], "shared_out")
    }

    /// Adds what the n-grams that end at each token say: one value for all streams, let through by how well
    /// each stream's query fits its key, and a convolution of that along the sequence.
    fn ngrams(&mut self, h: ValueId, ple: Ple) -> Result<ValueId, ModelError> {
        let (hidden, n) = (self.m.hyper.hidden, self.m.sizes.streams);
        let (width, embed) = (n * hidden, ple.heads * ple.width);
        let Some(e) = self.ngrams else { return Ok(h) };
        let key = self.p.linear(e, PLE_KEY, [width, embed], "ngram_key")?;
        let key = self.stream_norm(key, PLE_NORM_KEY)?;
        let value = self.p.linear(e, PLE_VALUE, [hidden, embed], "ngram_value")?;
        let query = self.stream_norm(h, PLE_NORM_QUERY)?;
        let dot = Streams { n, scale: 1.0 / (hidden as f32).sqrt() };
        let fit = self.p.b.streams(Op::StreamDot, dot, &[key, query], "ngram_fit");
        let fit = self.p.b.act(fit, Act { kind: ActKind::SignedSqrt, pre: 1.0, post: 1.0 });
        let gate = self.p.b.act(fit, SIGMOID);
        let gated = self.p.b.streams(Op::StreamMul, Streams { n, scale: 1.0 }, &[value, gate], "ngram_gated");
        let normed = self.stream_norm(gated, PLE_NORM_CONV)?;
        let conv = self.conv(normed, PLE_CONV, width, ple.conv, "ngram_conv")?;
        let added = self.p.b.add(gated, conv);
        Ok(self.p.b.add(h, added))
    }

    /// The last read of the wanted rows' streams, and the head.
    fn finish(mut self, h: ValueId, mixer: &Mixer) -> Result<Graph, ModelError> {
        let (x, _) = self.read(h, mixer)?;
        self.p.leave();
        let logits = self.p.linear(x, OUTPUT, [self.m.hyper.vocab, self.m.hyper.hidden], "logits")?;
        self.p.b.output("logits", logits);
        self.p.finish()
    }

    /// A norm's weight: Hugging Face directories store its distance from one.
    fn centred(&mut self, names: Names, n: usize) -> Result<WeightId, ModelError> {
        let map = if self.p.ck.is_hf() { WeightMap::AddOne } else { WeightMap::None };
        let decl = self.p.ck.mapped(names, self.p.layer(), "weight", &[n], map)?;
        Ok(self.p.b.weight(decl))
    }

    /// Norm of each residual stream, with weights of its own.
    fn stream_norm(&mut self, x: ValueId, names: Names) -> Result<ValueId, ModelError> {
        let group = self.m.hyper.hidden;
        let w = self.centred(names, self.m.sizes.streams * group)?;
        Ok(self.p.b.grouped_norm(x, w, Norm { eps: self.m.hyper.norm_eps, group }))
    }

    /// Causal depthwise convolution, whose tail is state of this name.
    fn conv(
        &mut self,
        x: ValueId,
        names: Names,
        channels: usize,
        conv: Conv1d,
        name: &str,
    ) -> Result<ValueId, ModelError> {
        let w = self.p.weight(names, "weight", &[channels, conv.kernel])?;
        let state = self.p.recurrent(name, conv.tail() * channels);
        let slots = self.p.state_slots();
        Ok(self.p.b.conv1d(x, slots, w, state, conv))
    }
}
