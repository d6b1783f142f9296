//! What pre-norm decoders with grouped-query attention share: inputs, embedding, attention, feed-forward
//! blocks, mixture of experts, head. An architecture file puts these together.

use minfer_graph::{
    Attend, Dim, Graph, GraphBuilder, RopeStyle, RopeTable, StateDecl, StateKind, ValueId, ValueType,
    WeightId,
};

use crate::checkpoint::{Checkpoint, Names};
use crate::error::ModelError;
use crate::hyper::{Experts, Hyper};
use crate::rope::Scaling;

pub(crate) const EMBED: Names = ("token_embd", "model.embed_tokens");
/// In directories whose names have no prefix.
pub(crate) const EMBED_BARE: Names = ("token_embd", "model.embed");
const OUTPUT: Names = ("output", "lm_head");
const OUTPUT_NORM: Names = ("output_norm", "model.norm");
const ROPE_DIVISORS: Names = ("rope_freqs", "rope_freqs");
pub(crate) const ATTN_NORM: Names = ("attn_norm", "input_layernorm");
pub(crate) const FFN_NORM: Names = ("ffn_norm", "post_attention_layernorm");
const Q: Names = ("attn_q", "self_attn.q_proj");
const K: Names = ("attn_k", "self_attn.k_proj");
const V: Names = ("attn_v", "self_attn.v_proj");
const O: Names = ("attn_output", "self_attn.o_proj");
const Q_NORM: Names = ("attn_q_norm", "self_attn.q_norm");
const K_NORM: Names = ("attn_k_norm", "self_attn.k_norm");
const GATE: Names = ("ffn_gate", "mlp.gate_proj");
const UP: Names = ("ffn_up", "mlp.up_proj");
const DOWN: Names = ("ffn_down", "mlp.down_proj");
const ROUTER: Names = ("ffn_gate_inp", "mlp.gate");
const GATE_EXPERTS: Names = ("ffn_gate_exps", "mlp.experts.{}.gate_proj");
const UP_EXPERTS: Names = ("ffn_up_exps", "mlp.experts.{}.up_proj");
const DOWN_EXPERTS: Names = ("ffn_down_exps", "mlp.experts.{}.down_proj");

/// What distinguishes one architecture's attention from another's.
#[derive(Clone, Copy)]
pub(crate) struct AttentionStyle {
    pub(crate) rope: RopeStyle,
    /// RMS norm of each query and key head before rotation.
    pub(crate) qk_norm: bool,
    /// q, k and v must have biases; otherwise they may.
    pub(crate) qkv_bias: bool,
}

/// A decoder's graph under construction.
pub(crate) struct Decoder<'a> {
    pub(crate) b: GraphBuilder,
    ck: &'a Checkpoint,
    h: &'a Hyper,
    layer: usize,
    slots: ValueId,
    /// Positions, start of each row's page list, page lists.
    tables: [ValueId; 3],
    out_rows: ValueId,
    rope: ValueId,
    /// The embedding table, which is also the head of models that tie the two.
    embedding: WeightId,
}

impl<'a> Decoder<'a> {
    /// Declares the step's inputs and embeds its tokens; returns the residual stream `[rows, hidden]`.
    pub(crate) fn start(
        ck: &'a Checkpoint,
        h: &'a Hyper,
        page_table: usize,
    ) -> Result<(Decoder<'a>, ValueId), ModelError> {
        let mut b = GraphBuilder::new();
        let mut per_row = |name| b.input(name, ValueType::i32(Dim::Rows, []));
        let (tokens, positions) = (per_row("tokens"), per_row("positions"));
        let (slots, table_at) = (per_row("slots"), per_row("table_at"));
        let pages = b.input("pages", ValueType::i32(Dim::Const(page_table), []));
        let out_rows = b.input("out_rows", ValueType::i32(Dim::Outs, []));
        let embedding = b.weight(ck.weight(EMBED, None, "weight", &[h.vocab, h.hidden])?);
        let x = b.embed(tokens, embedding);
        let rope = b.rope_table(positions, rope_table(ck, h)?);
        let tables = [positions, table_at, pages];
        Ok((Decoder { b, ck, h, layer: 0, slots, tables, out_rows, rope, embedding }, x))
    }

    /// The nodes that follow belong to layer `layer`.
    pub(crate) fn enter(&mut self, layer: usize) {
        self.layer = layer;
        self.b.set_layer(Some(layer as u32));
    }

