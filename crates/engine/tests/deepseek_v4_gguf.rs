//! DeepSeek V4 from a GGUF file: the fixture `tests-data/oracle/deepseek_v4`, converted here to the names, shapes and
//! keys that llama.cpp's `deepseek4` has, gives bit for bit the logits of the directory, since the same weights go
//! into the same graph. Those are within 1e-4 of transformers' (`deepseek_v4.rs`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::BTreeSet;

use common::chain::Chain;
use common::{Golden, bits, cpu, data, logits_in_chunks, max_difference, open};
use minfer_cpu::Isa;
use minfer_engine::{Checkpoint, EngineOptions, KvFormat};
use minfer_format::bytes::AlignedBuf;
use minfer_format::gguf::{Array, Value};
use minfer_format::hf::Dtype;
use minfer_format::{BlockType, Gguf, GgufWriter, HfDir, TensorBytes};

const LAYERS: usize = 5;
const EXPERTS: usize = 8;
const HASH_LAYERS: usize = 2;
/// Groups of the output projection, rows of each, and their width.
const O_DOWN: [usize; 3] = [2, 16, 64];

/// Published and GGUF names outside of layers.
const ROOT: [(&str, &str); 6] = [
    ("embed.weight", "token_embd.weight"),
    ("norm.weight", "output_norm.weight"),
    ("head.weight", "output.weight"),
    ("hc_head_fn", "output_hc_fn.weight"),
    ("hc_head_base", "output_hc_base.weight"),
    ("hc_head_scale", "output_hc_scale.weight"),
];
/// Published and GGUF names of a layer's tensors that only change their names.
const LAYER: [(&str, &str); 33] = [
    ("hc_attn_fn", "hc_attn_fn.weight"),
    ("hc_attn_base", "hc_attn_base.weight"),
    ("hc_attn_scale", "hc_attn_scale.weight"),
    ("hc_ffn_fn", "hc_ffn_fn.weight"),
    ("hc_ffn_base", "hc_ffn_base.weight"),
    ("hc_ffn_scale", "hc_ffn_scale.weight"),
    ("attn_norm.weight", "attn_norm.weight"),
    ("ffn_norm.weight", "ffn_norm.weight"),
    ("attn.attn_sink", "attn_sinks.weight"),
    ("attn.wq_a.weight", "attn_q_a.weight"),
    ("attn.q_norm.weight", "attn_q_a_norm.weight"),
    ("attn.wq_b.weight", "attn_q_b.weight"),
    ("attn.wkv.weight", "attn_kv.weight"),
    ("attn.kv_norm.weight", "attn_kv_a_norm.weight"),
    ("attn.wo_a.weight", "attn_output_a.weight"),
    ("attn.wo_b.weight", "attn_output_b.weight"),
    ("attn.compressor.ape", "attn_compressor_ape.weight"),
    ("attn.compressor.wkv.weight", "attn_compressor_kv.weight"),
    ("attn.compressor.wgate.weight", "attn_compressor_gate.weight"),
    ("attn.compressor.norm.weight", "attn_compressor_norm.weight"),
    ("attn.indexer.wq_b.weight", "indexer.attn_q_b.weight"),
    ("attn.indexer.weights_proj.weight", "indexer.proj.weight"),
    ("attn.indexer.compressor.ape", "indexer_compressor_ape.weight"),
    ("attn.indexer.compressor.wkv.weight", "indexer_compressor_kv.weight"),
    ("attn.indexer.compressor.wgate.weight", "indexer_compressor_gate.weight"),
    ("attn.indexer.compressor.norm.weight", "indexer_compressor_norm.weight"),
    ("ffn.gate.weight", "ffn_gate_inp.weight"),
    ("ffn.gate.bias", "exp_probs_b.bias"),
    ("ffn.gate.tid2eid", "ffn_gate_tid2eid.weight"),
    ("ffn.shared_experts.w1.weight", "ffn_gate_shexp.weight"),
    ("ffn.shared_experts.w2.weight", "ffn_down_shexp.weight"),
    ("ffn.shared_experts.w3.weight", "ffn_up_shexp.weight"),
    ("ffn.gate.bias_vl", "exp_probs_b_vl.bias"),
];
const PACKED: [(&str, &str); 3] =
    [("w1", "ffn_gate_exps.weight"), ("w2", "ffn_down_exps.weight"), ("w3", "ffn_up_exps.weight")];

/// A file under construction.
struct Converter {
    dir: HfDir,
    /// Tensors of the directory that are in the file already.
    taken: BTreeSet<String>,
    /// Name, whether it is of whole numbers, shape, bytes.
    tensors: Vec<(String, bool, Vec<usize>, Vec<u8>)>,
}

