//! The hybrid families on the command line: what `info` says of their shapes and draft heads, and that `bench` runs or
//! refuses the shapes.
#![cfg(feature = "builtin-model")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::Path;

use common::{minfer, said};
use minfer_format::{BlockType, Gguf, GgufWriter};
use serde_json::{Value as Json, json};

#[track_caller]
fn stdout_of(args: &[&str]) -> String {
    let said = said(minfer(args));
    assert_eq!(said.code, Some(0), "{}", said.err);
    said.out
}

fn info(shape: &str, context: &str) -> Json {
    serde_json::from_str(&stdout_of(&["info", "--json", "--shape", shape, "--context", context])).unwrap()
}

/// Without the lines about tensor types, whose numbers are the format's matter.
fn text(shape: &str, context: &str) -> String {
    let text = stdout_of(&["info", "--shape", shape, "--context", context]);
    let kept = text.lines().filter(|l| !l.starts_with("tensors") && !l.starts_with("   "));
    kept.map(|l| format!("{l}\n")).collect()
}

#[test]
fn info_of_qwen() {
    let want = "\
model         qwen3.8-flash-next:bf16 (shape)
architecture  qwen4exp
layers        48 of width 2560, feed-forward 640
layer kinds   36 gated DeltaNet, 12 block-sparse attention
experts       512 of width 640, 10 per token
attention     24 heads of 256, 2 for keys and values
context       262144 tokens, rope theta 10000000
vocabulary    248320
n-gram table  per_layer_token_embd.weight: 320001536 rows, 95.4 GiB that stay on disk
draft head    yes: multi-token prediction, one token after another (run --speculate)
parameters    179.6 B, 51.2 B of them in the n-gram table, 2.6 B in the draft head; a token is computed with 6.7 B
tokenizer     none
weights       233.2 GiB in memory on the CPU, repacked (9.8 MiB with --no-repack)
KV per token  24.8 KiB in f16, 13.1 KiB in q8_0, 49.5 KiB in f32
KV in all     2.4 GiB in f16, 1.3 GiB in q8_0, 4.7 GiB in f32 at 100000 tokens
recurrent     112.6 MiB per sequence, whatever its length
windows       12.0 KiB in f16, 6.4 KiB in q8_0, 24.0 KiB in f32 per sequence, whatever its length
in all        235.7 GiB with f16, 234.5 GiB with q8_0, 238.0 GiB with f32: weights and one such sequence
";
    assert_eq!(text("qwen3.8-flash-next:bf16", "100000"), want);
    let info = info("qwen3.8-flash-next:bf16", "1000");
    let table = json!({
        "tensor": "per_layer_token_embd.weight",
        "rows": 320_001_536,
        "parameters": 51_200_245_760u64,
        "bytes": 102_400_491_520u64,
        "on_disk": true,
        "file": null,
    });
    assert_eq!(info["ngram_table"], table);
    // 12 layers of 2 * 2 * 256 + 128 / 4 numbers; the published model is said to have "≈6B" active parameters, its head
    // of 0.64 B left out.
    let memory = &info["memory"];
    assert_eq!(memory["kv_bytes_per_token"]["f16"], 12 * 1056 * 2);
    let active = info["active_parameters"].as_f64().unwrap() / 1e9;
    assert!((active - 248_320.0 * 2560.0 / 1e9 - 6.0).abs() < 0.25, "{active}");
    // The table is in no sum of memory.
    let number = |v: &Json| v.as_u64().unwrap();
    let (weights, recurrent) =
        (number(&memory["cpu_weight_bytes"]), number(&memory["recurrent_bytes_per_sequence"]));
    assert!(weights < number(&info["parameters"]) * 2 - 102_000_000_000, "{weights}");
    // The raw keys of an open block of 4 positions.
    let windows = number(&memory["window_bytes_per_sequence"]["f32"]);
    assert_eq!(windows, 12 * 4 * 128 * 4);
    assert_eq!(recurrent, (36 * (3 * 10240 + 48 * 128 * 128) + 9 * 4 * 2560) * 4);
    assert_eq!(
        number(&memory["bytes_at_context"]["f32"]),
        weights + recurrent + windows + 12 * 1056 * 4 * 1000
    );
}

#[test]
fn info_of_deepseek() {
    let shape = text("deepseek-v4-flash:bf16", "1000000");
    for line in [
        "layer kinds   21 windowed attention with rows of 4, 20 windowed attention with rows of 128, 2 windowed attention",
        "experts       256 of width 2048, 6 per token",
        "attention     64 heads of 512, 1 for keys and values",
        "draft head    yes: multi-token prediction, one token after another (run --speculate)",
        "parameters    291.0 B, 6.7 B in the draft head; a token is computed with 13.3 B",
        "KV per token  6.7 KiB in f16, 3.6 KiB in q8_0, 13.4 KiB in f32",
        "KV in all     6.4 GiB in f16, 3.4 GiB in q8_0, 12.8 GiB in f32 at 1000000 tokens",
        "recurrent     11.4 MiB per sequence, whatever its length",
        "windows       5.4 MiB in f16, 2.9 MiB in q8_0, 10.8 MiB in f32 per sequence, whatever its length",
    ] {
        assert!(shape.lines().any(|l| l == line), "{line:?} is not in\n{shape}");
    }
    // Published as 13 B, rounded.
    let info = info("deepseek-v4-flash:q2_k", "1000");
    let active = info["active_parameters"].as_f64().unwrap() / 1e9;
    assert!((active - 13.0).abs() < 0.5, "{active}");
    assert_eq!(info["ngram_table"], Json::Null);
}

