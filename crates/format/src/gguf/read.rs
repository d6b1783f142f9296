//! The parser of one GGUF file: header, metadata, tensor list.
//!
//! Layout (little-endian): `GGUF`, version u32, tensor count u64, key count u64; per key its name, value
//! type u32 and value; per tensor its name, dimension count u32, dimensions u64 (innermost first), type
//! u32, offset u64; padding to the alignment; tensor data, to which the offsets are relative. A string is
//! its length u64 and its bytes. Source: ggml's `docs/gguf.md`.
//!
//! Every length is compared with what is left of the file before memory is taken for it, so a file can
//! not ask for more than it brings; what is larger in memory than in the file is counted ([`Budget`]).

use std::fmt;
use std::path::Path;

use crate::block::{BlockType, ggml_name};
use crate::error::{Error, shown};
use crate::limits;

use super::metadata::Metadata;
use super::tensor::TensorInfo;
use super::value::{Array, Value, ValueType};

const MAGIC: &[u8; 4] = b"GGUF";
/// ggml's number of whole numbers of 32 bits.
pub(super) const I32: u32 = 26;
/// Smallest entry of the metadata: an empty key, a type, a one-byte value.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;
/// Smallest entry of the tensor list: an empty name, no dimensions, a type, an offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;
const DEFAULT_ALIGNMENT: u64 = 32;

/// What a file says, checked.
#[derive(Debug)]
pub(super) struct Parsed {
    pub(super) version: u32,
    pub(super) metadata: Metadata,
    pub(super) tensors: Vec<TensorInfo>,
}

/// What has been used of the limits that hold for all parts of a model together.
#[derive(Default)]
pub(super) struct Budget {
    items: u64,
    tensors: u64,
}

/// Parses and checks a whole file; `part` is written into its tensors.
pub(super) fn parse(file: &Path, bytes: &[u8], part: u32, budget: &mut Budget) -> Result<Parsed, Error> {
    if bytes.is_empty() {
        return Err(Error::Empty { file: file.to_owned() });
    }
    let mut cursor = Cursor { file, bytes, at: 0 };
    let version = cursor.magic_and_version()?;
    let tensor_count = cursor.u64(What::Field("the tensor count"))?;
    let key_count = cursor.u64(What::Field("the key count"))?;
    cursor.count(What::Field("the key count"), key_count, MIN_KEY_BYTES, limits::MAX_KEYS)?;
    let mut pairs = Vec::with_capacity(key_count as usize);
    for _ in 0..key_count {
        pairs.push(cursor.pair(budget)?);
    }
    let metadata = Metadata::new(file, pairs)?;
    let alignment = alignment(&metadata)?;

    let left = limits::MAX_TENSORS - budget.tensors;
    cursor.count(What::Field("the tensor count"), tensor_count, MIN_TENSOR_BYTES, left)?;
    budget.tensors += tensor_count;
    let mut tensors = Vec::with_capacity(tensor_count as usize);
    for _ in 0..tensor_count {
        tensors.push(cursor.tensor(part, alignment)?);
    }
    // The offsets are relative to the data, which begins after the list, at a multiple of the alignment.
    place(file, &mut tensors, (cursor.at as u64).next_multiple_of(alignment), bytes.len() as u64)?;
    Ok(Parsed { version, metadata, tensors })
}

