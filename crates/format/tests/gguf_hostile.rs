//! Files that are wrong in one way each: the error is of the right kind and names the right thing.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;

use minfer_format::bytes::AlignedBuf;
use minfer_format::gguf::Value;
use minfer_format::{BlockType, Error, Gguf, GgufWriter};

const U32: u32 = 4;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// A file built by hand, field by field.
#[derive(Default)]
struct Raw(Vec<u8>);

impl Raw {
    fn header(version: u32, tensors: u64, keys: u64) -> Raw {
        let mut raw = Raw(b"GGUF".to_vec());
        raw.u32(version).u64(tensors).u64(keys);
        raw
    }

    fn u32(&mut self, x: u32) -> &mut Raw {
        self.0.extend(x.to_le_bytes());
        self
    }

    fn u64(&mut self, x: u64) -> &mut Raw {
        self.0.extend(x.to_le_bytes());
        self
    }

    fn string(&mut self, bytes: &[u8]) -> &mut Raw {
        self.u64(bytes.len() as u64);
        self.0.extend(bytes);
        self
    }

    /// An entry of the tensor list; `dims` innermost first.
    fn tensor(&mut self, name: &str, dims: &[u64], ty: u32, offset: u64) -> &mut Raw {
        self.string(name.as_bytes()).u32(dims.len() as u32);
        for &d in dims {
            self.u64(d);
        }
        self.u32(ty).u64(offset)
    }

    fn data(&mut self, len: usize) -> &mut Raw {
        self.0.resize(self.0.len().next_multiple_of(32) + len, 1);
        self
    }

    fn open(&self) -> Result<Gguf, Error> {
        open(&self.0)
    }
}

fn open(bytes: &[u8]) -> Result<Gguf, Error> {
    Gguf::from_bytes("bad.gguf", AlignedBuf::from(bytes).into())
}

/// Asserts that the result is an error of this kind, whose message names the file.
macro_rules! refused {
    ($result:expr, $pattern:pat $(if $guard:expr)?) => {{
        let error = $result.err().expect("should be refused");
        assert!(matches!(&error, $pattern $(if $guard)?), "{error:?}");
        assert!(error.to_string().contains("bad"), "{error}");
    }};
}

#[test]
fn what_is_not_gguf() {
    let dir = tempfile::tempdir().unwrap();
    let bad = dir.path().join("bad");
    refused!(Gguf::open(&bad), Error::Io { .. });
    fs::create_dir(&bad).unwrap();
    refused!(Gguf::open(&bad), Error::NotAFile { found: "a directory", .. });
    fs::remove_dir(&bad).unwrap();
    fs::write(&bad, b"").unwrap();
    refused!(Gguf::open(&bad), Error::Empty { .. });

    let looks: [(&[u8], &str); 6] = [
        (b"hello world", "begins with \"hell\""),
        (b"G", "begins with \"G\""),
        (b"PK\x03\x04....", "PyTorch"),
        (b"\x40\0\0\0\0\0\0\0{\"a\":", "safetensors"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"<!doctype html>", "web page"),
    ];
    for (bytes, expected) in looks {
        fs::write(&bad, bytes).unwrap();
        refused!(Gguf::open(&bad), Error::NotGguf { found, .. } if found.contains(expected));
    }
}

#[cfg(unix)]
#[test]
fn a_device_is_refused_instead_of_read_forever() {
    let error = Gguf::open("/dev/zero".as_ref()).unwrap_err();
    assert!(matches!(error, Error::NotAFile { found: "a pipe or device", .. }));
}

#[test]
fn versions_and_byte_order() {
    refused!(Raw::header(1, 0, 0).open(), Error::Version { version: 1, .. });
    refused!(Raw::header(4, 0, 0).open(), Error::Version { version: 4, .. });
    refused!(Raw::header(0, 0, 0).open(), Error::Version { version: 0, .. });
    refused!(Raw::header(3u32.swap_bytes(), 0, 0).open(), Error::BigEndian { .. });
    refused!(open(b"GGUF\x03\0"), Error::Truncated { needed: 4, available: 2, .. });
    assert!(Raw::header(2, 0, 0).open().is_ok() && Raw::header(3, 0, 0).open().is_ok());
}

