//! DeepSeek V4 (Flash): a decoder whose layers attend to a short window of positions and, in most layers, to
//! rows into which windows of 4 or 128 positions are compressed; those of 4 are chosen by an indexer. Keys
//! are also the values, from one head, with a sink per query head. Residual streams are mixed by doubly
//! stochastic matrices (manifold-constrained hyper-connections) in place of plain residuals; each layer is a
//! mixture of experts with a shared one, in the first layers chosen by the token alone.
//!
//! Tensor names are those of the published directories and of llama.cpp's GGUF files; formulas are transformers
//! 5.24's. The round trips of DeepSeek's own graph are a setting.

mod draft;
mod rounding;
mod sizes;

use minfer_graph::{
    Attend, AttendWindow, Compress, ExpertWeights, Graph, GraphBuilder, HyperMix, IndexSelect, Norm, Op,
    PagedPart, RopeTable, Router, Scoring, StateId, StorePart, Streams, ValueId,
};

use crate::checkpoint::{Checkpoint, Names};
use crate::decoder::EMBED_BARE;
use crate::error::ModelError;
use crate::hyper::{Hyper, text_config};
use crate::parts::{Parts, SIGMOID};
use crate::rope;
use crate::{DraftHead, Model};
use sizes::{Dspark, SPARSE, Sizes};

const ARCH: &str = "deepseek4";

/// The weights of a hyper-connection.
struct Mixer {
    project: Names,
    base: Names,
    scale: Names,
}

const ATTN_MIXER: Mixer = Mixer {
    project: ("hc_attn_fn.weight", "hc_attn_fn"),
    base: ("hc_attn_base.weight", "hc_attn_base"),
    scale: ("hc_attn_scale.weight", "hc_attn_scale"),
};
const FFN_MIXER: Mixer = Mixer {
    project: ("hc_ffn_fn.weight", "hc_ffn_fn"),
    base: ("hc_ffn_base.weight", "hc_ffn_base"),
    scale: ("hc_ffn_scale.weight", "hc_ffn_scale"),
};
const HEAD_MIXER: Mixer = Mixer {
    project: ("output_hc_fn.weight", "hc_head_fn"),
    base: ("output_hc_base.weight", "hc_head_base"),
    scale: ("output_hc_scale.weight", "hc_head_scale"),
};
const OUTPUT_NORM: Names = ("output_norm", "model.norm");
const OUTPUT: Names = ("output", "model.head");

const ATTN_NORM: Names = ("attn_norm", "attn_norm");
const Q_DOWN: Names = ("attn_q_a", "attn.wq_a");
const Q_NORM: Names = ("attn_q_a_norm", "attn.q_norm");
const Q_UP: Names = ("attn_q_b", "attn.wq_b");
const KV: Names = ("attn_kv", "attn.wkv");
const KV_NORM: Names = ("attn_kv_a_norm", "attn.kv_norm");
const SINKS: Names = ("attn_sinks.weight", "attn.attn_sink");
const O_DOWN: Names = ("attn_output_a", "attn.wo_a");
const O_UP: Names = ("attn_output_b", "attn.wo_b");
const INDEX_Q: Names = ("indexer.attn_q_b", "attn.indexer.wq_b");
const INDEX_WEIGHTS: Names = ("indexer.proj", "attn.indexer.weights_proj");

/// The weights of a compressor.
struct Compressor {
    kv: Names,
    gate: Names,
    bias: Names,
    norm: Names,
    /// Name of the state that holds the open window.
    open: &'static str,
}

const ROWS: Compressor = Compressor {
    kv: ("attn_compressor_kv", "attn.compressor.wkv"),
    gate: ("attn_compressor_gate", "attn.compressor.wgate"),
    bias: ("attn_compressor_ape.weight", "attn.compressor.ape"),
    norm: ("attn_compressor_norm", "attn.compressor.norm"),
    open: "compress",
};
const INDEX_ROWS: Compressor = Compressor {
    kv: ("indexer_compressor_kv", "attn.indexer.compressor.wkv"),
    gate: ("indexer_compressor_gate", "attn.indexer.compressor.wgate"),
    bias: ("indexer_compressor_ape.weight", "attn.indexer.compressor.ape"),
    norm: ("indexer_compressor_norm", "attn.indexer.compressor.norm"),
    open: "compress_index",
};

