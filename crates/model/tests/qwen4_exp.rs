//! Qwen4-Exp from Hugging Face directories: the graph, the states, the rows of the n-gram table.
//! Fixture: `tests-data/oracle/qwen4_exp`, made as `tests-data/oracle/README.md` says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

use minfer_format::hf::Safetensors;
use minfer_graph::{StateKind, WeightMap};
use minfer_model::{Checkpoint, load};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/oracle/qwen4_exp")
}

fn golden(name: &str) -> Vec<i64> {
    let file = Safetensors::open(&fixture().join("golden.safetensors")).unwrap();
    let bytes = file.raw(name).unwrap();
    bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
}

/// A copy of the fixture with its configuration changed by `edit`.
fn edited(edit: impl FnOnce(&mut serde_json::Value)) -> (tempfile::TempDir, Checkpoint) {
    let copy = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(fixture().join("config.json")).unwrap();
    let mut config = serde_json::from_str(&text).unwrap();
    edit(&mut config);
    std::fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(fixture().join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
    let ck = Checkpoint::open(copy.path()).unwrap();
    (copy, ck)
}

#[test]
fn builds_and_declares_its_states() {
    let ck = Checkpoint::open(&fixture()).unwrap();
    let model = load(&ck).unwrap();
    let h = model.hyper();
    assert_eq!((h.layers, h.hidden, h.vocab, h.rope_dims), (4, 64, 131, 8));
    let graph = model.graph(&ck, 8).unwrap();
    let widths = |name: &str| {
        let state = graph.states.iter().find(|s| s.name == name).unwrap();
        match &state.kind {
            StateKind::Paged { parts } => parts.iter().map(|p| p.width).collect(),
            StateKind::Recurrent { width } => vec![*width],
            other => panic!("{other:?}"),
        }
    };
    // 3 rows of 2 * 2 * 16 + 4 * 16 channels; 4 matrices of 16 x 16; 9 rows of 4 streams of 64.
    assert_eq!(widths("conv.0"), [3 * 128]);
    assert_eq!(widths("delta.2"), [4 * 16 * 16]);
    assert_eq!(widths("ngram_conv.1"), [9 * 256]);
    assert_eq!(widths("kv.3"), [64, 64, 16, 16]);
    assert_eq!(graph.states.len(), 8);
    // The table stays in its file: no weight of the graph, but rows that can be read.
    assert!(graph.weights.iter().all(|w| !w.name.contains("ngram_embedding")));
    let table = model.ngram_table(&ck).unwrap().unwrap();
    assert_eq!((table.shape.as_slice(), table.tensors.len()), (&[560, 8][..], 4));
    let rows = ck.row_table(&table, Default::default()).unwrap();
    let mut numbers = Vec::new();
    rows.read(&[0, 559, 140], &mut numbers).unwrap();
    let whole: Vec<f32> =
        ck.load(&table).unwrap().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(numbers, [&whole[..8], &whole[559 * 8..], &whole[140 * 8..141 * 8]].concat());
}

/// Each norm but DeltaNet's own has its one added, decay rates are negative exponentials.
#[test]
fn weights_are_mapped() {
    let ck = Checkpoint::open(&fixture()).unwrap();
    let graph = load(&ck).unwrap().graph(&ck, 8).unwrap();
    for w in &graph.weights {
        let norm = w.name.contains("norm") && !w.name.ends_with("linear_attn.norm.weight");
        let want = match () {
            () if norm => WeightMap::AddOne,
            () if w.name.ends_with("A_log") => WeightMap::NegExp,
            () => WeightMap::None,
        };
        assert_eq!(w.map, want, "{}", w.name);
    }
}

/// Reference: the rows that transformers looked up, all equal.
#[test]
fn ngram_rows_equal_the_reference() {
    let ck = Checkpoint::open(&fixture()).unwrap();
    let model = load(&ck).unwrap();
    let ngram = model.ngram().unwrap();
    let tokens: Vec<u32> = golden("input_ids").iter().map(|&t| t as u32).collect();
    let mut rows = vec![];
    (0..tokens.len()).for_each(|at| ngram.rows(&tokens, at, &mut rows));
    let want: Vec<i32> = golden("full/ngram_row_ids").iter().map(|&r| r as i32).collect();
    assert_eq!(rows, want);
}

/// A directory without the constants' tensors: they follow from the settings.
#[test]
fn ngram_constants_are_recomputed() {
    let ck = Checkpoint::open(&fixture()).unwrap();
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(fixture().join("config.json"), copy.path().join("config.json")).unwrap();
    let mut bytes = std::fs::read(fixture().join("model.safetensors")).unwrap();
    // Same length, so that the header's offsets stay.
    for name in ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"] {
        let at = bytes.windows(name.len()).position(|w| w == name.as_bytes()).unwrap();
        bytes[at] = b'_';
    }
    std::fs::write(copy.path().join("model.safetensors"), bytes).unwrap();
    let bare = Checkpoint::open(copy.path()).unwrap();
    assert_eq!(load(&bare).unwrap().ngram(), load(&ck).unwrap().ngram());
}