#[test]
fn counts_and_lengths_beyond_the_file() {
    for huge in [100, 1 << 40, u64::MAX] {
        refused!(Raw::header(3, huge, 0).open(), Error::Truncated { what, .. } if what == "the tensor count");
        refused!(Raw::header(3, 0, huge).open(), Error::Truncated { what, .. } if what == "the key count");
        refused!(
            Raw::header(3, 0, 1).string(b"k").u32(ARRAY).u32(U32).u64(huge).open(),
            Error::Truncated { what, .. } if what == "the key 'k'"
        );
        for (item, counted) in [(STRING, 8), (ARRAY, 12)] {
            refused!(
                Raw::header(3, 0, 1).string(b"k").u32(ARRAY).u32(item).u64(huge).open(),
                Error::Truncated { needed, .. } if *needed == huge.saturating_mul(counted)
            );
        }
    }
    refused!(
        Raw::header(3, 0, 1).string(b"k").u32(STRING).u64(1000).open(),
        Error::Truncated { what, needed: 1000, available: 0, .. } if what == "the key 'k'"
    );
    refused!(
        Raw::header(3, 0, 1).u64((16 << 20) + 1).data(100).open(),
        Error::Limit { found, limit, .. } if *found == limit + 1
    );
}

#[test]
fn counts_beyond_the_limits() {
    let limit = minfer_format::limits::MAX_TENSORS;
    let mut many = Raw::header(3, limit + 1, 0);
    many.data(24 * (limit as usize + 1));
    refused!(many.open(), Error::Limit { what, .. } if what == "the tensor count");

    let limit = minfer_format::limits::MAX_KEYS;
    let mut many = Raw::header(3, 0, limit + 1);
    many.data(13 * (limit as usize + 1));
    refused!(many.open(), Error::Limit { what, .. } if what == "the key count");

    // Two arrays that are allowed alone, but not together.
    let limit = minfer_format::limits::MAX_ITEMS;
    let mut many = Raw::header(3, 0, 2);
    for key in [b"a", b"b"] {
        many.string(key).u32(ARRAY).u32(STRING).u64(limit * 2 / 3);
        many.0.resize(many.0.len() + (limit * 2 / 3) as usize * 8, 0);
    }
    refused!(many.open(), Error::Limit { what, .. } if what == "the key 'b'");
}

#[test]
fn keys_and_values() {
    refused!(Raw::header(3, 0, 1).string(b"\xff\xfe").u32(U32).u32(1).open(), Error::NotUtf8 { .. });
    refused!(
        Raw::header(3, 0, 1).string(b"k").u32(STRING).string(b"a\xc3").open(),
        Error::NotUtf8 { what, .. } if what == "the key 'k'"
    );
    refused!(
        Raw::header(3, 0, 2).string(b"k").u32(U32).u32(1).string(b"k").u32(U32).u32(2).open(),
        Error::DuplicateKey { key, .. } if key == "k"
    );
    for number in [13, u32::MAX] {
        refused!(
            Raw::header(3, 0, 1).string(b"k").u32(number).u64(0).open(),
            Error::UnknownValueType { key, number: n, .. } if key == "k" && *n == number
        );
    }
    let mut boolean = Raw::header(3, 0, 1);
    boolean.string(b"k").u32(7).0.push(2);
    refused!(boolean.open(), Error::BadBool { found: 2, .. });
    let mut nested = Raw::header(3, 0, 1);
    nested.string(b"k").u32(ARRAY);
    nested.u32(ARRAY).u64(1).u32(ARRAY).u64(1);
    nested.u32(U32).u64(0).data(64);
    refused!(nested.open(), Error::NestingTooDeep { key, .. } if key == "k");
}

#[test]
fn alignments() {
    for found in [0u32, 3, 48, 1 << 21, u32::MAX] {
        let mut raw = Raw::header(3, 0, 1);
        raw.string(b"general.alignment").u32(U32).u32(found);
        refused!(raw.open(), Error::Alignment { found: f, .. } if *f == u64::from(found));
    }
    let mut raw = Raw::header(3, 0, 1);
    raw.string(b"general.alignment").u32(STRING).string(b"32");
    refused!(raw.open(), Error::WrongKeyType { .. });
}

