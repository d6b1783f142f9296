//! What the writer writes, the reader reads: values, tensors, versions, alignments, split models.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};

use minfer_format::gguf::{Array, Value};
use minfer_format::{BlockType, Error, Gguf, GgufWriter};

fn every_value() -> Vec<(&'static str, Value)> {
    vec![
        ("v.u8", Value::U8(200)),
        ("v.i8", Value::I8(-100)),
        ("v.u16", Value::U16(60_000)),
        ("v.i16", Value::I16(-30_000)),
        ("v.u32", Value::U32(4_000_000_000)),
        ("v.i32", Value::I32(-2_000_000_000)),
        ("v.f32", Value::F32(1.5)),
        ("v.true", Value::Bool(true)),
        ("v.false", Value::Bool(false)),
        ("v.string", Value::String("schön 漢字 \0".to_owned())),
        ("v.empty", Value::String(String::new())),
        ("v.u64", Value::U64(u64::MAX)),
        ("v.i64", Value::I64(i64::MIN)),
        ("v.f64", Value::F64(-0.1)),
    ]
}

fn every_array() -> Vec<(&'static str, Value)> {
    let arrays = vec![
        ("a.u8", Array::U8(vec![0, 255])),
        ("a.i8", Array::I8(vec![-128, 127])),
        ("a.u16", Array::U16(vec![1, 65_535])),
        ("a.i16", Array::I16(vec![-1, 2])),
        ("a.u32", Array::U32(vec![u32::MAX])),
        ("a.i32", Array::I32(vec![i32::MIN, 0, i32::MAX])),
        ("a.f32", Array::F32(vec![0.0, f32::INFINITY])),
        ("a.bool", Array::Bool(vec![true, false, true])),
        ("a.string", Array::String(vec!["a".to_owned(), String::new(), "ü".to_owned()])),
        ("a.u64", Array::U64(vec![u64::MAX])),
        ("a.i64", Array::I64(vec![i64::MIN])),
        ("a.f64", Array::F64(vec![1e300])),
        ("a.none", Array::U32(vec![])),
        (
            "a.nested",
            Array::Nested(vec![
                Array::U8(vec![1]),
                Array::String(vec!["x".to_owned()]),
                Array::F64(vec![]),
                Array::Bool(vec![true]),
            ]),
        ),
    ];
    arrays.into_iter().map(|(key, array)| (key, Value::Array(array))).collect()
}

fn open(bytes: &[u8]) -> Result<Gguf, Error> {
    Gguf::from_bytes("test.gguf", minfer_format::bytes::AlignedBuf::from(bytes).into())
}

#[test]
fn values_of_all_types_and_arrays_of_them() {
    for version in [2, 3] {
        let mut writer = GgufWriter::new();
        writer.version(version);
        let pairs: Vec<_> = every_value().into_iter().chain(every_array()).collect();
        for (key, value) in &pairs {
            writer.set(key, value.clone());
        }
        let gguf = open(&writer.to_bytes()).unwrap();
        assert_eq!(gguf.version(), version);
        let read: Vec<_> = gguf.metadata().iter().map(|(k, v)| (k, v.clone())).collect();
        assert_eq!(read, pairs);
        for (key, value) in &pairs {
            assert_eq!(gguf.metadata().get(key), Some(value));
        }
    }
}

#[test]
fn tensors_of_all_types_at_every_alignment() {
    for alignment in [1u32, 8, 32, 4096, 1 << 20] {
        let data: Vec<(BlockType, Vec<u8>)> = BlockType::ggml()
            .map(|ty| (ty, (0..3 * ty.block_bytes()).map(|i| (i * 7 + ty as usize) as u8).collect()))
            .collect();
        let mut writer = GgufWriter::new();
        writer.alignment(alignment);
        for (ty, bytes) in &data {
            writer.tensor(&format!("{ty}.weight"), *ty, &[3, ty.block_len()], bytes).unwrap();
        }
        let bytes = writer.to_bytes();
        let gguf = open(&bytes).unwrap();
        assert_eq!(gguf.tensors().len(), data.len());
        assert_eq!(gguf.file_bytes(), bytes.len() as u64);
        for (ty, bytes) in &data {
            let name = format!("{ty}.weight");
            let info = gguf.tensor(&name).unwrap();
            assert_eq!((info.ty, &info.shape[..]), (*ty, &[3, ty.block_len()][..]));
            assert_eq!((info.rows(), info.row_len(), info.n_bytes()), (3, ty.block_len(), bytes.len()));
            assert_eq!(&*gguf.data(&name).unwrap(), &bytes[..]);
        }
        assert!(matches!(gguf.data("none"), Err(Error::MissingTensor { tensor, .. }) if tensor == "none"));
    }
}

