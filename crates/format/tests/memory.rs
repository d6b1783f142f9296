//! Hostile files neither panic nor take more memory than their size plus 64 MiB.
//!
//! A counting allocator measures each parse on its own thread. The large cases are those that inflate
//! most in memory; the random ones are bytes without meaning, and valid files with random damage.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

use minfer_format::bytes::{AlignedBuf, TensorBytes};
use minfer_format::gguf::{Array, Value};
use minfer_format::hf::Safetensors;
use minfer_format::{BlockType, Error, Gguf, GgufWriter, limits};
use proptest::prelude::*;

thread_local! {
    /// Bytes that this thread holds (what it frees for others counts below zero), and the most so far.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

struct Counting;

fn count(change: isize) {
    // During the end of a thread there is nothing to count in any more.
    let _ = HELD.try_with(|h| {
        let (held, peak) = h.get();
        h.set((held + change, peak.max(held + change)));
    });
}

// SAFETY: every call goes to the system's allocator unchanged; the counter neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: `ptr` came from the system's allocator with this layout, as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both blocks may exist while the contents move.
        count(new_size as isize);
        count(-(layout.size() as isize));
        // SAFETY: as for `dealloc`; the caller promises a valid new size.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most memory that `parse` held, beyond what there was before, and its result.
fn measured<T>(parse: impl FnOnce() -> T) -> (usize, T) {
    let before = HELD.with(|h| {
        let (held, _) = h.get();
        h.set((held, held));
        held
    });
    let result = parse();
    let (_, peak) = HELD.with(Cell::get);
    ((peak - before) as usize, result)
}

#[track_caller]
fn bounded<T>(file: &[u8], parse: impl FnOnce(TensorBytes) -> Result<T, Error>) -> Result<T, Error> {
    let bytes: TensorBytes = AlignedBuf::from(file).into();
    let (peak, result) = measured(|| parse(bytes));
    let bound = file.len() + limits::SLACK;
    assert!(peak <= bound, "{peak} bytes for a file of {}", file.len());
    if let Err(error) = &result {
        assert!(error.to_string().len() < 1000, "{error}");
    }
    result
}

#[track_caller]
fn gguf(file: &[u8]) -> Result<Gguf, Error> {
    let gguf = bounded(file, |bytes| Gguf::from_bytes("f", bytes))?;
    for t in gguf.tensors() {
        assert_eq!(gguf.data(&t.name).unwrap().len(), t.n_bytes());
        assert_eq!(t.ty.row_bytes(t.row_len()).unwrap() * t.rows(), t.n_bytes());
    }
    Ok(gguf)
}

#[track_caller]
fn safetensors(file: &[u8]) -> Result<Safetensors, Error> {
    let file = bounded(file, |bytes| Safetensors::from_bytes(Path::new("f"), bytes))?;
    for t in file.tensors() {
        assert_eq!(file.raw(&t.name).unwrap().len(), t.n_bytes());
    }
    Ok(file)
}

#[test]
fn the_counter_counts() {
    let (peak, ()) = measured(|| drop((vec![0u8; 1 << 20], vec![0u8; 1 << 20])));
    assert!((2 << 20..3 << 20).contains(&peak), "{peak}");
}

/// All counts at their limits in one file: the smallest keys, strings, inner arrays and tensors.
#[test]
fn the_most_inflating_gguf_stays_in_bounds() {
    for nested in [false, true] {
        let items = limits::MAX_ITEMS as usize;
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(limits::MAX_TENSORS.to_le_bytes());
        file.extend(limits::MAX_KEYS.to_le_bytes());
        let key = |file: &mut Vec<u8>, i: u64, ty: u32| {
            file.extend(3u64.to_le_bytes());
            file.extend(&i.to_le_bytes()[..3].iter().map(|b| b & 0x7f).collect::<Vec<_>>());
            file.extend(ty.to_le_bytes());
        };
        let spread = |i: u64| (i % 128) + ((i / 128 % 128) << 8) + ((i / 128 / 128) << 16);
        for i in 0..limits::MAX_KEYS - 1 {
            key(&mut file, spread(i), 0);
            file.push(1);
        }
        key(&mut file, 0x7f_7f_7f, 9);
        file.extend(if nested { 9u32 } else { 8 }.to_le_bytes());
        file.extend((items as u64).to_le_bytes());
        file.resize(file.len() + items * if nested { 12 } else { 8 }, 0);
        for i in 0..limits::MAX_TENSORS {
            key(&mut file, spread(i), 1); // One dimension, of 1.
            file.extend(1u64.to_le_bytes());
            file.extend(0u32.to_le_bytes());
            file.extend((32 * i).to_le_bytes());
        }
        file.resize(file.len().next_multiple_of(32) + 32 * limits::MAX_TENSORS as usize, 0);
        let gguf = gguf(&file).unwrap();
        assert_eq!((gguf.tensors().len(), gguf.metadata().len()), (1 << 16, 1 << 16));
    }
}

fn with_header(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

#[test]
fn the_most_inflating_safetensors_stay_in_bounds() {
    let entries: Vec<String> = (0..limits::MAX_SHARD_TENSORS)
        .map(|i| format!(r#""{i:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#))
        .collect();
    let most = format!("{{{}}}", entries.join(","));
    assert_eq!(safetensors(&with_header(&most, 0)).unwrap().tensors().len(), limits::MAX_SHARD_TENSORS);
    let more = format!(r#"{{"x":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}},{}}}"#, entries.join(","));
    assert!(safetensors(&with_header(&more, 0)).is_err());

    let long = "\\n".repeat(15 << 20);
    let text = "\\n".repeat(limits::MAX_JSON_STRING / 2 - 8);
    let zeros = "0,".repeat(15 << 20);
    let hostile = [
        format!(r#"{{"{long}":1}}"#),
        format!(r#"{{"a":{{"dtype":"{long}"}}}}"#),
        format!(r#"{{"a":{{"shape":"{long}"}}}}"#),
        format!(r#"{{"{text}":1}}"#),
        format!(r#"{{"a":{{"dtype":"{text}"}}}}"#),
        format!(r#"{{"a":{{"shape":"{text}"}}}}"#),
        format!(r#"{{"a":{{"shape":[{zeros}0]}}}}"#),
        format!(r#"{{"a":{{"data_offsets":[{zeros}0]}}}}"#),
        format!(r#"{{"a":{{"other":[{zeros}0]}}}}"#),
        format!(r#"{{"__metadata__":{{"a":[{zeros}0]}},"b":1}}"#),
        "{\"a\":".repeat(5 << 20),
        format!("{{\"a\":{}", "[".repeat(30 << 20)),
    ];
    for header in hostile {
        assert!(safetensors(&with_header(&header, 0)).is_err(), "{}", &header[..40]);
    }
    let file = with_header(&" ".repeat(33 << 20).replacen(' ', "{", 1), 0);
    assert!(matches!(safetensors(&file), Err(Error::Limit { .. })));
}

#[test]
fn a_large_vocabulary_stays_in_bounds() {
    let tokens: Vec<String> = (0..150_000).map(|i| format!("token{i}")).collect();
    let mut writer = GgufWriter::new();
    writer.set("tokenizer.ggml.tokens", Value::Array(Array::String(tokens.clone())));
    let gguf = gguf(&writer.to_bytes()).unwrap();
    assert_eq!(gguf.metadata().strings("tokenizer.ggml.tokens").unwrap(), tokens);
}

fn valid_gguf() -> Vec<u8> {
    let data = [7u8; 1024];
    let mut writer = GgufWriter::new();
    writer.set("general.architecture", Value::String("llama".to_owned()));
    writer.set("general.alignment", Value::U32(32)).set("split.count", Value::U16(1));
    writer.set("a", Value::Array(Array::String(vec!["x".to_owned(), "yz".to_owned()])));
    writer.set("n", Value::Array(Array::Nested(vec![Array::Bool(vec![true]), Array::F64(vec![0.5])])));
    writer.tensor("token_embd.weight", BlockType::Q8_0, &[2, 64], &data[..136]).unwrap();
    writer.tensor("output.weight", BlockType::F32, &[1, 2, 4], &data[..32]).unwrap();
    writer.tensor("blk.0.ffn_up.weight", BlockType::Q4_K, &[2, 256], &data[..288]).unwrap();
    writer.to_bytes()
}

fn valid_safetensors() -> Vec<u8> {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]}}  "#;
    with_header(header, 22)
}

/// Damage to a file: bytes replaced, numbers that matter put anywhere, the end cut off.
#[derive(Clone, Debug)]
struct Damage {
    bytes: Vec<(prop::sample::Index, u8)>,
    numbers: Vec<(prop::sample::Index, u64)>,
    cut: Option<prop::sample::Index>,
}

impl Damage {
    fn any() -> impl Strategy<Value = Damage> {
        let number = prop_oneof![
            prop::sample::select(vec![
                0,
                1,
                2,
                31,
                33,
                1 << 16,
                1 << 24,
                1 << 31,
                1 << 32,
                1 << 63,
                u64::MAX
            ]),
            any::<u64>(),
            0..400u64,
        ];
        let bytes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
        let numbers = prop::collection::vec((any::<prop::sample::Index>(), number), 0..3);
        (bytes, numbers, prop::option::weighted(0.2, any::<prop::sample::Index>()))
            .prop_map(|(bytes, numbers, cut)| Damage { bytes, numbers, cut })
    }

    fn apply(&self, mut file: Vec<u8>) -> Vec<u8> {
        for (at, byte) in &self.bytes {
            let at = at.index(file.len());
            file[at] = *byte;
        }
        for (at, number) in &self.numbers {
            let at = at.index(file.len() - 8);
            file[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        if let Some(cut) = self.cut {
            file.truncate(cut.index(file.len()));
        }
        file
    }
}

#[test]
fn the_undamaged_files_are_valid() {
    assert_eq!(gguf(&valid_gguf()).unwrap().tensors().len(), 3);
    assert_eq!(safetensors(&valid_safetensors()).unwrap().tensors().len(), 2);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = gguf(&bytes);
        let _ = gguf(&[b"GGUF\x03\0\0\0", &bytes[..]].concat());
        let _ = safetensors(&bytes);
        let _ = safetensors(&[&(bytes.len() as u64 + 1).to_le_bytes(), &b"{"[..], &bytes].concat());
    }

    #[test]
    fn damaged_files_never_panic(damage in Damage::any()) {
        let _ = gguf(&damage.apply(valid_gguf()));
        let _ = safetensors(&damage.apply(valid_safetensors()));
    }
}
