//! One safetensors file: a JSON header, then the tensors' bytes without gaps.
//!
//! Layout: the header's length as u64, the header (a JSON object from tensor names to `dtype`, `shape`,
//! `data_offsets`; `__metadata__` is free text), the data, to which the offsets are relative. The list of
//! dtypes and their sizes is the `safetensors` crate's. Its header reader is not used: it collects the
//! whole header as generic values, some 30 times the header's size, and keeps the last of two tensors of
//! one name.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use ::safetensors::Dtype;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::block::BlockType;
use crate::bytes::TensorBytes;
use crate::error::{Error, shown};
use crate::limits;

use super::json;

/// Bytes of the length in front of the header.
const LEN_BYTES: usize = 8;

/// Name, dtype and shape of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfTensor {
    /// The name in the file, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// How its numbers are stored.
    pub dtype: Dtype,
    /// Outermost dimension first; `[out, in]` for a linear layer.
    pub shape: Vec<usize>,
    /// Relative to the data while the header is read, then to the file.
    range: Range<usize>,
}

impl HfTensor {
    /// The type of its blocks, where weights may be stored so: F32, F16 and BF16.
    pub fn ty(&self) -> Option<BlockType> {
        match self.dtype {
            Dtype::F32 => Some(BlockType::F32),
            Dtype::F16 => Some(BlockType::F16),
            Dtype::BF16 => Some(BlockType::BF16),
            _ => None,
        }
    }

    /// Bytes in the file.
    pub fn n_bytes(&self) -> usize {
        self.range.len()
    }
}

/// An open safetensors file.
#[derive(Debug)]
pub struct Safetensors {
    path: PathBuf,
    /// In the order of their names.
    tensors: Vec<HfTensor>,
    bytes: TensorBytes,
}

impl Safetensors {
    /// Maps and checks a file.
    pub fn open(path: &Path) -> Result<Safetensors, Error> {
        Safetensors::from_bytes(path, TensorBytes::map(path)?)
    }

    /// Checks a file in memory. `path` is for messages.
    pub fn from_bytes(path: &Path, bytes: TensorBytes) -> Result<Safetensors, Error> {
        let (header, data) = header(path, &bytes)?;
        let mut tensors = parse(path, header)?;
        place(path, &mut tensors, data, bytes.len())?;
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Safetensors { path: path.to_owned(), tensors, bytes })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors, in the order of their names.
    pub fn tensors(&self) -> &[HfTensor] {
        &self.tensors
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&HfTensor> {
        let place = self.tensors.binary_search_by(|t| t.name.as_str().cmp(name)).ok()?;
        Some(&self.tensors[place])
    }

    /// The bytes of a tensor of any dtype, without copying. They may start at any address.
    pub fn raw(&self, name: &str) -> Result<TensorBytes, Error> {
        self.tensor(name)
            .and_then(|t| self.bytes.slice(t.range.clone()))
            .ok_or_else(|| Error::MissingTensor { file: self.path.clone(), tensor: shown(name) })
    }

    /// Where a tensor lies on disk: the file and its first byte there. `None` for a file in memory.
    pub fn location(&self, name: &str) -> Option<(&Path, u64)> {
        let tensor = self.tensor(name)?;
        self.path.is_file().then_some((self.path.as_path(), tensor.range.start as u64))
    }

    /// The bytes of a weight, and how its numbers are stored. Other dtypes than F32, F16 and BF16 are refused.
    pub fn weight(&self, name: &str) -> Result<(BlockType, TensorBytes), Error> {
        let bytes = self.raw(name)?;
        let refused = |dtype: Dtype| Error::UnsupportedDtype {
            file: self.path.clone(),
            tensor: shown(name),
            dtype: format!("{dtype:?}"),
        };
        let missing = || Error::MissingTensor { file: self.path.clone(), tensor: shown(name) };
        let tensor = self.tensor(name).ok_or_else(missing)?;
        Ok((tensor.ty().ok_or_else(|| refused(tensor.dtype))?, bytes))
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }
}

fn not_safetensors(path: &Path, reason: impl Into<String>) -> Error {
    Error::SafetensorsHeader { file: path.to_owned(), reason: reason.into() }
}

/// The header, and where the data begins.
fn header<'a>(path: &Path, bytes: &'a [u8]) -> Result<(&'a [u8], usize), Error> {
    if bytes.is_empty() {
        return Err(Error::Empty { file: path.to_owned() });
    }
    let Some((len, rest)) = bytes.split_first_chunk::<LEN_BYTES>() else {
        return Err(not_safetensors(path, "it is shorter than the length of a header"));
    };
    if bytes.starts_with(b"GGUF") {
        return Err(not_safetensors(
            path,
            "it is a GGUF file; name the file itself instead of its directory",
        ));
    }
    if bytes.starts_with(b"version ") {
        return Err(not_safetensors(
            path,
            "it looks like a Git LFS pointer; fetch the real file with 'git lfs pull'",
        ));
    }
    let len = u64::from_le_bytes(*len);
    if rest.first().is_some_and(|&b| b != b'{') {
        return Err(not_safetensors(path, "its header does not begin with '{'"));
    }
    if len > rest.len() as u64 {
        let available = rest.len() as u64;
        return Err(Error::Truncated {
            file: path.to_owned(),
            what: "the header".to_owned(),
            needed: len,
            available,
        });
    }
    if len > limits::MAX_SAFETENSORS_HEADER {
        let what = "the length of the header".to_owned();
        return Err(Error::Limit {
            file: path.to_owned(),
            what,
            found: len,
            limit: limits::MAX_SAFETENSORS_HEADER,
        });
    }
    Ok((&rest[..len as usize], LEN_BYTES + len as usize))
}

