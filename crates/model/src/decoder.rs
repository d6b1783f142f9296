//! What pre-norm decoders with grouped-query attention share: inputs, embedding, attention, feed-forward
//! blocks, mixture of experts, head. An architecture file puts these together.

use minfer_graph::{Attend, Graph, PagedPart, RopeStyle, RopeTable, ValueId, WeightId};

use crate::checkpoint::{Checkpoint, Names};
use crate::error::ModelError;
use crate::hyper::{Experts, Hyper};
use crate::parts::Parts;
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
    p: Parts<'a>,
    h: &'a Hyper,
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
        let mut p = Parts::new(ck, h, page_table);
        let (x, embedding) = p.embed(EMBED, h)?;
        let rope = p.b.rope_table(p.positions(), rope_table(ck, h)?);
        Ok((Decoder { p, h, rope, embedding }, x))
    }

    /// The nodes that follow belong to layer `layer`.
    pub(crate) fn enter(&mut self, layer: usize) {
        self.p.enter(layer);
    }

    pub(crate) fn norm(&mut self, x: ValueId, names: Names) -> Result<ValueId, ModelError> {
        self.p.norm(x, names, self.h.hidden)
    }

    /// Grouped-query attention of the normed stream `x`, projected back to `[rows, hidden]`.
    pub(crate) fn attention(&mut self, x: ValueId, style: AttentionStyle) -> Result<ValueId, ModelError> {
        let h = self.h;
        let (q_width, kv_width) = (h.heads * h.head_dim, h.kv_heads * h.head_dim);
        let mut q = self.linear(x, Q, [q_width, h.hidden], style.qkv_bias, "q")?;
        let mut k = self.linear(x, K, [kv_width, h.hidden], style.qkv_bias, "k")?;
        let v = self.linear(x, V, [kv_width, h.hidden], style.qkv_bias, "v")?;
        if style.qk_norm {
            q = self.p.norm(q, Q_NORM, h.head_dim)?;
            k = self.p.norm(k, K_NORM, h.head_dim)?;
        }
        q = self.p.b.rope(q, self.rope, style.rope, h.head_dim);
        k = self.p.b.rope(k, self.rope, style.rope, h.head_dim);
        let state = self.p.paged("kv", vec![PagedPart::each(kv_width); 2]);
        self.p.b.store_kv(&[k, v], self.p.slots, state);
        let scale = 1.0 / (h.head_dim as f32).sqrt();
        let attend = Attend { heads: h.heads, kv_heads: h.kv_heads, scale, v_part: 1 };
        let attended = self.p.b.attend(q, self.p.tables, state, attend);
        self.linear(attended, O, [h.hidden, q_width], false, "attn_out")
    }

    /// `down(silu(gate(x)) * up(x))`.
    pub(crate) fn swiglu(&mut self, x: ValueId) -> Result<ValueId, ModelError> {
        let h = self.h;
        let gate = self.feed(x, GATE, [h.ffn, h.hidden], "gate")?;
        let up = self.feed(x, UP, [h.ffn, h.hidden], "up")?;
        let hidden = self.p.swiglu(gate, up);
        self.feed(hidden, DOWN, [h.hidden, h.ffn], "ffn_out")
    }

    /// Mixture of experts with softmax routing.
    pub(crate) fn moe(&mut self, x: ValueId, e: &Experts) -> Result<ValueId, ModelError> {
        let hidden = self.h.hidden;
        let router = self.p.weight(ROUTER, "weight", &[e.count, hidden])?;
        let logits = self.p.b.matmul(x, router, "router_logits");
        let (ids, weights) = self.p.b.router(logits, None, e.softmax_router());
        let gate = self.p.experts(x, ids, GATE_EXPERTS, [e.count, e.ffn, hidden], "gate")?;
        let up = self.p.experts(x, ids, UP_EXPERTS, [e.count, e.ffn, hidden], "up")?;
        let inner = self.p.swiglu(gate, up);
        let down = self.p.experts(inner, ids, DOWN_EXPERTS, [e.count, hidden, e.ffn], "down")?;
        Ok(self.p.b.combine_experts(down, weights))
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
        let w = self.p.weight(names, "weight", &shape)?;
        let y = self.p.b.matmul(x, w, name);
        let y = self.p.scaled(y, names)?;
        self.p.biased(y, names, shape[0], needs_bias)
    }

    /// As [`Decoder::linear`], but GGUF files of feed-forward blocks mean `(x W^T + bias) * scale`.
    fn feed(
        &mut self,
        x: ValueId,
        names: Names,
        shape: [usize; 2],
        name: &str,
    ) -> Result<ValueId, ModelError> {
        let w = self.p.weight(names, "weight", &shape)?;
        let y = self.p.b.matmul(x, w, name);
        let y = self.p.biased(y, names, shape[0], false)?;
        // llama.cpp, whose files these are, leaves these scales out of its qwen2 graph.
        if self.h.arch == "qwen2" { Ok(y) } else { self.p.scaled(y, names) }
    }

    /// Adds a sublayer's result to the stream. After the last layer's attention only the rows whose logits
    /// are wanted go on.
    pub(crate) fn residual(&mut self, mut x: ValueId, mut y: ValueId, after_attention: bool) -> ValueId {
        if after_attention && self.p.number() + 1 == self.h.layers {
            x = self.p.b.gather_rows(x, self.p.out_rows);
            y = self.p.b.gather_rows(y, self.p.out_rows);
        }
        self.p.b.add(x, y)
    }

    /// Final norm and head; a file without a head ties it to the embedding.
    pub(crate) fn finish(mut self, x: ValueId) -> Result<Graph, ModelError> {
        self.p.leave();
        let x = self.p.norm(x, OUTPUT_NORM, self.h.hidden)?;
        let shape = [self.h.vocab, self.h.hidden];
        let head = match self.p.ck {
            Checkpoint::Shape(s) if !s.preset.tied => {
                self.p.ck.weight(OUTPUT, None, "weight", &shape).map(Some)
            }
            ck => ck.optional(OUTPUT, None, "weight", &shape),
        }?;
        let head = match head {
            Some(decl) => self.p.b.weight(decl),
            None => self.embedding,
        };
        let logits = self.p.b.matmul(x, head, "logits");
        let logits = self.p.biased(logits, OUTPUT, self.h.vocab, false)?;
        self.p.b.output("logits", logits);
        self.p.finish()
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
