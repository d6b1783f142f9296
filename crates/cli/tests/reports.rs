//! `info`, `backends`, `bench` and `--help`: that people and programs can read them.
#![cfg(feature = "builtin-model")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{example, minfer, nano_path, said};
use serde_json::Value as Json;

#[track_caller]
fn stdout_of(args: &[&str]) -> String {
    let said = said(minfer(args));
    assert_eq!(said.code, Some(0), "{}", said.err);
    said.out
}

#[track_caller]
fn json_of(args: &[&str]) -> Json {
    serde_json::from_str(&stdout_of(args)).unwrap()
}

#[test]
fn info_of_the_built_in_model() {
    let text = stdout_of(&["info"]);
    for part in [
        "minfer-nano (built in) (GGUF v3",
        "architecture  qwen3\n",
        "8 of width 512, feed-forward 1536",
        "8 heads of 64, 4 for keys and values",
        "2048 tokens",
        "vocabulary    8192",
        "29.4 M",
        "Q8_0",
        "gpt2, qwen2; 8192 tokens",
        "chat template yes",
        "30.0 MiB in files",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

/// Sizes from models/README.md: 8 layers, 4 KV heads of 64, so K and V take 8 * 2 * 4 * 64 numbers a token.
#[test]
fn info_as_json() {
    let info = json_of(&["info", "--json", "--tensors", nano_path().to_str().unwrap()]);
    assert_eq!(info["sizes"]["architecture"], "qwen3");
    assert_eq!((&info["sizes"]["layers"], &info["sizes"]["kv_heads"]), (&8.into(), &4.into()));
    assert_eq!(info["memory"]["kv_bytes_per_token"]["f16"], 4096 * 2);
    assert_eq!(info["memory"]["kv_bytes_per_token"]["f32"], 4096 * 4);
    assert_eq!(info["memory"]["kv_bytes_at_default_context"]["f16"], 4096 * 2 * 2048);
    assert_eq!(info["memory"]["file_bytes"], 31_505_376);
    assert_eq!(info["tokenizer"]["chat_template"], true);
    let tensors = info["tensors"].as_array().unwrap();
    let counted: u64 =
        info["tensor_types"].as_array().unwrap().iter().map(|t| t["tensors"].as_u64().unwrap()).sum();
    assert_eq!(counted as usize, tensors.len());
    let embedding = tensors.iter().find(|t| t["name"] == "token_embd.weight").unwrap();
    assert_eq!(embedding["shape"], serde_json::json!([8192, 512]));
}

/// The sizes of state follow `--context`, which ends where the model's does.
#[test]
fn info_about_structure() {
    let info = json_of(&["info", "--json", "--context", "100"]);
    assert_eq!(info["layer_kinds"], serde_json::json!([{ "kind": "attention", "layers": 8 }]));
    assert_eq!((&info["draft_head"], &info["ngram_table"]), (&false.into(), &Json::Null));
    let memory = &info["memory"];
    assert_eq!((&memory["context"], &memory["recurrent_bytes_per_sequence"]), (&100.into(), &0.into()));
    assert_eq!(memory["kv_bytes_at_context"]["f16"], 4096 * 2 * 100);
    assert_eq!(memory["default_context"], 2048);
    let text = stdout_of(&["info", "--ctx", "100"]);
    for part in ["layer kinds   8 attention\n", "draft head    no\n", " at 100 tokens\n"] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let error = "Error: a context of 5000 tokens (--ctx) exceeds the 2048 that this model was made for";
    common::refused(&["info", "--context", "5000"], 1, error);
}

#[test]
fn info_of_a_shape() {
    let info = json_of(&["info", "--json", "--shape", "qwen3-0.6b:q4_0"]);
    assert_eq!(info["sizes"]["layers"], 28);
    // The published model has 596 million parameters with its tied embedding counted once.
    let parameters = info["parameters"].as_u64().unwrap();
    assert!((595_000_000..598_000_000).contains(&parameters), "{parameters}");
    assert_eq!((&info["tokenizer"], &info["memory"]["file_bytes"]), (&Json::Null, &0.into()));
    assert!(
        stdout_of(&["info", "--shape", "qwen3-30b-a3b:q4_k_m"]).contains("128 of width 768, 8 per token")
    );
}

#[test]
fn backends_table() {
    let text = stdout_of(&["backends"]);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[1].starts_with("0   cpu      yes       1 device"), "{text}");
    assert_eq!(lines[3], "2   cuda     no        no: the CUDA backend is compiled only with --features cuda");
    assert!(text.contains("threads"), "{text}");
    let report = json_of(&["backends", "--json"]);
    let names: Vec<_> =
        report["backends"].as_array().unwrap().iter().map(|b| b["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["cpu", "metal", "cuda", "vulkan"]);
    assert_eq!(report["devices"][0]["id"], "cpu");
    assert_eq!(
        (&report["backends"][1]["compiled"], &report["backends"][1]["available"]),
        (&false.into(), &false.into())
    );
}

#[test]
fn backends_that_are_compiled_in_but_not_there() {
    let said = said(example("fake_cuda", &["backends"]));
    let expected =
        "2   cuda     yes       no: no CUDA device is available, or CUDA is disabled (MINFER_DISABLE_CUDA)";
    assert!(said.out.lines().any(|l| l == expected), "{}", said.out);
}

#[test]
fn bench_as_json() {
    let args =
        ["bench", "-p", "16", "-n", "4", "-d", "0,70", "-b", "1,2", "-t", "1,2", "-r", "2", "-o", "json"];
    let rows = json_of(&args);
    let rows = rows.as_array().unwrap();
    // 2 depths, 2 batches, 2 thread counts, and both phases.
    assert_eq!(rows.len(), 16);
    for row in rows {
        let samples: Vec<f64> =
            row["samples"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
        assert_eq!((samples.len(), &row["repetitions"]), (2, &2.into()));
        let mean = row["tokens_per_second"].as_f64().unwrap();
        assert!(mean > 0.0 && (mean - (samples[0] + samples[1]) / 2.0).abs() < 1e-6 * mean, "{row}");
        assert!(row["stddev"].as_f64().unwrap() >= 0.0);
        assert_eq!((&row["device"], &row["kv"]), (&"cpu".into(), &"f16".into()));
        assert_eq!(row["weights"], "repacked");
        assert!(
            row["weight_bytes"].as_u64().unwrap() > 20_000_000 && row["load_seconds"].as_f64().unwrap() > 0.0
        );
        assert_eq!(row["model"], "minfer-nano (built in)");
        assert!(
            row["model_bytes"].as_u64().unwrap() > 30_000_000
                && row["build"].as_str().unwrap().starts_with("minfer ")
        );
    }
    let (pp, tg) = (&rows[0], &rows[1]);
    assert_eq!((&pp["test"], &pp["prompt"], &pp["gen"]), (&"pp16".into(), &16.into(), &0.into()));
    assert_eq!((&tg["test"], &tg["prompt"], &tg["gen"]), (&"tg4".into(), &0.into(), &4.into()));
    assert!(pp["weight_gbps"].is_null() && tg["weight_gbps"].as_f64().unwrap() > 0.0);
    // About 31 MB are read for a token, so the two figures hang together.
    let per_token = tg["weight_gbps"].as_f64().unwrap() * 1e9 / tg["tokens_per_second"].as_f64().unwrap();
    assert!((25e6..40e6).contains(&per_token), "{per_token}");
}

#[test]
fn bench_as_a_table() {
    let text = stdout_of(&["bench", "-p", "8", "-n", "2", "-d", "32", "-b", "2", "-t", "2", "-r", "1"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!(lines[2].contains("| pp8 @ d32 x2 |") && lines[3].contains("| tg2 @ d32 x2 |"), "{text}");
    assert!(lines.iter().all(|l| l.starts_with("| ") && l.ends_with(" |")), "{text}");
}

#[test]
fn help() {
    for (args, parts) in [
        (&["--help"][..], &["Examples:", "run", "info", "backends", "bench"][..]),
        (&["run", "--help"], &["--backend", "[default: 0]", "--raw", "Examples:", "built-in"]),
        (&["bench", "--help"], &["[default: 512]", "[default: 128]", "--shape", "Examples:"]),
        (&["info", "--help"], &["--tensors", "--json", "--context"]),
    ] {
        let text = stdout_of(args);
        for part in parts {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        // Longer lines wrap badly in a terminal of usual width.
        assert!(text.lines().all(|l| l.chars().count() <= 120), "{text}");
    }
    assert!(stdout_of(&["--version"]).starts_with("minfer 0."));
    // No command at all: the help, as a mistake.
    let bare = said(minfer(&[]));
    assert_eq!((bare.code, bare.out.as_str()), (Some(2), ""));
    assert!(bare.err.contains("Usage:"));
}