const FFN_NORM: Names = ("ffn_norm", "ffn_norm");
const ROUTER: Names = ("ffn_gate_inp", "ffn.gate");
const ROUTER_BIAS: Names = ("exp_probs_b", "ffn.gate");
const TOKEN_EXPERTS: Names = ("ffn_gate_tid2eid.weight", "ffn.gate.tid2eid");
const GATE_EXPERTS: Names = ("ffn_gate_exps", "ffn.experts.{}.w1");
const UP_EXPERTS: Names = ("ffn_up_exps", "ffn.experts.{}.w3");
const DOWN_EXPERTS: Names = ("ffn_down_exps", "ffn.experts.{}.w2");
const SHARED_GATE: Names = ("ffn_gate_shexp", "ffn.shared_experts.w1");
const SHARED_UP: Names = ("ffn_up_shexp", "ffn.shared_experts.w3");
const SHARED_DOWN: Names = ("ffn_down_shexp", "ffn.shared_experts.w2");

struct DeepseekV4 {
    hyper: Hyper,
    sizes: Sizes,
    /// Rows pass through the round trips of [`rounding`].
    official_rounding: bool,
}

pub(crate) fn load(ck: &Checkpoint) -> Result<Box<dyn Model>, ModelError> {
    let model = match ck {
        Checkpoint::Gguf(g) => DeepseekV4::from_gguf(ck, g.metadata())?,
        Checkpoint::Hf(d) => DeepseekV4::from_hf(ck, text_config(d.config()))?,
        Checkpoint::Shape(s) => DeepseekV4::from_hf(ck, s.config())?,
    };
    Ok(Box::new(model))
}

impl Model for DeepseekV4 {
    fn hyper(&self) -> &Hyper {
        &self.hyper
    }

    fn round_officially(&mut self, ck: &Checkpoint) -> Result<(), ModelError> {
        self.check_rounding(ck)?;
        self.official_rounding = true;
        Ok(())
    }

    fn graph(&self, ck: &Checkpoint, page_table: usize) -> Result<Graph, ModelError> {
        self.trunk(ck, page_table, Head::None)
    }

    fn graph_with_streams(&self, ck: &Checkpoint, page_table: usize) -> Result<Graph, ModelError> {
        self.trunk(ck, page_table, draft::find(self, ck)?)
    }

    fn draft_head(&self, ck: &Checkpoint, page_table: usize) -> Result<Option<DraftHead>, ModelError> {
        match draft::find(self, ck)? {
            Head::None => Ok(None),
            Head::Legacy => draft::chain(self, ck, page_table).map(Some),
            Head::Dspark(dspark) => draft::block(self, ck, page_table, dspark).map(Some),
        }
    }
}

/// The draft heads that checkpoints of this architecture come with.
#[derive(Clone, Copy)]
enum Head<'a> {
    None,
    Legacy,
    Dspark(&'a Dspark),
}

impl DeepseekV4 {
    /// The decoder, with what a draft head needs of it.
    fn trunk(&self, ck: &Checkpoint, page_table: usize, head: Head<'_>) -> Result<Graph, ModelError> {
        let (mut step, x) = Step::start(ck, self, page_table)?;
        let mut h = step.streams(x);
        let mut taps = Vec::new();
        for layer in 0..self.hyper.layers {
            step.p.enter(layer);
            let reach = step.reach();
            h = step.attend(h, reach)?;
            h = step.feed(h)?;
            if matches!(head, Head::Dspark(d) if d.targets.contains(&layer)) {
                taps.push(step.mean(h));
            }
        }
        match head {
            Head::None => {}
            Head::Legacy => step.p.b.output("streams", h),
            Head::Dspark(_) => step.keep_main(&taps)?,
        }
        step.p.leave();
        let h = step.p.b.gather_rows(h, step.p.out_rows);
        let x = step.collapse(h)?;
        step.finish(x, OUTPUT_NORM)
    }
}

