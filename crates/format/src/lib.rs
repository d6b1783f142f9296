//! Model files and the blocks in them.
//!
//! In: a path (a GGUF file, one part of a split GGUF, a Hugging Face directory) or bytes that are already
//! in memory. Out: typed metadata, a checked list of tensors, and zero-copy views of their bytes;
//! [`decode`] turns stored blocks into numbers and [`synth`] makes random ones. Everything that a file
//! says is checked before it is used: a hostile file yields an [`Error`], never a panic, and reading one
//! takes at most the file's size plus 64 MiB of memory.
//!
//! What tensors *mean* (architectures, weight names, tokens) does not belong here.

pub mod block;
pub mod bytes;
pub mod decode;
mod error;
pub mod gguf;
pub mod hf;
pub mod limits;
pub mod synth;
pub mod table;

pub use block::BlockType;
pub use bytes::{Reading, TensorBytes};
pub use decode::{DecodeError, decode_row};
pub use error::Error;
pub use gguf::{Gguf, GgufWriter, Metadata, TensorInfo};
pub use hf::{HfDir, HfTensor};
