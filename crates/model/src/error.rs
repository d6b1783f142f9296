//! Errors of recognising a model and building its graph.

use std::path::PathBuf;

use minfer_graph::GraphError;
use thiserror::Error;

/// A model that cannot be used, with the file and what in it is the reason.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum ModelError {
    #[error(transparent)]
    Format(#[from] minfer_format::Error),
    #[error("{source_name}: architecture '{name}' is not supported; supported are: {known}")]
    UnknownArchitecture { source_name: String, name: String, known: String },
    #[error("{source_name}: {key} {why}")]
    BadSetting { source_name: String, key: String, why: String },
    #[error("{source_name}: rope scaling '{kind}' is not supported; supported are: none, linear, llama3")]
    RopeScaling { source_name: String, kind: String },
    #[error("{source_name}: tensor '{tensor}' is missing")]
    MissingTensor { source_name: String, tensor: String },
    #[error("{source_name}: tensor '{tensor}' has shape {found:?}, expected {expected:?}")]
    WrongShape { source_name: String, tensor: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("{source_name}: tensor '{tensor}' is {ty}, whose rows of {k} are not a multiple of 32 numbers")]
    RowLength { source_name: String, tensor: String, ty: String, k: usize },
    #[error("{source_name}: {first} is {first_ty}, but {second} is {second_ty}; stacked tensors must agree")]
    MixedTypes { source_name: String, first: String, first_ty: String, second: String, second_ty: String },
    #[error(
        "{source_name}: --official-rounding is for deepseek_v4 with its published sizes, but {why}; leave it out"
    )]
    OfficialRounding { source_name: String, why: String },
    #[error("{} cannot join {}, which is a GGUF file: a draft head in a file of its own needs a Hugging Face directory; leave out --draft-head, or name the directory", head.display(), model.display())]
    HeadBesideGguf { head: PathBuf, model: PathBuf },
    #[error("{} has no tensor of a draft head for {source_name} ({arch}); name the file that its makers give for it, or leave out --draft-head", head.display())]
    NoHeadInFile { head: PathBuf, source_name: String, arch: &'static str },
    #[error("unknown shape '{name}'; known shapes are: {known}")]
    UnknownShape { name: String, known: String },
    #[error("{source_name}: {source}")]
    Graph { source_name: String, source: GraphError },
}
