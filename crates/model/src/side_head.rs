//! Draft heads in a file of their own, beside the directory of the model that they belong to.

use std::path::Path;

use minfer_format::{Gguf, HfDir};
use minfer_graph::WeightDecl;

use crate::DraftHead;
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;

impl Checkpoint {
    /// Opens a directory with `config.json`, and a safetensors file with the model's draft head, whose tensors join the
    /// directory's. Settings that the head needs are those of `config.json`.
    ///
    /// # Errors
    /// As [`Checkpoint::open`] for both; a GGUF file as the model; a tensor that both have; a file from which the
    /// model's draft head takes nothing.
    pub fn open_with_head(path: &Path, head: &Path) -> Result<Checkpoint, ModelError> {
        if !path.is_dir() {
            // A path that is nothing is told first.
            Gguf::open(path)?;
            return Err(ModelError::HeadBesideGguf { head: head.to_owned(), model: path.to_owned() });
        }
        let dir = HfDir::open_with(path, head)?;
        dir.check_quantisation()?;
        let checkpoint = Checkpoint::Hf(dir);
        let model = crate::load(&checkpoint)?;
        // Page lists have no part in it.
        if model.draft_head(&checkpoint, 1)?.is_some_and(|h| h.weights().any(|w| checkpoint.is_from(w, head)))
        {
            return Ok(checkpoint);
        }
        let (source_name, arch) = (checkpoint.name(), model.hyper().arch);
        Err(ModelError::NoHeadInFile { head: head.to_owned(), source_name, arch })
    }

    /// Whether any tensor of a weight lies in this file.
    fn is_from(&self, weight: &WeightDecl, file: &Path) -> bool {
        let Checkpoint::Hf(dir) = self else { return false };
        weight.tensors.iter().any(|name| dir.location(name).is_some_and(|(path, _)| path == file))
    }
}

impl DraftHead {
    /// Weights of all its graphs; some may be the model's own, and some may come twice.
    pub fn weights(&self) -> impl Iterator<Item = &WeightDecl> {
        let graphs = match self {
            DraftHead::Chain(graph) => [Some(graph), None],
            DraftHead::Block(head) => [Some(&head.block), Some(&head.correct)],
        };
        graphs.into_iter().flatten().flat_map(|graph| &graph.weights)
    }
}