impl Converter {
    fn read(&mut self, name: &str) -> Option<(bool, Vec<usize>, Vec<u8>)> {
        let info = self.dir.tensor(name)?.clone();
        self.taken.insert(name.to_string());
        let bytes = self.dir.raw(name).unwrap();
        let (integers, bytes) = match info.dtype {
            Dtype::F32 => (false, bytes.to_vec()),
            Dtype::I64 => {
                let ids = bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as i32);
                (true, ids.flat_map(i32::to_le_bytes).collect())
            }
            other => panic!("{name} is {other}"),
        };
        Some((integers, info.shape, bytes))
    }

    fn rename(&mut self, from: &str, to: String) {
        if let Some((integers, shape, bytes)) = self.read(from) {
            let shape = if to.contains("attn_output_a") { O_DOWN.to_vec() } else { shape };
            self.tensors.push((to, integers, shape, bytes));
        }
    }

    fn layer(&mut self, i: usize) {
        self.layer_from(&format!("layers.{i}"), i);
    }

    fn layer_from(&mut self, hf: &str, i: usize) {
        for (from, to) in LAYER {
            self.rename(&format!("{hf}.{from}"), format!("blk.{i}.{to}"));
        }
        for (from, to) in PACKED {
            let experts = (0..EXPERTS).map(|e| self.read(&format!("{hf}.ffn.experts.{e}.{from}.weight")));
            let experts: Vec<_> = experts.map(Option::unwrap).collect();
            let shape = [&[EXPERTS], &experts[0].1[..]].concat();
            let bytes = experts.iter().flat_map(|e| e.2.clone()).collect();
            self.tensors.push((format!("blk.{i}.{to}"), false, shape, bytes));
        }
    }
}

/// The draft layer: both of its projections in one, and where `own`, weights of its own in place of the model's.
fn draft_layer(c: &mut Converter, own: bool) {
    c.layer_from("mtp.0", LAYERS);
    let [(_, shape, e), (_, _, h)] =
        ["e_proj", "h_proj"].map(|p| c.read(&format!("mtp.0.{p}.weight")).unwrap());
    let row = 4 * shape[1];
    let both = e.chunks(row).zip(h.chunks(row)).flat_map(|(e, h)| [e, h].concat()).collect();
    let name = format!("blk.{LAYERS}.nextn.eh_proj.weight");
    c.tensors.push((name, false, vec![shape[0], 2 * shape[1]], both));
    let norms = [("enorm", "enorm"), ("hnorm", "hnorm"), ("norm", "shared_head_norm")];
    for (from, to) in &norms[..if own { 3 } else { 2 }] {
        c.rename(&format!("mtp.0.{from}.weight"), format!("blk.{LAYERS}.nextn.{to}.weight"));
    }
    for part in if own { &["fn", "base", "scale"][..] } else { &[] } {
        c.rename(&format!("mtp.0.hc_head_{part}"), format!("blk.{LAYERS}.output_hc_{part}.weight"));
    }
}

/// The legacy head of a file: within 1e-4 of the reference where the file has all of it. llama.cpp's files have the
/// model's own stream weights and norm for it, which gives other logits.
#[test]
fn draft_head() {
    let golden = Golden::open(&data("oracle/deepseek_v4/golden_mtp.safetensors"));
    let (next, streams) = (golden.ids("next_ids"), golden.f32("hc_hidden").concat());
    for own in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let path = common::with_head(dir.path(), "deepseek_v4", "mtp_legacy.safetensors");
        let model = convert_from(HfDir::open(&path).unwrap(), own, |w, _| {
            w.set("deepseek4.block_count", Value::U32(LAYERS as u32 + 1));
            w.set("deepseek4.nextn_predict_layers", Value::U32(1));
        });
        let worst =
            max_difference(&Chain::open(&model).run(0, &next, &streams).0, &golden.f32("mtp.prefill.logits"));
        println!("own weights: {own}: largest difference {worst:e}");
        assert_eq!(worst <= 1e-4, own, "{worst}");
    }
}

/// Every tensor of the fixture, with the keys of llama.cpp's converter; `edit` changes either.
fn convert(edit: impl FnOnce(&mut GgufWriter, &mut Converter)) -> Checkpoint {
    convert_from(HfDir::open(&data("oracle/deepseek_v4")).unwrap(), true, edit)
}

