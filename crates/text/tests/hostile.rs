//! Broken and hostile tokenizer data: always an error, never a panic.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{fixture, json, metadata, nano, nano_pairs, plain, strings, with};
use minfer_format::gguf::{Array, Value};
use minfer_text::{EncodeOptions, Error, Tokenizer};
use proptest::prelude::*;

fn refused(key: &'static str, value: Option<Value>) -> Error {
    Tokenizer::from_gguf(&with(nano_pairs("qwen2"), key, value)).unwrap_err()
}

fn text(text: &str) -> Option<Value> {
    Some(Value::String(text.to_owned()))
}

#[test]
fn unknown_kinds_are_refused_with_the_known_ones() {
    let known = "llama-bpe, llama3, llama-v3, qwen2, deepseek-r1-qwen, qwen35, gpt-2, smollm, starcoder, refact, \
                 deepseek-v3, joyai-llm, glm4, tekken";
    assert_eq!(
        refused("tokenizer.ggml.pre", text("default")).to_string(),
        format!("unknown pre-tokenizer 'default' (tokenizer.ggml.pre); known are: {known}")
    );
    assert!(matches!(refused("tokenizer.ggml.pre", None), Error::NoPre { .. }));
    for model in ["bert", "t5", "rwkv", "gemma4", "no_vocab"] {
        assert_eq!(
            refused("tokenizer.ggml.model", text(model)).to_string(),
            format!(
                "unknown tokenizer model '{model}' (tokenizer.ggml.model); known are: gpt2 (byte-level BPE), llama (SentencePiece BPE)"
            )
        );
    }
    assert!(matches!(refused("tokenizer.ggml.model", None), Error::Metadata(_)));
}

#[test]
fn contradictory_metadata_is_refused() {
    let ints = |v: &[i32]| Some(Value::Array(Array::I32(v.to_vec())));
    assert!(matches!(
        refused("tokenizer.ggml.token_type", ints(&[1, 1])),
        Error::Length { len: 2, expected: 8192, .. }
    ));
    assert!(matches!(refused("tokenizer.ggml.tokens", Some(strings([]))), Error::Length { .. }));
    assert!(matches!(refused("tokenizer.ggml.tokens", None), Error::Metadata(_)));
    assert!(matches!(refused("tokenizer.ggml.merges", None), Error::Metadata(_)));
    assert!(matches!(
        refused("tokenizer.ggml.eos_token_id", Some(Value::U32(8192))),
        Error::TokenId { id: 8192, .. }
    ));
    assert!(matches!(
        refused("tokenizer.ggml.eot_token_id", Some(Value::U64(1 << 40))),
        Error::TokenId { .. }
    ));
    assert!(matches!(refused("tokenizer.ggml.eos_token_id", Some(Value::I32(-1))), Error::Metadata(_)));
    for (merge, reason) in [
        ("Ġt", "is not two tokens with a space between"),
        ("", "is not two tokens with a space between"),
        ("Ġ nowhere", "names a token that is not in the vocabulary"),
        ("Ġ ", "names a token that is not in the vocabulary"),
        ("ĠTheĠĠĠĠĠĠĠĠ ĠĠĠĠĠĠĠĠ", "names a token that is not in the vocabulary"),
        ("z Q", "makes a token that is not in the vocabulary"),
    ] {
        let error = refused("tokenizer.ggml.merges", Some(strings(["Ġ t", merge])));
        assert!(
            matches!(&error, Error::Merge { index: 1, reason: r, .. } if *r == reason),
            "{merge}: {error}"
        );
    }
}

#[test]
fn an_empty_vocabulary_is_refused() {
    let pairs = |model: &str, tokens: Value| {
        metadata([
            ("tokenizer.ggml.model", Value::String(model.to_owned())),
            ("tokenizer.ggml.pre", Value::String("gpt-2".to_owned())),
            ("tokenizer.ggml.tokens", tokens),
            ("tokenizer.ggml.merges", strings([])),
            ("tokenizer.ggml.scores", Value::Array(Array::F32(vec![]))),
        ])
    };
    for model in ["gpt2", "llama"] {
        assert!(
            matches!(Tokenizer::from_gguf(&pairs(model, strings([]))), Err(Error::EmptyVocab)),
            "{model}"
        );
        assert!(Tokenizer::from_gguf(&pairs(model, strings(["", ""]))).is_err(), "{model}");
    }
    let scores = Tokenizer::from_gguf(&pairs("llama", strings(["a", "b"])));
    assert!(matches!(scores, Err(Error::Length { len: 0, expected: 2, .. })));
}

#[test]
fn text_outside_the_alphabet_is_an_error() {
    let meta = metadata([
        ("tokenizer.ggml.model", Value::String("gpt2".to_owned())),
        ("tokenizer.ggml.pre", Value::String("gpt-2".to_owned())),
        ("tokenizer.ggml.tokens", strings(["a", "b", "ab"])),
        ("tokenizer.ggml.merges", strings(["a b"])),
    ]);
    let tokenizer = Tokenizer::from_gguf(&meta).unwrap();
    assert_eq!(plain(&tokenizer, "aba"), [2, 0]);
    let error = tokenizer.encode("abc", EncodeOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Unencodable { byte: b'c' }), "{error:?}");
}

