//! GLM-5.3-Flash from Hugging Face directories: states, absorbed weights, refusals.
//! Fixture: `tests-data/oracle/glm5_next`, made as `tests-data/oracle/README.md` says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

use minfer_format::hf::Safetensors;
use minfer_graph::{StateKind, WeightMap};
use minfer_model::{Checkpoint, load};
use serde_json::{Value, json};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/oracle/glm5_next")
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// A copy of the fixture with its decoder's configuration changed by `edit`.
fn edited(edit: impl FnOnce(&mut Value)) -> (tempfile::TempDir, Checkpoint) {
    let copy = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(fixture().join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    edit(&mut config["text_config"]);
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
    assert_eq!((h.layers, h.hidden, h.vocab, h.context), (5, 64, 131, 512));
    let graph = model.graph(&ck, 8).unwrap();
    let widths = |name: &str| {
        let state = graph.states.iter().find(|s| s.name == name).unwrap();
        match &state.kind {
            StateKind::Paged { parts } => parts.iter().map(|p| p.width).collect(),
            StateKind::Recurrent { width } => vec![*width],
            other => panic!("{other:?}"),
        }
    };
    // 3 rows of 3 * 4 * 16 channels; 4 matrices of 16 x 16; a latent, an index key, its gate and its block's key.
    assert_eq!(widths("conv.0"), [3 * 192]);
    assert_eq!(widths("delta.2"), [4 * 16 * 16]);
    assert_eq!(widths("latent.3"), [24, 16, 16, 16]);
    assert_eq!(graph.states.len(), 8);
}

/// `kv_b_proj` is `[heads * (k + v), latent]`; keys go in transposed, values as they are.
#[test]
fn absorbed_weights_are_parts_of_one_tensor() {
    let ck = Checkpoint::open(&fixture()).unwrap();
    let graph = load(&ck).unwrap().graph(&ck, 8).unwrap();
    let name = "model.language_model.layers.1.self_attn.kv_b_proj.weight";
    let file = Safetensors::open(&fixture().join("model.safetensors")).unwrap();
    let stored = floats(&file.raw(name).unwrap());
    let (heads, k, v, latent) = (4, 16, 20, 24);
    let at = |head: usize, row: usize, c: usize| stored[(head * (k + v) + row) * latent + c];
    let parts: Vec<_> = graph.weights.iter().filter(|w| w.name == name).collect();
    assert_eq!(parts.iter().map(|w| w.shape.clone()).collect::<Vec<_>>(), [[4, 24, 16], [4, 20, 24]]);
    let (keys, values) = (floats(&ck.load(parts[0]).unwrap()), floats(&ck.load(parts[1]).unwrap()));
    for head in 0..heads {
        for c in 0..latent {
            (0..k).for_each(|i| assert_eq!(keys[(head * latent + c) * k + i], at(head, i, c)));
            (0..v).for_each(|i| assert_eq!(values[(head * v + i) * latent + c], at(head, k + i, c)));
        }
    }
    let decay = graph.weights.iter().find(|w| w.name.ends_with("layers.0.self_attn.A_log")).unwrap();
    assert_eq!(decay.map, WeightMap::NegExp);
    let joined =
        graph.weights.iter().find(|w| w.name.contains("layers.0.self_attn.q_conv1d.weight + ")).unwrap();
    assert_eq!((joined.shape.as_slice(), joined.tensors.len()), (&[192, 4][..], 3));
}

/// Published configurations may give the linear layers' sizes in a group of their own.
#[test]
fn linear_sizes_in_a_group() {
    let (_dir, ck) = edited(|c| {
        c["linear_num_heads"] = json!(64);
        c["linear_attn_config"] = json!({
            "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
        });
    });
    load(&ck).unwrap().graph(&ck, 8).unwrap();
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let refusals: [(&str, Value, &str); 15] = [
        ("n_group", json!(2), "n_group"),
        ("qk_rope_head_dim", json!(64), "qk_rope_head_dim"),
        ("index_kpool_always_select_tail", json!(false), "index_kpool_always_select_tail"),
        ("hidden_act", json!("gelu"), "hidden_act"),
        ("indexer_types", json!(["full", "shared"]), "indexer_types"),
        ("linear_lower_bound", Value::Null, "linear_lower_bound"),
        ("linear_lower_bound", json!(1.0), "linear_lower_bound"),
        ("mlp_layer_types", json!(["dense"]), "mlp_layer_types"),
        ("layer_types", json!(["full_attention"]), "layer_types"),
        ("index_kpool", json!(0), "indexer block"),
        ("hc_mult", json!(1_000_000), "residual stream count"),
        ("kv_lora_rank", json!(u64::MAX), "latent size"),
        ("num_experts_per_tok", json!(9), "experts per token"),
        ("num_hidden_layers", json!(1u64 << 60), "layer count"),
        ("num_attention_heads", json!(0), "head count"),
    ];
    for (key, value, named) in refusals {
        let (_dir, ck) = edited(|c| c[key] = value.clone());
        let error = load(&ck).err().unwrap_or_else(|| panic!("{key} = {value} is taken")).to_string();
        assert!(error.contains(named), "{key} = {value}: {error}");
    }
    let (_dir, ck) = edited(|c| c["kv_lora_rank"] = json!(25));
    let error = load(&ck).unwrap().graph(&ck, 8).unwrap_err().to_string();
    assert!(error.contains("kv_b_proj.weight' has shape [144, 24], expected [144, 25]"), "{error}");
}