fn alignment(metadata: &Metadata) -> Result<u64, Error> {
    let found = metadata.opt_u64("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
    if !found.is_power_of_two() || found > limits::MAX_ALIGNMENT {
        return Err(Error::Alignment { file: metadata.file().to_owned(), found });
    }
    Ok(found)
}

/// Makes offsets absolute, after checking that each tensor lies inside the file and apart from the others.
fn place(file: &Path, tensors: &mut [TensorInfo], data: u64, len: u64) -> Result<(), Error> {
    for t in tensors.iter_mut() {
        let start = data.saturating_add(t.start as u64);
        let end = start.saturating_add(t.bytes as u64);
        if end > len {
            return Err(Error::OutOfFile { file: file.to_owned(), tensor: shown(&t.name), end, len });
        }
        t.start = start as usize;
    }
    let mut order: Vec<u32> = (0..tensors.len() as u32).collect();
    order.sort_unstable_by_key(|&i| tensors[i as usize].start);
    for pair in order.windows(2) {
        let (first, second) = (&tensors[pair[0] as usize], &tensors[pair[1] as usize]);
        if second.start < first.start + first.bytes {
            let (first, second) = (shown(&first.name), shown(&second.name));
            return Err(Error::Overlap { file: file.to_owned(), first, second });
        }
    }
    Ok(())
}

/// What stands at the beginning of a file that is not GGUF, as far as a person may have mixed it up.
fn looks_like(bytes: &[u8]) -> String {
    let head = &bytes[..bytes.len().min(16)];
    let known = match head {
        [b'P', b'K', 3, 4, ..] => {
            "it is a zip archive, perhaps a PyTorch checkpoint; convert it to GGUF or safetensors"
        }
        [0x1f, 0x8b, ..] | [0x28, 0xb5, 0x2f, 0xfd, ..] => "it is compressed; unpack it first",
        [b't', b'j', b'g', b'g', ..] | [b'l', b'm', b'g', b'g', ..] => {
            "it is in the older GGML format; convert the model again"
        }
        [_, _, _, _, _, 0, 0, 0, b'{', ..] => {
            "it looks like a safetensors file; name the directory that holds its config.json"
        }
        [b'v', b'e', b'r', b's', b'i', b'o', b'n', b' ', ..] => {
            "it looks like a Git LFS pointer; fetch the real file with 'git lfs pull'"
        }
        [b'<', ..] => "it looks like a web page; the download failed",
        _ => {
            return format!(
                "it begins with \"{}\" instead of \"GGUF\"",
                head[..head.len().min(4)].escape_ascii()
            );
        }
    };
    known.to_owned()
}

/// What is being read, for messages.
#[derive(Clone, Copy)]
enum What<'a> {
    Field(&'static str),
    Key(&'a str),
    Tensor(&'a str),
}

impl fmt::Display for What<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Field(name) => f.write_str(name),
            What::Key(key) => write!(f, "the key '{}'", shown(key)),
            What::Tensor(name) => write!(f, "the tensor '{}'", shown(name)),
        }
    }
}