/// Published models that also see images have the decoder's settings one level deeper.
#[test]
fn nested_configuration() {
    let (_dir, ck) = edited(|c| {
        let text = c.take();
        *c = serde_json::json!({ "model_type": "qwen4_exp", "text_config": text });
    });
    let model = load(&ck).unwrap();
    assert_eq!(model.hyper().layers, 4);
    model.graph(&ck, 8).unwrap();
}

/// Tensors one level deeper, too.
#[test]
fn nested_names() {
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(fixture().join("config.json"), copy.path().join("config.json")).unwrap();
    let bytes = std::fs::read(fixture().join("model.safetensors")).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + n]).unwrap();
    let header = header.replace("\"model.", "\"model.language_model.");
    let header = format!("{header}{}", " ".repeat((8 - header.len() % 8) % 8));
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(&bytes[8 + n..]);
    std::fs::write(copy.path().join("model.safetensors"), out).unwrap();
    let ck = Checkpoint::open(copy.path()).unwrap();
    let model = load(&ck).unwrap();
    let graph = model.graph(&ck, 8).unwrap();
    assert!(graph.weights.iter().any(|w| w.name.starts_with("model.language_model.layers.3.self_attn")));
    assert_eq!(model.ngram(), load(&Checkpoint::open(&fixture()).unwrap()).unwrap().ngram());
}

/// Settings that are wrong or unsupported are refused by name, never computed with.
#[test]
fn bad_settings() {
    for (key, value, names) in [
        ("hc_count", 0.into(), "residual stream count"),
        ("hc_count", 5.into(), "expected [320]"),
        ("linear_num_key_heads", 3.into(), "DeltaNet value head count"),
        ("linear_value_head_dim", u64::MAX.into(), "DeltaNet value size"),
        ("linear_num_value_heads", 8.into(), "in_proj_qkv"),
        ("output_gate_type", "tanh".into(), "output_gate_type"),
        ("layer_types", serde_json::json!(["linear_attention"]), "layer_types"),
        ("layer_types", serde_json::json!(["a", "b", "c", "d"]), "layer_types"),
        ("ple_layer_ids", serde_json::json!([1, 2]), "ple_layer_ids"),
        ("ple_layer_ids", serde_json::json!([0]), "ple_layer_ids"),
        ("ple_layer_ids", serde_json::json!([9]), "n-gram embedding"),
        ("ngram_size", 1.into(), "n-gram heads"),
        ("ngram_size", 4.into(), "expected [140, 5]"),
        ("heads_per_ngram", 0.into(), "n-gram heads"),
        ("indexer_compress_ratio", 0.into(), "indexer block"),
        ("indexer_budget", 3.into(), "indexer blocks per row"),
        ("indexer_kv_heads", 2.into(), "indexer_kv_heads"),
        ("eos_token_id", serde_json::Value::Null, "eos_token_id"),
        ("num_experts", 4.into(), "mlp.gate"),
    ] {
        let (_dir, ck) = edited(|c| c[key] = value);
        let result = load(&ck).and_then(|m| m.graph(&ck, 8));
        let Err(e) = result else { panic!("{key} was accepted") };
        let message = e.to_string();
        assert!(message.contains(names), "{key}: {message}");
    }
}

/// The trained model of `MINFER_NANO_NEXT_DIR`.
#[test]
#[ignore = "needs MINFER_NANO_NEXT_DIR"]
fn nano_next_builds() {
    let dir = std::env::var_os("MINFER_NANO_NEXT_DIR").expect("MINFER_NANO_NEXT_DIR");
    let ck = Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(dir)).unwrap();
    let model = load(&ck).unwrap();
    assert_eq!(model.hyper().rope_dims, 16);
    assert_eq!(model.ngram().unwrap().heads(), 16);
    let graph = model.graph(&ck, 32).unwrap();
    assert_eq!(graph.states.len(), 6 * 2 + 1 + 2);
}
