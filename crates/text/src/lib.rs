//! Text in, token ids out, and back: tokenizers, the streaming detokeniser, stop strings, chat templates.
//!
//! In: GGUF metadata or a `tokenizer.json` and its configuration, chat messages, token ids as they are
//! sampled. Out: token ids, whole characters, rendered prompts. Everything here is read-only after it is
//! made and can be shared between threads, except the small per-request states ([`TokenStream`],
//! [`StopStrings`]).
//!
//! Sampling, sessions and the meaning of a conversation do not belong here.

mod error;
mod stop;
mod stream;
pub mod template;
pub mod tokenizer;

pub use error::Error;
pub use stop::{StopOutcome, StopStrings};
pub use stream::TokenStream;
pub use template::{ChatTemplate, Message, RenderOptions};
pub use tokenizer::{EncodeOptions, Tokenizer};
