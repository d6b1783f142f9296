//! Hugging Face directories, whole and broken.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::Path;

use minfer_format::bytes::AlignedBuf;
use minfer_format::hf::{Dtype, Safetensors};
use minfer_format::{BlockType, Error, HfDir};
use safetensors::tensor::TensorView;
use tempfile::TempDir;

fn shard(tensors: &[(&str, Dtype, &[usize], &[u8])]) -> Vec<u8> {
    let views = tensors.iter().map(|&(name, dtype, shape, data)| {
        (name, TensorView::new(dtype, shape.to_vec(), data).expect("a valid tensor"))
    });
    safetensors::serialize(views, None).unwrap()
}

fn write(dir: &Path, name: &str, bytes: impl AsRef<[u8]>) {
    fs::write(dir.join(name), bytes).unwrap();
}

fn with_config() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "config.json", r#"{"model_type": "qwen3", "hidden_size": 64}"#);
    dir
}

const A: (&str, Dtype, &[usize], &[u8]) = ("a.weight", Dtype::F32, &[1, 2], &[1; 8]);
const B: (&str, Dtype, &[usize], &[u8]) = ("b.weight", Dtype::BF16, &[3], &[2; 6]);
const IDS: (&str, Dtype, &[usize], &[u8]) = ("ids", Dtype::I64, &[1], &[3; 8]);

fn sharded() -> TempDir {
    let dir = with_config();
    write(dir.path(), "model-1.safetensors", shard(&[A]));
    write(dir.path(), "model-2.safetensors", shard(&[B, IDS]));
    index(dir.path(), &[("a.weight", "model-1.safetensors"), ("b.weight", "model-2.safetensors")]);
    dir
}

fn index(dir: &Path, map: &[(&str, &str)]) {
    let map: serde_json::Map<_, _> = map.iter().map(|&(k, v)| (k.to_owned(), v.into())).collect();
    let index = serde_json::json!({ "metadata": { "total_size": 22 }, "weight_map": map });
    write(dir, "model.safetensors.index.json", index.to_string());
}

/// Asserts that the directory is refused with this kind of error.
macro_rules! refused {
    ($dir:expr, $pattern:pat $(if $guard:expr)?) => {{
        let error = HfDir::open($dir.path()).err().expect("should be refused");
        assert!(matches!(&error, $pattern $(if $guard)?), "{error:?}");
        assert!(error.to_string().contains($dir.path().to_str().unwrap()), "{error}");
    }};
}