/// What rows attend to.
#[derive(Clone, Copy)]
struct Reach {
    /// Last position, start of the page list, page lists of the window.
    tables: [ValueId; 3],
    /// Positions up to the last.
    window: usize,
}

/// Rotation of a layer's rows.
#[derive(Clone, Copy)]
struct Tables {
    /// At each row's position.
    forward: ValueId,
    /// The same, backwards.
    back: ValueId,
}

/// The graph of a step under construction.
struct Step<'a> {
    p: Parts<'a>,
    m: &'a DeepseekV4,
    /// Layers without and with compressed rows.
    rope: [Tables; 2],
    /// For each ratio the rotation at the first position of each row's window.
    window_ropes: Vec<(usize, ValueId)>,
}

impl<'a> Step<'a> {
    /// Declares the inputs and embeds the tokens; returns `[rows, hidden]`.
    fn start(
        ck: &'a Checkpoint,
        m: &'a DeepseekV4,
        page_table: usize,
    ) -> Result<(Step<'a>, ValueId), ModelError> {
        let (h, s) = (&m.hyper, &m.sizes);
        let mut p = Parts::new(ck, h, page_table);
        let (x, _) = p.embed(EMBED_BARE, h)?;
        let plain = rope::table(h.rope_theta, h.rope_dims, &h.scaling);
        let compressed = rope::table(s.compress_theta, h.rope_dims, &s.compress_scaling);
        let positions = p.positions();
        let window_ropes = window_ropes(&mut p.b, s, positions, &compressed);
        let rope = [plain, compressed].map(|table| Tables {
            back: p.b.rope_table(positions, backwards(&table)),
            forward: p.b.rope_table(positions, table),
        });
        Ok((Step { p, m, rope, window_ropes }, x))
    }

    /// The row as every one of its residual streams.
    fn streams(&mut self, x: ValueId) -> ValueId {
        self.p.b.streams(Op::Repeat, Streams { n: self.m.sizes.streams, scale: 1.0 }, &[x], "streams")
    }

    /// The attention sublayer.
    fn attend(&mut self, h: ValueId, reach: Reach) -> Result<ValueId, ModelError> {
        let (x, mix) = self.read(h, &ATTN_MIXER)?;
        let x = self.p.norm(x, ATTN_NORM, self.m.hyper.hidden)?;
        let y = self.attention(x, reach)?;
        Ok(self.write(h, y, mix))
    }

    /// The sublayer of experts.
    fn feed(&mut self, h: ValueId) -> Result<ValueId, ModelError> {
        let (x, mix) = self.read(h, &FFN_MIXER)?;
        let x = self.p.norm(x, FFN_NORM, self.m.hyper.hidden)?;
        let y = self.moe(x)?;
        Ok(self.write(h, y, mix))
    }

    /// Of a row to the window that ends with it.
    fn reach(&mut self) -> Reach {
        Reach { tables: self.p.window_tables(), window: self.m.sizes.window }
    }

    /// What a sublayer sees of the streams `h`, and how its result is written back: weights of the streams, and
    /// the matrix that mixes them.
    fn read(&mut self, h: ValueId, mixer: &Mixer) -> Result<(ValueId, [ValueId; 2]), ModelError> {
        let s = &self.m.sizes;
        let n = s.streams;
        let width = (2 + n) * n;
        let m = self.mixer_input(h, mixer, width)?;
        let parts = [(mixer.base, "", width), (mixer.scale, "", 3)];
        let weight = self.p.ck.joined(&parts, self.p.layer(), &[])?;
        let weight = self.p.b.weight(weight);
        let mix = HyperMix { n, iterations: s.sinkhorn, eps: s.hyper_eps };
        let [pre, post, comb] = self.p.b.hyper_mix(m, weight, mix);
        let x = self.p.b.streams(Op::StreamWeightedSum, Streams { n, scale: 1.0 }, &[h, pre], "mixed");
        Ok((x, [post, comb]))
    }