#[test]
fn info_of_glm() {
    let shape = text("glm-5.3-flash:q4_k_m", "1000");
    for line in [
        "layer kinds   34 Kimi delta attention, 11 block-sparse attention",
        "experts       288 of width 2048, 8 per token, in 42 of 45 layers",
        "context       1048576 tokens, nothing is rotated",
        "draft head    yes: multi-token prediction, one token after another (run --speculate)",
        "parameters    320.8 B, 7.4 B in the draft head; a token is computed with 16.7 B",
        "KV per token  11.7 KiB in f16, 6.2 KiB in q8_0, 23.4 KiB in f32",
        "windows       22.0 KiB in f16, 11.7 KiB in q8_0, 44.0 KiB in f32 per sequence, whatever its length",
    ] {
        assert!(shape.lines().any(|l| l == line), "{line:?} is not in\n{shape}");
    }
    // Published as 18 B: with the embedding (0.6 B) and the draft head (0.4 B), which a token of the model needs not.
    let info = info("glm-5.3-flash:q4_k_m", "1000");
    let active = info["active_parameters"].as_f64().unwrap() / 1e9;
    assert!((active + 0.63 + 0.4 - 18.0).abs() < 0.5, "{active}");
    assert_eq!((&info["draft_head"], &info["sizes"]["experts"]["layers"]), (&true.into(), &42.into()));
}

/// No machine has room for these: the memory check says so, with numbers, before anything is loaded.
#[test]
fn too_large_is_refused_with_numbers() {
    for name in ["qwen3.8-flash-next", "deepseek-v4-flash", "glm-5.3-flash"] {
        let shape = format!("{name}:f32");
        // 64 sequences of 200,000 tokens.
        let args = ["bench", "--shape", &shape, "-p", "0", "-n", "1", "-d", "200000", "-b", "64"];
        let said = said(minfer(&args));
        assert_eq!((said.code, said.out.as_str()), (Some(1), ""), "{}", said.err);
        let line = said.err.lines().find(|l| l.starts_with("Error: ")).unwrap();
        assert!(line.starts_with("Error: cpu has ") && line.contains(" MiB free, but this needs "), "{line}");
        let needed: u64 = line.split("weights ").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
        assert!((400_000..1_300_000).contains(&needed), "{line}");
    }
}

/// The same architectures at a size that runs anywhere, in float and quantised.
#[test]
fn small_ones_run() {
    for name in ["qwen4exp-small", "deepseek4-small", "glm5-next-small"] {
        for ty in ["bf16", "q4_k_m"] {
            let shape = format!("{name}:{ty}");
            let args = ["bench", "--shape", &shape, "-p", "40", "-n", "4", "-r", "1", "-o", "json"];
            let rows: Json = serde_json::from_str(&stdout_of(&args)).unwrap();
            assert_eq!(rows.as_array().unwrap().len(), 2, "{shape}");
        }
    }
}

/// The oracle's DeepSeek V4 with a draft head beside it.
fn with_head(dir: &Path, head: &str, settings: Json) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/oracle/deepseek_v4");
    let mut map = serde_json::Map::new();
    for (file, shard) in [("model.safetensors", "a.safetensors"), (head, "b.safetensors")] {
        std::fs::copy(from.join(file), dir.join(shard)).unwrap();
        let tensors = minfer_format::hf::Safetensors::open(&from.join(file)).unwrap();
        map.extend(tensors.tensors().iter().map(|t| (t.name.clone(), shard.into())));
    }
    let config = std::fs::read(from.join("config.json")).unwrap();
    let mut config: serde_json::Map<String, Json> = serde_json::from_slice(&config).unwrap();
    config.extend(settings.as_object().unwrap().clone());
    std::fs::write(dir.join("config.json"), serde_json::to_string(&config).unwrap()).unwrap();
    let index = json!({ "weight_map": map });
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Which draft head there is, and whether it can be used.
#[test]
fn info_of_draft_heads() {
    let dspark = json!({
        "dspark_block_size": 5, "dspark_markov_rank": 12, "dspark_noise_token_id": 130,
        "dspark_target_layer_ids": [2, 3, 4],
    });
    for (head, settings, line) in [
        (
            "mtp_legacy.safetensors",
            json!({}),
            "yes: multi-token prediction, one token after another (run --speculate)",
        ),
        ("dspark.safetensors", dspark, "yes: DSpark, 5 tokens at once (run --speculate)"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        with_head(dir.path(), head, settings);
        let text = stdout_of(&["info", dir.path().to_str().unwrap()]);
        assert!(text.contains(&format!("draft head    {line}\n")), "{head}: {line:?} is not in\n{text}");
    }
    // A GGUF file with a draft layer that its architecture knows nothing of.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("drafts.gguf");
    let nano = Gguf::open(&common::nano_path()).unwrap();
    let mut writer = GgufWriter::new();
    for (key, value) in nano.metadata().iter() {
        writer.set(key, value.clone());
    }
    let data: Vec<_> = nano.tensors().iter().map(|t| nano.data(&t.name).unwrap()).collect();
    for (t, data) in nano.tensors().iter().zip(&data) {
        writer.tensor(&t.name, t.ty, &t.shape, data).unwrap();
    }
    writer.tensor("blk.8.nextn.eh_proj.weight", BlockType::F32, &[1], &[0; 4]).unwrap();
    writer.write_file(&path).unwrap();
    let text = stdout_of(&["info", path.to_str().unwrap()]);
    let line = "draft head    no: the file has one of a form that is not supported\n";
    assert!(text.contains(line), "{line:?} is not in\n{text}");
}