    pub(crate) fn norm(&mut self, x: ValueId, names: Names) -> Result<ValueId, ModelError> {
        let w = self.weight(names, "weight", &[self.h.hidden])?;
        Ok(self.b.rms_norm(x, w, self.h.norm_eps))
    }

    /// Grouped-query attention of the normed stream `x`, projected back to `[rows, hidden]`.
    pub(crate) fn attention(&mut self, x: ValueId, style: AttentionStyle) -> Result<ValueId, ModelError> {
        let h = self.h;
        let (q_width, kv_width) = (h.heads * h.head_dim, h.kv_heads * h.head_dim);
        let mut q = self.linear(x, Q, [q_width, h.hidden], style.qkv_bias, "q")?;
        let mut k = self.linear(x, K, [kv_width, h.hidden], style.qkv_bias, "k")?;
        let v = self.linear(x, V, [kv_width, h.hidden], style.qkv_bias, "v")?;
        if style.qk_norm {
            q = self.head_norm(q, Q_NORM)?;
            k = self.head_norm(k, K_NORM)?;
        }
        q = self.b.rope(q, self.rope, style.rope, h.head_dim);
        k = self.b.rope(k, self.rope, style.rope, h.head_dim);
        let state = self.b.state(StateDecl {
            name: format!("kv.{}", self.layer),
            layer: self.layer as u32,
            kind: StateKind::Paged { widths: vec![kv_width, kv_width] },
        });
        self.b.store_kv(&[k, v], self.slots, state);
        let scale = 1.0 / (h.head_dim as f32).sqrt();
        let attend = Attend { heads: h.heads, kv_heads: h.kv_heads, scale, v_part: 1 };
        let attended = self.b.attend(q, self.tables, state, attend);
        self.linear(attended, O, [h.hidden, q_width], false, "attn_out")
    }

    fn head_norm(&mut self, x: ValueId, names: Names) -> Result<ValueId, ModelError> {
        let w = self.weight(names, "weight", &[self.h.head_dim])?;
        Ok(self.b.rms_norm(x, w, self.h.norm_eps))
    }

    /// `down(silu(gate(x)) * up(x))`.
    pub(crate) fn swiglu(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let h = self.h;
        let gate = self.feed(x, GATE, [h.ffn, h.hidden], "gate")?;
        let up = self.feed(x, UP, [h.ffn, h.hidden], "up")?;
        let gate = self.b.silu(gate);
        let hidden = self.b.mul(gate, up);
        self.feed(hidden, DOWN, [h.hidden, h.ffn], "ffn_out")
    }

    /// Mixture of experts with softmax routing.
    pub(crate) fn moe(&mut self, x: ValueId, e: &Experts) -> Result<ValueId, ModelError> {
        let hidden = self.h.hidden;
        let router = self.weight(ROUTER, "weight", &[e.count, hidden])?;
        let logits = self.b.matmul(x, router, "router_logits");
        let (ids, weights) = self.b.router(logits, None, e.softmax_router());
        let gate = self.experts(x, ids, GATE_EXPERTS, [e.count, e.ffn, hidden], "gate")?;
        let up = self.experts(x, ids, UP_EXPERTS, [e.count, e.ffn, hidden], "up")?;
        let gate = self.b.silu(gate);
        let inner = self.b.mul(gate, up);
        let down = self.experts(inner, ids, DOWN_EXPERTS, [e.count, hidden, e.ffn], "down")?;
        Ok(self.b.combine_experts(down, weights))
    }

    fn experts(
        &mut self,
        x: ValueId,
        ids: ValueId,
        names: Names,
        shape: [usize; 3],
        name: &str,
    ) -> Result<ValueId, ModelError> {
        let w = self.ck.experts(names, self.layer, shape)?;
        let w = self.b.weight(w);
        let y = self.b.grouped_matmul(x, ids, w, name);
        match self.ck.optional(names, Some(self.layer), "scale", &[shape[0]])? {
            Some(scales) => {
                let scales = self.b.weight(scales);
                Ok(self.b.expert_scale(y, ids, scales))
            }
            None => Ok(y),
        }
    }

