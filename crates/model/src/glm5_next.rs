//! GLM-5.3-Flash: a decoder of Kimi delta attention layers (Kimi Team 2025) with latent attention (DeepSeek-AI 2024)
//! to chosen blocks of positions in every fourth, both under manifold-constrained hyper-connections (Xie et al. 2025);
//! dense SwiGLU in the first layers, then a mixture of experts with a shared one. Nothing is rotated. Formulas and
//! names as transformers 5.24 has them; GGUF names as llama.cpp has them, where decay rates are `-exp(A_log)` and
//! `kv_b_proj` comes in two parts.
//!
//! Latent attention runs absorbed: a query head is taken into the space of the latents by its part of `kv_b_proj`,
//! so that one latent per position serves all heads, both as key and as value; its other part takes what was
//! attended to out of that space.

mod draft;
mod sizes;

use minfer_graph::{
    Act, Attend, AttendBlocks, Conv1d, Graph, HeadRows, IndexSelect, Norm, Op, PagedPart, PoolGated, Router,
    Scoring, StateId, Streams, ValueId, WeightId, WeightMap,
};

use crate::checkpoint::{Checkpoint, Names};
use crate::decoder::EMBED;
use crate::error::ModelError;
use crate::hyper::{Experts, Hyper, text_config};
use crate::parts::{Parts, SIGMOID};
use crate::{DraftHead, Model};
use sizes::Sizes;

const ARCH: &str = "glm5-next";

/// The weights of a hyper-connection, and the norm of what it reads.
struct Mixer {
    function: Names,
    base: Names,
    scale: Names,
    norm: Names,
}

const ATTN_MIXER: Mixer = Mixer {
    function: ("hc_attn_fn.weight", "hc_attn_fn"),
    base: ("hc_attn_base.weight", "hc_attn_base"),
    scale: ("hc_attn_scale.weight", "hc_attn_scale"),
    norm: ("attn_norm", "input_layernorm"),
};
const FFN_MIXER: Mixer = Mixer {
    function: ("hc_ffn_fn.weight", "hc_ffn_fn"),
    base: ("hc_ffn_base.weight", "hc_ffn_base"),
    scale: ("hc_ffn_scale.weight", "hc_ffn_scale"),
    norm: ("ffn_norm", "post_attention_layernorm"),
};
const OUTPUT_NORM: Names = ("output_norm", "model.norm");
const OUTPUT: Names = ("output", "lm_head");

/// Queries, keys and values of the linear layers.
const DELTA_QKV: [Names; 3] =
    [("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"), ("attn_v", "self_attn.v_proj")];
const DELTA_CONV: [Names; 3] = [
    ("ssm_conv1d_q", "self_attn.q_conv1d"),
    ("ssm_conv1d_k", "self_attn.k_conv1d"),
    ("ssm_conv1d_v", "self_attn.v_conv1d"),
];
const DELTA_FORGET: [Names; 2] = [("ssm_f_a", "self_attn.f_a_proj"), ("ssm_f_b", "self_attn.f_b_proj")];
const DELTA_GATE: [Names; 2] = [("ssm_g_a", "self_attn.g_a_proj"), ("ssm_g_b", "self_attn.g_b_proj")];
const DELTA_BETA: Names = ("ssm_beta", "self_attn.b_proj");
const DELTA_DT: Names = ("ssm_dt.bias", "self_attn.dt_bias");
const DELTA_DECAY: Names = ("ssm_a", "self_attn.A_log");
const DELTA_NORM: Names = ("ssm_norm", "self_attn.o_norm");
const O: Names = ("attn_output", "self_attn.o_proj");

