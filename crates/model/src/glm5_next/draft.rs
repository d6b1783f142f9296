//! The model's own draft head (multi-token prediction, DeepSeek-V3 2024): one attention layer with plain residuals
//! that continues what the output matrix saw of position `t`, given the token after it, to predict the one after
//! that. Formulas are vLLM's; the choice of positions is made anew for each draft of a chain.

use minfer_graph::{Dim, Graph, ValueType};

use super::{ATTN_MIXER, FFN_MIXER, Glm5Next, Step};
use crate::checkpoint::{Checkpoint, Names};
use crate::decoder::EMBED;
use crate::error::ModelError;
use crate::parts::Parts;

const JOIN: Names = ("nextn.eh_proj", "eh_proj");
const EMBEDDING_NORM: Names = ("nextn.enorm", "enorm");
const HIDDEN_NORM: Names = ("nextn.hnorm", "hnorm");
const OUTPUT_NORM: Names = ("nextn.shared_head_norm", "shared_head.norm");

pub(super) fn graph(m: &Glm5Next, ck: &Checkpoint, page_table: usize) -> Result<Option<Graph>, ModelError> {
    let (layer, hidden) = (m.hyper.layers, m.hyper.hidden);
    if !ck.has(JOIN, Some(layer), "weight")? {
        return Ok(None);
    }
    let mut step = Step { p: Parts::new(ck, &m.hyper, page_table), m };
    let (embedded, _) = step.p.embed(EMBED, &m.hyper)?;
    let streams = step.p.b.input("streams", ValueType::f32(Dim::Rows, [hidden]));
    step.p.enter(layer);
    // The head was trained without the embedding in its first row.
    let embedded = step.p.b.zero_first(embedded, step.p.positions());
    let e = step.p.norm(embedded, EMBEDDING_NORM, hidden)?;
    let h = step.p.norm(streams, HIDDEN_NORM, hidden)?;
    let both = step.p.b.concat(&[e, h], "draft_input");
    let x = step.p.linear(both, JOIN, [hidden, 2 * hidden], "draft_joined")?;
    let normed = step.p.norm(x, ATTN_MIXER.norm, hidden)?;
    let y = step.attention(normed)?;
    let x = step.p.b.add(x, y);
    // Rows that nothing is drafted from only leave their keys and values.
    let x = step.p.b.gather_rows(x, step.p.out_rows);
    let normed = step.p.norm(x, FFN_MIXER.norm, hidden)?;
    let y = step.moe(normed)?;
    let x = step.p.b.add(x, y);
    let x = if ck.has(OUTPUT_NORM, Some(layer), "weight")? {
        step.p.norm(x, OUTPUT_NORM, hidden)?
    } else {
        // Files may leave out what is the model's own.
        step.p.leave();
        step.p.norm(x, super::OUTPUT_NORM, hidden)?
    };
    step.p.b.output("streams", x);
    step.head(x).map(Some)
}