    /// `x W^T`, with the tensor's scale and then its bias where the file has them.
    fn linear(
        &mut self,
        x: ValueId,
        names: Names,
        shape: [usize; 2],
        needs_bias: bool,
        name: &str,
    ) -> Result<ValueId, ModelError> {
        let w = self.weight(names, "weight", &shape)?;
        let y = self.b.matmul(x, w, name);
        let y = self.scaled(y, names)?;
        self.biased(y, names, Some(self.layer), shape[0], needs_bias)
    }

    /// As [`Decoder::linear`], but GGUF files of feed-forward blocks mean `(x W^T + bias) * scale`.
    fn feed(
        &mut self,
        x: ValueId,
        names: Names,
        shape: [usize; 2],
        name: &str,
    ) -> Result<ValueId, ModelError> {
        let w = self.weight(names, "weight", &shape)?;
        let y = self.b.matmul(x, w, name);
        let y = self.biased(y, names, Some(self.layer), shape[0], false)?;
        // llama.cpp, whose files these are, leaves these scales out of its qwen2 graph.
        if self.h.arch == "qwen2" { Ok(y) } else { self.scaled(y, names) }
    }

    fn scaled(&mut self, y: ValueId, names: Names) -> Result<ValueId, ModelError> {
        match self.ck.optional(names, Some(self.layer), "scale", &[1])? {
            Some(scale) => {
                let scale = self.b.weight(scale);
                Ok(self.b.scale(y, scale))
            }
            None => Ok(y),
        }
    }

    fn biased(
        &mut self,
        y: ValueId,
        names: Names,
        layer: Option<usize>,
        n: usize,
        needed: bool,
    ) -> Result<ValueId, ModelError> {
        let bias = match needed {
            true => Some(self.ck.weight(names, layer, "bias", &[n])?),
            false => self.ck.optional(names, layer, "bias", &[n])?,
        };
        match bias {
            Some(bias) => {
                let bias = self.b.weight(bias);
                Ok(self.b.bias_add(y, bias))
            }
            None => Ok(y),
        }
    }

    fn weight(&mut self, names: Names, suffix: &str, shape: &[usize]) -> Result<WeightId, ModelError> {
        let decl = self.ck.weight(names, Some(self.layer), suffix, shape)?;
        Ok(self.b.weight(decl))
    }

    /// Adds a sublayer's result to the stream. After the last layer's attention only the rows whose logits
    /// are wanted go on.
    pub(crate) fn residual(&mut self, mut x: ValueId, mut y: ValueId, after_attention: bool) -> ValueId {
        if after_attention && self.layer + 1 == self.h.layers {
            x = self.b.gather_rows(x, self.out_rows);
            y = self.b.gather_rows(y, self.out_rows);
        }
        self.b.add(x, y)
    }

    /// Final norm and head; a file without a head ties it to the embedding.
    pub(crate) fn finish(mut self, x: ValueId) -> Result<Graph, ModelError> {
        self.b.set_layer(None);
        let norm = self.ck.weight(OUTPUT_NORM, None, "weight", &[self.h.hidden])?;
        let norm = self.b.weight(norm);
        let x = self.b.rms_norm(x, norm, self.h.norm_eps);
        let head = match self.ck {
            Checkpoint::Shape(s) if !s.preset.tied => {
                self.ck.weight(OUTPUT, None, "weight", &[self.h.vocab, self.h.hidden]).map(Some)
            }
            ck => ck.optional(OUTPUT, None, "weight", &[self.h.vocab, self.h.hidden]),
        }?;
        let head = match head {
            Some(decl) => self.b.weight(decl),
            None => self.embedding,
        };
        let logits = self.b.matmul(x, head, "logits");
        let logits = self.biased(logits, OUTPUT, None, self.h.vocab, false)?;
        self.b.output("logits", logits);
        self.b.finish().map_err(|source| ModelError::Graph { source_name: self.ck.name(), source })
    }
}

/// Frequencies, with the divisors that GGUF files of Llama 3 carry as a tensor.
fn rope_table(ck: &Checkpoint, h: &Hyper) -> Result<RopeTable, ModelError> {
    let scaling = match ck.optional(ROPE_DIVISORS, None, "weight", &[h.rope_dims / 2])? {
        Some(decl) => Scaling::Divisors(ck.vector(&decl)?),
        None => h.scaling.clone(),
    };
    Ok(crate::rope::table(h.rope_theta, h.rope_dims, &scaling))
}