const Q_A: Names = ("attn_q_a", "self_attn.q_a_proj");
const Q_A_NORM: Names = ("attn_q_a_norm", "self_attn.q_a_layernorm");
const Q_B: Names = ("attn_q_b", "self_attn.q_b_proj");
const KV_A: Names = ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa");
const KV_A_NORM: Names = ("attn_kv_a_norm", "self_attn.kv_a_layernorm");
/// Keys and values of each head, one below the other; apart in GGUF files, with the keys' part transposed.
const KV_B: Names = ("", "self_attn.kv_b_proj");
const K_B: Names = ("attn_k_b", "");
const V_B: Names = ("attn_v_b", "");
const INDEX_Q: Names = ("indexer.attn_q_b", "self_attn.indexer.wq_b");
const INDEX_K: Names = ("indexer.attn_k", "self_attn.indexer.wk");
const INDEX_K_NORM: Names = ("indexer.k_norm", "self_attn.indexer.k_norm");
const INDEX_HEADS: Names = ("indexer.proj", "self_attn.indexer.weights_proj");
const INDEX_GATE: Names = ("indexer_compressor_gate.weight", "self_attn.indexer.index_kpool_compress_gate");
const INDEX_BIAS: Names = ("indexer_compressor_ape.weight", "self_attn.indexer.index_kpool_compress_ape");

const ROUTER: Names = ("ffn_gate_inp", "mlp.gate");
const ROUTER_BIAS: Names = ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias");
const GATE_EXPERTS: Names = ("ffn_gate_exps", "mlp.experts.{}.gate_proj");
const UP_EXPERTS: Names = ("ffn_up_exps", "mlp.experts.{}.up_proj");
const DOWN_EXPERTS: Names = ("ffn_down_exps", "mlp.experts.{}.down_proj");
/// Gate, up, down.
const SHARED: [Names; 3] = [
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];
const DENSE: [Names; 3] =
    [("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj")];

struct Glm5Next {
    hyper: Hyper,
    experts: Experts,
    sizes: Sizes,
}

pub(crate) fn load(ck: &Checkpoint) -> Result<Box<dyn Model>, ModelError> {
    let model = match ck {
        Checkpoint::Gguf(g) => Glm5Next::from_gguf(ck, g.metadata())?,
        Checkpoint::Hf(d) => Glm5Next::from_hf(ck, text_config(d.config()))?,
        Checkpoint::Shape(s) => Glm5Next::from_hf(ck, s.config())?,
    };
    Ok(Box::new(model))
}

impl Model for Glm5Next {
    fn hyper(&self) -> &Hyper {
        &self.hyper
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

impl Glm5Next {
    /// The decoder; with `streams`, the normed mean of its residual streams of all rows is a result too.
    fn trunk(&self, ck: &Checkpoint, page_table: usize, streams: bool) -> Result<Graph, ModelError> {
        let (mut step, mut h) = Step::start(ck, self, page_table)?;
        for layer in 0..self.hyper.layers {
            step.p.enter(layer);
            let (x, write) = step.read(h, &ATTN_MIXER)?;
            let y = if self.sizes.attends[layer] { step.attention(x)? } else { step.delta_attention(x)? };
            h = step.write(h, y, write);
            let (x, write) = step.read(h, &FFN_MIXER)?;
            let dense = self.experts.dense_layers.contains(&layer);
            let y = if dense { step.ffn(x, DENSE, self.hyper.ffn)? } else { step.moe(x)? };
            h = step.write(h, y, write);
        }
        step.p.leave();
        if streams {
            let x = step.collapse(h)?;
            step.p.b.output("streams", x);
            let x = step.p.b.gather_rows(x, step.p.out_rows);
            return step.head(x);
        }
        let h = step.p.b.gather_rows(h, step.p.out_rows);
        let x = step.collapse(h)?;
        step.head(x)
    }
}

/// How a sublayer's result goes into the residual streams.
struct Write {
    post: ValueId,
    comb: ValueId,
}

/// The graph of a step under construction.
struct Step<'a> {
    p: Parts<'a>,
    m: &'a Glm5Next,
}

impl<'a> Step<'a> {
    /// Declares the inputs and embeds the tokens; returns the residual streams `[rows, streams * hidden]`.
    fn start(
        ck: &'a Checkpoint,
        m: &'a Glm5Next,
        page_table: usize,
    ) -> Result<(Step<'a>, ValueId), ModelError> {
        let mut p = Parts::new(ck, &m.hyper, page_table);
        let (x, _) = p.embed(EMBED, &m.hyper)?;
        let mut step = Step { p, m };
        let x = step.p.b.streams(Op::Repeat, step.streams(), &[x], "streams");
        Ok((step, x))
    }

