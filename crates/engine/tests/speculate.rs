//! Speculation against plain decoding: the same text, token for token.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::{Path, PathBuf};

use common::{cpu, open, path_from_env, with_head};
use minfer_cpu::Isa;
use minfer_engine::{
    Checkpoint, Engine, EngineOptions, Finish, Generate, Message, SamplerOptions, Speculate, Text,
};

fn nano_next() -> PathBuf {
    path_from_env("MINFER_NANO_NEXT_DIR")
}

/// All tokens of a greedy answer, end tokens not stopping it, with drafts made and kept per depth.
fn answer(
    engine: &mut Engine,
    text: &Text,
    prompt: &[u32],
    speculate: Speculate,
    n: usize,
) -> (Vec<u32>, String, Vec<u64>, Vec<u64>) {
    let options = Generate {
        max_tokens: Some(n),
        ignore_end: true,
        speculate,
        sampler: SamplerOptions::default(),
        ..Generate::default()
    };
    let mut session = engine.session();
    let mut generation = session.generate(text, prompt, &options).unwrap();
    let (mut tokens, mut out) = (Vec::new(), String::new());
    while let Some(piece) = generation.next_piece().unwrap() {
        tokens.extend(piece.token);
        out.push_str(&piece.text);
    }
    assert!(matches!(generation.finish(), Some(Finish::MaxTokens | Finish::ContextFull)));
    let acceptance = generation.acceptance().cloned().unwrap_or_default();
    (tokens, out, acceptance.drafted, acceptance.accepted)
}

/// A tokenizer of single characters with as many tokens as the tiny models have.
fn write_tokenizer(dir: &Path) {
    let characters = ('!'..='~').chain('\u{a1}'..='\u{ac}').chain('\u{ae}'..='\u{ff}').take(131);
    let vocab: serde_json::Map<String, serde_json::Value> =
        characters.enumerate().map(|(id, c)| (c.to_string(), id.into())).collect();
    let byte_level = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let json = serde_json::json!({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] } });
    std::fs::write(dir.join("tokenizer.json"), json.to_string()).unwrap();
}

/// Every kind of head: 100 tokens after prompts of several lengths, up to the end of the context, are those of plain
/// decoding. The heads' weights are random, so that most drafts are refused; trained ones are below.
#[test]
fn every_head_changes_nothing() {
    for (family, head) in [
        ("qwen4_exp", "mtp_hf.safetensors"),
        ("glm5_next", "mtp.safetensors"),
        ("deepseek_v4", "mtp_legacy.safetensors"),
        ("deepseek_v4", "dspark.safetensors"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let model = Checkpoint::open(&with_head(dir.path(), family, head)).unwrap();
        write_tokenizer(dir.path());
        let model_with_text = Checkpoint::open(dir.path()).unwrap();
        let text = Text::open(&model_with_text).unwrap();
        let options = EngineOptions {
            context: Some(180),
            draft: true,
            max_rows: 32,
            ..EngineOptions::new(cpu(2, Isa::detect()))
        };
        let mut engine = open(&model, options);
        let free = (engine.free_pages(), engine.free_state_slots());
        let (mut drafted, mut accepted) = (0, 0);
        for len in [1, 80] {
            let prompt: Vec<u32> = (0..len).map(|i| (i * 37 + 11) % 131).collect();
            let plain = answer(&mut engine, &text, &prompt, Speculate::Off, 100);
            for depth in [2, 7] {
                let fast = answer(&mut engine, &text, &prompt, Speculate::Head { depth }, 100);
                assert_eq!(fast.0, plain.0, "{family} with {head}, {len} tokens, depth {depth}");
                drafted += fast.2.iter().sum::<u64>();
                accepted += fast.3.iter().sum::<u64>();
            }
        }
        println!("{family} with {head}: {accepted} of {drafted} drafts kept");
        assert!(drafted > 500, "{drafted} drafts");
        assert_eq!((engine.free_pages(), engine.free_state_slots()), free, "everything is given back");
    }
}

/// 50 prompts of 200 tokens: speculation at depth 1, 2 and 3 gives the text of plain decoding, byte for byte.
#[test]
#[ignore = "needs MINFER_NANO_NEXT_DIR"]
fn speculation_changes_nothing() {
    let model = Checkpoint::open(&nano_next()).unwrap();
    let text = Text::open(&model).unwrap();
    let devices = cpu(2, Isa::detect());
    let mut engine =
        open(&model, EngineOptions { context: Some(512), draft: true, ..EngineOptions::new(devices) });
    let free = (engine.free_pages(), engine.free_state_slots());
    let topics = [
        "a rabbit",
        "the sea",
        "an old clock",
        "two friends",
        "a red ball",
        "the moon",
        "a robot",
        "rain",
        "a king",
        "bread",
    ];
    let asks = [
        "Tell me a story about {}.",
        "What is {}?",
        "Write a poem about {}.",
        "Why do people like {}?",
        "Write a Python function about {}.",
    ];
    let mut totals = vec![(vec![0u64; 3], vec![0u64; 3]); 4];
    for prompt in asks.iter().flat_map(|ask| topics.iter().map(move |t| ask.replace("{}", t))) {
        let ids = text.encode_chat(&[Message::new("user", prompt.as_str())]).unwrap();
        let plain = answer(&mut engine, &text, &ids, Speculate::Off, 200);
        assert_eq!(plain.0.len(), 200);
        for (depth, total) in totals.iter_mut().enumerate().skip(1) {
            let fast = answer(&mut engine, &text, &ids, Speculate::Head { depth }, 200);
            assert_eq!(fast.0, plain.0, "{prompt} at depth {depth}");
            assert_eq!(fast.1, plain.1, "{prompt} at depth {depth}");
            for (i, (d, a)) in fast.2.iter().zip(&fast.3).enumerate() {
                total.0[i] += d;
                total.1[i] += a;
            }
        }
    }
    for (depth, (drafted, accepted)) in totals.iter().enumerate().skip(1) {
        let rates: Vec<_> = drafted
            .iter()
            .zip(accepted)
            .take(depth)
            .map(|(d, a)| format!("{:.3}", *a as f64 / *d as f64))
            .collect();
        println!("depth {depth}: first drafts kept {}, of {} rounds", rates.join(", "), drafted[0]);
        assert!(accepted[0] * 2 > drafted[0], "the head is trained: most first drafts are right");
    }
    assert_eq!((engine.free_pages(), engine.free_state_slots()), free, "everything is given back");
}
