//! GLM-5.3-Flash from a GGUF file: the fixture `tests-data/oracle/glm5_next`, converted here to the names, shapes and
//! keys that llama.cpp's `glm5-next` has (`kv_b_proj` in two parts, keys transposed; `-exp(A_log)`), gives
//! transformers' logits within 1e-4.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::chain::Chain;
use common::{Golden, data, logits_in_chunks, max_difference, open, options};
use minfer_engine::Checkpoint;
use minfer_format::gguf::{Array, Value};
use minfer_format::{BlockType, Gguf, GgufWriter, HfDir, TensorBytes};

const HEADS: usize = 4;
/// Numbers per head of keys and values, and per latent.
const K: usize = 16;
const V: usize = 20;
const LATENT: usize = 24;
const EXPERTS: usize = 8;

/// Hugging Face and GGUF names of tensors that only change their names.
const PLAIN: [(&str, &str); 43] = [
    ("hc_attn_fn", "hc_attn_fn.weight"),
    ("hc_attn_base", "hc_attn_base.weight"),
    ("hc_attn_scale", "hc_attn_scale.weight"),
    ("hc_ffn_fn", "hc_ffn_fn.weight"),
    ("hc_ffn_base", "hc_ffn_base.weight"),
    ("hc_ffn_scale", "hc_ffn_scale.weight"),
    ("input_layernorm.weight", "attn_norm.weight"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.q_conv1d.weight", "ssm_conv1d_q.weight"),
    ("self_attn.k_conv1d.weight", "ssm_conv1d_k.weight"),
    ("self_attn.v_conv1d.weight", "ssm_conv1d_v.weight"),
    ("self_attn.f_a_proj.weight", "ssm_f_a.weight"),
    ("self_attn.f_b_proj.weight", "ssm_f_b.weight"),
    ("self_attn.g_a_proj.weight", "ssm_g_a.weight"),
    ("self_attn.g_b_proj.weight", "ssm_g_b.weight"),
    ("self_attn.b_proj.weight", "ssm_beta.weight"),
    ("self_attn.dt_bias", "ssm_dt.bias"),
    ("self_attn.o_norm.weight", "ssm_norm.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("self_attn.q_a_proj.weight", "attn_q_a.weight"),
    ("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight"),
    ("self_attn.q_b_proj.weight", "attn_q_b.weight"),
    ("self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight"),
    ("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight"),
    ("self_attn.indexer.wq_b.weight", "indexer.attn_q_b.weight"),
    ("self_attn.indexer.wk.weight", "indexer.attn_k.weight"),
    ("self_attn.indexer.k_norm.weight", "indexer.k_norm.weight"),
    ("self_attn.indexer.k_norm.bias", "indexer.k_norm.bias"),
    ("self_attn.indexer.weights_proj.weight", "indexer.proj.weight"),
    ("self_attn.indexer.index_kpool_compress_gate", "indexer_compressor_gate.weight"),
    ("self_attn.indexer.index_kpool_compress_ape", "indexer_compressor_ape.weight"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight"),
    ("mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight"),
    ("mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight"),
    ("eh_proj.weight", "nextn.eh_proj.weight"),
    ("enorm.weight", "nextn.enorm.weight"),
    ("hnorm.weight", "nextn.hnorm.weight"),
    ("shared_head.norm.weight", "nextn.shared_head_norm.weight"),
];
const DENSE: [(&str, &str); 3] = [
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
];

/// A file under construction.
struct Converter {
    dir: HfDir,
    tensors: Vec<(String, Vec<usize>, Vec<u8>)>,
}

impl Converter {
    fn read(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let shape = self.dir.tensor(name)?.shape.clone();
        let bytes = self.dir.raw(name).unwrap();
        Some((shape, bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()))
    }

    fn put(&mut self, name: String, shape: &[usize], numbers: &[f32]) {
        let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.tensors.push((name, shape.to_vec(), bytes));
    }

    fn rename(&mut self, from: &str, to: String) {
        if let Some((shape, numbers)) = self.read(from) {
            self.put(to, &shape, &numbers);
        }
    }

    fn layer(&mut self, i: usize) {
        let hf = |name: &str| format!("model.language_model.layers.{i}.{name}");
        let gguf = |name: &str| format!("blk.{i}.{name}");
        for (from, to) in PLAIN.into_iter().chain(DENSE) {
            self.rename(&hf(from), gguf(to));
        }
        if let Some((shape, log)) = self.read(&hf("self_attn.A_log")) {
            let rates: Vec<f32> = log.iter().map(|x| -x.exp()).collect();
            self.put(gguf("ssm_a"), &shape, &rates);
        }
        if let Some((_, kv)) = self.read(&hf("self_attn.kv_b_proj.weight")) {
            let at = |head: usize, row: usize, c: usize| kv[(head * (K + V) + row) * LATENT + c];
            let (mut keys, mut values) = (vec![], vec![]);
            for head in 0..HEADS {
                keys.extend((0..LATENT * K).map(|n| at(head, n % K, n / K)));
                values.extend((0..V * LATENT).map(|n| at(head, K + n / LATENT, n % LATENT)));
            }
            self.put(gguf("attn_k_b.weight"), &[HEADS, LATENT, K], &keys);
            self.put(gguf("attn_v_b.weight"), &[HEADS, V, LATENT], &values);
        }
        for part in ["gate", "up", "down"] {
            let expert = |e: usize| self.read(&hf(&format!("mlp.experts.{e}.{part}_proj.weight")));
            if let Some((shape, _)) = expert(0) {
                let all: Vec<f32> = (0..EXPERTS).flat_map(|e| expert(e).unwrap().1).collect();
                self.put(gguf(&format!("ffn_{part}_exps.weight")), &[EXPERTS, shape[0], shape[1]], &all);
            }
        }
    }
}

/// Every tensor of the fixture's decoder, with the keys of llama.cpp's file and `edit` on top.
fn convert(edit: impl FnOnce(&mut GgufWriter)) -> Checkpoint {
    convert_from(HfDir::open(&data("oracle/glm5_next")).unwrap(), edit)
}

fn convert_from(dir: HfDir, edit: impl FnOnce(&mut GgufWriter)) -> Checkpoint {
    let mut c = Converter { dir, tensors: vec![] };
    for (from, to) in [
        ("model.language_model.embed_tokens.weight", "token_embd.weight"),
        ("model.language_model.norm.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ] {
        c.rename(from, to.to_string());
    }
    // The last one is the draft head's, where there is one.
    (0..6).for_each(|i| c.layer(i));
    let mut writer = GgufWriter::new();
    writer.set("general.architecture", Value::String("glm5-next".to_string()));
    for (key, value) in [
        ("block_count", 5),
        ("context_length", 512),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("leading_dense_block_count", 1),
        ("attention.head_count", HEADS),
        ("attention.q_lora_rank", 40),
        ("attention.kv_lora_rank", LATENT),
        ("attention.key_length_mla", K),
        ("attention.value_length_mla", V),
        ("attention.indexer.head_count", 32),
        ("attention.indexer.key_length", 16),
        ("attention.indexer.top_k", 8),
        ("attention.indexer.kpool", 4),
        ("kda.head_dim", 16),
        ("ssm.conv_kernel", 4),
        ("expert_count", EXPERTS),
        ("expert_used_count", 2),
        ("expert_shared_count", 1),
        ("expert_feed_forward_length", 40),
        ("expert_gating_func", 2),
        ("hyper_connection.count", 4),
        ("hyper_connection.sinkhorn_iterations", 20),
    ] {
        writer.set(&format!("glm5-next.{key}"), Value::U32(value as u32));
    }
    for (key, value) in [
        ("attention.layer_norm_rms_epsilon", 1e-5),
        ("attention.layer_norm_epsilon", 1e-6),
        ("hyper_connection.epsilon", 1e-6),
        ("kda.gate_lower_bound", -5.0),
        ("expert_weights_scale", 2.5),
    ] {
        writer.set(&format!("glm5-next.{key}"), Value::F32(value));
    }
    writer.set("glm5-next.expert_weights_norm", Value::Bool(true));
    writer.set("glm5-next.attention.indexer.kpool_select_tail", Value::Bool(true));
    for key in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
        writer.set(&format!("glm5-next.{key}"), Value::Array(Array::F32(vec![1.5; 5])));
    }
    edit(&mut writer);
    for (name, shape, bytes) in &c.tensors {
        writer.tensor(name, BlockType::F32, shape, bytes).unwrap();
    }
    let bytes = minfer_format::bytes::AlignedBuf::from(&writer.to_bytes()[..]);
    Checkpoint::Gguf(Gguf::from_bytes("converted.gguf", TensorBytes::from(bytes)).unwrap())
}

#[test]
fn logits() {
    let golden = Golden::open(&data("oracle/glm5_next/golden.safetensors"));
    let model = convert(|_| ());
    let mut engine = open(&model, options(2));
    for chunk in [70, 13] {
        let got = logits_in_chunks(&mut engine, &golden.ids("input_ids"), &[chunk]);
        let worst = max_difference(&got, &golden.f32("full.logits"));
        println!("chunks of {chunk}: largest difference {worst:e}");
        assert!(worst <= 1e-4, "{worst}");
    }
}

/// The draft head of a file: the same bits as the directory's.
#[test]
fn draft_head() {
    let dir = tempfile::tempdir().unwrap();
    let path = common::with_head(dir.path(), "glm5_next", "mtp.safetensors");
    let golden = Golden::open(&data("oracle/glm5_next/golden_mtp.safetensors"));
    let (next, streams) = (golden.ids("next_ids"), golden.f32("post_norm_hidden").concat());
    let converted = convert_from(HfDir::open(&path).unwrap(), |w| {
        w.set("glm5-next.block_count", Value::U32(6));
        w.set("glm5-next.nextn_predict_layers", Value::U32(1));
        for key in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
            w.set(&format!("glm5-next.{key}"), Value::Array(Array::F32(vec![1.5; 6])));
        }
    });
    let original = Checkpoint::open(&path).unwrap();
    let logits = |model| common::bits(&Chain::open(model).run(0, &next, &streams).0);
    assert!(logits(&converted) == logits(&original));
}

/// A file's bounds count: without them logits differ by far more.
#[test]
fn no_bound_is_no_bound() {
    let golden = Golden::open(&data("oracle/glm5_next/golden.safetensors"));
    let model = convert(|w| {
        for key in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
            w.set(&format!("glm5-next.{key}"), Value::Array(Array::F32(vec![0.0; 5])));
        }
    });
    let got = logits_in_chunks(&mut open(&model, options(2)), &golden.ids("input_ids"), &[70]);
    assert!(max_difference(&got, &golden.f32("full.logits")) > 0.1);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let refusals: [(&str, Value); 5] = [
        ("expert_gating_func", Value::U32(1)),
        ("expert_group_count", Value::U32(2)),
        ("attention.indexer.kpool_select_tail", Value::Bool(false)),
        ("swiglu_clamp_exp", Value::Array(Array::F32(vec![1.5, 1.5, 1.5, 1.5, 2.0]))),
        ("attention.kv_lora_rank", Value::String("many".to_string())),
    ];
    for (key, value) in refusals {
        let key = format!("glm5-next.{key}");
        let model = convert(|w| {
            w.set(&key, value);
        });
        let error = minfer_model::load(&model).err().unwrap().to_string();
        assert!(error.contains(&key), "{key}: {error}");
    }
}
