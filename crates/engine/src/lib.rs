//! The engine: open a model, make a session, stream tokens.
//!
//! ```no_run
//! use minfer_engine::{Checkpoint, Engine, EngineOptions, Generate, Text, cpu_devices};
//! # fn main() -> Result<(), minfer_engine::EngineError> {
//! let model = Checkpoint::open("model.gguf".as_ref())?;
//! let text = Text::open(&model)?;
//! let mut engine = Engine::open(&model, EngineOptions::new(cpu_devices(None)?), &mut |_, _| ())?;
//! let mut session = engine.session();
//! let prompt = text.encode_raw("The capital of France is")?;
//! let mut generation = session.generate(&text, &prompt, &Generate::default())?;
//! while let Some(piece) = generation.next_piece()? {
//!     print!("{}", piece.text);
//! }
//! # Ok(()) }
//! ```
//!
//! In: a checkpoint and devices. Out: logits of steps ([`Engine::step`]) and, above that, text
//! ([`Session::generate`]). The engine owns pages and block tables; kernels, plans and model definitions live
//! in the crates below, flags and servers above.

mod block_table;
mod draft;
mod engine;
mod error;
mod generate;
mod ngrams;
mod options;
mod pages;
mod reuse;
mod sampler;
mod sequence;
mod session;
mod session_file;
mod snapshot;
mod speculate;
mod states;
mod text;

pub use engine::{Chunk, Engine, Logits, Outs, cpu_devices, cpu_devices_with};
pub use error::{EngineError, SessionError};
pub use generate::{Finish, Generate, Generation, Piece, Timings};
pub use minfer_model::{Checkpoint, Hyper, Shape};
pub use minfer_runtime::{Counters, KvFormat, WeightOptions};
pub use minfer_text::{ChatTemplate, Message, RenderOptions, Tokenizer};
pub use options::EngineOptions;
pub use reuse::ReuseCounters;
pub use sampler::{Penalties, Sampler, SamplerOptions, Stage};
pub use sequence::SequenceId;
pub use session::Session;
pub use snapshot::Snapshot;
pub use speculate::{Acceptance, Speculate};
pub use text::Text;
