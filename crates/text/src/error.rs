//! Everything that can go wrong with text, in one enum: tokenizer data, encoding, chat templates.

use std::path::PathBuf;

/// Why a tokenizer or a template cannot be used, or why a text cannot be encoded or rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The message of each variant says what its fields are.
pub enum Error {
    #[error(transparent)]
    Metadata(#[from] minfer_format::Error),
    #[error("unknown tokenizer model '{model}' (tokenizer.ggml.model); known are: {known}")]
    UnknownModel { model: String, known: String },
    #[error(
        "the file names no pre-tokenizer (tokenizer.ggml.pre); convert it again with a current tool. Known are: {known}"
    )]
    NoPre { known: String },
    #[error("unknown pre-tokenizer '{pre}' (tokenizer.ggml.pre); known are: {known}")]
    UnknownPre { pre: String, known: String },
    #[error("{key} has {len} entries, but the vocabulary has {expected}")]
    Length { key: &'static str, len: usize, expected: usize },
    #[error("the vocabulary is empty")]
    EmptyVocab,
    #[error("the tokens {first} and {second} have the same text {text:?}")]
    DuplicateToken { first: u32, second: u32, text: String },
    #[error("merge {index} ({merge:?}) {reason}")]
    Merge { index: usize, merge: String, reason: &'static str },
    #[error("{key} is {id}, but the vocabulary has {len} tokens")]
    TokenId { key: String, id: u64, len: usize },
    #[error("{key} is {text:?}, which is not a token of the vocabulary")]
    TokenText { key: &'static str, text: String },
    #[error(
        "the tokenizer wants a BOS token in front of a prompt, but names none (tokenizer.ggml.bos_token_id or bos_token)"
    )]
    NoBos,
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: {reason}", path.display())]
    Json { path: PathBuf, reason: String },
    #[error("{}: {what} is not supported; supported are {supported}", path.display())]
    Unsupported { path: PathBuf, what: String, supported: &'static str },
    #[error("the tokenizer library refused the data: {0}")]
    Library(String),

    #[error("the vocabulary has no token for the byte 0x{byte:02X}, and no unknown token")]
    Unencodable { byte: u8 },
    #[error(
        "the text has a run of more than {limit} characters that are all whitespace or all not whitespace; split it"
    )]
    LongRun { limit: usize },
    #[error("stop string {index} is empty; it would stop before the first character")]
    EmptyStop { index: usize },

    #[error("the chat template cannot be parsed at line {line}: {detail}")]
    TemplateSyntax { line: usize, detail: String },
    #[error("the chat template uses something unknown at line {line}: {construct}")]
    TemplateUnknown { line: usize, construct: String },
    #[error("the chat template refused the conversation: {message}")]
    TemplateRaised { message: String },
    #[error("the chat template exceeded the limit of {what} at line {line}")]
    TemplateLimit { what: String, line: usize },
    #[error("the chat template failed at line {line}: {detail}")]
    TemplateFailed { line: usize, detail: String },
}