#[test]
fn tensor_types() {
    let one = |number| Raw::header(3, 1, 0).tensor("t", &[256], number, 0).data(1024).open();
    for (number, expected) in
        [(16, Some("IQ2_XXS")), (4, None), (9, Some("Q8_1")), (27, Some("I64")), (99, None)]
    {
        refused!(
            one(number),
            Error::UnsupportedType { tensor, number: n, name, .. }
                if tensor == "t" && *n == number && *name == expected
        );
    }
    let text = one(16).unwrap_err().to_string();
    assert!(text.contains("'t' has type 16 (IQ2_XXS)") && text.contains("Q4_K"), "{text}");
}

#[test]
fn tensor_shapes() {
    let one =
        |dims: &[u64], ty: BlockType| Raw::header(3, 1, 0).tensor("t", dims, ty as u32, 0).data(64).open();
    refused!(one(&[0], BlockType::F32), Error::Shape { why: "a dimension is zero", .. });
    refused!(one(&[4, 0], BlockType::F32), Error::Shape { shape, .. } if shape == &[0, 4]);
    refused!(one(&[1, 1, 1, 1, 1], BlockType::F32), Error::Limit { found: 5, limit: 4, .. });
    refused!(one(&[33], BlockType::Q8_0), Error::PartialBlock { k: 33, ty: BlockType::Q8_0, .. });
    refused!(one(&[16, 2], BlockType::Q8_0), Error::PartialBlock { k: 16, .. });
    refused!(one(&[], BlockType::Q8_0), Error::PartialBlock { k: 1, .. });
    for dims in [&[u64::MAX, 2][..], &[1 << 62, 1 << 62], &[1 << 32, 1 << 32, 1 << 32, 1 << 32], &[u64::MAX]]
    {
        refused!(one(dims, BlockType::F32), Error::Shape { why: "its size overflows", .. });
    }
}

#[test]
fn tensor_places() {
    let f32s = |n: u64| [n];
    refused!(
        Raw::header(3, 1, 0).tensor("t", &f32s(8), 0, 4).data(64).open(),
        Error::Misaligned { offset: 4, alignment: 32, .. }
    );
    refused!(
        Raw::header(3, 1, 0).tensor("t", &f32s(17), 0, 0).data(64).open(),
        Error::OutOfFile { end, len, .. } if *end == len + 4
    );
    for offset in [64, 1 << 40, u64::MAX - 31] {
        refused!(
            Raw::header(3, 1, 0).tensor("t", &f32s(1), 0, offset).data(64).open(),
            Error::OutOfFile { tensor, .. } if tensor == "t"
        );
    }
    refused!(
        Raw::header(3, 2, 0).tensor("b", &f32s(8), 0, 32).tensor("a", &f32s(9), 0, 0).data(64).open(),
        Error::Overlap { first, second, .. } if first == "a" && second == "b"
    );
    refused!(
        Raw::header(3, 2, 0).tensor("a", &f32s(1), 0, 0).tensor("a", &f32s(1), 0, 32).data(64).open(),
        Error::DuplicateTensor { tensor, .. } if tensor == "a"
    );
    let fits = Raw::header(3, 2, 0).tensor("b", &f32s(8), 0, 32).tensor("a", &f32s(8), 0, 0).data(64).open();
    assert_eq!(fits.unwrap().tensors()[0].name, "b", "the order of the file");
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let data = [9u8; 4 * 40];
    let mut writer = GgufWriter::new();
    writer.set("general.name", Value::String("x".to_owned()));
    writer.tensor("a", BlockType::F32, &[8], &data[..32]).unwrap();
    writer.tensor("b", BlockType::F32, &[40], &data).unwrap();
    let bytes = writer.to_bytes();
    for len in 0..bytes.len() {
        assert!(open(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
    }
    open(&bytes).unwrap();
}

#[test]
fn hostile_names_do_not_reach_the_terminal() {
    let name = format!("\x1b[2J{}", "x".repeat(5000));
    let error = Raw::header(3, 1, 0).tensor(&name, &[1], 99, 0).data(64).open().unwrap_err().to_string();
    assert!(error.len() < 600 && !error.contains('\x1b') && error.contains("\\u{1b}[2Jxxx"), "{error}");
}
