//! Token ids against references: `tokenizers` and `sentencepiece` (committed vectors), and llama.cpp's
//! vocabularies (fetched by `scripts/fetch-tokenizer-vectors.sh`, named by `MINFER_VOCAB_DIR`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{fixture, ids, json, metadata, nano, nano_pairs, plain, special, strings};
use minfer_format::gguf::{Array, Gguf, Value};
use minfer_text::{EncodeOptions, Error, Tokenizer};
use proptest::prelude::*;

fn check(tokenizer: &Tokenizer, name: &str, text: &str, expected: &[u32]) {
    let got = plain(tokenizer, text);
    assert_eq!(
        got,
        expected,
        "{name}: {text:?}: {:?}",
        got.iter().map(|&id| tokenizer.token_text(id)).collect::<Vec<_>>()
    );
}

/// Reference: nano's own tokenizer.json in Python's `tokenizers`.
#[test]
fn nano_equals_tokenizers() {
    let vectors = json("byte-level-vectors.json");
    let from_gguf = Tokenizer::from_gguf(&metadata(nano_pairs("qwen2"))).unwrap();
    for tokenizer in [nano(), from_gguf] {
        for (text, expected) in
            vectors["texts"].as_array().unwrap().iter().zip(vectors["ids"]["nano"].as_array().unwrap())
        {
            let text = text.as_str().unwrap();
            check(&tokenizer, "nano", text, &ids(expected));
            assert_eq!(special(&tokenizer, text), ids(expected), "{text:?}");
        }
        for pair in vectors["special"].as_array().unwrap() {
            assert_eq!(special(&tokenizer, pair[0].as_str().unwrap()), ids(&pair[1]), "{}", pair[0]);
        }
    }
}

/// Reference: the same vocabulary behind each pre-tokenizer, in Python's `tokenizers`.
#[test]
fn every_pre_tokenizer_equals_tokenizers() {
    let vectors = json("byte-level-vectors.json");
    let texts = vectors["texts"].as_array().unwrap();
    let aliases = [
        ("llama3", "llama-bpe"),
        ("llama-v3", "llama-bpe"),
        ("joyai-llm", "deepseek-v3"),
        ("deepseek-r1-qwen", "qwen2"),
        ("starcoder", "smollm"),
        ("refact", "smollm"),
    ];
    let own = vectors["ids"]
        .as_object()
        .unwrap()
        .keys()
        .filter(|name| *name != "nano")
        .map(|name| (name.as_str(), name.as_str()));
    let mut tested = 0;
    for (name, same_as) in own.chain(aliases) {
        let tokenizer = Tokenizer::from_gguf(&metadata(nano_pairs(name))).unwrap();
        for (text, expected) in texts.iter().zip(vectors["ids"][same_as].as_array().unwrap()) {
            check(&tokenizer, name, text.as_str().unwrap(), &ids(expected));
        }
        tested += 1;
    }
    assert_eq!(tested, 14, "a pre-tokenizer without vectors, or vectors without a pre-tokenizer");
}

fn sentencepiece(data: &serde_json::Value) -> Tokenizer {
    let tokens = data["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap());
    let scores = data["scores"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap() as f32).collect();
    let types = data["types"].as_array().unwrap().iter().map(|t| t.as_i64().unwrap() as i32).collect();
    let meta = metadata([
        ("tokenizer.ggml.model", Value::String("llama".to_owned())),
        ("tokenizer.ggml.tokens", strings(tokens)),
        ("tokenizer.ggml.scores", Value::Array(Array::F32(scores))),
        ("tokenizer.ggml.token_type", Value::Array(Array::I32(types))),
    ]);
    Tokenizer::from_gguf(&meta).unwrap()
}

/// Reference: Python's `sentencepiece` with the same model. It puts its space in front of the whole text
/// only, we (as llama.cpp) in front of each stretch between added tokens, so texts with those are left out.
#[test]
fn sentencepiece_equals_sentencepiece() {
    let data = json("sentencepiece.json");
    let tokenizer = sentencepiece(&data);
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.wants_bos()), (Some(1), Some(2), true));
    let vectors = data["vectors"].as_array().unwrap();
    assert!(vectors.len() > 200);
    for pair in vectors {
        check(&tokenizer, "sentencepiece", pair[0].as_str().unwrap(), &ids(&pair[1]));
        let text = pair[0].as_str().unwrap().replace('\u{2581}', " ");
        assert_eq!(tokenizer.decode(&ids(&pair[1]), true), text);
    }
}

