//! `--speculate`: its forms, what it refuses, and that the text stays the same.
#![cfg(feature = "builtin-model")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Said, minfer, nano_path, refused, said};
use serde_json::Value as Json;

const SUM: &str = "What is 27 + 58?";
const ANSWER: &str = "27 + 58 = 85.\n";
const NO_HEAD: &str =
    "Error: the model has no draft head, which --speculate mtp needs; use --speculate auto or leave it out";

fn nano() -> String {
    nano_path().to_str().unwrap().to_string()
}

/// One `Error:` line that has all of these parts, before any model is opened.
#[track_caller]
fn usage_error(args: &[&str], parts: &[&str]) {
    let said = said(minfer(args));
    assert_eq!((said.code, said.err.lines().count(), said.out.as_str()), (Some(2), 1, ""), "{}", said.err);
    for part in parts {
        assert!(
            said.err.starts_with("Error: ") && said.err.contains(part),
            "{part:?} is not in {}",
            said.err
        );
    }
}

#[test]
fn forms() {
    let form = "must be off, auto, mtp or mtp:DEPTH with a depth of 1 to 7";
    for wrong in ["on", "mtp:0", "mtp:8", "mtp:", "mtp:two", "auto:2"] {
        usage_error(&["run", "-m", "none", "--speculate", wrong, "hi"], &[wrong, "--speculate", form]);
        usage_error(&["bench", "-m", "none", "--speculate", wrong], &[wrong, "--speculate", form]);
    }
}

#[test]
fn sampled_text_is_refused() {
    let args = ["run", "-m", "none", "--speculate", "mtp:2", "--temp", "0.7", "hi"];
    usage_error(&args, &["speculation needs greedy decoding (--temp 0)"]);
}

#[test]
fn batches_are_refused() {
    let args = ["bench", "-m", "none", "--speculate", "mtp", "-b", "1,4"];
    usage_error(&args, &["--speculate measures one sequence at a time"]);
}

#[test]
fn models_without_a_head() {
    refused(&["run", "-m", &nano(), "--speculate", "mtp", SUM], 1, NO_HEAD);
    refused(&["run", "-m", &nano(), "--speculate", "mtp:3", SUM], 1, NO_HEAD);
    let shape = ["bench", "--shape", "smollm2-135m:q4_0", "--speculate", "mtp:2", "-o", "json"];
    refused(&shape, 1, NO_HEAD);
}

#[test]
fn auto_without_a_head_is_off() {
    let quiet = said(minfer(&["run", "-m", &nano(), "--speculate", "auto", SUM]));
    assert_eq!((quiet.code, quiet.out.as_str()), (Some(0), ANSWER), "{}", quiet.err);
    assert_eq!(quiet.err.lines().count(), 1, "{}", quiet.err);
    let verbose = said(minfer(&["run", "--verbose", "--speculate", "auto", SUM]));
    assert_eq!(verbose.out, ANSWER);
    assert!(verbose.err.contains("speculation is off: the model has no draft head\n"), "{}", verbose.err);
    let sampled =
        said(minfer(&["run", "--verbose", "--speculate", "auto", "--temp", "0.5", "-n", "2", "--raw", "a"]));
    let line = "speculation is off: decoding is not greedy (--temp 0)\n";
    assert!(sampled.code == Some(0) && sampled.err.contains(line), "{}", sampled.err);
}

fn nano_next() -> String {
    let dir = std::env::var("MINFER_NANO_NEXT_DIR").expect("MINFER_NANO_NEXT_DIR names the model");
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(dir).display().to_string()
}

#[track_caller]
fn succeeds(args: &[&str]) -> Said {
    let said = said(minfer(args));
    assert_eq!(said.code, Some(0), "{}", said.err);
    said
}

/// The numbers of `drafts kept: 0.83 of 120, 0.69 of 120`.
#[track_caller]
fn drafts_kept(err: &str) -> Vec<(f64, u64)> {
    let line = err.lines().find_map(|l| l.strip_prefix("drafts kept: ")).unwrap_or_else(|| panic!("{err}"));
    let pairs = line.split(", ").map(|p| p.split_once(" of ").unwrap());
    pairs.map(|(kept, made)| (kept.parse().unwrap(), made.parse().unwrap())).collect()
}

