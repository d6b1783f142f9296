//! The model's own draft heads, of which a checkpoint has one.
//!
//! The legacy head (multi-token prediction, DeepSeek-V3 2024) is one layer with a window that continues the residual
//! streams of position `t`, given the token after it, to predict the one after that. Alignment is MTPLX's.
//!
//! DSpark (DeepSeek 2026) drafts a block at once, in layers whose keys of committed positions are not computed from
//! their own rows but from the model's: the mean of the streams after some layers, projected. A block is the last
//! chosen token and noise; its rows see the window before it and one another. Each draft is then corrected by the one
//! before it, through a product of low rank.

use minfer_graph::{Dim, Graph, GraphBuilder, Op, Streams, ValueId, ValueType};

use super::sizes::Dspark;
use super::{DeepseekV4, HEAD_MIXER, Head, Reach, Step};
use crate::checkpoint::{Checkpoint, Names};
use crate::error::ModelError;
use crate::parts::SIGMOID;
use crate::{BlockHead, DraftHead};

/// Two tensors in published directories, one of twice the width in GGUF files, the embedding's half first.
const HIDDEN: Names = ("", "h_proj");
const EMBEDDING: Names = ("", "e_proj");
const BOTH: Names = ("nextn.eh_proj", "");
const HIDDEN_NORM: Names = ("nextn.hnorm", "hnorm");
const EMBEDDING_NORM: Names = ("nextn.enorm", "enorm");
const OUTPUT_NORM: Names = ("nextn.shared_head_norm", "norm");

/// Only in published directories.
const MAIN: Names = ("", "main_proj");
const MAIN_NORM: Names = ("", "main_norm");
const MARKOV_IN: Names = ("", "markov_head.markov_w1");
const MARKOV_OUT: Names = ("", "markov_head.markov_w2");
const CONFIDENCE: Names = ("", "confidence_head.proj");

/// Layers of a DSpark head.
const STAGES: usize = 3;

/// Which head a checkpoint has.
pub(super) fn find<'m>(m: &'m DeepseekV4, ck: &Checkpoint) -> Result<Head<'m>, ModelError> {
    let has = |names| ck.has(names, Some(m.hyper.layers), "weight");
    if has(MAIN)? {
        let missing = || ck.bad("config.json: dspark_target_layer_ids", "is missing, but there is a head");
        return Ok(Head::Dspark(m.sizes.dspark.as_ref().ok_or_else(missing)?));
    }
    Ok(if has(HIDDEN)? || has(BOTH)? { Head::Legacy } else { Head::None })
}

/// The legacy head.
pub(super) fn chain(m: &DeepseekV4, ck: &Checkpoint, page_table: usize) -> Result<DraftHead, ModelError> {
    let (n, hidden) = (m.sizes.streams, m.hyper.hidden);
    let (mut step, embedded) = Step::start(ck, m, page_table)?;
    let streams = step.p.b.input("streams", ValueType::f32(Dim::Rows, [n * hidden]));
    step.p.enter(m.hyper.layers);
    let h = step.join(embedded, streams)?;
    let reach = step.reach();
    let h = step.attend(h, reach)?;
    // Rows that nothing is drafted from only leave their keys.
    let h = step.p.b.gather_rows(h, step.p.out_rows);
    let h = step.feed(h)?;
    step.p.b.output("streams", h);
    // Files may leave out what is the model's own.
    let own = |names, suffix| ck.has(names, Some(m.hyper.layers), suffix);
    if !own(HEAD_MIXER.project, "")? {
        step.p.leave();
    }
    let x = step.collapse(h)?;
    step.p.enter(m.hyper.layers);
    if own(OUTPUT_NORM, "weight")? {
        return step.finish(x, OUTPUT_NORM).map(DraftHead::Chain);
    }
    step.p.leave();
    step.finish(x, super::OUTPUT_NORM).map(DraftHead::Chain)
}