#[test]
fn added_tokens_are_matched_as_asked() {
    let tokenizer = nano();
    let (start, think) =
        (tokenizer.token_id("<|im_start|>").unwrap(), tokenizer.token_id("<think>").unwrap());
    let text = "<|im_start|><think>";
    assert_eq!(special(&tokenizer, text), [start, think]);
    let as_text = plain(&tokenizer, text);
    assert!(!as_text.contains(&start), "a control token in plain text stays text");
    assert_eq!(as_text.last(), Some(&think), "a token that is not special is always matched");
    assert_eq!(tokenizer.decode(&as_text, true), text);
    assert_eq!(tokenizer.decode(&[start, think], true), "<think>");
    assert_eq!(tokenizer.decode(&[start, think], false), text);
}

#[test]
fn ends_and_starts() {
    let tokenizer = Tokenizer::from_gguf(&metadata(nano_pairs("qwen2"))).unwrap();
    assert_eq!(tokenizer.end_tokens(), [0, 2]);
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.wants_bos()), (Some(0), Some(2), false));
    let opts = EncodeOptions { parse_special: false, add_bos: true };
    assert!(tokenizer.encode("", opts).unwrap().is_empty(), "this model wants no BOS");
    let llama = Tokenizer::from_gguf(&metadata(nano_pairs("llama-bpe"))).unwrap();
    assert_eq!(llama.encode("", opts).unwrap(), [0]);
    let config = serde_json::json!({"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "add_bos_token": true});
    let hf = Tokenizer::from_hf(&fixture("nano-tokenizer.json"), Some(&config)).unwrap();
    assert_eq!((hf.bos(), hf.eos()), (Some(1), Some(2)));
    assert_eq!(hf.encode("", opts).unwrap(), [1]);
}

#[test]
fn long_texts_are_encoded_whole_or_refused() {
    let tokenizer = Tokenizer::from_gguf(&metadata(nano_pairs("qwen2"))).unwrap();
    for unit in [" ", "\n", "a", "A", "é", "!"] {
        let most = minfer_text::tokenizer::MAX_RUN;
        let text = format!("{}x y", unit.repeat(most - 1));
        assert_eq!(tokenizer.decode(&plain(&tokenizer, &text), false), text);
        // The last space goes to the next word: the expression engine did not give up in between.
        let space_y = tokenizer.token_id("Ġy").unwrap();
        assert_eq!(plain(&tokenizer, &text).last(), Some(&space_y), "{unit:?}");
        let refused = tokenizer.encode(&unit.repeat(most + 1), EncodeOptions::default());
        assert!(matches!(refused, Err(Error::LongRun { .. })), "{unit:?}");
    }
}

/// Any characters, with more of those that pre-tokenizers and UTF-8 care about.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        any::<String>(),
        "[ \\n\\r\\t]{1,5}",
        "[a-zA-Z' 0-9.,]{1,12}",
        prop::sample::select(vec![
            "<think>",
            "</think>",
            "<|im_end|>",
            "e\u{301}",
            "日本語",
            "😀",
            "\u{85}",
            "'S",
            "１２３"
        ])
        .prop_map(str::to_owned),
    ];
    prop::collection::vec(part, 0..8).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// References: the two ways to make nano's tokenizer against each other, and the text itself for
    /// decoding (with a pre-tokenizer that does not normalise).
    #[test]
    fn random_texts(text in text()) {
        let hf = nano_once();
        let gguf = GGUF.get_or_init(|| Tokenizer::from_gguf(&metadata(nano_pairs("qwen2"))).unwrap());
        let ids = plain(hf, &text);
        prop_assert_eq!(&ids, &plain(gguf, &text));
        prop_assert_eq!(special(hf, &text), special(gguf, &text));
        let smollm = SMOLLM.get_or_init(|| Tokenizer::from_gguf(&metadata(nano_pairs("smollm"))).unwrap());
        prop_assert_eq!(smollm.decode(&plain(smollm, &text), false), &*text);
    }

    #[test]
    fn streams_add_up_to_decode(ids in prop::collection::vec(0u32..8300, 0..40), skip in any::<bool>()) {
        let tokenizer = nano_once();
        let mut stream = tokenizer.stream(skip);
        let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
        text += &stream.finish();
        prop_assert_eq!(text, tokenizer.decode(&ids, skip));
    }
}

static NANO: std::sync::OnceLock<Arc<Tokenizer>> = std::sync::OnceLock::new();
static GGUF: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
static SMOLLM: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();

fn nano_once() -> &'static Arc<Tokenizer> {
    NANO.get_or_init(|| Arc::new(nano()))
}

