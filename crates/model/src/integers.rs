//! Tensors of whole numbers: hash parameters of Hugging Face directories, and tables of ids that a graph reads.

use minfer_format::bytes::AlignedBuf;
use minfer_format::hf::Dtype;
use minfer_format::{BlockType, HfDir, TensorBytes};
use minfer_graph::{WeightDecl, WeightMap};

use crate::checkpoint::{Checkpoint, Names};
use crate::error::ModelError;

/// Whole numbers from this one on are not all exact in f32.
const EXACT: i64 = 1 << 24;

/// All numbers of an I64 tensor.
pub(crate) fn integers(ck: &Checkpoint, dir: &HfDir, name: &str) -> Result<Vec<i64>, ModelError> {
    match dir.tensor(name) {
        Some(t) if t.dtype == Dtype::I64 => {
            let bytes = dir.raw(name)?;
            let (numbers, _) = bytes.as_chunks::<8>();
            Ok(numbers.iter().map(|b| i64::from_le_bytes(*b)).collect())
        }
        Some(t) => Err(ck.bad(name, format!("is {}, expected I64", t.dtype))),
        None => Err(ModelError::MissingTensor { source_name: ck.name(), tensor: name.to_string() }),
    }
}

impl Checkpoint {
    /// A table of ids, of this shape, which arrives as F32.
    pub(crate) fn ids(
        &self,
        names: Names,
        layer: Option<usize>,
        shape: [usize; 2],
    ) -> Result<WeightDecl, ModelError> {
        let name = self.full_name(names, layer, "");
        let found = match self {
            Checkpoint::Hf(dir) => dir.tensor(&name).map(|t| t.shape.clone()),
            Checkpoint::Gguf(g) => g.integers(&name).map(|(shape, _)| shape.to_vec()),
            Checkpoint::Shape(_) => Some(shape.to_vec()),
        };
        let Some(found) = found else {
            if self.has(names, layer, "")? {
                return Err(self.bad(&name, "is not of whole numbers"));
            }
            return Err(ModelError::MissingTensor { source_name: self.name(), tensor: name });
        };
        if found != shape {
            let (source_name, expected) = (self.name(), shape.to_vec());
            return Err(ModelError::WrongShape { source_name, tensor: name, found, expected });
        }
        let tensors = vec![name.clone()];
        Ok(WeightDecl { name, ty: BlockType::F32, shape: shape.to_vec(), tensors, map: WeightMap::Ids })
    }

    /// The numbers of a table of ids as F32.
    pub(crate) fn load_ids(&self, decl: &WeightDecl) -> Result<TensorBytes, ModelError> {
        let ids = match self {
            Checkpoint::Hf(dir) => integers(self, dir, &decl.name)?,
            Checkpoint::Gguf(g) => match g.integers(&decl.name) {
                Some((_, ids)) => ids.into_iter().map(i64::from).collect(),
                None => return Err(self.bad(&decl.name, "is not a table of ids")),
            },
            Checkpoint::Shape(s) => s.ids(decl),
        };
        if let Some(id) = ids.iter().find(|id| !(0..EXACT).contains(*id)) {
            return Err(self.bad(&decl.name, format!("has id {id}, outside 0..{EXACT}")));
        }
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| (id as f32).to_le_bytes()).collect();
        Ok(AlignedBuf::from(&bytes[..]).into())
    }
}