/// Also the draft layer, if there is one.
fn convert_from(dir: HfDir, own: bool, edit: impl FnOnce(&mut GgufWriter, &mut Converter)) -> Checkpoint {
    let mut c = Converter { dir, taken: BTreeSet::new(), tensors: vec![] };
    for (from, to) in ROOT {
        c.rename(from, to.to_string());
    }
    (0..LAYERS).for_each(|i| c.layer(i));
    if c.dir.tensor("mtp.0.e_proj.weight").is_some() {
        draft_layer(&mut c, own);
    }
    let all: BTreeSet<String> = c.dir.tensors().map(|t| t.name.clone()).collect();
    assert!(c.taken == all || !own, "every tensor is converted");
    let mut writer = GgufWriter::new();
    writer.set("general.architecture", Value::String("deepseek4".to_string()));
    for (key, value) in [
        ("block_count", LAYERS),
        ("context_length", 4096),
        ("embedding_length", 64),
        ("expert_feed_forward_length", 48),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("rope.dimension_count", 8),
        ("attention.q_lora_rank", 24),
        ("attention.output_group_count", O_DOWN[0]),
        ("attention.output_lora_rank", O_DOWN[1]),
        ("attention.sliding_window", 32),
        ("attention.indexer.head_count", 32),
        ("attention.indexer.key_length", 16),
        ("attention.indexer.top_k", 8),
        ("expert_count", EXPERTS),
        ("expert_used_count", 2),
        ("expert_shared_count", 1),
        ("expert_gating_func", 4),
        ("hash_layer_count", HASH_LAYERS),
        ("hyper_connection.count", 4),
        ("hyper_connection.sinkhorn_iterations", 20),
        ("rope.scaling.original_context_length", 64),
    ] {
        writer.set(&format!("deepseek4.{key}"), Value::U32(value as u32));
    }
    for (key, value) in [
        ("attention.layer_norm_rms_epsilon", 1e-6),
        ("hyper_connection.epsilon", 1e-6),
        ("expert_weights_scale", 1.5),
        ("rope.freq_base", 10_000.0),
        ("attention.compress_rope_freq_base", 160_000.0),
        ("rope.scaling.factor", 16.0),
        ("rope.scaling.yarn_beta_fast", 32.0),
        ("rope.scaling.yarn_beta_slow", 1.0),
    ] {
        writer.set(&format!("deepseek4.{key}"), Value::F32(value));
    }
    writer.set("deepseek4.rope.scaling.type", Value::String("yarn".to_string()));
    writer.set("deepseek4.expert_weights_norm", Value::Bool(true));
    // The last one belongs to a draft layer.
    let ratios = Array::I32(vec![0, 0, 4, 128, 4, 0]);
    writer.set("deepseek4.attention.compress_ratios", Value::Array(ratios));
    for key in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
        writer.set(&format!("deepseek4.{key}"), Value::Array(Array::F32(vec![1.5; LAYERS])));
    }
    edit(&mut writer, &mut c);
    for (name, integers, shape, bytes) in &c.tensors {
        match integers {
            true => writer.integers(name, shape, bytes).unwrap(),
            false => writer.tensor(name, BlockType::F32, shape, bytes).unwrap(),
        };
    }
    let bytes = AlignedBuf::from(&writer.to_bytes()[..]);
    Checkpoint::Gguf(Gguf::from_bytes("converted.gguf", TensorBytes::from(bytes)).unwrap())
}

fn logits(model: &Checkpoint, chunk: usize) -> Vec<Vec<f32>> {
    let tokens = Golden::open(&data("oracle/deepseek_v4/golden.safetensors")).ids("input_ids");
    let options = EngineOptions {
        kv_format: KvFormat::F32,
        context: Some(320),
        max_rows: 300,
        max_outs: 300,
        ..EngineOptions::new(cpu(2, Isa::detect()))
    };
    logits_in_chunks(&mut open(model, options), &tokens, &[chunk])
}

#[test]
fn logits_of_the_directory() {
    let want = logits(&Checkpoint::open(&data("oracle/deepseek_v4")).unwrap(), 300);
    let golden = Golden::open(&data("oracle/deepseek_v4/golden.safetensors")).f32("full.logits");
    let worst = max_difference(&want, &golden);
    assert!(worst <= 1e-4, "directory against transformers: {worst}");
    for chunk in [300, 13] {
        assert!(bits(&logits(&convert(|_, _| ()), chunk)) == bits(&want), "chunks of {chunk}");
    }
    // As published files have it: the groups' rows below one another.
    let flat = convert(|_, c| {
        for (_, _, shape, _) in c.tensors.iter_mut().filter(|t| t.0.contains("attn_output_a")) {
            *shape = vec![O_DOWN[0] * O_DOWN[1], O_DOWN[2]];
        }
    });
    assert!(bits(&logits(&flat, 300)) == bits(&want), "flat output projection");
}