    fn streams(&self) -> Streams {
        Streams { n: self.m.sizes.mix.n, scale: 1.0 }
    }

    /// What a sublayer sees of the streams `h`: their weighted sum, normed. Also says how to write.
    fn read(&mut self, h: ValueId, mixer: &Mixer) -> Result<(ValueId, Write), ModelError> {
        let (mix, hidden) = (self.m.sizes.mix, self.m.hyper.hidden);
        let group = mix.n * hidden;
        let u = self.p.b.unit_norm(h, Norm { eps: self.m.hyper.norm_eps, group });
        let function = self.p.weight(mixer.function, "", &[mix.width(), group])?;
        let m = self.p.b.matmul(u, function, "mix_logits");
        let parts = [(mixer.base, "", mix.width()), (mixer.scale, "", 3)];
        let constants = self.p.ck.joined(&parts, self.p.layer(), &[])?;
        let constants = self.p.b.weight(constants);
        let [pre, post, comb] = self.p.b.hyper_mix(m, constants, mix);
        let x = self.p.b.streams(Op::StreamWeightedSum, self.streams(), &[h, pre], "mixed");
        Ok((self.p.norm(x, mixer.norm, hidden)?, Write { post, comb }))
    }

    /// Adds a sublayer's result `y` to the mixed streams of `h`.
    fn write(&mut self, h: ValueId, y: ValueId, w: Write) -> ValueId {
        self.p.b.streams(Op::StreamMix, self.streams(), &[h, y, w.post, w.comb], "streams")
    }

    /// Kimi delta attention of `x [rows, hidden]`: the delta rule with a decay for each key channel.
    fn delta_attention(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let (rule, hidden) = (self.m.sizes.delta, self.m.hyper.hidden);
        let (width, heads) = (rule.v_heads * rule.v_dim, rule.v_heads);
        let mut parts = Vec::with_capacity(DELTA_QKV.len());
        for names in DELTA_QKV {
            parts.push(self.p.linear(x, names, [width, hidden], "qkv")?);
        }
        let qkv = self.p.b.concat(&parts, "qkv");
        let qkv = self.delta_conv(qkv, width)?;
        let g = self.decay(x)?;
        let beta = self.p.linear(x, DELTA_BETA, [heads, hidden], "beta")?;
        let beta = self.p.b.act(beta, SIGMOID);
        let state = self.p.recurrent("delta", rule.v_heads * rule.k_dim * rule.v_dim);
        let slots = self.p.state_slots();
        let y = self.p.b.delta_rule([qkv, g, beta], slots, state, rule);
        let y = self.p.norm(y, DELTA_NORM, rule.v_dim)?;
        let z = self.p.low_rank(x, DELTA_GATE, [width, rule.v_dim, hidden], "gate")?;
        let z = self.p.b.act(z, SIGMOID);
        let y = self.p.b.mul(y, z);
        self.p.linear(y, O, [hidden, width], "delta_out")
    }

    /// Causal depthwise convolution of queries, keys and values side by side, and SiLU.
    fn delta_conv(&mut self, qkv: ValueId, width: usize) -> Result<ValueId, ModelError> {
        let conv = Conv1d { kernel: self.m.sizes.conv, dilation: 1 };
        let w =
            self.p.ck.joined(&DELTA_CONV.map(|n| (n, "weight", width)), self.p.layer(), &[conv.kernel])?;
        let w = self.p.b.weight(w);
        let state = self.p.recurrent("conv", conv.tail() * 3 * width);
        let slots = self.p.state_slots();
        Ok(self.p.b.conv1d(qkv, slots, w, state, conv))
    }

