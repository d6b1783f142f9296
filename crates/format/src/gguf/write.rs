//! A writer of GGUF files, version 3 (or 2, which differs in the number only).
//!
//! In: metadata and tensors as borrowed bytes of whole blocks. Out: one file, written from front to back,
//! whose tensors are padded to the alignment.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::block::BlockType;
use crate::error::{Error, shown};
use crate::limits;

use super::read::I32;
use super::value::{Array, Value, ValueType};

/// Collects metadata and tensors, then writes them.
#[derive(Clone, Debug)]
pub struct GgufWriter<'a> {
    version: u32,
    alignment: u64,
    pairs: Vec<(String, Value)>,
    tensors: Vec<Tensor<'a>>,
}

#[derive(Clone, Debug)]
struct Tensor<'a> {
    name: String,
    /// ggml's number of its type.
    number: u32,
    shape: Vec<usize>,
    data: &'a [u8],
}

impl Default for GgufWriter<'_> {
    fn default() -> Self {
        GgufWriter { version: 3, alignment: 32, pairs: Vec::new(), tensors: Vec::new() }
    }
}

impl<'a> GgufWriter<'a> {
    /// An empty file of version 3 with an alignment of 32 bytes.
    pub fn new() -> GgufWriter<'a> {
        GgufWriter::default()
    }

    /// Writes this version number instead of 3.
    pub fn version(&mut self, version: u32) -> &mut Self {
        self.version = version;
        self
    }

    /// Starts tensors at multiples of `alignment` bytes, and says so in `general.alignment`.
    pub fn alignment(&mut self, alignment: u32) -> &mut Self {
        self.alignment = alignment.into();
        self.set("general.alignment", Value::U32(alignment))
    }

    /// Adds a key, or replaces its value.
    pub fn set(&mut self, key: &str, value: Value) -> &mut Self {
        match self.pairs.iter_mut().find(|(k, _)| k == key) {
            Some(pair) => pair.1 = value,
            None => self.pairs.push((key.to_owned(), value)),
        }
        self
    }

    /// Adds a tensor: `shape` outermost first, `data` the blocks of its rows.
    pub fn tensor(
        &mut self,
        name: &str,
        ty: BlockType,
        shape: &[usize],
        data: &'a [u8],
    ) -> Result<&mut Self, Error> {
        self.add(name, (ty, ty as u32), shape, data)
    }

    /// Adds a tensor of type I32: `shape` outermost first, `data` its little-endian numbers.
    pub fn integers(&mut self, name: &str, shape: &[usize], data: &'a [u8]) -> Result<&mut Self, Error> {
        self.add(name, (BlockType::F32, I32), shape, data)
    }

    /// `ty` has the size of the type with this number.
    fn add(
        &mut self,
        name: &str,
        (ty, number): (BlockType, u32),
        shape: &[usize],
        data: &'a [u8],
    ) -> Result<&mut Self, Error> {
        let refuse = |reason: String| Err(Error::Unwritable { tensor: shown(name), reason });
        if self.tensors.iter().any(|t| t.name == name) {
            return refuse("there is one of that name already".to_owned());
        }
        if shape.len() > limits::MAX_DIMS as usize || shape.contains(&0) {
            return refuse(format!(
                "the shape {shape:?} is not 1 to {} dimensions above zero",
                limits::MAX_DIMS
            ));
        }
        if !ty.is_ggml() {
            return refuse(format!("{ty} is not a type of GGUF files"));
        }
        let (k, outer) = shape.split_last().map_or((1, shape), |(&k, outer)| (k, outer));
        let bytes = ty.row_bytes(k).and_then(|row| outer.iter().try_fold(row, |n, &d| n.checked_mul(d)));
        match bytes {
            None => refuse(format!("the shape {shape:?} is not whole {ty} blocks")),
            Some(bytes) if bytes != data.len() => {
                refuse(format!("{ty} {shape:?} takes {bytes} bytes, {} were given", data.len()))
            }
            Some(_) => {
                self.tensors.push(Tensor { name: name.to_owned(), number, shape: shape.to_owned(), data });
                Ok(self)
            }
        }
    }

    /// Writes the file.
    pub fn write(&self, out: impl Write) -> io::Result<()> {
        let mut out = Counted { out, written: 0 };
        out.write_all(b"GGUF")?;
        out.write_all(&self.version.to_le_bytes())?;
        put_len(&mut out, self.tensors.len())?;
        put_len(&mut out, self.pairs.len())?;
        for (key, value) in &self.pairs {
            put_string(&mut out, key)?;
            put_type(&mut out, value.value_type())?;
            put_value(&mut out, value)?;
        }
        let mut offset = 0u64;
        for t in &self.tensors {
            put_string(&mut out, &t.name)?;
            out.write_all(&(t.shape.len() as u32).to_le_bytes())?;
            t.shape.iter().rev().try_for_each(|&d| put_len(&mut out, d))?;
            out.write_all(&t.number.to_le_bytes())?;
            out.write_all(&offset.to_le_bytes())?;
            offset += (t.data.len() as u64).next_multiple_of(self.alignment);
        }
        out.pad(self.alignment)?;
        for t in &self.tensors {
            out.write_all(t.data)?;
            out.pad(self.alignment)?;
        }
        out.flush()
    }

    /// Writes the file into memory.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        // A vector takes every write.
        let _ = self.write(&mut bytes);
        bytes
    }

    /// Writes the file to `path`, replacing what is there.
    pub fn write_file(&self, path: &Path) -> Result<(), Error> {
        let file = File::create(path).map_err(|e| Error::io(path, e))?;
        self.write(BufWriter::new(file)).map_err(|e| Error::io(path, e))
    }
}