    /// `n` numbers from the streams, normed as one row.
    fn mixer_input(&mut self, h: ValueId, mixer: &Mixer, n: usize) -> Result<ValueId, ModelError> {
        let width = self.m.sizes.streams * self.m.hyper.hidden;
        let normed = self.p.b.unit_norm(h, Norm { eps: self.m.hyper.norm_eps, group: width });
        let project = self.p.weight(mixer.project, "", &[n, width])?;
        Ok(self.p.b.matmul(normed, project, "mixer"))
    }

    /// Mixes the streams and adds a sublayer's result to each.
    fn write(&mut self, h: ValueId, y: ValueId, [post, comb]: [ValueId; 2]) -> ValueId {
        let streams = Streams { n: self.m.sizes.streams, scale: 1.0 };
        self.p.b.streams(Op::StreamMix, streams, &[h, y, post, comb], "streams")
    }

    /// Attention of `x [rows, hidden]`, projected back.
    fn attention(&mut self, x: ValueId, reach: Reach) -> Result<ValueId, ModelError> {
        let (h, s, ratio) = (&self.m.hyper, &self.m.sizes, self.ratio());
        let (dim, width) = (h.head_dim, h.heads * h.head_dim);
        let rope = self.rope[usize::from(ratio > 0)];
        let low = self.p.linear(x, Q_DOWN, [s.q_rank, h.hidden], "q_low")?;
        let low = self.p.norm(low, Q_NORM, s.q_rank)?;
        let q = self.p.linear(low, Q_UP, [width, s.q_rank], "q")?;
        let q = self.p.b.unit_norm(q, Norm { eps: h.norm_eps, group: dim });
        let q = self.p.b.rope_tail(q, rope.forward, dim);
        let state = self.keep(x, rope)?;
        let mut chosen = None;
        if ratio > 0 {
            self.compress(x, &ROWS, dim, state, 1)?;
        }
        if ratio == SPARSE {
            self.compress(x, &INDEX_ROWS, s.index_dim, state, 2)?;
            chosen = Some(self.choose(x, low, state)?);
        }
        let sinks = self.p.weight(SINKS, "", &[h.heads])?;
        let attend = Attend { heads: h.heads, kv_heads: 1, scale: 1.0 / (dim as f32).sqrt(), v_part: 0 };
        let attend = AttendWindow { attend, window: reach.window, ratio };
        let y = self.p.b.attend_window(q, reach.tables, self.p.tables[2], chosen, sinks, state, attend);
        let y = self.p.b.rope_tail(y, rope.back, dim);
        self.project_out(y)
    }

    /// Keys of `x`, which are also the values, into the layer's state.
    fn keep(&mut self, x: ValueId, rope: Tables) -> Result<StateId, ModelError> {
        let (hidden, dim) = (self.m.hyper.hidden, self.m.hyper.head_dim);
        let kv = self.p.linear(x, KV, [dim, hidden], "kv")?;
        let kv = self.p.norm(kv, KV_NORM, dim)?;
        let kv = self.p.b.rope_tail(kv, rope.forward, dim);
        let kv = self.rounded_keys(kv);
        let state = self.kv_state(self.ratio());
        self.p.store_windowed(kv, state, 0);
        Ok(state)
    }

    /// Positions per compressed row of this layer; draft heads have none.
    fn ratio(&self) -> usize {
        self.m.sizes.ratios.get(self.p.number()).copied().unwrap_or(0)
    }

    /// Rows of positions; compressed rows; keys of the indexer.
    fn kv_state(&mut self, ratio: usize) -> StateId {
        let row = PagedPart::each(self.m.hyper.head_dim);
        let mut parts = vec![row.window(self.m.sizes.window)];
        if ratio > 0 {
            parts.push(row.every(ratio));
        }
        if ratio == SPARSE {
            parts.push(PagedPart::each(self.m.sizes.index_dim).every(ratio));
        }
        self.p.paged("kv", parts)
    }