    /// Log-decay per key channel: `bound * sigmoid(exp(A_log) * (f(x) + dt_bias))`, `A_log` being one per head.
    fn decay(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let (rule, hidden) = (self.m.sizes.delta, self.m.hyper.hidden);
        let f = self.p.low_rank(x, DELTA_FORGET, [rule.decays(), rule.k_dim, hidden], "forget")?;
        let dt = self.p.weight(DELTA_DT, "", &[rule.decays()])?;
        let f = self.p.b.bias_add(f, dt);
        let map = if self.p.ck.is_hf() { WeightMap::NegExp } else { WeightMap::None };
        let rate = self.p.ck.mapped(DELTA_DECAY, self.p.layer(), "", &[rule.v_heads], map)?;
        let rate = self.p.b.weight(rate);
        let f = self.p.b.scale_vec(f, rate);
        // The rate is negative, as decay rates are kept.
        Ok(self.p.b.act(f, Act { pre: -1.0, post: self.m.sizes.lower_bound, ..SIGMOID }))
    }

    /// Latent attention of `x [rows, hidden]` to the blocks of positions that an indexer chooses.
    fn attention(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let (h, s) = (&self.m.hyper, &self.m.sizes);
        let [keys, values] = self.absorbed()?;
        let r = self.p.linear(x, Q_A, [s.q_rank, h.hidden], "q_a")?;
        let r = self.p.norm(r, Q_A_NORM, s.q_rank)?;
        let q = self.p.linear(r, Q_B, [h.heads * s.k_dim, s.q_rank], "q")?;
        let q = self.p.b.head_matmul(q, keys, "q_latent");
        let latent = self.p.linear(x, KV_A, [s.latent, h.hidden], "kv_a")?;
        let latent = self.p.norm(latent, KV_A_NORM, s.latent)?;
        let (state, blocks) = self.index(x, r, latent)?;
        let scale = 1.0 / (s.k_dim as f32).sqrt();
        let attend = Attend { heads: h.heads, kv_heads: 1, scale, v_part: 0 };
        let attend = AttendBlocks { attend, block: s.block };
        let y = self.p.b.attend_blocks(q, self.p.tables, blocks, state, attend);
        let y = self.p.b.head_matmul(y, values, "attended_v");
        self.p.linear(y, O, [h.hidden, h.heads * s.v_dim], "attn_out")
    }

    /// `kv_b_proj` as two matrices per head: from keys to latents, from latents to values.
    fn absorbed(&mut self) -> Result<[WeightId; 2], ModelError> {
        let (heads, s) = (self.m.hyper.heads, &self.m.sizes);
        if !self.p.ck.is_hf() {
            let keys = self.p.weight(K_B, "weight", &[heads, s.latent, s.k_dim])?;
            return Ok([keys, self.p.weight(V_B, "weight", &[heads, s.v_dim, s.latent])?]);
        }
        let group = s.k_dim + s.v_dim;
        let keys = HeadRows { group, from: 0, len: s.k_dim, transposed: true };
        let values = HeadRows { group, from: s.k_dim, len: s.v_dim, transposed: false };
        let mut part = |rows| -> Result<WeightId, ModelError> {
            let decl = self.p.ck.head_rows(KV_B, self.p.layer(), [heads, s.latent], rows)?;
            Ok(self.p.b.weight(decl))
        };
        Ok([part(keys)?, part(values)?])
    }