#[test]
#[ignore = "needs MINFER_NANO_NEXT_DIR"]
fn the_text_stays_the_same() {
    let dir = nano_next();
    for prompt in [SUM, "Write this as a JSON list of strings: yellow, boastful, woman"] {
        let run = |how: &str| {
            succeeds(&["run", "-m", &dir, "-n", "60", "--ignore-eos", "--speculate", how, prompt])
        };
        let off = run("off");
        assert!(!off.err.contains("drafts kept"), "{}", off.err);
        for (how, depth) in [("mtp:1", 1), ("mtp:2", 2), ("mtp:5", 5), ("mtp", 2), ("auto", 2)] {
            let on = run(how);
            assert_eq!(on.out, off.out, "{how}");
            let kept = drafts_kept(&on.err);
            assert_eq!(kept.len(), depth, "{}", on.err);
            // A head that never drafts well is broken: this model's first drafts are mostly kept.
            assert!(kept[0].1 > 0 && kept[0].0 > 0.3, "{}", on.err);
        }
    }
    let verbose = succeeds(&["run", "-m", &dir, "-n", "4", "--verbose", "--speculate", "mtp:1", SUM]);
    assert!(verbose.err.contains("speculating 1 token ahead with the draft head"), "{}", verbose.err);
}

#[test]
#[ignore = "needs MINFER_NANO_NEXT_DIR"]
fn bench_with_drafts() {
    let dir = nano_next();
    let args = ["bench", "-m", &dir, "-p", "8", "-n", "12", "-d", "0,20", "-r", "2", "--speculate", "mtp:2"];
    let rows: Json = serde_json::from_str(&succeeds(&[&args[..], &["-o", "json"]].concat()).out).unwrap();
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 4);
    assert!(rows.iter().all(|r| r["tokens_per_second"].as_f64().unwrap() > 0.0));
    for (pp, tg) in [(&rows[0], &rows[1]), (&rows[2], &rows[3])] {
        assert!(pp["speculate"].is_null() && tg["weight_gbps"].is_null());
        let drafts = &tg["speculate"];
        assert_eq!(drafts["depth"], 2);
        let sum = |what: &str| -> u64 {
            drafts[what].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum()
        };
        // Each round makes one token and keeps some drafts: 12 timed tokens in all.
        let rounds = drafts["drafted"][0].as_u64().unwrap();
        assert!(sum("accepted") <= sum("drafted") && rounds + sum("accepted") <= 12, "{drafts}");
        assert!(rounds > 0);
    }
    let table = succeeds(&args).out;
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].ends_with("| weights GB/s | drafts kept |") && lines.len() == 6, "{table}");
    assert!(lines[3].contains("| tg12 mtp:2 |") && lines[3].contains(" of "), "{table}");
}

/// From `config.json`. Each of 6 layers keeps 8 matrices of 32 x 32 and 3 rows of 512 numbers for its
/// convolution, the n-gram layer 3 * 3 rows of 4 * 256: 67,584 numbers of 4 bytes. Each of 2 layers keeps K and
/// V of 2 * 64 numbers and two index keys of 32 per token: 640 numbers. The table has 128 * n rows.
#[test]
#[ignore = "needs MINFER_NANO_NEXT_DIR"]
fn info_of_a_hybrid_model() {
    let dir = nano_next();
    let config: Json = serde_json::from_slice(&std::fs::read(format!("{dir}/config.json")).unwrap()).unwrap();
    let info: Json =
        serde_json::from_str(&succeeds(&["info", &dir, "--json", "--context", "100"]).out).unwrap();
    let types = config["layer_types"].as_array().unwrap();
    let linear = types.iter().filter(|t| *t == "linear_attention").count();
    let kinds = serde_json::json!([
        { "kind": "gated DeltaNet", "layers": linear },
        { "kind": "block-sparse attention", "layers": types.len() - linear },
    ]);
    assert_eq!(info["layer_kinds"], kinds);
    assert_eq!(info["draft_head"], true);
    let memory = &info["memory"];
    assert_eq!(memory["recurrent_bytes_per_sequence"], 67_584 * 4);
    // 528 numbers a token: the pooled index keys of a block of 4 share a row, the raw ones of the last 4 are a window.
    assert_eq!(memory["kv_bytes_per_token"]["f16"], 528 * 2);
    assert_eq!((&memory["context"], &memory["kv_bytes_at_context"]["f32"]), (&100.into(), &211_200.into()));
    assert_eq!(memory["window_bytes_per_sequence"]["f16"], 512);
    let rows = info["ngram_table"]["rows"].as_u64().unwrap();
    assert!(rows > 16 * 20_011 && rows.is_multiple_of(128), "{rows}");
    let text = succeeds(&["info", &dir]).out;
    for part in ["gated DeltaNet", "per sequence, whatever its length", "draft head    yes", "n-gram table"] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}