#[test]
fn ids_out_of_range_are_answered() {
    let tokenizer = std::sync::Arc::new(nano());
    for id in [8192, 1 << 20, u32::MAX] {
        assert_eq!(tokenizer.token_text(id), None);
        assert_eq!(tokenizer.token_bytes(id), None);
        assert!(!tokenizer.is_special(id));
        assert_eq!(tokenizer.decode(&[id], false), "\u{FFFD}");
        assert_eq!(tokenizer.stream(true).push(id), "\u{FFFD}");
    }
    assert_eq!(tokenizer.vocab_size(), 8192);
    assert!(matches!(nano().add_end_tokens(&[8192]), Err(Error::TokenId { .. })));
}

fn from_json(value: &serde_json::Value) -> Result<Tokenizer, Error> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), value.to_string()).unwrap();
    Tokenizer::from_hf(file.path(), None)
}

#[test]
fn damaged_tokenizer_json_is_refused() {
    let whole = std::fs::read(fixture("nano-tokenizer.json")).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    for len in [0, 1, 100, whole.len() / 2, whole.len() - 2] {
        std::fs::write(file.path(), &whole[..len]).unwrap();
        assert!(matches!(Tokenizer::from_hf(file.path(), None), Err(Error::Json { .. })), "{len}");
    }
    assert!(matches!(Tokenizer::from_hf(&fixture("nowhere.json"), None), Err(Error::Io { .. })));
    let config = serde_json::json!({"eos_token": "<nowhere>"});
    let error = Tokenizer::from_hf(&fixture("nano-tokenizer.json"), Some(&config)).unwrap_err();
    assert!(matches!(error, Error::TokenText { key: "eos_token", .. }));
}

#[test]
fn contradictory_tokenizer_json_is_refused() {
    let good = json("nano-tokenizer.json");
    assert!(from_json(&good).is_ok());
    let changes: [(&str, serde_json::Value); 14] = [
        ("/model/type", "Unigram".into()),
        ("/model/vocab", serde_json::json!({})),
        ("/model/vocab/Ġt", 4_000_000_000u32.into()),
        ("/model/vocab/Ġt", 17.into()),
        ("/model/vocab/Ġt", (-1).into()),
        ("/model/dropout", 0.5.into()),
        ("/model/continuing_subword_prefix", "###########".into()),
        ("/model/merges/0", serde_json::json!(["z", "Q"])),
        ("/model/merges/0", serde_json::json!(["a very long token", "that is not there"])),
        ("/model/merges/0", "Ġ".into()),
        ("/added_tokens/0/id", 4_294_967_295u32.into()),
        ("/added_tokens/0/content", "Ġt".into()),
        ("/decoder", serde_json::json!({"type": "WordPiece", "prefix": "##", "cleanup": true})),
        ("/pre_tokenizer/pretokenizers/0/pattern/Regex", "(".into()),
    ];
    for (place, value) in changes {
        let mut bad = good.clone();
        *bad.pointer_mut(place).unwrap() = value.clone();
        let error = from_json(&bad).expect_err(place);
        println!("{place} = {value}: {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Small vocabularies with random tokens, kinds, merges and scores: an error or a tokenizer that
    /// encodes, never a panic.
    #[test]
    fn random_metadata(tokens in prop::collection::vec("[abĠ<>0x]{0,4}", 0..12),
                       kinds in prop::collection::vec(0i32..8, 0..12),
                       merges in prop::collection::vec("[abĠ]{0,2} ?[abĠ]{0,2}", 0..6),
                       scores in prop::collection::vec(any::<f32>(), 0..12),
                       model in prop::sample::select(vec!["gpt2", "llama"]),
                       input in "[ab <>0x]{0,12}") {
        let kinds = kinds.into_iter().chain(std::iter::repeat(1)).take(tokens.len()).collect();
        let scores = scores.into_iter().chain(std::iter::repeat(0.0)).take(tokens.len()).collect();
        let meta = metadata([
            ("tokenizer.ggml.model", Value::String(model.to_owned())),
            ("tokenizer.ggml.pre", Value::String("gpt-2".to_owned())),
            ("tokenizer.ggml.tokens", Value::Array(Array::String(tokens))),
            ("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds))),
            ("tokenizer.ggml.scores", Value::Array(Array::F32(scores))),
            ("tokenizer.ggml.merges", Value::Array(Array::String(merges))),
            ("tokenizer.ggml.add_bos_token", Value::Bool(false)),
        ]);
        if let Ok(tokenizer) = Tokenizer::from_gguf(&meta) {
            for parse_special in [false, true] {
                if let Ok(ids) = tokenizer.encode(&input, EncodeOptions { parse_special, add_bos: true }) {
                    prop_assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
                    let plain = !parse_special && ids.iter().any(|&id| tokenizer.is_special(id));
                    prop_assert!(!plain || model == "llama", "plain text became a control token");
                }
            }
        }
    }
}
