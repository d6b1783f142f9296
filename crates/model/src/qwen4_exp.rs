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
    Act, ActKind, Attend, AttendBlocks, Conv1d, Dim, Graph, GraphBuilder, IndexSelect, Norm, Op, PoolKeys,
    RopeStyle, Slice, StateDecl, StateId, StateKind, Streams, ValueId, ValueType, WeightDecl, WeightId,
    WeightMap,
};

use crate::Model;
use crate::checkpoint::{Checkpoint, Names};
use crate::decoder::EMBED;
use crate::error::ModelError;
use crate::hyper::{Experts, Hyper, text_config};
use crate::ngram::Ngram;
use crate::rope;
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
        Checkpoint::Shape(_) => return Err(ck.bad("shape", "of this architecture is not known")),
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

    fn draft_graph(&self, ck: &Checkpoint, page_table: usize) -> Result<Option<Graph>, ModelError> {
        draft::graph(self, ck, page_table)
    }
}

impl Qwen4Exp {
    /// The decoder; with `streams`, its residual streams of all rows are a result too.
    fn trunk(&self, ck: &Checkpoint, page_table: usize, streams: bool) -> Result<Graph, ModelError> {
        let (mut step, mut h) = Step::start(ck, self, page_table)?;
        for layer in 0..self.hyper.layers {
            step.enter(layer);
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
            step.b.output("streams", h);
        }
        let h = step.b.gather_rows(h, step.out_rows);
        step.finish(h, &OUTPUT_MIXER)
    }
}