/// Each of these keys counts: with another value, logits differ by more than rounding (1e-3).
#[test]
fn keys_are_read() {
    let want = Golden::open(&data("oracle/deepseek_v4/golden.safetensors")).f32("full.logits");
    let other: [(&str, Value); 9] = [
        ("expert_weights_scale", Value::F32(1.0)),
        ("rope.scaling.factor", Value::F32(2.0)),
        ("rope.scaling.yarn_beta_slow", Value::F32(0.1)),
        ("rope.freq_base", Value::F32(100.0)),
        ("attention.compress_rope_freq_base", Value::F32(100.0)),
        ("attention.sliding_window", Value::U32(16)),
        ("attention.indexer.top_k", Value::U32(64)),
        ("hyper_connection.sinkhorn_iterations", Value::U32(1)),
        ("rope.scaling.type", Value::String("none".to_string())),
    ];
    for (key, value) in other {
        let model = convert(|w, _| {
            w.set(&format!("deepseek4.{key}"), value);
        });
        let worst = max_difference(&logits(&model, 300), &want);
        println!("{key}: {worst:e}");
        assert!(worst > 1e-3, "{key}: {worst}");
    }
    let unbounded = convert(|w, _| {
        w.set("deepseek4.swiglu_clamp_exp", Value::F32(0.0));
        w.set("deepseek4.swiglu_clamp_shexp", Value::F32(0.0));
    });
    assert!(max_difference(&logits(&unbounded, 300), &want) > 1e-3);
}

/// Some files name draft layers that they do not have; others have them.
#[test]
fn draft_layers_are_no_layers() {
    let layers = |model: &Checkpoint| minfer_model::load(model).unwrap().hyper().layers;
    let named = |w: &mut GgufWriter| {
        w.set("deepseek4.nextn_predict_layers", Value::U32(1));
    };
    assert_eq!(layers(&convert(|w, _| named(w))), LAYERS);
    let there = convert(|w, c| {
        named(w);
        w.set("deepseek4.block_count", Value::U32(LAYERS as u32 + 1));
        let name = format!("blk.{LAYERS}.nextn.eh_proj.weight");
        c.tensors.push((name, false, vec![64, 128], vec![0; 64 * 128 * 4]));
    });
    assert_eq!(layers(&there), LAYERS);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let refusals: [(&str, Value, &str); 10] = [
        ("expert_gating_func", Value::U32(2), "expert_gating_func is not 4"),
        ("expert_group_count", Value::U32(2), "expert_group_count is above 1"),
        ("expert_weights_norm", Value::Bool(false), "expert_weights_norm is false"),
        ("attention.head_count_kv", Value::U32(2), "attention.head_count_kv is not 1"),
        ("attention.value_length", Value::U32(16), "attention.value_length differs"),
        ("swiglu_clamp_exp", Value::F32(2.0), "different numbers for different layers"),
        ("rope.scaling.type", Value::String("longrope".to_string()), "rope scaling 'longrope'"),
        ("rope.scaling.yarn_ext_factor", Value::F32(0.5), "yarn_ext_factor is 0.5"),
        ("attention.compress_ratios", Value::Array(Array::I32(vec![0, 4])), "has 2 entries for 5 layers"),
        ("attention.compress_ratios", Value::Array(Array::I32(vec![0, 0, -4, 4, 4])), "compression ratio is"),
    ];
    for (key, value, says) in refusals {
        let model = convert(|w, _| {
            w.set(&format!("deepseek4.{key}"), value);
        });
        let error = minfer_model::load(&model).err().unwrap().to_string();
        assert!(error.contains(says), "{key}: {error}");
    }
    // Expert ids as floats.
    let floats = convert(|_, c| c.tensors.iter_mut().for_each(|t| t.1 = false));
    let error = minfer_model::load(&floats).unwrap().graph(&floats, 1).err().unwrap().to_string();
    assert!(error.contains("blk.0.ffn_gate_tid2eid.weight is not of whole numbers"), "{error}");
}

/// Experts that do not exist are an error of the step, not a read past the weights.
#[test]
fn ids_out_of_range() {
    let model = convert(|_, c| {
        for (_, _, _, bytes) in c.tensors.iter_mut().filter(|t| t.0 == "blk.1.ffn_gate_tid2eid.weight") {
            bytes[..4].copy_from_slice(&(EXPERTS as i32).to_le_bytes());
        }
    });
    let mut engine =
        open(&model, EngineOptions { context: Some(64), ..EngineOptions::new(cpu(1, Isa::detect())) });
    let mut session = engine.session();
    // The table's first row is token 0's.
    session.append(&[1], &mut || true).unwrap();
    let error = session.append(&[0], &mut || true).err().unwrap().to_string();
    assert!(error.contains("expert id 8 of 8 experts"), "{error}");
}
