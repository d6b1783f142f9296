//! The tensors that make up a weight, as bytes of its blocks.
//!
//! Most lie in a file as they are wanted; packs of Hugging Face directories are gathered when they are written to their
//! place, so that a stack of experts exists once in memory.

use minfer_format::bytes::AlignedBuf;
use minfer_format::hf::Packed;
use minfer_format::{Error, TensorBytes};

use crate::checkpoint::Checkpoint;
use crate::error::ModelError;

/// One tensor of a weight.
pub(crate) enum Part {
    /// Bytes of a file.
    Plain(TensorBytes),
    /// Blocks that are to be gathered.
    Packed(Packed),
}

impl Part {
    fn len(&self) -> usize {
        match self {
            Part::Plain(bytes) => bytes.len(),
            Part::Packed(packed) => packed.bytes(),
        }
    }

    fn write(&self, out: &mut [u8]) -> Result<(), Error> {
        match self {
            Part::Plain(bytes) => out.copy_from_slice(bytes),
            Part::Packed(packed) => packed.unpack(0..packed.rows(), out)?,
        }
        Ok(())
    }
}

impl Checkpoint {
    /// A tensor with rows of `k` numbers.
    pub(crate) fn part(&self, name: &str, k: usize) -> Result<Part, ModelError> {
        Ok(match self {
            Checkpoint::Gguf(g) => Part::Plain(g.data(name)?),
            Checkpoint::Hf(d) => match d.packed(name, k)? {
                Some(packed) => Part::Packed(packed),
                None => Part::Plain(d.data(name)?),
            },
            Checkpoint::Shape(_) => {
                return Err(ModelError::MissingTensor { source_name: self.name(), tensor: name.to_string() });
            }
        })
    }
}

/// All parts, one after the other; a single one that lies in a file stays there.
pub(crate) fn join(parts: &[Part]) -> Result<TensorBytes, Error> {
    if let [Part::Plain(bytes)] = parts {
        return Ok(bytes.clone());
    }
    let mut joined = AlignedBuf::zeroed(parts.iter().map(Part::len).sum());
    let mut rest = &mut joined[..];
    for part in parts {
        let (place, after) = rest.split_at_mut(part.len());
        part.write(place)?;
        rest = after;
    }
    Ok(joined.into())
}