/// DSpark.
pub(super) fn block(
    m: &DeepseekV4,
    ck: &Checkpoint,
    page_table: usize,
    dspark: &Dspark,
) -> Result<DraftHead, ModelError> {
    let (mut step, x) = Step::start(ck, m, page_table)?;
    let ends = step.p.b.input("ends", ValueType::i32(Dim::Rows, []));
    let [_, table_at, pages] = step.p.window_tables();
    let reach = Reach { tables: [ends, table_at, pages], window: m.sizes.window + dspark.size };
    let mut h = step.streams(x);
    for stage in 0..STAGES {
        step.p.enter(m.hyper.layers + stage);
        h = step.attend(h, reach)?;
        h = step.feed(h)?;
    }
    let h = step.p.b.gather_rows(h, step.p.out_rows);
    let x = step.collapse(h)?;
    step.p.b.output("hidden", x);
    let block = step.finish(x, OUTPUT_NORM)?;
    let correct = correct(m, ck, dspark.rank)?;
    Ok(DraftHead::Block(BlockHead { block, correct, size: dspark.size, noise: dspark.noise }))
}

/// Drafts corrected by the tokens before them, and how sure the head is of them.
fn correct(m: &DeepseekV4, ck: &Checkpoint, rank: usize) -> Result<Graph, ModelError> {
    let (vocab, hidden, last) = (m.hyper.vocab, m.hyper.hidden, Some(m.hyper.layers + STAGES - 1));
    let mut b = GraphBuilder::new();
    let tokens = b.input("tokens", ValueType::i32(Dim::Rows, []));
    let base = b.input("base", ValueType::f32(Dim::Rows, [vocab]));
    let x = b.input("hidden", ValueType::f32(Dim::Rows, [hidden]));
    let table = b.weight(ck.weight(MARKOV_IN, last, "weight", &[vocab, rank])?);
    let e = b.embed(tokens, table);
    let out = b.weight(ck.weight(MARKOV_OUT, last, "weight", &[vocab, rank])?);
    let correction = b.matmul(e, out, "markov");
    let logits = b.add(base, correction);
    b.output("logits", logits);
    let both = b.concat(&[x, e], "confidence_input");
    let sure = b.weight(ck.weight(CONFIDENCE, last, "weight", &[1, hidden + rank])?);
    let sure = b.matmul(both, sure, "confidence_logit");
    let sure = b.act(sure, SIGMOID);
    b.output("confidence", sure);
    b.finish().map_err(|source| ModelError::Graph { source_name: ck.name(), source })
}

impl Step<'_> {
    /// `W_h a_s + W_e e` for each stream `s`: `a` is the normed streams, `e` the normed embedding of the token.
    fn join(&mut self, embedded: ValueId, streams: ValueId) -> Result<ValueId, ModelError> {
        let (n, hidden) = (self.m.sizes.streams, self.m.hyper.hidden);
        let a = self.p.b.reshape(streams, &[n, hidden]);
        let a = self.p.norm(a, HIDDEN_NORM, hidden)?;
        let e = self.p.norm(embedded, EMBEDDING_NORM, hidden)?;
        if self.p.ck.has(BOTH, self.p.layer(), "weight")? {
            return self.p.join_streams(e, a, BOTH, [n, hidden]);
        }
        let a = self.p.linear(a, HIDDEN, [hidden, hidden], "draft_hidden")?;
        let a = self.p.b.reshape(a, &[n * hidden]);
        let e = self.p.linear(e, EMBEDDING, [hidden, hidden], "draft_embedding")?;
        let e = self.streams(e);
        Ok(self.p.b.add(a, e))
    }

    /// The mean of the residual streams.
    pub(super) fn mean(&mut self, h: ValueId) -> ValueId {
        let n = self.m.sizes.streams;
        self.p.b.streams(Op::StreamSum, Streams { n, scale: 1.0 / n as f32 }, &[h], "tap")
    }

    /// Keys of the model's rows in every stage of DSpark, from its streams after some layers.
    pub(super) fn keep_main(&mut self, taps: &[ValueId]) -> Result<(), ModelError> {
        let hidden = self.m.hyper.hidden;
        self.p.enter(self.m.hyper.layers);
        let x = self.p.b.concat(taps, "taps");
        let x = self.p.linear(x, MAIN, [hidden, taps.len() * hidden], "main")?;
        let x = self.p.norm(x, MAIN_NORM, hidden)?;
        for stage in 0..STAGES {
            self.p.enter(self.m.hyper.layers + stage);
            self.keep(x, self.rope[0])?;
        }
        Ok(())
    }
}