    /// Compresses windows of `x` into rows of `dim` numbers, and keeps those in a part of `state`.
    fn compress(
        &mut self,
        x: ValueId,
        c: &Compressor,
        dim: usize,
        state: StateId,
        part: usize,
    ) -> Result<(), ModelError> {
        let (hidden, ratio) = (self.m.hyper.hidden, self.ratio());
        let compress = Compress { ratio, overlap: ratio == SPARSE };
        let width = compress.parts() * dim;
        let kv = self.p.linear(x, c.kv, [width, hidden], "compress_kv")?;
        let gate = self.p.linear(x, c.gate, [width, hidden], "compress_gate")?;
        let bias = self.p.weight(c.bias, "", &[ratio, width])?;
        let open = self.p.recurrent(c.open, compress.tail() * 2 * width);
        let positions = self.p.positions();
        let slots = self.p.state_slots();
        let row = self.p.b.compress([kv, gate, positions], slots, bias, open, compress);
        let row = self.p.norm(row, c.norm, dim)?;
        // `start` has a table for every ratio of the model.
        let table = self.window_ropes.iter().find(|(r, _)| *r == ratio).map_or(positions, |(_, t)| *t);
        let row = self.p.b.rope_tail(row, table, dim);
        let row = if part == 1 { self.rounded_keys(row) } else { self.rounded_index(row) };
        self.p.b.store_part(row, positions, self.p.slots, state, StorePart { part, every: ratio });
        Ok(())
    }

    /// Compressed rows that the indexer chooses for each row, from `x` and the query's low-rank form.
    fn choose(&mut self, x: ValueId, low: ValueId, state: StateId) -> Result<ValueId, ModelError> {
        let (h, s) = (&self.m.hyper, &self.m.sizes);
        let q = self.p.linear(low, INDEX_Q, [s.index_heads * s.index_dim, s.q_rank], "index_q")?;
        let q = self.p.b.rope_tail(q, self.rope[1].forward, s.index_dim);
        let q = self.rounded_index(q);
        let weights = self.p.linear(x, INDEX_WEIGHTS, [s.index_heads, h.hidden], "index_weights")?;
        let scale = 1.0 / ((s.index_heads * s.index_dim) as f32).sqrt();
        let select =
            IndexSelect { heads: s.index_heads, block: SPARSE, top: s.top, pooled: 2, scale, weighted: true };
        Ok(self.p.b.index_select(q, self.p.tables, Some(weights), state, select))
    }

    /// The output projection: low rank by groups of heads, then dense.
    fn project_out(&mut self, y: ValueId) -> Result<ValueId, ModelError> {
        let (h, s) = (&self.m.hyper, &self.m.sizes);
        let (k, width) = (h.heads * h.head_dim / s.groups, s.groups * s.o_rank);
        let mut down = self.p.ck.weight(O_DOWN, self.p.layer(), "weight", &[width, k])?;
        // The file has the groups' rows one after the other.
        down.shape = vec![s.groups, s.o_rank, k];
        let down = self.p.b.weight(down);
        let low = self.p.b.head_matmul(y, down, "out_low");
        self.p.linear(low, O_UP, [h.hidden, width], "attn_out")
    }

    /// Mixture of experts, and a shared expert.
    fn moe(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let (hidden, s) = (self.m.hyper.hidden, &self.m.sizes);
        let (ids, weights) = self.route(x)?;
        let (count, ffn) = (self.m.experts(), self.m.hyper.ffn);
        let gate = self.p.experts(x, ids, GATE_EXPERTS, [count, ffn, hidden], "gate")?;
        let up = self.p.experts(x, ids, UP_EXPERTS, [count, ffn, hidden], "up")?;
        let inner = self.p.bounded_swiglu(gate, up, s.swiglu_limit);
        let down = self.p.experts(inner, ids, DOWN_EXPERTS, [count, hidden, ffn], "down")?;
        let chosen = self.p.b.combine_experts(down, weights);
        let gate = self.p.linear(x, SHARED_GATE, [s.shared_ffn, hidden], "shared_gate")?;
        let up = self.p.linear(x, SHARED_UP, [s.shared_ffn, hidden], "shared_up")?;
        let inner = self.p.bounded_swiglu(gate, up, s.swiglu_limit);
        let shared = self.p.linear(inner, SHARED_DOWN, [hidden, s.shared_ffn], "shared_out")?;
        Ok(self.p.b.add(chosen, shared))
    }