fn parse(path: &Path, header: &[u8]) -> Result<Vec<HfTensor>, Error> {
    json::check_strings(path, header)?;
    let mut names = HashSet::new();
    let mut json = serde_json::Deserializer::from_slice(header);
    let parsed = Header.deserialize(&mut json).and_then(|tensors| json.end().map(|()| tensors));
    let tensors = parsed.map_err(|e| {
        not_safetensors(path, format!("byte {} of its header: {}", e.column(), json::reason(&e)))
    })?;
    match tensors.iter().find(|t| !names.insert(t.name.as_str())) {
        Some(twice) => Err(Error::DuplicateTensor { file: path.to_owned(), tensor: shown(&twice.name) }),
        None => Ok(tensors),
    }
}

/// Makes ranges relative to the file, after checking that each has the size of its tensor and that
/// together they cover the data exactly: no overlap, no gap, nothing beyond the end.
fn place(path: &Path, tensors: &mut [HfTensor], data: usize, len: usize) -> Result<(), Error> {
    tensors.sort_by(|a, b| (a.range.start, a.range.end, &a.name).cmp(&(b.range.start, b.range.end, &b.name)));
    let mut at = 0;
    let mut previous = String::new();
    for t in tensors.iter_mut() {
        let file = || path.to_owned();
        let Range { start, end } = t.range;
        let (expected, found) = (size(path, t)?, (end as u64).saturating_sub(start as u64));
        if expected != found || end < start {
            let (tensor, dtype) = (shown(&t.name), format!("{:?}", t.dtype));
            return Err(Error::TensorBytes {
                file: file(),
                tensor,
                dtype,
                shape: t.shape.clone(),
                expected,
                found,
            });
        }
        if start < at {
            return Err(Error::Overlap { file: file(), first: shown(&previous), second: shown(&t.name) });
        }
        if start > at {
            return Err(Error::Gap { file: file(), before: shown(&t.name), gap: (start - at) as u64 });
        }
        if end > len - data {
            let end = (data as u64).saturating_add(end as u64);
            return Err(Error::OutOfFile { file: file(), tensor: shown(&t.name), end, len: len as u64 });
        }
        at = end;
        previous.clone_from(&t.name);
        t.range = data + start..data + end;
    }
    match len - data - at {
        0 => Ok(()),
        gap => Err(Error::Gap {
            file: path.to_owned(),
            before: "the end of the file".to_owned(),
            gap: gap as u64,
        }),
    }
}

/// Bytes that a tensor of this dtype and shape takes.
fn size(path: &Path, t: &HfTensor) -> Result<u64, Error> {
    let bad = |why| Error::Shape {
        file: path.to_owned(),
        tensor: shown(&t.name),
        shape: t.shape.iter().map(|&d| d as u64).collect(),
        why,
    };
    let bits = t.shape.iter().try_fold(t.dtype.bitsize() as u64, |n, &d| n.checked_mul(d as u64));
    let bits = bits.ok_or_else(|| bad("its size overflows"))?;
    if bits % 8 == 0 { Ok(bits / 8) } else { Err(bad("its size is not whole bytes")) }
}

/// Reads the header object entry by entry.
struct Header;

impl<'de> DeserializeSeed<'de> for Header {
    type Value = Vec<HfTensor>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Header {
    type Value = Vec<HfTensor>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to their descriptions")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut tensors = Vec::new();
        while let Some(Name(name)) = map.next_key()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if tensors.len() == limits::MAX_SHARD_TENSORS {
                return Err(A::Error::custom(format_args!(
                    "more than {} tensors",
                    limits::MAX_SHARD_TENSORS
                )));
            }
            let Entry { dtype, shape: Shape(shape), data_offsets: (start, end) } = map.next_value()?;
            tensors.push(HfTensor { name, dtype, shape, range: start..end });
        }
        Ok(tensors)
    }
}

#[derive(Deserialize)]
struct Entry {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (usize, usize),
}

/// A tensor name whose length is checked before it is copied.
struct Name(String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Name, D::Error> {
        struct Bounded;
        impl Visitor<'_> for Bounded {
            type Value = Name;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a name of at most {} bytes", limits::MAX_NAME)
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Name, E> {
                if name.len() > limits::MAX_NAME {
                    return Err(E::invalid_length(name.len(), &self));
                }
                Ok(Name(name.to_owned()))
            }
        }
        deserializer.deserialize_str(Bounded)
    }
}

/// Dimensions whose number is checked while they are read.
struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Shape, D::Error> {
        struct Dims;
        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {} dimensions", limits::MAX_SAFETENSORS_DIMS)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = seq.next_element()? {
                    if dims.len() == limits::MAX_SAFETENSORS_DIMS {
                        return Err(A::Error::invalid_length(dims.len() + 1, &self));
                    }
                    dims.push(dim);
                }
                Ok(Shape(dims))
            }
        }
        deserializer.deserialize_seq(Dims)
    }
}