/// The graph of a step under construction.
struct Step<'a> {
    b: GraphBuilder,
    ck: &'a Checkpoint,
    m: &'a Qwen4Exp,
    layer: Option<usize>,
    slots: ValueId,
    /// Positions, start of each row's page list, page lists.
    tables: [ValueId; 3],
    /// Slots that recurrent state is read from and written to.
    state: [ValueId; 2],
    ngrams: Option<ValueId>,
    out_rows: ValueId,
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
        let mut per_row = |name| step.b.input(name, ValueType::i32(Dim::Rows, []));
        step.state = [per_row("state_from"), per_row("state_to")];
        let ngrams = |p: Ple| step.b.input("ngrams", ValueType::f32(Dim::Rows, [p.heads * p.width]));
        step.ngrams = m.sizes.ple.map(ngrams);
        let streams = Streams { n: m.sizes.streams, scale: 1.0 };
        let x = step.b.streams(Op::Repeat, streams, &[x], "streams");
        Ok((step, x))
    }

    /// The inputs that the model and its draft head share; returns the embedded tokens `[rows, hidden]`.
    fn inputs(
        ck: &'a Checkpoint,
        m: &'a Qwen4Exp,
        page_table: usize,
    ) -> Result<(Step<'a>, ValueId), ModelError> {
        let (mut b, h) = (GraphBuilder::new(), &m.hyper);
        let mut per_row = |name| b.input(name, ValueType::i32(Dim::Rows, []));
        let (tokens, positions) = (per_row("tokens"), per_row("positions"));
        let (slots, table_at) = (per_row("slots"), per_row("table_at"));
        let pages = b.input("pages", ValueType::i32(Dim::Const(page_table), []));
        let out_rows = b.input("out_rows", ValueType::i32(Dim::Outs, []));
        let embedding = b.weight(ck.weight(EMBED, None, "weight", &[h.vocab, h.hidden])?);
        let x = b.embed(tokens, embedding);
        let table = rope::table(h.rope_theta, h.rope_dims, &h.scaling);
        let inv_freq = table.inv_freq.clone();
        let rope = b.rope_table(positions, table);
        let tables = [positions, table_at, pages];
        // The draft head has no recurrent state; `start` puts the real inputs here.
        let state = [slots, slots];
        let (layer, ngrams) = (None, None);
        Ok((Step { b, ck, m, layer, slots, tables, state, ngrams, out_rows, rope, inv_freq }, x))
    }

    fn enter(&mut self, layer: usize) {
        self.layer = Some(layer);
        self.b.set_layer(Some(layer as u32));
    }

    /// What a sublayer sees of the streams `h`: their norms, each element gated, averaged. Also returns the
    /// norms.
    fn read(&mut self, h: ValueId, mixer: &Mixer) -> Result<(ValueId, ValueId), ModelError> {
        let (n, rank) = (self.m.sizes.streams, self.m.sizes.rank);
        let width = n * self.m.hyper.hidden;
        let u = self.stream_norm(h, mixer.norm)?;
        let low = self.linear(u, mixer.down, [rank, width], "mix_down")?;
        let low = self.b.act(low, Act { kind: ActKind::Silu, pre: 1.0 / n as f32, post: 1.0 });
        let gate = self.linear(low, mixer.up, [width, rank], "mix_up")?;
        let gate = self.b.act(gate, SIGMOID);
        let gated = self.b.mul(gate, u);
        let mean = Streams { n, scale: 1.0 / n as f32 };
        Ok((self.b.streams(Op::StreamSum, mean, &[gated], "mixed"), u))
    }

    /// Adds a sublayer's result `y` to each stream of `h`, weighted by the normed streams `u`.
    fn write(&mut self, h: ValueId, y: ValueId, mixer: &Mixer, u: ValueId) -> Result<ValueId, ModelError> {
        let n = self.m.sizes.streams;
        let weights = self.linear(u, mixer.inject, [n, n * self.m.hyper.hidden], "inject")?;
        let act = Act { kind: ActKind::Sigmoid, pre: 1.0 / n as f32, post: 2.0 };
        let weights = self.b.act(weights, act);
        Ok(self.b.streams(Op::StreamAdd, Streams { n, scale: 1.0 }, &[h, y, weights], "streams"))
    }

    /// Gated DeltaNet of `x [rows, hidden]`.
    fn delta_net(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let (rule, hidden) = (self.m.sizes.delta, self.m.hyper.hidden);
        let (channels, width) = (rule.input_width(), rule.v_heads * rule.v_dim);
        let qkv = self.linear(x, DELTA_QKV, [channels, hidden], "qkv")?;
        let z = self.linear(x, DELTA_Z, [width, hidden], "z")?;
        let beta = self.linear(x, DELTA_BETA, [rule.v_heads, hidden], "beta")?;
        let alpha = self.linear(x, DELTA_ALPHA, [rule.v_heads, hidden], "alpha")?;
        let conv = Conv1d { kernel: self.m.sizes.delta_conv, dilation: 1 };
        let qkv = self.conv(qkv, DELTA_CONV, channels, conv, "conv")?;
        let beta = self.b.act(beta, SIGMOID);
        let g = self.decay(alpha, rule.v_heads)?;
        let state = self.recurrent("delta", rule.v_heads * rule.k_dim * rule.v_dim);
        let y = self.b.delta_rule([qkv, g, beta], self.state, state, rule);
        let norm = self.weight(DELTA_NORM, "weight", &[rule.v_dim])?;
        let y = self.b.rms_norm(y, norm, self.m.hyper.norm_eps);
        let z = self.b.act(z, Act { kind: self.m.sizes.delta_gate, pre: 1.0, post: 1.0 });
        let y = self.b.mul(y, z);
        self.linear(y, DELTA_OUT, [hidden, width], "delta_out")
    }

    /// Log-decay per value head: `-exp(A_log) * softplus(alpha + dt_bias)`.
    fn decay(&mut self, alpha: ValueId, v_heads: usize) -> Result<ValueId, ModelError> {
        let dt = self.weight(DELTA_DT, "", &[v_heads])?;
        let alpha = self.b.bias_add(alpha, dt);
        let alpha = self.b.act(alpha, Act { kind: ActKind::Softplus, pre: 1.0, post: 1.0 });
        let map = if self.ck.is_hf() { WeightMap::NegExp } else { WeightMap::None };
        let rate = self.ck.mapped(DELTA_DECAY, self.layer, "", &[v_heads], map)?;
        let rate = self.b.weight(rate);
        Ok(self.b.scale_vec(alpha, rate))
    }

    /// Attention of `x [rows, hidden]` to the blocks of keys that an indexer chooses, with gated output.
    fn attention(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let (h, s) = (&self.m.hyper, &self.m.sizes);
        let (width, kv_width, dim) = (h.heads * h.head_dim, h.kv_heads * h.head_dim, h.head_dim);
        let q_gate = self.linear(x, Q, [2 * width, h.hidden], "q_gate")?;
        let q = self.b.slice(q_gate, Slice { group: 2 * dim, from: 0, len: dim }, "q");
        let gate = self.b.slice(q_gate, Slice { group: 2 * dim, from: dim, len: dim }, "gate");
        let k = self.linear(x, K, [kv_width, h.hidden], "k")?;
        let v = self.linear(x, V, [kv_width, h.hidden], "v")?;
        let (q, k) = (self.rotated(q, Q_NORM, dim)?, self.rotated(k, K_NORM, dim)?);
        let (index_q, index_k) = self.index_qk(x)?;
        let index_q = self.rotated(index_q, INDEX_Q_NORM, s.index_dim)?;
        let state = self.b.state(StateDecl {
            name: format!("kv.{}", self.number()),
            layer: self.number() as u32,
            kind: StateKind::Paged { widths: vec![kv_width, kv_width, s.index_dim, s.index_dim] },
        });
        self.b.store_kv(&[k, v, index_k], self.slots, state);
        let norm = self.centred(INDEX_K_NORM, s.index_dim)?;
        let inv_freq = self.inv_freq.clone();
        let pool = PoolKeys { block: s.block, raw: 2, pooled: 3, eps: h.norm_eps, inv_freq };
        self.b.pool_keys(self.tables, self.slots, norm, state, pool);
        let scale = 1.0 / (s.index_dim as f32).sqrt();
        let (heads, top, block) = (s.index_heads, s.top, s.block);
        let select = IndexSelect { heads, block, top, pooled: 3, scale, weighted: false };
        let blocks = self.b.index_select(index_q, self.tables, None, state, select);
        let scale = 1.0 / (dim as f32).sqrt();
        let attend = Attend { heads: h.heads, kv_heads: h.kv_heads, scale, v_part: 1 };
        let attend = AttendBlocks { attend, block: s.block };
        let attended = self.b.attend_blocks(q, self.tables, blocks, state, attend);
        let gate = self.b.act(gate, SIGMOID);
        let y = self.b.mul(attended, gate);
        self.linear(y, O, [h.hidden, width], "attn_out")
    }

    /// The indexer's query heads and its key, neither normed nor rotated.
    fn index_qk(&mut self, x: ValueId) -> Result<(ValueId, ValueId), ModelError> {
        let (hidden, s) = (self.m.hyper.hidden, &self.m.sizes);
        let (q_width, dim) = (s.index_heads * s.index_dim, s.index_dim);
        if !self.ck.is_hf() {
            let q = self.linear(x, INDEX_Q, [q_width, hidden], "index_q")?;
            return Ok((q, self.linear(x, INDEX_K, [dim, hidden], "index_k")?));
        }
        let group = q_width + dim;
        let qk = self.linear(x, INDEX_QK, [group, hidden], "index_qk")?;
        let q = self.b.slice(qk, Slice { group, from: 0, len: q_width }, "index_q");
        Ok((q, self.b.slice(qk, Slice { group, from: q_width, len: dim }, "index_k")))
    }

    /// Heads of `x`, normed and with their first dimensions rotated.
    fn rotated(&mut self, x: ValueId, norm: Names, head_dim: usize) -> Result<ValueId, ModelError> {
        let norm = self.centred(norm, head_dim)?;
        let x = self.b.rms_norm(x, norm, self.m.hyper.norm_eps);
        Ok(self.b.rope(x, self.rope, RopeStyle::HalfSplit, head_dim))
    }

    /// Mixture of experts, and a shared expert behind a gate of its own.
    fn moe(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let (e, hidden) = (&self.m.experts, self.m.hyper.hidden);
        let logits = self.linear(x, ROUTER, [e.count, hidden], "router_logits")?;
        let (ids, weights) = self.b.router(logits, None, e.softmax_router());
        let (gate, up) = self.gate_up(x, ids)?;
        let gate = self.b.silu(gate);
        let inner = self.b.mul(gate, up);
        let down = self.experts(inner, ids, DOWN_EXPERTS, DOWN_PACKED, [e.count, hidden, e.ffn], "down")?;
        let chosen = self.b.combine_experts(down, weights);
        let shared = self.shared_expert(x)?;
        let switch = self.linear(x, SHARED_SWITCH, [1, hidden], "shared_switch")?;
        let switch = self.b.act(switch, SIGMOID);
        let one = Streams { n: 1, scale: 1.0 };
        Ok(self.b.streams(Op::StreamAdd, one, &[chosen, shared, switch], "ffn_out"))
    }

    fn gate_up(&mut self, x: ValueId, ids: ValueId) -> Result<(ValueId, ValueId), ModelError> {
        let (e, hidden) = (&self.m.experts, self.m.hyper.hidden);
        let packed = [e.count, 2 * e.ffn, hidden];
        if let Some(decl) = self.ck.optional(GATE_UP_PACKED, self.layer, "", &packed)? {
            let w = self.b.weight(decl);
            let both = self.b.grouped_matmul(x, ids, w, "gate_up");
            let gate = self.b.slice(both, Slice { group: 2 * e.ffn, from: 0, len: e.ffn }, "gate");
            return Ok((gate, self.b.slice(both, Slice { group: 2 * e.ffn, from: e.ffn, len: e.ffn }, "up")));
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
        let decl = match self.ck.has(packed, self.layer, "")? {
            true => self.ck.weight(packed, self.layer, "", &shape)?,
            false => self.ck.experts(names, self.number(), shape)?,
        };
        let w = self.b.weight(decl);
        let y = self.b.grouped_matmul(x, ids, w, name);
        match self.ck.optional(names, self.layer, "scale", &[shape[0]])? {
            Some(scales) => {
                let scales = self.b.weight(scales);
                Ok(self.b.expert_scale(y, ids, scales))
            }
            None => Ok(y),
        }
    }

    fn shared_expert(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let (hidden, ffn) = (self.m.hyper.hidden, self.m.sizes.shared_ffn);
        let gate = self.linear(x, SHARED_GATE, [ffn, hidden], "shared_gate")?;
        let up = self.linear(x, SHARED_UP, [ffn, hidden], "shared_up")?;
        let gate = self.b.silu(gate);
        let inner = self.b.mul(gate, up);
        self.linear(inner, SHARED_DOWN, [hidden, ffn], "shared_out")
    }

    /// Adds what the n-grams that end at each token say: one value for all streams, let through by how well
    /// each stream's query fits its key, and a convolution of that along the sequence.
    fn ngrams(&mut self, h: ValueId, ple: Ple) -> Result<ValueId, ModelError> {
        let (hidden, n) = (self.m.hyper.hidden, self.m.sizes.streams);
        let (width, embed) = (n * hidden, ple.heads * ple.width);
        let Some(e) = self.ngrams else { return Ok(h) };
        let key = self.linear(e, PLE_KEY, [width, embed], "ngram_key")?;
        let key = self.stream_norm(key, PLE_NORM_KEY)?;
        let value = self.linear(e, PLE_VALUE, [hidden, embed], "ngram_value")?;
        let query = self.stream_norm(h, PLE_NORM_QUERY)?;
        let dot = Streams { n, scale: 1.0 / (hidden as f32).sqrt() };
        let fit = self.b.streams(Op::StreamDot, dot, &[key, query], "ngram_fit");
        let fit = self.b.act(fit, Act { kind: ActKind::SignedSqrt, pre: 1.0, post: 1.0 });
        let gate = self.b.act(fit, SIGMOID);
        let gated = self.b.streams(Op::StreamMul, Streams { n, scale: 1.0 }, &[value, gate], "ngram_gated");
        let normed = self.stream_norm(gated, PLE_NORM_CONV)?;
        let conv = self.conv(normed, PLE_CONV, width, ple.conv, "ngram_conv")?;
        let added = self.b.add(gated, conv);
        Ok(self.b.add(h, added))
    }

    /// The last read of the wanted rows' streams, and the head.
    fn finish(mut self, h: ValueId, mixer: &Mixer) -> Result<Graph, ModelError> {
        self.layer = None;
        self.b.set_layer(None);
        let (x, _) = self.read(h, mixer)?;
        let logits = self.linear(x, OUTPUT, [self.m.hyper.vocab, self.m.hyper.hidden], "logits")?;
        self.b.output("logits", logits);
        self.b.finish().map_err(|source| ModelError::Graph { source_name: self.ck.name(), source })
    }

    fn number(&self) -> usize {
        self.layer.unwrap_or(0)
    }

    fn weight(&mut self, names: Names, suffix: &str, shape: &[usize]) -> Result<WeightId, ModelError> {
        let decl = self.ck.weight(names, self.layer, suffix, shape)?;
        Ok(self.b.weight(decl))
    }

    /// A norm's weight: Hugging Face directories store its distance from one.
    fn centred(&mut self, names: Names, n: usize) -> Result<WeightId, ModelError> {
        let map = if self.ck.is_hf() { WeightMap::AddOne } else { WeightMap::None };
        let decl = self.ck.mapped(names, self.layer, "weight", &[n], map)?;
        Ok(self.b.weight(decl))
    }

    /// Norm of each residual stream, with weights of its own.
    fn stream_norm(&mut self, x: ValueId, names: Names) -> Result<ValueId, ModelError> {
        let group = self.m.hyper.hidden;
        let w = self.centred(names, self.m.sizes.streams * group)?;
        Ok(self.b.grouped_norm(x, w, Norm { eps: self.m.hyper.norm_eps, group }))
    }

    /// `x W^T`, with the tensor's scale and then its bias where the file has them.
    fn linear(
        &mut self,
        x: ValueId,
        names: Names,
        shape: [usize; 2],
        name: &str,
    ) -> Result<ValueId, ModelError> {
        let w = self.weight(names, "weight", &shape)?;
        let mut y = self.b.matmul(x, w, name);
        if let Some(scale) = self.ck.optional(names, self.layer, "scale", &[1])? {
            let scale = self.b.weight(scale);
            y = self.b.scale(y, scale);
        }
        if let Some(bias) = self.ck.optional(names, self.layer, "bias", &[shape[0]])? {
            let bias = self.b.weight(bias);
            y = self.b.bias_add(y, bias);
        }
        Ok(y)
    }

    fn recurrent(&mut self, name: &str, width: usize) -> StateId {
        let layer = self.number();
        let kind = StateKind::Recurrent { width };
        self.b.state(StateDecl { name: format!("{name}.{layer}"), layer: layer as u32, kind })
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
        let w = self.weight(names, "weight", &[channels, conv.kernel])?;
        let state = self.recurrent(name, conv.tail() * channels);
        Ok(self.b.conv1d(x, self.state, w, state, conv))
    }
}

const SIGMOID: Act = Act { kind: ActKind::Sigmoid, pre: 1.0, post: 1.0 };