/// Reference: nano's tokenizer.json, for the file that was converted from it.
#[test]
fn nano_file_equals_tokenizers() {
    let gguf = Gguf::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/minfer-nano-Q8_0.gguf"))
        .unwrap();
    let (file, hf) = (Tokenizer::from_gguf(gguf.metadata()).unwrap(), nano());
    let vectors = json("byte-level-vectors.json");
    for text in vectors["texts"].as_array().unwrap() {
        let text = text.as_str().unwrap();
        assert_eq!(plain(&file, text), plain(&hf, text), "{text:?}");
    }
    for pair in vectors["special"].as_array().unwrap() {
        assert_eq!(special(&file, pair[0].as_str().unwrap()), ids(&pair[1]), "{}", pair[0]);
    }
    for id in 0..8300 {
        assert_eq!(file.token_bytes(id), hf.token_bytes(id), "{id}");
        assert_eq!(file.is_special(id), hf.is_special(id), "{id}");
    }
    println!("{file:?}");
}

/// What became of one vocabulary of llama.cpp.
enum Verdict {
    Equal(String),
    Different(String),
    Skipped(String),
}

fn run_vocab(path: &Path) -> Verdict {
    let gguf = Gguf::open(path).unwrap();
    let started = std::time::Instant::now();
    let tokenizer = match Tokenizer::from_gguf(gguf.metadata()) {
        Ok(tokenizer) => tokenizer,
        Err(error @ (Error::UnknownModel { .. } | Error::UnknownPre { .. } | Error::NoPre { .. })) => {
            return Verdict::Skipped(error.to_string());
        }
        Err(error) => return Verdict::Different(error.to_string()),
    };
    let beside = |suffix| std::fs::read_to_string(format!("{}.{suffix}", path.display()));
    let (Ok(inputs), Ok(outputs)) = (beside("inp"), beside("out")) else {
        return Verdict::Skipped("there are no vectors for it".to_owned());
    };
    let texts: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
    let lines: Vec<&str> = outputs.lines().collect();
    // The file ends with a separator, after which there is no text.
    let texts = &texts[..texts.len() - usize::from(texts.last() == Some(&""))];
    assert_eq!(texts.len(), lines.len(), "{}", path.display());
    let loaded = started.elapsed();
    let expected = lines.iter().map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect());
    let expected: Vec<Vec<u32>> = expected.collect();
    // llama.cpp does not normalise, the models do: on texts in normal form there is no difference.
    let ours: Vec<Vec<u32>> = texts.iter().map(|text| plain(&tokenizer, text)).collect();
    let raw = tokenizer.without_normalizer();
    let mut normalised = 0;
    for ((text, expected), ours) in texts.iter().zip(&expected).zip(ours) {
        let got = plain(&raw, text);
        if got != *expected || (ours != got && is_normal(text)) {
            return Verdict::Different(format!("{text:?}: {got:?} and {ours:?} instead of {expected:?}"));
        }
        normalised += usize::from(ours != got);
    }
    let note = if normalised > 0 { format!(", {normalised} only without NFC") } else { String::new() };
    Verdict::Equal(format!("{} texts{note}; loaded in {} ms", lines.len(), loaded.as_millis()))
}

/// Whether a text is in Unicode normal form C.
fn is_normal(text: &str) -> bool {
    let mut normal = tokenizers::NormalizedString::from(text);
    tokenizers::Normalizer::normalize(&tokenizers::normalizers::NFC, &mut normal).unwrap();
    normal.get() == text
}

/// Reference: the ids that llama.cpp's own tests expect.
#[test]
#[ignore = "needs MINFER_VOCAB_DIR, made by scripts/fetch-tokenizer-vectors.sh"]
fn llama_cpp_vocabularies() {
    let dir = std::env::var_os("MINFER_VOCAB_DIR").expect("MINFER_VOCAB_DIR");
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(dir);
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "gguf"));
    paths.sort();
    let (mut equal, mut different) = (0, 0);
    for path in paths {
        let verdict = match run_vocab(&path) {
            Verdict::Equal(what) => {
                equal += 1;
                format!("equal: {what}")
            }
            Verdict::Different(what) => {
                different += 1;
                format!("DIFFERENT: {what}")
            }
            Verdict::Skipped(why) => format!("skipped: {why}"),
        };
        println!("{:30} {verdict}", path.file_stem().unwrap().to_string_lossy());
    }
    assert!(equal > 0, "no vocabulary was tested");
    assert_eq!(different, 0);
}