/// Ids are apart from weights: nobody decodes them by mistake, and names are unique all the same.
#[test]
fn whole_numbers() {
    let ids: Vec<u8> = [5i32, -7, i32::MAX, 0, 1, 2].iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut writer = GgufWriter::new();
    writer.integers("ids", &[3, 2], &ids).unwrap();
    writer.tensor("w", BlockType::F32, &[6], &ids).unwrap();
    assert!(writer.integers("w", &[3, 2], &ids).is_err() && writer.integers("x", &[3], &ids).is_err());
    let gguf = open(&writer.to_bytes()).unwrap();
    assert_eq!(gguf.integers("ids"), Some((&[3usize, 2][..], vec![5, -7, i32::MAX, 0, 1, 2])));
    assert_eq!((gguf.integers("w"), gguf.tensor("ids"), gguf.tensors().len()), (None, None, 1));
    assert!(gguf.data("ids").is_err() && gguf.data("w").is_ok());
}

#[test]
fn types_of_other_files_are_refused() {
    for ty in BlockType::all().filter(|ty| !ty.is_ggml()) {
        let data = vec![0; ty.block_bytes()];
        let mut writer = GgufWriter::new();
        let error = writer.tensor("a.weight", ty, &[1, ty.block_len()], &data).err().unwrap();
        assert!(matches!(&error, Error::Unwritable { tensor, .. } if tensor == "a.weight"), "{error}");
    }
}

#[test]
fn shapes_are_outermost_first() {
    let data = [0u8; 2 * 3 * 5 * 4];
    let mut writer = GgufWriter::new();
    writer.tensor("t", BlockType::F32, &[2, 3, 5], &data).unwrap();
    writer.tensor("scalar", BlockType::F32, &[], &data[..4]).unwrap();
    let bytes = writer.to_bytes();
    // The innermost dimension, 5, comes first in the file.
    let name = bytes.windows(9).position(|w| w == b"\x01\0\0\0\0\0\0\0t").unwrap();
    assert_eq!(bytes[name + 13..name + 21], 5u64.to_le_bytes());
    let gguf = open(&bytes).unwrap();
    assert_eq!(gguf.tensor("t").unwrap().shape, [2, 3, 5]);
    assert_eq!(gguf.tensor("t").unwrap().rows(), 6);
    assert_eq!(gguf.tensor("scalar").unwrap().elements(), 1);
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let mut w = GgufWriter::new();
    w.tensor("t", BlockType::F32, &[1], &[0; 4]).unwrap();
    for (name, shape, bytes) in
        [("t", &[1][..], 4), ("u", &[0], 0), ("u", &[2], 4), ("u", &[1, 1, 1, 1, 1], 4)]
    {
        let refused = w.tensor(name, BlockType::F32, shape, &[0; 8][..bytes]);
        assert!(matches!(refused, Err(Error::Unwritable { tensor, .. }) if tensor == name));
    }
    assert!(w.tensor("q", BlockType::Q8_0, &[33], &[0; 34]).is_err());
}

#[test]
fn a_file_is_mapped_and_static_bytes_are_not_copied() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let data = [3u8; 64];
    let mut writer = GgufWriter::new();
    writer.tensor("t", BlockType::F32, &[16], &data).unwrap();
    writer.write_file(&path).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(&*gguf.data("t").unwrap(), data);
    assert!(gguf.data("t").unwrap().is_mapped());
    assert_eq!(gguf.files().collect::<Vec<_>>(), [path.as_path()]);

    let bytes: &'static [u8] = Box::leak(fs::read(&path).unwrap().into_boxed_slice());
    let tensor = Gguf::from_static("built in", bytes).unwrap().data("t").unwrap();
    assert!(bytes.as_ptr_range().contains(&tensor.as_ptr()));
    assert_eq!(&*tensor, data, "the bytes outlive the file that they came from");
}

/// Writes a part; `total` is what it says about the tensors of all parts.
fn write_part(dir: &Path, name: &str, no: u16, count: u16, total: i32, tensors: &[(&str, u8)]) -> PathBuf {
    let data: Vec<Vec<u8>> = tensors.iter().map(|&(_, fill)| vec![fill; 4 * (1 + fill as usize)]).collect();
    let mut writer = GgufWriter::new();
    if no == 0 {
        writer.set("general.architecture", Value::String("llama".to_owned()));
    }
    writer.set("split.no", Value::U16(no)).set("split.count", Value::U16(count));
    writer.set("split.tensors.count", Value::I32(total));
    for ((name, fill), bytes) in tensors.iter().zip(&data) {
        writer.tensor(name, BlockType::F32, &[1 + *fill as usize], bytes).unwrap();
    }
    let path = dir.join(name);
    writer.write_file(&path).unwrap();
    path
}

/// A model in three parts, the first of which has no tensors, as some tools write it.
fn write_model(dir: &Path) -> [PathBuf; 3] {
    [
        write_part(dir, "m-00001-of-00003.gguf", 0, 3, 3, &[]),
        write_part(dir, "m-00002-of-00003.gguf", 1, 3, 3, &[("a", 1), ("b", 2)]),
        write_part(dir, "m-00003-of-00003.gguf", 2, 3, 3, &[("c", 3)]),
    ]
}

