//! What several test files need: the fixtures, and GGUF metadata made of a `tokenizer.json`.

#![allow(dead_code, unreachable_pub)]

use std::path::{Path, PathBuf};

use minfer_format::gguf::{Array, Metadata, Value};
use minfer_text::{EncodeOptions, Tokenizer};

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

pub fn json(name: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(fixture(name)).unwrap()).unwrap()
}

pub fn nano() -> Tokenizer {
    Tokenizer::from_hf(&fixture("nano-tokenizer.json"), None).unwrap()
}

pub fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub fn plain(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, EncodeOptions::default()).unwrap()
}

pub fn special(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, EncodeOptions { parse_special: true, add_bos: false }).unwrap()
}

pub fn strings<'a>(items: impl IntoIterator<Item = &'a str>) -> Value {
    Value::Array(Array::String(items.into_iter().map(str::to_owned).collect()))
}

pub fn metadata<'a>(pairs: impl IntoIterator<Item = (&'a str, Value)>) -> Metadata {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// Nano's vocabulary as a GGUF file describes it.
pub fn nano_pairs(pre: &str) -> Vec<(&'static str, Value)> {
    let source = json("nano-tokenizer.json");
    let vocab = source["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![""; vocab.len()];
    let mut types = vec![1; vocab.len()];
    for (text, id) in vocab {
        tokens[id.as_u64().unwrap() as usize] = text;
    }
    for added in source["added_tokens"].as_array().unwrap() {
        types[added["id"].as_u64().unwrap() as usize] = if added["special"] == true { 3 } else { 4 };
    }
    let merges = source["model"]["merges"].as_array().unwrap();
    let merges = merges.iter().map(|m| format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap()));
    vec![
        ("tokenizer.ggml.model", Value::String("gpt2".to_owned())),
        ("tokenizer.ggml.pre", Value::String(pre.to_owned())),
        ("tokenizer.ggml.tokens", strings(tokens)),
        ("tokenizer.ggml.token_type", Value::Array(Array::I32(types))),
        ("tokenizer.ggml.merges", Value::Array(Array::String(merges.collect()))),
        ("tokenizer.ggml.bos_token_id", Value::U32(0)),
        ("tokenizer.ggml.eos_token_id", Value::U32(2)),
    ]
}

/// The same pairs with one replaced or, for `None`, left out.
pub fn with(mut pairs: Vec<(&'static str, Value)>, key: &'static str, value: Option<Value>) -> Metadata {
    pairs.retain(|pair| pair.0 != key);
    pairs.extend(value.map(|value| (key, value)));
    metadata(pairs)
}