/// A place in a file, and the file for messages.
struct Cursor<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn truncated(&self, what: What<'_>, needed: u64) -> Error {
        Error::Truncated {
            file: self.file.to_owned(),
            what: what.to_string(),
            needed,
            available: self.left(),
        }
    }

    fn take(&mut self, len: u64, what: What<'_>) -> Result<&'a [u8], Error> {
        if len > self.left() {
            return Err(self.truncated(what, len));
        }
        let taken = &self.bytes[self.at..self.at + len as usize];
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: What<'_>) -> Result<[u8; N], Error> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: What<'_>) -> Result<u32, Error> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: What<'_>) -> Result<u64, Error> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Refuses a count of things of at least `min_bytes` each that the rest of the file cannot hold.
    fn count(&self, what: What<'_>, found: u64, min_bytes: u64, limit: u64) -> Result<(), Error> {
        let needed = found.saturating_mul(min_bytes);
        if needed > self.left() {
            return Err(self.truncated(what, needed));
        }
        self.limit(what, found, limit)
    }

    fn limit(&self, what: What<'_>, found: u64, limit: u64) -> Result<(), Error> {
        if found > limit {
            return Err(Error::Limit { file: self.file.to_owned(), what: what.to_string(), found, limit });
        }
        Ok(())
    }

    fn magic_and_version(&mut self) -> Result<u32, Error> {
        if !self.bytes.starts_with(MAGIC) {
            return Err(Error::NotGguf { file: self.file.to_owned(), found: looks_like(self.bytes) });
        }
        self.at = MAGIC.len();
        let version = self.u32(What::Field("the version"))?;
        match version {
            2 | 3 => Ok(version),
            // A small number in the other byte order.
            _ if version & 0xffff == 0 && version != 0 => {
                Err(Error::BigEndian { file: self.file.to_owned() })
            }
            _ => Err(Error::Version { file: self.file.to_owned(), version }),
        }
    }

    fn string(&mut self, what: What<'_>) -> Result<&'a str, Error> {
        let len = self.u64(what)?;
        self.limit(what, len, limits::MAX_STRING)?;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes)
            .map_err(|_| Error::NotUtf8 { file: self.file.to_owned(), what: what.to_string() })
    }

    fn pair(&mut self, budget: &mut Budget) -> Result<(String, Value), Error> {
        let key = self.string(What::Field("a metadata key"))?;
        let ty = self.value_type(key)?;
        let value = self.value(key, ty, budget)?;
        Ok((key.to_owned(), value))
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, Error> {
        let number = self.u32(What::Key(key))?;
        ValueType::from_number(number).ok_or_else(|| Error::UnknownValueType {
            file: self.file.to_owned(),
            key: shown(key),
            number,
        })
    }

    fn value(&mut self, key: &str, ty: ValueType, budget: &mut Budget) -> Result<Value, Error> {
        Ok(match ty {
            ValueType::U8 => Value::U8(u8::from_le_bytes(self.array(What::Key(key))?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(self.array(What::Key(key))?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(self.array(What::Key(key))?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(self.array(What::Key(key))?)),
            ValueType::U32 => Value::U32(u32::from_le_bytes(self.array(What::Key(key))?)),
            ValueType::I32 => Value::I32(i32::from_le_bytes(self.array(What::Key(key))?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(self.array(What::Key(key))?)),
            ValueType::U64 => Value::U64(u64::from_le_bytes(self.array(What::Key(key))?)),
            ValueType::I64 => Value::I64(i64::from_le_bytes(self.array(What::Key(key))?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(self.array(What::Key(key))?)),
            ValueType::Bool => Value::Bool(self.bools(key, 1)?[0]),
            ValueType::String => Value::String(self.string(What::Key(key))?.to_owned()),
            ValueType::Array => Value::Array(self.value_array(key, 1, budget)?),
        })
    }

    /// An array, `depth` arrays deep.
    fn value_array(&mut self, key: &str, depth: usize, budget: &mut Budget) -> Result<Array, Error> {
        let ty = self.value_type(key)?;
        let count = self.u64(What::Key(key))?;
        Ok(match ty {
            ValueType::U8 => Array::U8(self.numbers(key, count, u8::from_le_bytes)?),
            ValueType::I8 => Array::I8(self.numbers(key, count, i8::from_le_bytes)?),
            ValueType::U16 => Array::U16(self.numbers(key, count, u16::from_le_bytes)?),
            ValueType::I16 => Array::I16(self.numbers(key, count, i16::from_le_bytes)?),
            ValueType::U32 => Array::U32(self.numbers(key, count, u32::from_le_bytes)?),
            ValueType::I32 => Array::I32(self.numbers(key, count, i32::from_le_bytes)?),
            ValueType::F32 => Array::F32(self.numbers(key, count, f32::from_le_bytes)?),
            ValueType::U64 => Array::U64(self.numbers(key, count, u64::from_le_bytes)?),
            ValueType::I64 => Array::I64(self.numbers(key, count, i64::from_le_bytes)?),
            ValueType::F64 => Array::F64(self.numbers(key, count, f64::from_le_bytes)?),
            ValueType::Bool => Array::Bool(self.bools(key, count)?),
            ValueType::String => Array::String(
                self.items(key, count, 8, budget, |c, _| c.string(What::Key(key)).map(str::to_owned))?,
            ),
            ValueType::Array if depth >= limits::MAX_NESTING => {
                return Err(Error::NestingTooDeep { file: self.file.to_owned(), key: shown(key) });
            }
            ValueType::Array => {
                Array::Nested(self.items(key, count, 12, budget, |c, b| c.value_array(key, depth + 1, b))?)
            }
        })
    }

    fn numbers<T, const N: usize>(
        &mut self,
        key: &str,
        count: u64,
        read: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, Error> {
        let bytes = self.take(count.saturating_mul(N as u64), What::Key(key))?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|&item| read(item)).collect())
    }

    fn bools(&mut self, key: &str, count: u64) -> Result<Vec<bool>, Error> {
        let bytes = self.take(count, What::Key(key))?;
        match bytes.iter().find(|&&b| b > 1) {
            Some(&found) => Err(Error::BadBool { file: self.file.to_owned(), key: shown(key), found }),
            None => Ok(bytes.iter().map(|&b| b == 1).collect()),
        }
    }

    /// Items that take more room in memory than in the file, `min_bytes` each in the file.
    fn items<T>(
        &mut self,
        key: &str,
        count: u64,
        min_bytes: u64,
        budget: &mut Budget,
        mut read: impl FnMut(&mut Self, &mut Budget) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        self.count(What::Key(key), count, min_bytes, limits::MAX_ITEMS - budget.items)?;
        budget.items += count;
        let mut items = Vec::with_capacity(count as usize);
        for _ in 0..count {
            items.push(read(self, budget)?);
        }
        Ok(items)
    }

    /// One entry of the tensor list; its `start` is still relative to the data.
    fn tensor(&mut self, part: u32, alignment: u64) -> Result<TensorInfo, Error> {
        let name = self.string(What::Field("a tensor name"))?;
        let dims = self.dims(name)?;
        let number = self.u32(What::Tensor(name))?;
        let offset = self.u64(What::Tensor(name))?;
        let file = || self.file.to_owned();
        let tensor = || shown(name);

        let integers = number == I32;
        let ty = if integers { Some(BlockType::F32) } else { BlockType::from_ggml(number) };
        let Some(ty) = ty else {
            return Err(Error::UnsupportedType {
                file: file(),
                tensor: tensor(),
                number,
                name: ggml_name(number),
            });
        };
        if !offset.is_multiple_of(alignment) {
            return Err(Error::Misaligned { file: file(), tensor: tensor(), offset, alignment });
        }
        let (shape, bytes) = sizes(ty, &dims).map_err(|bad| match bad {
            BadShape::PartialBlock(k) => Error::PartialBlock { file: file(), tensor: tensor(), ty, k },
            BadShape::Other(why) => {
                Error::Shape { file: file(), tensor: tensor(), shape: outermost_first(&dims), why }
            }
        })?;
        // What does not fit an address cannot be inside a mapped file either.
        let start = usize::try_from(offset).map_err(|_| Error::OutOfFile {
            file: file(),
            tensor: tensor(),
            end: offset,
            len: self.bytes.len() as u64,
        })?;
        Ok(TensorInfo { name: name.to_owned(), ty, shape, integers, part, start, bytes })
    }

    fn dims(&mut self, name: &str) -> Result<Vec<u64>, Error> {
        let count = self.u32(What::Tensor(name))?;
        if count > limits::MAX_DIMS {
            return Err(Error::Limit {
                file: self.file.to_owned(),
                what: format!("the number of dimensions of {}", What::Tensor(name)),
                found: count.into(),
                limit: limits::MAX_DIMS.into(),
            });
        }
        (0..count).map(|_| self.u64(What::Tensor(name))).collect()
    }
}

fn outermost_first(dims: &[u64]) -> Vec<u64> {
    dims.iter().rev().copied().collect()
}

enum BadShape {
    /// A row of this many numbers is not whole blocks.
    PartialBlock(u64),
    Other(&'static str),
}

/// Shape (outermost first) and bytes of a tensor with these dimensions (innermost first).
fn sizes(ty: BlockType, dims: &[u64]) -> Result<(Vec<usize>, usize), BadShape> {
    const TOO_LARGE: BadShape = BadShape::Other("its size overflows");
    if dims.contains(&0) {
        return Err(BadShape::Other("a dimension is zero"));
    }
    let shape = dims
        .iter()
        .rev()
        .map(|&d| usize::try_from(d))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| TOO_LARGE)?;
    let k = shape.last().copied().unwrap_or(1);
    if !k.is_multiple_of(ty.block_len()) {
        return Err(BadShape::PartialBlock(k as u64));
    }
    let row_bytes = ty.row_bytes(k).ok_or(TOO_LARGE)?;
    let fold = |init: usize, dims: &[usize]| dims.iter().try_fold(init, |n, &d| n.checked_mul(d));
    fold(1, &shape).ok_or(TOO_LARGE)?;
    let bytes = fold(row_bytes, &shape[..shape.len().saturating_sub(1)]).ok_or(TOO_LARGE)?;
    Ok((shape, bytes))
}
