//! Model architectures: one file each, and what they share.
//!
//! In: a [`Checkpoint`] (a GGUF file, a Hugging Face directory, or a shape to be filled from a seed). Out: a
//! [`Model`], which knows its hyper-parameters and builds the graph of one step, weights and states
//! declared by name. How anything is computed or stored does not belong here.
//!
//! A new architecture is one file with a `load` function plus one line in [`ARCHITECTURES`].

mod checkpoint;
mod decoder;
mod deepseek_v4;
mod error;
mod fingerprint;
mod glm5_next;
mod hyper;
mod integers;
mod llama;
mod ngram;
mod parts;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod qwen4_exp;
mod rope;
mod shapes;
mod side_head;
mod tensors;

pub use checkpoint::Checkpoint;
pub use error::ModelError;
pub use fingerprint::Fingerprint;
pub use hyper::{Experts, Hyper};
pub use ngram::Ngram;
pub use shapes::{SHAPES, Shape};

use minfer_graph::{Graph, WeightDecl};

/// A loaded architecture.
pub trait Model: Send + Sync {
    /// Sizes and settings.
    fn hyper(&self) -> &Hyper;

    /// From here on graphs round rows as the graph of the model's makers does, with which its weights were trained,
    /// where that is not what other engines do. Off in a model that was just loaded.
    ///
    /// # Errors
    /// An architecture whose makers do nothing else, or sizes that the rounding does not fit.
    fn round_officially(&mut self, checkpoint: &Checkpoint) -> Result<(), ModelError> {
        let (source_name, why) = (checkpoint.name(), format!("this model is {}", self.hyper().arch));
        Err(ModelError::OfficialRounding { source_name, why })
    }

    /// The graph of one step. Inputs: `tokens`, `positions`, `slots`, `table_at` (i32 per row), `pages`
    /// (i32, at most `page_table` of them), `out_rows` (i32 per output); models with recurrent state also
    /// `state_from`, `state_to` (i32 per row), and those with an n-gram table `ngrams` (f32
    /// `[rows, heads * width]`, the rows of [`Model::ngram_table`] that [`Model::ngram`] names). Output: `logits` f32 `[outs, vocab]`.
    ///
    /// # Errors
    /// A missing tensor or a wrong shape, by name.
    fn graph(&self, checkpoint: &Checkpoint, page_table: usize) -> Result<Graph, ModelError>;

    /// The same graph with what the draft head needs of it: a second output `streams` f32 `[rows, width]` for a
    /// [`DraftHead::Chain`], the head's own paged state of every row for a [`DraftHead::Block`].
    ///
    /// # Errors
    /// As [`Model::graph`].
    fn graph_with_streams(&self, checkpoint: &Checkpoint, page_table: usize) -> Result<Graph, ModelError> {
        self.graph(checkpoint, page_table)
    }

    /// The model's own draft head, if the checkpoint has one.
    ///
    /// # Errors
    /// As [`Model::graph`].
    fn draft_head(
        &self,
        _checkpoint: &Checkpoint,
        _page_table: usize,
    ) -> Result<Option<DraftHead>, ModelError> {
        Ok(None)
    }

    /// How tokens become rows of the model's n-gram table, if it has one.
    fn ngram(&self) -> Option<&Ngram> {
        None
    }

    /// That table, `[rows, width]`. No node of the graph holds it: it may be larger than memory, so its rows
    /// are read from the file as tokens ask for them ([`Checkpoint::row_table`]).
    ///
    /// # Errors
    /// As [`Model::graph`].
    fn ngram_table(&self, _checkpoint: &Checkpoint) -> Result<Option<WeightDecl>, ModelError> {
        Ok(None)
    }
}

/// A model's own draft head. Its graphs take the inputs of a model without recurrent state.
pub enum DraftHead {
    /// Drafts one token after the other. Row `t` has the token *after* position `t`, and of the further input
    /// `streams` f32 `[rows, width]` the model's row for committed rows, the head's own for drafts of drafts.
    /// Outputs: `logits` f32 `[outs, vocab]` for the token after that, and `streams` f32 `[outs, width]`.
    Chain(Graph),
    /// Drafts several tokens at once.
    Block(BlockHead),
}

/// A head that drafts a block of tokens at once, then corrects each by the one before it.
pub struct BlockHead {
    /// The rows of a block: the last chosen token at the position after the committed ones, then noise. The
    /// further input `ends` i32 `[rows]` is the last position of the block, to which all of its rows attend.
    /// Outputs for row `i`, a draft of the token at the position after its own: `logits` f32 `[outs, vocab]`,
    /// `hidden` f32 `[outs, width]`. State of committed rows comes from the model's own graph, which has
    /// states of the same names.
    pub block: Graph,
    /// Inputs: `tokens` i32 `[rows]`, the token before each draft, and that draft's `base` and `hidden`, outputs
    /// of the block. Outputs: `logits` f32 `[rows, vocab]`, and `confidence` f32 `[rows, 1]`, the expected rate at
    /// which such drafts are kept.
    pub correct: Graph,
    /// Drafts per block.
    pub size: usize,
    /// The token of all rows but the first.
    pub noise: u32,
}

/// One row of the architecture table.
pub struct Architecture {
    /// `general.architecture` in GGUF files.
    pub gguf: &'static str,
    /// `model_type`s in Hugging Face configurations.
    pub hf: &'static [&'static str],
    load: fn(&Checkpoint) -> Result<Box<dyn Model>, ModelError>,
}

/// Every architecture.
pub const ARCHITECTURES: [Architecture; 7] = [
    Architecture { gguf: "llama", hf: &["llama"], load: llama::load },
    Architecture { gguf: "qwen2", hf: &["qwen2"], load: qwen2::load },
    Architecture { gguf: "qwen3", hf: &["qwen3"], load: qwen3::load },
    Architecture { gguf: "qwen3moe", hf: &["qwen3_moe"], load: qwen3_moe::load },
    // The second type of each has the decoder's configuration under `text_config`.
    Architecture { gguf: "qwen4exp", hf: &["qwen4_exp_text", "qwen4_exp"], load: qwen4_exp::load },
    Architecture { gguf: "glm5-next", hf: &["glm5_next_text", "glm5_next"], load: glm5_next::load },
    Architecture { gguf: "deepseek4", hf: &["deepseek_v4"], load: deepseek_v4::load },
];

/// Recognises the architecture of a checkpoint and reads its hyper-parameters.
///
/// # Errors
/// An unknown architecture (with the known list), or one whose settings are not supported.
pub fn load(checkpoint: &Checkpoint) -> Result<Box<dyn Model>, ModelError> {
    let name = checkpoint.architecture()?;
    let known = |a: &Architecture| if checkpoint.is_hf() { a.hf.to_vec() } else { vec![a.gguf] };
    match ARCHITECTURES.iter().find(|a| known(a).contains(&name.as_str())) {
        Some(a) => (a.load)(checkpoint),
        None => Err(ModelError::UnknownArchitecture {
            source_name: checkpoint.name(),
            name,
            known: ARCHITECTURES.iter().flat_map(known).collect::<Vec<_>>().join(", "),
        }),
    }
}
