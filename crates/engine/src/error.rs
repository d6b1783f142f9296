//! What can go wrong between a model file and a token.

use std::path::PathBuf;

use minfer_model::{Fingerprint, ModelError};
use minfer_runtime::{BackendError, DeviceKind, RuntimeError};
use thiserror::Error;

/// An engine error, one readable line each.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum EngineError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Text(#[from] minfer_text::Error),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("a context of {asked} tokens (--ctx) exceeds the {allowed} that this model was made for")]
    ContextTooLong { asked: usize, allowed: usize },
    #[error("{what} is {value}; it must be {allowed}")]
    BadOption { what: &'static str, value: String, allowed: &'static str },
    #[error(
        "{add} more tokens do not fit: {have} of the context's {limit} are in use; raise the context size (--ctx, up \
         to {model_limit} for this model) or shorten the prompt"
    )]
    ContextOverflow { have: usize, add: usize, limit: usize, model_limit: usize },
    #[error(
        "the KV cache is full: {needed} more pages of {page} tokens are needed, {free} of {total} are free; \
         raise the context size or the number of sequences, or release a sequence"
    )]
    OutOfPages { needed: usize, free: usize, total: usize, page: usize },
    #[error("{asked} sequences were asked for, the engine was opened for {limit}")]
    TooManySequences { asked: usize, limit: usize },
    #[error("sequence {0} does not exist (any more)")]
    UnknownSequence(u32),
    #[error("token id {id} is outside the model's vocabulary of {vocab}")]
    TokenOutOfRange { id: u32, vocab: usize },
    #[error("cannot truncate a sequence of {len} tokens to {to}")]
    BadTruncation { len: usize, to: usize },
    #[error(
        "all {total} slots of recurrent state are in use; open the engine for more sequences or checkpoints"
    )]
    OutOfStateSlots { total: usize },
    #[error("the sequence's last step was a window of guesses: commit it first")]
    OpenWindow,
    #[error("the model has no draft head, or it was not opened")]
    NoDraftHead,
    #[error("speculation needs greedy decoding (--temp 0): drafts of sampled text are not supported yet")]
    SpeculationNeedsGreedy,
    #[error("the sequence has no window to commit")]
    NoWindow,
    #[error("a sequence appears twice in one step")]
    SequenceTwice,
    #[error("a step has no tokens")]
    EmptyStep,
    #[error("the prompt is empty: there is nothing to continue")]
    EmptyPrompt,
    #[error("the model has no chat template; give the prompt with --raw, or use a model that has one")]
    NoTemplate,
    #[error(
        "the model's logits are not numbers (NaN) at position {position}: its weights are damaged or unsupported"
    )]
    NotANumber { position: usize },
}

/// Why a snapshot or a session file cannot be written, read or restored. `session` says which one.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum SessionError {
    #[error("{doing} the session file {}: {source}", file.display())]
    Io { doing: &'static str, file: PathBuf, source: std::io::Error },
    #[error("{} is {found}, not a session file; give the path of a file that was saved as one", file.display())]
    NotASession { file: PathBuf, found: &'static str },
    #[error("{} is a session file of version {found}, this program reads version {known}; save the session again with this program", file.display())]
    Version { file: PathBuf, found: u32, known: u32 },
    #[error("the session file {} is truncated: {found} of its {expected} bytes are there; copy or save it again", file.display())]
    Truncated { file: PathBuf, found: u64, expected: u64 },
    #[error("the session file {} is damaged: {why}; copy or save it again", file.display())]
    Damaged { file: PathBuf, why: String },
    #[error(
        "not enough memory for the {bytes} bytes of {session}; close other sessions, or use a shorter one"
    )]
    OutOfMemory { session: String, bytes: u64 },
    #[error(
        "{session} belongs to another model ({found_arch} {found}; this one is {arch} {fingerprint}): open the model \
         that it was made with, or start anew"
    )]
    OtherModel {
        session: String,
        found_arch: String,
        found: Fingerprint,
        arch: String,
        fingerprint: Fingerprint,
    },
    #[error(
        "{session} keeps keys and values as {found}, this engine as {here}: open the engine with --kv {found}, or \
         start anew"
    )]
    OtherKvFormat { session: String, found: &'static str, here: &'static str },
    #[error(
        "{session} was made {found} the model's draft head, this engine was opened {here} it: open the engine {found} \
         it, or start anew"
    )]
    OtherDraftHead { session: String, found: &'static str, here: &'static str },
    #[error(
        "{session} has state '{state}' in the layout of {found}, which {here} cannot read: place the model as it was \
         (--backend, --gpu-layers), or start anew"
    )]
    OtherDevice { session: String, state: String, found: DeviceKind, here: DeviceKind },
    #[error("{session} has other state than this program keeps for the model ({what}): start anew")]
    OtherLayout { session: String, what: String },
}