/// Counts bytes, for padding.
struct Counted<W> {
    out: W,
    written: u64,
}

impl<W: Write> Counted<W> {
    fn pad(&mut self, alignment: u64) -> io::Result<()> {
        const ZEROS: [u8; 64] = [0; 64];
        let mut left = self.written.next_multiple_of(alignment) - self.written;
        while left > 0 {
            let n = left.min(ZEROS.len() as u64);
            self.write_all(&ZEROS[..n as usize])?;
            left -= n;
        }
        Ok(())
    }
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let n = self.out.write(buf)?;
        self.written += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn put_len(out: &mut impl Write, len: usize) -> io::Result<()> {
    out.write_all(&(len as u64).to_le_bytes())
}

fn put_type(out: &mut impl Write, ty: ValueType) -> io::Result<()> {
    out.write_all(&(ty as u32).to_le_bytes())
}

fn put_string(out: &mut impl Write, text: &str) -> io::Result<()> {
    put_len(out, text.len())?;
    out.write_all(text.as_bytes())
}

fn put_value(out: &mut impl Write, value: &Value) -> io::Result<()> {
    match value {
        Value::U8(x) => out.write_all(&x.to_le_bytes()),
        Value::I8(x) => out.write_all(&x.to_le_bytes()),
        Value::U16(x) => out.write_all(&x.to_le_bytes()),
        Value::I16(x) => out.write_all(&x.to_le_bytes()),
        Value::U32(x) => out.write_all(&x.to_le_bytes()),
        Value::I32(x) => out.write_all(&x.to_le_bytes()),
        Value::F32(x) => out.write_all(&x.to_le_bytes()),
        Value::Bool(x) => out.write_all(&[u8::from(*x)]),
        Value::String(x) => put_string(out, x),
        Value::Array(x) => put_array(out, x),
        Value::U64(x) => out.write_all(&x.to_le_bytes()),
        Value::I64(x) => out.write_all(&x.to_le_bytes()),
        Value::F64(x) => out.write_all(&x.to_le_bytes()),
    }
}

fn put_array(out: &mut impl Write, array: &Array) -> io::Result<()> {
    put_type(out, array.item_type())?;
    put_len(out, array.len())?;
    match array {
        Array::U8(v) => out.write_all(v),
        Array::I8(v) => v.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
        Array::U16(v) => v.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
        Array::I16(v) => v.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
        Array::U32(v) => v.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
        Array::I32(v) => v.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
        Array::F32(v) => v.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
        Array::Bool(v) => v.iter().try_for_each(|&x| out.write_all(&[u8::from(x)])),
        Array::String(v) => v.iter().try_for_each(|x| put_string(out, x)),
        Array::Nested(v) => v.iter().try_for_each(|x| put_array(out, x)),
        Array::U64(v) => v.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
        Array::I64(v) => v.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
        Array::F64(v) => v.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
    }
}
