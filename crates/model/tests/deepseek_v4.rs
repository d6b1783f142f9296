//! DeepSeek V4 from Hugging Face directories: the graph, the states, tables of ids, refused settings.
//! Fixture: `tests-data/oracle/deepseek_v4`, made as `tests-data/oracle/README.md` says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

use minfer_graph::{StateKind, WeightMap};
use minfer_model::{Checkpoint, load};
use serde_json::json;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/oracle/deepseek_v4")
}

/// A copy of the fixture with its configuration changed by `config` and its weights by `weights`.
fn edited(
    config: impl FnOnce(&mut serde_json::Value),
    weights: impl FnOnce(&mut Vec<u8>),
) -> (tempfile::TempDir, Checkpoint) {
    let copy = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(fixture().join("config.json")).unwrap();
    let mut json = serde_json::from_str(&text).unwrap();
    config(&mut json);
    std::fs::write(copy.path().join("config.json"), json.to_string()).unwrap();
    let mut bytes = std::fs::read(fixture().join("model.safetensors")).unwrap();
    weights(&mut bytes);
    std::fs::write(copy.path().join("model.safetensors"), bytes).unwrap();
    let ck = Checkpoint::open(copy.path()).unwrap();
    (copy, ck)
}

#[test]
fn builds_and_declares_its_states() {
    let ck = Checkpoint::open(&fixture()).unwrap();
    let model = load(&ck).unwrap();
    let h = model.hyper();
    assert_eq!((h.arch, h.layers, h.hidden, h.vocab, h.rope_dims), ("deepseek4", 5, 64, 131, 8));
    let graph = model.graph(&ck, 8).unwrap();
    let widths = |name: &str| {
        let state = graph.states.iter().find(|s| s.name == name).unwrap();
        match &state.kind {
            StateKind::Paged { parts } => parts.iter().map(|p| p.width).collect(),
            StateKind::Recurrent { width } => vec![*width],
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(widths("kv.0"), [32]);
    assert_eq!(widths("kv.2"), [32, 32, 16]);
    assert_eq!(widths("kv.3"), [32, 32]);
    // 7 rows of kv and gates, twice as wide as what they are compressed to; 127 rows that are not.
    assert_eq!(widths("compress.2"), [7 * 2 * 64]);
    assert_eq!(widths("compress_index.4"), [7 * 2 * 32]);
    assert_eq!(widths("compress.3"), [127 * 2 * 32]);
    assert_eq!(graph.states.len(), 5 + 2 * 2 + 1);
    let mixer = graph.weights.iter().find(|w| w.name.starts_with("layers.1.hc_ffn_base")).unwrap();
    assert_eq!((mixer.shape.as_slice(), mixer.tensors.len()), (&[27][..], 2));
    assert_eq!(ck.load(mixer).unwrap().len(), 27 * 4);
}

/// Experts of the first layers by token: whole numbers, as F32.
#[test]
fn ids_arrive_as_numbers() {
    let ck = Checkpoint::open(&fixture()).unwrap();
    let graph = load(&ck).unwrap().graph(&ck, 8).unwrap();
    let tables: Vec<_> = graph.weights.iter().filter(|w| w.map == WeightMap::Ids).collect();
    let names: Vec<_> = tables.iter().map(|w| w.name.as_str()).collect();
    assert_eq!(names, ["layers.0.ffn.gate.tid2eid", "layers.1.ffn.gate.tid2eid"]);
    let bytes = ck.load(tables[0]).unwrap();
    let ids: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    assert_eq!(ids.len(), 131 * 2);
    assert!(ids.chunks(2).all(|row| row[0] != row[1]), "two different experts");
    assert!(ids.iter().all(|id| (0.0..8.0).contains(id) && id.fract() == 0.0));
}

/// An id that no f32 holds, in the first entry of a table (I64 data of the file's first such tensor).
#[test]
fn ids_out_of_range_are_refused() {
    let (_dir, ck) = edited(
        |_| (),
        |bytes| {
            let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
            let at = header["layers.0.ffn.gate.tid2eid"]["data_offsets"][0].as_u64().unwrap() as usize;
            bytes[8 + n + at..][..8].copy_from_slice(&(-1i64).to_le_bytes());
        },
    );
    let graph = load(&ck).unwrap().graph(&ck, 8).unwrap();
    let table = graph.weights.iter().find(|w| w.map == WeightMap::Ids).unwrap();
    let message = ck.load(table).unwrap_err().to_string();
    assert!(message.contains("layers.0.ffn.gate.tid2eid has id -1"), "{message}");
}

/// Settings that are wrong or unsupported are refused by name, never computed with.
#[test]
fn bad_settings() {
    for (key, value, names) in [
        ("scoring_func", json!("softmax"), "scoring_func"),
        ("norm_topk_prob", json!(false), "norm_topk_prob"),
        ("num_key_value_heads", json!(2), "num_key_value_heads"),
        ("compress_ratios", json!([0, 0, 4]), "compress_ratios has 3 entries for 5 layers"),
        ("compress_ratios", json!([0, 0, 0, 0, 0]), "compress_ratios names no layer"),
        ("compress_ratios", json!([0, 0, 4, 5000, 4]), "compression ratio is 5000"),
        ("compress_ratios", json!([0, 0, 8, 128, 4]), "expected [32, 64]"),
        ("hc_mult", json!(0), "residual stream count"),
        ("hc_mult", json!(5), "expected [35, 320]"),
        ("o_groups", json!(3), "output group count"),
        ("q_lora_rank", json!(0), "query rank"),
        ("sliding_window", json!(0), "sliding window"),
        ("index_topk", json!(0), "indexer rows"),
        ("index_head_dim", json!(4), "rotated dimension count"),
        ("index_head_dim", json!(u64::MAX), "indexer head size"),
        ("qk_rope_head_dim", json!(34), "rotated dimension count"),
        ("qk_rope_head_dim", json!(0), "rotated dimension count"),
        ("swiglu_limit", json!(-1.0), "swiglu_limit"),
        ("num_experts_per_tok", json!(9), "experts per token"),
        ("n_routed_experts", json!(4), "ffn.gate.weight"),
        ("num_hash_layers", json!(3), "layers.2.ffn.gate.tid2eid"),
        ("rope_scaling", json!({"type": "linear", "factor": 2}), "rope_scaling type is 'linear'"),
        ("rope_scaling", json!({"type": "yarn", "factor": 16}), "original_max_position_embeddings"),
    ] {
        let (_dir, ck) = edited(|c| c[key] = value.clone(), |_| ());
        let result = load(&ck).and_then(|m| m.graph(&ck, 8));
        let Err(e) = result else { panic!("{key} {value} was accepted") };
        let message = e.to_string();
        assert!(message.contains(names), "{key} {value}: {message}");
    }
}
