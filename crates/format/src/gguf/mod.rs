//! GGUF files, versions 2 and 3, little-endian, whole or split into parts.
//!
//! In: a path or bytes. Out: a [`Gguf`] whose metadata and tensor list are checked, so that everything
//! after it may trust them: every tensor has a supported type, whole blocks, a range inside its file and
//! a unique name. [`value`] holds the values of metadata, [`metadata`] the typed access to them, `read`
//! the parser, `split` the opening of parts, [`mod@write`] the writer. What keys mean does not belong here.

pub mod metadata;
mod read;
mod split;
mod tensor;
pub mod value;
pub mod write;

use std::path::{Path, PathBuf};

use crate::bytes::TensorBytes;
use crate::error::{Error, shown};

pub use metadata::Metadata;
pub use tensor::TensorInfo;
pub use value::{Array, Value};
pub use write::GgufWriter;

/// An open GGUF model: its metadata, its tensors and their bytes.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    /// Tensors of whole numbers.
    integers: Vec<TensorInfo>,
    /// Indices of `tensors` in the order of their names.
    by_name: Vec<u32>,
    parts: Vec<Part>,
}

/// One file of a model.
#[derive(Debug)]
struct Part {
    file: PathBuf,
    bytes: TensorBytes,
}

impl Gguf {
    /// Maps and checks a file. Any part of a split model (`…-00001-of-00003.gguf`) opens all of it.
    pub fn open(path: &Path) -> Result<Gguf, Error> {
        let mut budget = read::Budget::default();
        let named = split::NamedPart::open(path, 0, &mut budget)?;
        match split::count(&named.parsed.metadata)? {
            None => Gguf::new(path, vec![named]),
            Some(count) => Gguf::new(path, split::open_all(path, named, count)?),
        }
    }

    /// Checks a file that is part of the binary; nothing is copied. `name` stands for the path in messages.
    pub fn from_static(name: &str, bytes: &'static [u8]) -> Result<Gguf, Error> {
        Gguf::from_bytes(name, bytes.into())
    }

    /// Checks a file in memory. `name` stands for the path in messages.
    pub fn from_bytes(name: &str, bytes: TensorBytes) -> Result<Gguf, Error> {
        let path = Path::new(name);
        let parsed = read::parse(path, &bytes, 0, &mut read::Budget::default())?;
        if let Some(count) = split::count(&parsed.metadata)? {
            let expected = "a whole file (parts can only be opened by path)".to_owned();
            let found = format!("one of {count} parts");
            return Err(Error::WrongPart {
                file: path.to_owned(),
                what: "the model".to_owned(),
                expected,
                found,
            });
        }
        Gguf::new(path, vec![split::NamedPart { file: path.to_owned(), bytes, parsed }])
    }

    fn new(path: &Path, named: Vec<split::NamedPart>) -> Result<Gguf, Error> {
        let (mut parts, mut tensors, mut first) = (Vec::new(), Vec::new(), None);
        for split::NamedPart { file, bytes, parsed } in named {
            parts.push(Part { file, bytes });
            tensors.extend(parsed.tensors);
            first.get_or_insert((parsed.version, parsed.metadata));
        }
        let (version, metadata) = first.unwrap_or_default();
        let by_name = sorted_by_name(&tensors);
        if let Some(twice) =
            by_name.windows(2).find(|w| tensors[w[0] as usize].name == tensors[w[1] as usize].name)
        {
            let again = &tensors[twice[1] as usize];
            let file = parts[again.part as usize].file.clone();
            return Err(Error::DuplicateTensor { file, tensor: shown(&again.name) });
        }
        let (integers, tensors): (Vec<_>, Vec<_>) = tensors.into_iter().partition(|t| t.integers);
        let by_name = sorted_by_name(&tensors);
        Ok(Gguf { path: path.to_owned(), version, metadata, tensors, integers, by_name, parts })
    }

    /// The metadata (of the first part, when there are several).
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors but those of whole numbers, in the order of the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let place =
            self.by_name.binary_search_by(|&i| self.tensors[i as usize].name.as_str().cmp(name)).ok()?;
        Some(&self.tensors[self.by_name[place] as usize])
    }

    /// Shape (outermost dimension first) and numbers of a tensor of type I32, such as a table of ids.
    pub fn integers(&self, name: &str) -> Option<(&[usize], Vec<i32>)> {
        let tensor = self.integers.iter().find(|t| t.name == name)?;
        let bytes = self.parts[tensor.part as usize].bytes.slice(tensor.range())?;
        let numbers = bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
        Some((&tensor.shape, numbers))
    }

    /// The bytes of a tensor, without copying: rows of blocks, outermost dimension slowest.
    pub fn data(&self, name: &str) -> Result<TensorBytes, Error> {
        self.tensor(name)
            .and_then(|t| self.parts[t.part as usize].bytes.slice(t.range()))
            .ok_or_else(|| Error::MissingTensor { file: self.path.clone(), tensor: shown(name) })
    }

    /// Where a tensor lies on disk: the file and its first byte there. `None` for a model in memory.
    pub fn location(&self, name: &str) -> Option<(&Path, u64)> {
        let tensor = self.tensor(name)?;
        let file = &self.parts[tensor.part as usize].file;
        file.is_file().then_some((file.as_path(), tensor.start as u64))
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files of the model, first part first.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.parts.iter().map(|p| p.file.as_path())
    }

    /// The GGUF version of the (first) file: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Bytes of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes.len() as u64).sum()
    }
}

fn sorted_by_name(tensors: &[TensorInfo]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..tensors.len() as u32).collect();
    order.sort_by_key(|&i| tensors[i as usize].name.as_str());
    order
}