    /// Experts of each row and their weights.
    fn route(&mut self, x: ValueId) -> Result<(ValueId, ValueId), ModelError> {
        let (h, s, count) = (&self.m.hyper, &self.m.sizes, self.m.experts());
        let used = h.experts.as_ref().map_or(0, |e| e.used);
        // Its bias takes part in the choice only.
        let router = self.p.weight(ROUTER, "weight", &[count, h.hidden])?;
        let logits = self.p.b.matmul(x, router, "router_logits");
        let (scoring, scale) = (Scoring::SqrtSoftplus, s.routed_scale);
        if self.p.number() >= s.hash_layers {
            let bias = self.p.weight(ROUTER_BIAS, "bias", &[count])?;
            let router = Router { scoring, top_k: used, renormalise: true, biased: true, scale };
            return Ok(self.p.b.router(logits, Some(bias), router));
        }
        let table = self.p.ck.ids(TOKEN_EXPERTS, self.p.layer(), [h.vocab, used])?;
        let table = self.p.b.weight(table);
        let ids = self.p.b.gather_ids(self.p.tokens, table);
        Ok((ids, self.p.b.expert_weights(logits, ids, ExpertWeights { scoring, scale })))
    }

    /// The streams weighted and summed, with the weights of the model's end or of the draft layer's.
    fn collapse(&mut self, h: ValueId) -> Result<ValueId, ModelError> {
        let n = self.m.sizes.streams;
        let m = self.mixer_input(h, &HEAD_MIXER, n)?;
        let scale = self.p.weight(HEAD_MIXER.scale, "", &[1])?;
        let base = self.p.weight(HEAD_MIXER.base, "", &[n])?;
        let m = self.p.b.scale(m, scale);
        let m = self.p.b.bias_add(m, base);
        let weights = self.p.b.act(m, SIGMOID);
        let x = self.p.b.streams(Op::StreamWeightedSum, Streams { n, scale: 1.0 }, &[h, weights], "weighted");
        // Each weight is a sigmoid plus epsilon.
        let rest = Streams { n, scale: self.m.sizes.hyper_eps };
        let rest = self.p.b.streams(Op::StreamSum, rest, &[h], "rest");
        Ok(self.p.b.add(x, rest))
    }

    /// Norm and output matrix.
    fn finish(mut self, x: ValueId, norm: Names) -> Result<Graph, ModelError> {
        let hidden = self.m.hyper.hidden;
        let x = self.p.norm(x, norm, hidden)?;
        self.p.leave();
        let logits = self.p.linear(x, OUTPUT, [self.m.hyper.vocab, hidden], "logits")?;
        self.p.b.output("logits", logits);
        self.p.finish()
    }
}

impl DeepseekV4 {
    fn experts(&self) -> usize {
        self.hyper.experts.as_ref().map_or(0, |e| e.count)
    }
}

/// For each ratio of the model, the rotation at the first position of each row's window.
fn window_ropes(
    b: &mut GraphBuilder,
    s: &Sizes,
    positions: ValueId,
    table: &RopeTable,
) -> Vec<(usize, ValueId)> {
    let mut ratios: Vec<usize> = s.ratios.iter().copied().filter(|&r| r > 0).collect();
    ratios.sort_unstable();
    ratios.dedup();
    let rope = |ratio| {
        let start = b.window_start(positions, ratio);
        (ratio, b.rope_table(start, table.clone()))
    };
    ratios.into_iter().map(rope).collect()
}

/// Rotation by the same angles the other way.
fn backwards(table: &RopeTable) -> RopeTable {
    RopeTable { inv_freq: table.inv_freq.iter().map(|f| -f).collect(), ..table.clone() }
}
