//! `--draft-head` and `--official-rounding`: what they do to a directory, and what they refuse.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::{Path, PathBuf};

use common::{Said, minfer, refused, said};
use serde_json::{Value as Json, json};

fn oracle(path: &str) -> String {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/oracle");
    data.join(path).to_str().unwrap().to_string()
}

/// A copy of an oracle's model with a tokenizer of single characters, and settings added to its configuration.
fn model(dir: &Path, family: &str, settings: &Json) -> String {
    let from = PathBuf::from(oracle(family));
    std::fs::copy(from.join("model.safetensors"), dir.join("model.safetensors")).unwrap();
    let mut config: Json = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    config.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let vocab_size = config["vocab_size"].as_u64().unwrap() as usize;
    let characters = ('!'..='~').chain('\u{a1}'..='\u{ac}').chain('\u{ae}'..='\u{ff}').take(vocab_size);
    let vocab: serde_json::Map<String, Json> =
        characters.enumerate().map(|(id, c)| (c.to_string(), id.into())).collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] } });
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    dir.to_str().unwrap().to_string()
}

#[track_caller]
fn succeeds(args: &[&str]) -> Said {
    let said = said(minfer(args));
    assert_eq!(said.code, Some(0), "{}", said.err);
    said
}

/// Both heads of DeepSeek V4 draft from their own files, and leave the text as it is.
#[test]
fn a_head_from_its_own_file() {
    let dspark = json!({
        "dspark_block_size": 5, "dspark_markov_rank": 12, "dspark_noise_token_id": 130,
        "dspark_target_layer_ids": [2, 3, 4] });
    for (file, settings, kind) in [
        ("mtp_legacy.safetensors", json!({}), "multi-token prediction, one token after another"),
        ("dspark.safetensors", dspark, "DSpark, 5 tokens at once"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (model, head) =
            (model(dir.path(), "deepseek_v4", &settings), oracle(&format!("deepseek_v4/{file}")));
        let run = |more: &[&str]| {
            let args = ["run", "-m", &model, "--raw", "-n", "20", "--ignore-eos", "--kv", "f32", "ABCabc"];
            succeeds(&[&args, more].concat())
        };
        let drafted = run(&["--draft-head", &head, "--speculate", "mtp:2"]);
        assert!(drafted.err.contains("drafts kept: "), "{}", drafted.err);
        assert_eq!(drafted.out, run(&[]).out, "{file}");
        let info = succeeds(&["info", &model, "--draft-head", &head]).out;
        assert!(info.contains(&format!("draft head    yes: {kind} (run --speculate)\n")), "{info}");
        let bench = ["bench", "-m", &model, "-p", "0", "-n", "4", "-r", "1", "-o", "json"];
        let bench = succeeds(&[&bench[..], &["--draft-head", &head, "--speculate", "mtp:2"]].concat()).out;
        assert!(bench.contains("\"speculate\""), "{bench}");
    }
}

#[test]
fn heads_that_do_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let (model, head) = (oracle("deepseek_v4"), oracle("deepseek_v4/mtp_legacy.safetensors"));
    let missing = dir.path().join("none").to_str().unwrap().to_string();
    let text = dir.path().join("text").to_str().unwrap().to_string();
    std::fs::write(&text, "this is text, and no tensors").unwrap();
    let gguf = common::nano_path().to_str().unwrap().to_string();
    let llama = oracle("llama");
    for (model, head, error) in [
        (&model, &missing, format!("no such file: {missing}")),
        (&model, &text, format!("{text} is not a safetensors file: its header does not begin with '{{'")),
        (
            &gguf,
            &head,
            format!(
                "{head} cannot join {gguf}, which is a GGUF file: a draft head in a file of its own needs a Hugging \
                 Face directory; leave out --draft-head, or name the directory"
            ),
        ),
        (
            &llama,
            &head,
            format!(
                "{head} has no tensor of a draft head for {llama} (llama); name the file that its makers give for it, \
                 or leave out --draft-head"
            ),
        ),
    ] {
        let error = format!("Error: {error}");
        refused(&["info", model, "--draft-head", head], 1, &error);
        refused(&["run", "-m", model, "--draft-head", head, "--speculate", "auto", "hi"], 1, &error);
        refused(
            &["bench", "-m", model, "--draft-head", head, "--speculate", "auto", "-o", "json"],
            1,
            &error,
        );
    }
    let unused = "Error: --draft-head names a draft head that nothing uses: add --speculate auto or mtp, or leave it out";
    refused(&["run", "-m", &model, "--draft-head", &head, "hi"], 2, unused);
    refused(&["bench", "-m", &model, "--draft-head", &head], 2, unused);
    // The built-in model and shapes take none.
    for args in
        [&["run", "hi", "--speculate", "mtp"][..], &["bench", "--shape", "qwen3-0.6b:q4_0"], &["info"]]
    {
        let said = said(minfer(&[args, &["--draft-head", &head]].concat()));
        assert_eq!(said.code, Some(2), "{args:?}: {}", said.err);
        assert!(said.err.starts_with("Error: "), "{args:?}: {}", said.err);
    }
}

/// The flag reaches the graph, changes the text, and is refused elsewhere by name.
#[test]
fn official_rounding() {
    let dir = tempfile::tempdir().unwrap();
    let official = model(dir.path(), "deepseek_v4_official", &json!({}));
    let dump = dir.path().join("graph.json");
    // More rows than the indexer chooses, and random choices, which show small differences.
    let prompt = "ABC;<=>DEF@((9:;?A".repeat(6);
    let run = |more: &[&str]| {
        let args = ["run", "-m", &official, "--raw", "-n", "40", "--ignore-eos", "--temp", "1", &prompt];
        let said = succeeds(&[&args[..], &["--dump-graph", dump.to_str().unwrap()], more].concat());
        let rounds = std::fs::read_to_string(&dump).unwrap().matches("\"round_trip\"").count();
        (said.out, rounds)
    };
    let ((with, rounds), (without, none)) = (run(&["--official-rounding"]), run(&[]));
    assert_eq!((rounds, none), (6, 0));
    assert_ne!(with, without);
    succeeds(&[
        "bench",
        "-m",
        &official,
        "--official-rounding",
        "-p",
        "8",
        "-n",
        "2",
        "-r",
        "1",
        "-o",
        "json",
    ]);

    let line = |model: &str, why: &str| {
        format!(
            "Error: {model}: --official-rounding is for deepseek_v4 with its published sizes, but {why}; leave it out"
        )
    };
    let (small, nano) = (oracle("deepseek_v4"), common::nano_path().to_str().unwrap().to_string());
    let why = "24 of the 32 numbers of a head are not rotated, which are not whole blocks of 64";
    for (args, model, why) in [
        (&["bench", "-p", "8", "-n", "0", "-o", "json"][..], &small, why),
        (&["run", "hi"], &nano, "this model is qwen3"),
    ] {
        let said = said(minfer(&[args, &["-m", model, "--official-rounding"]].concat()));
        // A debug build of bench says so first.
        let last = said.err.lines().next_back();
        assert_eq!((said.code, last, said.out.as_str()), (Some(1), Some(line(model, why).as_str()), ""));
    }
}