#[test]
fn one_file() {
    let dir = with_config();
    write(dir.path(), "model.safetensors", shard(&[B, A, IDS]));
    write(dir.path(), "tokenizer.json", "{}");
    write(dir.path(), "generation_config.json", r#"{"eos_token_id": [1, 2]}"#);
    let hf = HfDir::open(dir.path()).unwrap();
    assert_eq!(hf.config()["hidden_size"], 64);
    assert_eq!(hf.generation_config().unwrap()["eos_token_id"][1], 2);
    assert_eq!(hf.tokenizer_config(), None);
    assert_eq!(hf.tokenizer_json_path(), Some(dir.path().join("tokenizer.json")));
    assert_eq!(hf.chat_template(), None);
    let names: Vec<_> = hf.tensors().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a.weight", "b.weight", "ids"]);
    assert_eq!(hf.tensor("a.weight").unwrap().shape, [1, 2]);
    let (ty, bytes) = hf.weight("b.weight").unwrap();
    assert_eq!((ty, &*bytes), (BlockType::BF16, &[2; 6][..]));
    assert_eq!(&*hf.data("a.weight").unwrap(), [1; 8]);
}

#[test]
fn other_dtypes_are_listed_and_refused_as_weights_only() {
    let dir = with_config();
    write(dir.path(), "model.safetensors", shard(&[IDS]));
    let hf = HfDir::open(dir.path()).unwrap();
    assert_eq!(hf.tensor("ids").unwrap().dtype, Dtype::I64);
    assert_eq!(&*hf.raw("ids").unwrap(), [3; 8]);
    let error = hf.data("ids").unwrap_err();
    assert!(
        matches!(&error, Error::UnsupportedDtype { tensor, dtype, .. } if tensor == "ids" && dtype == "I64")
    );
    assert!(matches!(hf.data("none"), Err(Error::MissingTensor { tensor, .. }) if tensor == "none"));
}

#[test]
fn shards() {
    let hf_dir = sharded();
    let hf = HfDir::open(hf_dir.path()).unwrap();
    assert_eq!(hf.tensors().len(), 3);
    assert_eq!(&*hf.data("a.weight").unwrap(), [1; 8]);
    assert_eq!(&*hf.data("b.weight").unwrap(), [2; 6]);
}

#[test]
fn broken_shards() {
    let dir = sharded();
    fs::remove_file(dir.path().join("model-2.safetensors")).unwrap();
    refused!(dir, Error::MissingShard { shard, .. } if shard.ends_with("model-2.safetensors"));

    let dir = sharded();
    index(dir.path(), &[("a.weight", "model-1.safetensors"), ("c.weight", "model-1.safetensors")]);
    refused!(dir, Error::NotInShard { tensor, .. } if tensor == "c.weight");

    let dir = sharded();
    let whole = shard(&[A]);
    write(dir.path(), "model-1.safetensors", &whole[..whole.len() - 1]);
    refused!(dir, Error::OutOfFile { tensor, end, len, .. } if tensor == "a.weight" && *end == len + 1);
    write(dir.path(), "model-1.safetensors", &whole[..20]);
    refused!(dir, Error::Truncated { what, .. } if what == "the header");
    write(dir.path(), "model-1.safetensors", b"");
    refused!(dir, Error::Empty { .. });

    let dir = sharded();
    write(dir.path(), "model-2.safetensors", shard(&[B, A]));
    refused!(dir, Error::InTwoFiles { first, second, tensor } if tensor == "a.weight"
        && first.ends_with("model-1.safetensors") && second.ends_with("model-2.safetensors"));

    for name in ["../model-1.safetensors", "/etc/passwd", "", "..", "c:x"] {
        let dir = sharded();
        index(dir.path(), &[("a.weight", name)]);
        refused!(dir, Error::ShardName { shard, .. } if shard == name);
    }
}

#[test]
fn missing_files() {
    let dir = tempfile::tempdir().unwrap();
    refused!(dir, Error::NoConfig { .. });
    write(dir.path(), "config.json", "{}");
    refused!(dir, Error::NoWeights { found: None, .. });
    write(dir.path(), "pytorch_model.bin", "x");
    refused!(dir, Error::NoWeights { found: Some(name), .. } if name == "pytorch_model.bin");
    let file = dir.path().join("config.json");
    assert!(matches!(HfDir::open(&file), Err(Error::NotADirectory { .. })));
    assert!(matches!(HfDir::open(&dir.path().join("none")), Err(Error::Io { .. })));
}

#[test]
fn malformed_json_names_the_file_and_the_line() {
    for name in ["config.json", "generation_config.json", "tokenizer_config.json"] {
        let dir = sharded();
        write(dir.path(), name, "{\n  \"a\": 1,\n  \"b\": oops\n}");
        refused!(dir, Error::Json { file, line: 3, .. } if file.ends_with(name));
    }
    let dir = sharded();
    write(dir.path(), "model.safetensors.index.json", r#"{"weight_map": {"a": 3}}"#);
    refused!(dir, Error::Json { line: 1, .. });
    write(dir.path(), "model.safetensors.index.json", r#"{"metadata": {}}"#);
    refused!(dir, Error::Json { reason, .. } if reason.contains("weight_map"));
    write(dir.path(), "config.json", "");
    refused!(dir, Error::Empty { .. });
}

#[test]
fn json_that_would_take_too_much_memory() {
    let dir = sharded();
    write(dir.path(), "config.json", format!("[0{}]", ",0".repeat(1 << 18)));
    refused!(dir, Error::Limit { what, .. } if what == "the number of values");
    fs::File::create(dir.path().join("config.json")).unwrap().set_len((16 << 20) + 1).unwrap();
    refused!(dir, Error::Limit { what, .. } if what == "the size in bytes");
    write(dir.path(), "config.json", "[".repeat(100_000));
    refused!(dir, Error::Json { .. });
}

#[test]
fn chat_templates() {
    let dir = sharded();
    let template = || HfDir::open(dir.path()).unwrap().chat_template().map(str::to_owned);
    write(dir.path(), "tokenizer_config.json", r#"{"chat_template": "plain"}"#);
    assert_eq!(template().as_deref(), Some("plain"));
    let named =
        r#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#;
    write(dir.path(), "tokenizer_config.json", named);
    assert_eq!(template().as_deref(), Some("d"));
    write(dir.path(), "chat_template.jinja", "{{ from_file }}");
    assert_eq!(template().as_deref(), Some("{{ from_file }}"));
    write(dir.path(), "chat_template.jinja", b"\xff");
    refused!(dir, Error::NotUtf8 { .. });
}

/// A safetensors file with this header and this much data.
fn raw(header: &str, data: usize) -> Result<Safetensors, Error> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    Safetensors::from_bytes(Path::new("bad"), AlignedBuf::from(&bytes[..]).into())
}

fn entry(name: &str, dtype: &str, shape: &str, start: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#)
}

#[test]
fn safetensors_headers() {
    let one = |dtype: &str, shape: &str, start, end, data| {
        raw(&format!("{{{}}}", entry("t", dtype, shape, start, end)), data)
    };
    assert!(one("F32", "[2]", 0, 8, 8).is_ok());
    assert!(one("F32", "[0]", 0, 0, 0).is_ok());
    assert!(one("F4", "[2]", 0, 1, 1).is_ok());
    assert!(matches!(one("F32", "[2]", 0, 4, 4), Err(Error::TensorBytes { expected: 8, found: 4, .. })));
    assert!(matches!(one("F32", "[2]", 8, 0, 8), Err(Error::TensorBytes { .. })));
    assert!(matches!(one("F32", "[2]", 0, 8, 7), Err(Error::OutOfFile { .. })));
    assert!(matches!(one("F32", "[2]", 4, 12, 12), Err(Error::Gap { gap: 4, .. })));
    assert!(matches!(one("F32", "[2]", 0, 8, 9), Err(Error::Gap { gap: 1, .. })));
    assert!(matches!(one("F4", "[3]", 0, 1, 1), Err(Error::Shape { .. })));
    let huge = format!("[{}, 2]", u64::MAX);
    assert!(matches!(one("U8", &huge, 0, 8, 8), Err(Error::Shape { why: "its size overflows", .. })));
    assert!(matches!(one("U8", "[1,1,1,1,1,1,1,1,1]", 0, 1, 1), Err(Error::SafetensorsHeader { .. })));
    assert!(matches!(one("F99", "[1]", 0, 1, 1), Err(Error::SafetensorsHeader { .. })));
    assert!(matches!(one("U8", "[-1]", 0, 1, 1), Err(Error::SafetensorsHeader { .. })));

    let (a, b) = (entry("a", "U8", "[4]", 0, 4), entry("b", "U8", "[4]", 2, 6));
    let overlap = raw(&format!("{{{a},{b}}}"), 6);
    assert!(matches!(overlap, Err(Error::Overlap { first, second, .. }) if first == "a" && second == "b"));
    let twice = raw(&format!("{{{a},{}}}", entry("a", "U8", "[4]", 4, 8)), 8);
    assert!(matches!(twice, Err(Error::DuplicateTensor { tensor, .. }) if tensor == "a"));
    let long = raw(&format!("{{{}}}", entry(&"n".repeat(5000), "U8", "[1]", 0, 1)), 1);
    assert!(
        matches!(long, Err(Error::SafetensorsHeader { reason, .. }) if reason.contains("invalid length 5000"))
    );
    assert!(matches!(raw("[]", 0), Err(Error::SafetensorsHeader { .. })));
    assert!(matches!(raw("{} x", 0), Err(Error::SafetensorsHeader { .. })));
    assert!(raw(r#"{"__metadata__":{"format":"pt"}}   "#, 0).is_ok());
}

#[test]
fn safetensors_that_are_something_else() {
    let open = |bytes: &[u8]| Safetensors::from_bytes(Path::new("bad"), AlignedBuf::from(bytes).into());
    assert!(
        matches!(open(b"GGUF\x03\0\0\0aaaa"), Err(Error::SafetensorsHeader { reason, .. }) if reason.contains("GGUF"))
    );
    assert!(
        matches!(open(b"version https://"), Err(Error::SafetensorsHeader { reason, .. }) if reason.contains("LFS"))
    );
    assert!(matches!(open(b"abc"), Err(Error::SafetensorsHeader { .. })));
    assert!(matches!(open(b""), Err(Error::Empty { .. })));
    for len in [100, 1 << 40, u64::MAX] {
        let bytes = [&len.to_le_bytes()[..], b"{}"].concat();
        assert!(matches!(open(&bytes), Err(Error::Truncated { needed, available: 2, .. }) if needed == len));
    }
}