    /// Stores the latents and what the indexer keeps; returns that state and the blocks for each row. `r` are the
    /// low-rank queries.
    fn index(&mut self, x: ValueId, r: ValueId, latent: ValueId) -> Result<(StateId, ValueId), ModelError> {
        let (hidden, s) = (self.m.hyper.hidden, &self.m.sizes);
        let (heads, dim, block) = (s.index_heads, s.index_dim, s.block);
        let k = self.p.linear(x, INDEX_K, [dim, hidden], "index_k")?;
        let norm = [(INDEX_K_NORM, "weight", dim), (INDEX_K_NORM, "bias", dim)];
        let norm = self.p.ck.joined(&norm, self.p.layer(), &[])?;
        let norm = self.p.b.weight(norm);
        let k = self.p.b.layer_norm(k, norm, Norm { eps: s.index_eps, group: dim });
        let gate = self.p.weight(INDEX_GATE, "", &[dim, hidden])?;
        let gate = self.p.b.matmul(x, gate, "index_gate");
        let index = PagedPart::each(dim);
        // Keys and gates of positions are needed until their block is complete.
        let (raw, pooled) = (index.window(block), index.every(block));
        let state = self.p.paged("latent", vec![PagedPart::each(s.latent), raw, raw, pooled]);
        self.p.store(latent, state, 0);
        self.p.store_windowed(k, state, 1);
        self.p.store_windowed(gate, state, 2);
        let bias = self.p.weight(INDEX_BIAS, "", &[block * dim])?;
        let pool = PoolGated { block, raw: 1, gates: 2, pooled: 3 };
        let tables = self.p.window_tables();
        self.p.b.pool_gated(tables, self.p.slots, bias, state, pool);
        let q = self.p.linear(r, INDEX_Q, [heads * dim, s.q_rank], "index_q")?;
        let weights = self.p.linear(x, INDEX_HEADS, [heads, hidden], "index_weights")?;
        let scale = 1.0 / (dim as f32 * heads as f32).sqrt();
        let select = IndexSelect { heads, block, top: s.top, pooled: 3, scale, weighted: true };
        Ok((state, self.p.b.index_select(q, self.p.tables, Some(weights), state, select)))
    }

    /// Mixture of experts and a shared one. A bias takes part in the choice of experts, not in their weights.
    fn moe(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let (e, hidden) = (&self.m.experts, self.m.hyper.hidden);
        let logits = self.p.linear(x, ROUTER, [e.count, hidden], "router_logits")?;
        let bias = self.p.weight(ROUTER_BIAS, "", &[e.count])?;
        let router = Router {
            scoring: Scoring::Sigmoid,
            top_k: e.used,
            renormalise: e.renormalise,
            biased: true,
            scale: self.m.sizes.routed_scale,
        };
        let (ids, weights) = self.p.b.router(logits, Some(bias), router);
        let gate = self.p.experts(x, ids, GATE_EXPERTS, [e.count, e.ffn, hidden], "gate")?;
        let up = self.p.experts(x, ids, UP_EXPERTS, [e.count, e.ffn, hidden], "up")?;
        let inner = self.p.bounded_swiglu(gate, up, self.m.sizes.limit);
        let down = self.p.experts(inner, ids, DOWN_EXPERTS, [e.count, hidden, e.ffn], "down")?;
        let chosen = self.p.b.combine_experts(down, weights);
        let shared = self.ffn(x, SHARED, self.m.sizes.shared_ffn)?;
        Ok(self.p.b.add(chosen, shared))
    }

    fn ffn(&mut self, x: ValueId, [gate, up, down]: [Names; 3], ffn: usize) -> Result<ValueId, ModelError> {
        let hidden = self.m.hyper.hidden;
        let gate = self.p.linear(x, gate, [ffn, hidden], "gate")?;
        let up = self.p.linear(x, up, [ffn, hidden], "up")?;
        let inner = self.p.bounded_swiglu(gate, up, self.m.sizes.limit);
        self.p.linear(inner, down, [hidden, ffn], "ffn_out")
    }

    /// The normed mean of the streams.
    fn collapse(&mut self, h: ValueId) -> Result<ValueId, ModelError> {
        let n = self.m.sizes.mix.n;
        let x = self.p.b.streams(Op::StreamSum, Streams { n, scale: 1.0 / n as f32 }, &[h], "mean");
        self.p.norm(x, OUTPUT_NORM, self.m.hyper.hidden)
    }

    /// The output matrix, for rows whose logits are wanted.
    fn head(mut self, x: ValueId) -> Result<Graph, ModelError> {
        self.p.leave();
        let logits = self.p.linear(x, OUTPUT, [self.m.hyper.vocab, self.m.hyper.hidden], "logits")?;
        self.p.b.output("logits", logits);
        self.p.finish()
    }
}
