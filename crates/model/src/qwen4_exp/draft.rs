//! The model's own draft head (multi-token prediction, DeepSeek-V3 2024): one attention layer that continues
//! the residual streams of position `t`, given the token after it, to predict the one after that.
//!
//! Alignment and the norm over the whole width of the streams are MTPLX's and vLLM's. GGUF files keep its weights in a
//! layer behind the model's, and two of its matrices in one.

use minfer_graph::{Dim, Graph, Norm, Op, Streams, ValueId, ValueType};

use super::{ATTN_MIXER, FFN_MIXER, Mixer, Qwen4Exp, Step};
use crate::checkpoint::{Checkpoint, Names};
use crate::error::ModelError;

const MIXER: Mixer = Mixer {
    norm: ("nextn.hc_head_norm", "mtp.hyper_connection_mixer.hc_norm"),
    down: ("nextn.hc_head_down", "mtp.hyper_connection_mixer.input_mix_weight_down"),
    up: ("nextn.hc_head_up", "mtp.hyper_connection_mixer.input_mix_weight_up"),
    inject: ("", ""),
};
const NORM_HIDDEN: Names = ("nextn.hnorm", "mtp.pre_fc_norm_hidden");
const NORM_EMBEDDING: Names = ("nextn.enorm", "mtp.pre_fc_norm_embedding");
const FC_HIDDEN: Names = ("", "mtp.fc_hidden");
const FC_EMBEDDING: Names = ("", "mtp.fc_embedding");
/// The embedding's half first.
const FC_BOTH: Names = ("nextn.eh_proj", "");

pub(super) fn graph(m: &Qwen4Exp, ck: &Checkpoint, page_table: usize) -> Result<Option<Graph>, ModelError> {
    let layer = m.hyper.layers;
    let there =
        if ck.is_hf() { ck.has(FC_HIDDEN, None, "weight") } else { ck.has(FC_BOTH, Some(layer), "weight") };
    if !there? {
        return Ok(None);
    }
    let (mut step, embedded) = Step::inputs(ck, m, page_table)?;
    let width = m.sizes.streams * m.hyper.hidden;
    let streams = step.p.b.input("streams", ValueType::f32(Dim::Rows, [width]));
    if !ck.is_hf() {
        step.p.enter(layer);
    }
    let mut h = step.join(embedded, streams)?;
    step.p.enter(layer);
    let (x, inject) = step.read(h, &ATTN_MIXER)?;
    let y = step.attention(x)?;
    h = step.write(h, y, &ATTN_MIXER, inject)?;
    // Rows that nothing is drafted from only leave their keys and values.
    h = step.p.b.gather_rows(h, step.p.out_rows);
    let (x, inject) = step.read(h, &FFN_MIXER)?;
    let y = step.moe(x)?;
    h = step.write(h, y, &FFN_MIXER, inject)?;
    step.p.b.output("streams", h);
    if ck.is_hf() {
        step.p.leave();
    }
    step.finish(h, &MIXER).map(Some)
}

impl Step<'_> {
    /// `W_h a_s + W_e e` for each stream `s`: `a` is the normed streams, `e` the normed embedding of the token.
    fn join(&mut self, embedded: ValueId, streams: ValueId) -> Result<ValueId, ModelError> {
        let (n, hidden, eps) = (self.m.sizes.streams, self.m.hyper.hidden, self.m.hyper.norm_eps);
        let norm = self.centred(NORM_HIDDEN, n * hidden)?;
        let a = self.p.b.grouped_norm(streams, norm, Norm { eps, group: n * hidden });
        let a = self.p.b.reshape(a, &[n, hidden]);
        let norm = self.centred(NORM_EMBEDDING, hidden)?;
        let e = self.p.b.rms_norm(embedded, norm, eps);
        if !self.p.ck.is_hf() {
            return self.p.join_streams(e, a, FC_BOTH, [n, hidden]);
        }
        let a = self.p.linear(a, FC_HIDDEN, [hidden, hidden], "draft_hidden")?;
        let a = self.p.b.reshape(a, &[n * hidden]);
        let e = self.p.linear(e, FC_EMBEDDING, [hidden, hidden], "draft_embedding")?;
        let e = self.p.b.streams(Op::Repeat, Streams { n, scale: 1.0 }, &[e], "draft_embedding");
        Ok(self.p.b.add(a, e))
    }
}