#[test]
fn any_part_opens_the_whole_model() {
    let dir = tempfile::tempdir().unwrap();
    let parts = write_model(dir.path());
    for part in &parts {
        let gguf = Gguf::open(part).unwrap();
        assert_eq!(gguf.path(), part);
        assert_eq!(gguf.metadata().string("general.architecture").unwrap(), "llama");
        assert_eq!(gguf.files().collect::<Vec<_>>(), parts.iter().map(PathBuf::as_path).collect::<Vec<_>>());
        for (name, fill) in [("a", 1u8), ("b", 2), ("c", 3)] {
            assert_eq!(&*gguf.data(name).unwrap(), vec![fill; 4 * (1 + fill as usize)]);
        }
        let size: u64 = parts.iter().map(|p| fs::metadata(p).unwrap().len()).sum();
        assert_eq!(gguf.file_bytes(), size);
    }
}

#[test]
fn a_missing_part_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let parts = write_model(dir.path());
    fs::remove_file(&parts[1]).unwrap();
    for named in [&parts[0], &parts[2]] {
        let error = Gguf::open(named).unwrap_err();
        assert!(matches!(&error, Error::MissingPart { part, count: 3, .. } if *part == parts[1]), "{error}");
    }
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    type Change = (&'static str, fn(&Path));
    let changes: [Change; 6] = [
        ("split.count", |d| drop(write_part(d, "m-00002-of-00003.gguf", 1, 4, 3, &[("a", 1), ("b", 2)]))),
        ("split.no", |d| drop(write_part(d, "m-00002-of-00003.gguf", 2, 3, 3, &[("a", 1), ("b", 2)]))),
        ("split.tensors.count", |d| {
            drop(write_part(d, "m-00002-of-00003.gguf", 1, 3, 9, &[("a", 1), ("b", 2)]))
        }),
        ("the number of tensors of all parts", |d| {
            drop(write_part(d, "m-00002-of-00003.gguf", 1, 3, 3, &[("a", 1)]));
        }),
        ("the key 'general.architecture'", |d| {
            let mut other = GgufWriter::new();
            other.set("general.architecture", Value::String("qwen3".to_owned()));
            other.set("split.no", Value::U16(1)).set("split.count", Value::U16(3));
            other.set("split.tensors.count", Value::I32(3));
            other.write_file(&d.join("m-00002-of-00003.gguf")).unwrap();
        }),
        ("the key 'general.name'", |d| {
            let mut other = GgufWriter::new();
            other.set("general.name", Value::String("x".to_owned()));
            other.set("split.no", Value::U16(1)).set("split.count", Value::U16(3));
            other.set("split.tensors.count", Value::I32(3));
            other.write_file(&d.join("m-00002-of-00003.gguf")).unwrap();
        }),
    ];
    for (expected, change) in changes {
        let dir = tempfile::tempdir().unwrap();
        let parts = write_model(dir.path());
        change(dir.path());
        let error = Gguf::open(&parts[0]).unwrap_err();
        assert!(matches!(&error, Error::WrongPart { what, .. } if what == expected), "{expected}: {error}");
    }
}

#[test]
fn a_part_with_a_whole_files_keys_missing_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let parts = write_model(dir.path());
    GgufWriter::new().write_file(&parts[1]).unwrap();
    assert!(matches!(Gguf::open(&parts[0]), Err(Error::MissingKey { key, .. }) if key == "split.count"));
    // Named alone it is a whole (empty) file: the metadata decides, not the name.
    assert_eq!(Gguf::open(&parts[1]).unwrap().tensors().len(), 0);
}

#[test]
fn tensors_of_one_name_in_two_parts_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let parts = write_model(dir.path());
    write_part(dir.path(), "m-00003-of-00003.gguf", 2, 3, 3, &[("a", 3)]);
    let error = Gguf::open(&parts[0]).unwrap_err();
    assert!(matches!(&error, Error::DuplicateTensor { tensor, .. } if tensor == "a"), "{error}");
}

#[test]
fn a_renamed_part_says_what_its_name_should_be() {
    let dir = tempfile::tempdir().unwrap();
    let parts = write_model(dir.path());
    let renamed = dir.path().join("renamed.gguf");
    fs::rename(&parts[1], &renamed).unwrap();
    let error = Gguf::open(&renamed).unwrap_err();
    assert!(
        matches!(&error, Error::SplitName { expected, .. } if expected == "-00002-of-00003.gguf"),
        "{error}"
    );
    let bytes = fs::read(&renamed).unwrap();
    assert!(matches!(open(&bytes), Err(Error::WrongPart { .. })), "a part in memory has no neighbours");
}
