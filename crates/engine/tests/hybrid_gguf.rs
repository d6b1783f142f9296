//! Qwen4-Exp from a GGUF file: the fixture `tests-data/oracle/qwen4_exp`, converted here by the rules of
//! llama.cpp's converter (one added to zero-centred norms, `-exp(A_log)`, value heads in tiled order, the
//! indexer's projection split), gives transformers' logits within 1e-4.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::chain::Chain;
use common::{Golden, data, logits_in_chunks, max_difference, open, options};
use minfer_engine::Checkpoint;
use minfer_format::gguf::{Array, Value};
use minfer_format::{BlockType, Gguf, GgufWriter, HfDir, TensorBytes};

const K_HEADS: usize = 2;
const V_HEADS: usize = 4;
const HEAD: usize = 16;
const EXPERTS: usize = 8;

/// Hugging Face and GGUF names of tensors that only change their names.
const PLAIN: [(&str, &str); 20] = [
    ("attn_hyper_connection.input_mix_weight_down.weight", "hc_attn_down.weight"),
    ("attn_hyper_connection.input_mix_weight_up.weight", "hc_attn_up.weight"),
    ("attn_hyper_connection.block_inject_weight.weight", "hc_attn_inject.weight"),
    ("mlp_hyper_connection.input_mix_weight_down.weight", "hc_ffn_down.weight"),
    ("mlp_hyper_connection.input_mix_weight_up.weight", "hc_ffn_up.weight"),
    ("mlp_hyper_connection.block_inject_weight.weight", "hc_ffn_inject.weight"),
    ("linear_attn.norm.weight", "ssm_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
    ("mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight"),
    ("mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight"),
    ("mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight"),
    ("ple.key_proj.weight", "ple_key.weight"),
    ("ple.value_proj.weight", "ple_value.weight"),
    ("ple.conv1d.weight", "ple_conv1d.weight"),
    ("linear_attn.conv1d.weight", "ssm_conv1d.weight"),
];

/// The same for norms that are stored as their distance from one.
const NORMS: [(&str, &str); 9] = [
    ("attn_hyper_connection.hc_norm.weight", "hc_attn_norm.weight"),
    ("mlp_hyper_connection.hc_norm.weight", "hc_ffn_norm.weight"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("self_attn.indexer.q_layernorm.weight", "indexer.q_norm.weight"),
    ("self_attn.indexer.k_layernorm.weight", "indexer.k_norm.weight"),
    ("ple.norm_key.weight", "ple_norm_key.weight"),
    ("ple.norm_query.weight", "ple_norm_query.weight"),
    ("ple.norm_conv.weight", "ple_norm_conv.weight"),
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

    fn integers(&self, name: &str) -> Vec<u64> {
        let name = format!("model.layers.1.ple.ple_embedding.{name}");
        let bytes = self.dir.raw(&name).unwrap();
        bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn put(&mut self, name: String, shape: &[usize], numbers: &[f32]) {
        let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let shape = shape.iter().copied().filter(|&d| d != 1).collect();
        self.tensors.push((name, shape, bytes));
    }

    fn rename(&mut self, from: &str, to: String, change: impl Fn(f32) -> f32) {
        if let Some((shape, numbers)) = self.read(from) {
            self.put(to, &shape, &numbers.into_iter().map(change).collect::<Vec<_>>());
        }
    }

    fn layer(&mut self, i: usize, fused: bool) {
        let hf = |name: &str| format!("model.layers.{i}.{name}");
        let gguf = |name: &str| format!("blk.{i}.{name}");
        for (from, to) in PLAIN {
            self.rename(&hf(from), gguf(to), |x| x);
        }
        for (from, to) in NORMS {
            self.rename(&hf(from), gguf(to), |x| x + 1.0);
        }
        // One row per residual stream.
        for (name, shape, _) in &mut self.tensors {
            if (name.contains("hc_") || name.contains("ple_norm")) && name.ends_with("norm.weight") {
                *shape = vec![4, 64];
            }
        }
        if i == 3 {
            let (shape, qk) = self.read(&hf("self_attn.indexer.index_qk_proj.weight")).unwrap();
            let (q, k) = qk.split_at(2 * HEAD * shape[1]);
            self.put(gguf("indexer.q_proj.weight"), &[2 * HEAD, shape[1]], q);
            self.put(gguf("indexer.k_proj.weight"), &[HEAD, shape[1]], k);
        } else {
            self.delta_net(i);
        }
        self.experts(i, fused);
    }

    fn delta_net(&mut self, i: usize) {
        let hf = |name: &str| format!("model.layers.{i}.linear_attn.{name}");
        let gguf = |name: &str| format!("blk.{i}.{name}");
        let qk_rows = 2 * K_HEADS * HEAD;
        for (from, to, kept, unit) in [
            ("in_proj_qkv.weight", "attn_qkv.weight", qk_rows, HEAD),
            ("in_proj_z.weight", "attn_gate.weight", 0, HEAD),
            ("in_proj_b.weight", "ssm_beta.weight", 0, 1),
            ("in_proj_a.weight", "ssm_alpha.weight", 0, 1),
            ("dt_bias", "ssm_dt.bias", 0, 1),
            ("A_log", "ssm_a", 0, 1),
            ("conv1d.weight", "ssm_conv1d.weight", qk_rows, HEAD),
        ] {
            let (shape, numbers) = self.read(&hf(from)).unwrap();
            let width = numbers.len() / shape[0];
            let (before, v) = numbers.split_at(kept * width);
            let mut out = [before, &tiled(v, unit * width)].concat();
            if from == "A_log" {
                out.iter_mut().for_each(|x| *x = -x.exp());
            }
            self.tensors.retain(|t| t.0 != gguf(to));
            self.put(gguf(to), &shape, &out);
        }
        let (shape, out) = self.read(&hf("out_proj.weight")).unwrap();
        let out: Vec<f32> = out.chunks(shape[1]).flat_map(|row| tiled(row, HEAD)).collect();
        self.put(gguf("ssm_out.weight"), &shape, &out);
    }

    fn experts(&mut self, i: usize, fused: bool) {
        let read = |c: &Converter, e: usize, part: &str| {
            c.read(&format!("model.layers.{i}.mlp.experts.{e}.{part}_proj.weight")).unwrap()
        };
        let stack = |c: &Converter, parts: &[&str]| -> (Vec<usize>, Vec<f32>) {
            let (shape, _) = read(c, 0, parts[0]);
            let each = |e: usize| parts.iter().flat_map(move |p| read(c, e, p).1);
            (vec![EXPERTS, parts.len() * shape[0], shape[1]], (0..EXPERTS).flat_map(each).collect())
        };
        let all: &[(&str, &[&str])] = match fused {
            true => &[("gate_up", &["gate", "up"]), ("down", &["down"])],
            false => &[("gate", &["gate"]), ("up", &["up"]), ("down", &["down"])],
        };
        for (name, parts) in all {
            let (shape, numbers) = stack(self, parts);
            self.put(format!("blk.{i}.ffn_{name}_exps.weight"), &shape, &numbers);
        }
    }
}

/// Value heads in tiled order: those that read the first key head come first of each round.
fn tiled(heads: &[f32], unit: usize) -> Vec<f32> {
    let per_key = V_HEADS / K_HEADS;
    let from = |t: usize| (t % K_HEADS) * per_key + t / K_HEADS;
    (0..V_HEADS).flat_map(|t| heads[from(t) * unit..][..unit].to_vec()).collect()
}

/// The draft head: a layer behind the model's, with both of its projections in one tensor.
fn draft_layer(c: &mut Converter) {
    for (from, to) in PLAIN {
        c.rename(&format!("mtp.layers.0.{from}"), format!("blk.4.{to}"), |x| x);
    }
    for (from, to) in NORMS {
        c.rename(&format!("mtp.layers.0.{from}"), format!("blk.4.{to}"), |x| x + 1.0);
    }
    let (shape, qk) = c.read("mtp.layers.0.self_attn.indexer.index_qk_proj.weight").unwrap();
    let (q, k) = qk.split_at(2 * HEAD * shape[1]);
    c.put("blk.4.indexer.q_proj.weight".to_string(), &[2 * HEAD, shape[1]], q);
    c.put("blk.4.indexer.k_proj.weight".to_string(), &[HEAD, shape[1]], k);
    for part in ["gate", "up", "down"] {
        let read = |e: usize| c.read(&format!("mtp.layers.0.mlp.experts.{e}.{part}_proj.weight")).unwrap();
        let (shape, numbers) = (read(0).0, (0..EXPERTS).flat_map(|e| read(e).1).collect::<Vec<_>>());
        c.put(format!("blk.4.ffn_{part}_exps.weight"), &[EXPERTS, shape[0], shape[1]], &numbers);
    }
    for (from, to, add) in [
        ("pre_fc_norm_hidden", "hnorm", 1.0),
        ("pre_fc_norm_embedding", "enorm", 1.0),
        ("hyper_connection_mixer.hc_norm", "hc_head_norm", 1.0),
        ("hyper_connection_mixer.input_mix_weight_down", "hc_head_down", 0.0),
        ("hyper_connection_mixer.input_mix_weight_up", "hc_head_up", 0.0),
    ] {
        c.rename(&format!("mtp.{from}.weight"), format!("blk.4.nextn.{to}.weight"), |x| x + add);
    }
    let [(shape, e), (_, h)] =
        ["embedding", "hidden"].map(|p| c.read(&format!("mtp.fc_{p}.weight")).unwrap());
    let both: Vec<f32> =
        e.chunks(shape[1]).zip(h.chunks(shape[1])).flat_map(|(e, h)| [e, h].concat()).collect();
    c.put("blk.4.nextn.eh_proj.weight".to_string(), &[shape[0], 2 * shape[1]], &both);
}

/// The draft head of a file, under the names that the spec lists, within 1e-4 of the reference.
#[test]
fn draft_head() {
    let dir = tempfile::tempdir().unwrap();
    let path = common::with_head(dir.path(), "qwen4_exp", "mtp_hf.safetensors");
    let golden = Golden::open(&data("oracle/qwen4_exp/golden_mtp.safetensors"));
    let model = convert_from(HfDir::open(&path).unwrap(), false);
    let (next, streams) = (golden.ids("next_ids"), golden.f32("widened").concat());
    let got = Chain::open(&model).run(0, &next, &streams).0;
    let worst = max_difference(&got, &golden.f32("mtp.prefill.logits"));
    println!("largest difference {worst:e}");
    assert!(worst <= 1e-4, "{worst}");
}

fn convert(fused: bool) -> Checkpoint {
    convert_from(HfDir::open(&data("oracle/qwen4_exp")).unwrap(), fused)
}

/// Also the draft head, if there is one.
fn convert_from(dir: HfDir, fused: bool) -> Checkpoint {
    let drafts = u32::from(dir.tensor("mtp.fc_hidden.weight").is_some());
    let mut c = Converter { dir, tensors: vec![] };
    for (from, to) in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.hyper_connection_mixer.input_mix_weight_down.weight", "output_hc_down.weight"),
        ("model.hyper_connection_mixer.input_mix_weight_up.weight", "output_hc_up.weight"),
    ] {
        c.rename(from, to.to_string(), |x| x);
    }
    c.rename("model.hyper_connection_mixer.hc_norm.weight", "output_hc_norm.weight".to_string(), |x| x + 1.0);
    let shard = |k: usize| format!("model.layers.1.ple.ple_embedding.ngram_embedding.shard_{k}.weight");
    let table: Vec<f32> = (0..4).flat_map(|k| c.read(&shard(k)).unwrap().1).collect();
    c.put("per_layer_token_embd.weight".to_string(), &[560, 8], &table);
    (0..4).for_each(|i| c.layer(i, fused));
    if drafts > 0 {
        draft_layer(&mut c);
    }
    let mut writer = GgufWriter::new();
    writer.set("general.architecture", Value::String("qwen4exp".to_string()));
    writer.set("qwen4exp.block_count", Value::U32(4 + drafts));
    writer.set("qwen4exp.nextn_predict_layers", Value::U32(drafts));
    for (key, value) in [
        ("context_length", 512),
        ("embedding_length", 64),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("rope.dimension_count", 8),
        ("expert_count", EXPERTS),
        ("expert_used_count", 3),
        ("expert_feed_forward_length", 24),
        ("expert_shared_feed_forward_length", 40),
        ("hyper_connection.count", 4),
        ("hyper_connection.low_rank", 12),
        ("attention.indexer.head_count", 2),
        ("attention.indexer.key_length", HEAD),
        ("attention.indexer.top_k", 8),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", HEAD),
        ("ssm.group_count", K_HEADS),
        ("ssm.time_step_rank", V_HEADS),
        ("ssm.inner_size", V_HEADS * HEAD),
        ("ple.ngram_size", 3),
        ("ple.heads_per_ngram", 4),
        ("ple.conv_kernel", 4),
        ("ple.eos_token_id", 5),
        ("embedding_length_per_layer_input", 8),
    ] {
        writer.set(&format!("qwen4exp.{key}"), Value::U32(value as u32));
    }
    writer.set("qwen4exp.rope.freq_base", Value::F32(1e7));
    writer.set("qwen4exp.attention.layer_norm_rms_epsilon", Value::F32(1e-6));
    writer.set("qwen4exp.attention.compress_ratios", Value::Array(Array::I32(vec![0, 0, 0, 4])));
    writer.set("qwen4exp.ple.layers", Value::Array(Array::I32(vec![1])));
    for (key, tensor) in [
        ("layer_multipliers", "layer_multipliers"),
        ("head_vocab_sizes", "ngram_heads_vocab_sizes"),
        ("head_offsets", "ngram_heads_offsets"),
    ] {
        writer.set(&format!("qwen4exp.ple.{key}"), Value::Array(Array::U64(c.integers(tensor))));
    }
    for (name, shape, bytes) in &c.tensors {
        writer.tensor(name, BlockType::F32, shape, bytes).unwrap();
    }
    let bytes = minfer_format::bytes::AlignedBuf::from(&writer.to_bytes()[..]);
    Checkpoint::Gguf(Gguf::from_bytes("converted.gguf", TensorBytes::from(bytes)).unwrap())
}

fn check(fused: bool) {
    let golden = Golden::open(&data("oracle/qwen4_exp/golden.safetensors"));
    let model = convert(fused);
    let mut engine = open(&model, options(2));
    for chunk in [60, 13] {
        let got = logits_in_chunks(&mut engine, &golden.ids("input_ids"), &[chunk]);
        let worst = max_difference(&got, &golden.f32("full.logits"));
        println!("fused {fused}, chunks of {chunk}: largest difference {worst:e}");
        assert!(worst <= 1e-4, "{worst}");
    }
}

#[test]
fn experts_in_three_tensors() {
    check(false);
}

#[test]
fn gate_and_up_in_one_tensor() {
    check(true);
}
