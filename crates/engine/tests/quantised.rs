//! Quantised Hugging Face directories (FP8, FP4, MLX): copies of the tiny checkpoints give the weights of their F32 twins
//! bit for bit, and their logits.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::quantised::{Layout, Source, copies, same_weights};
use common::{Golden, bits, cpu, data, logits_in_chunks, max_difference, open, options};
use minfer_cpu::Isa;
use minfer_engine::{Checkpoint, EngineOptions};
use minfer_format::BlockType;
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A quantised checkpoint, its F32 twin, and a prompt.
struct Pair {
    packed: Checkpoint,
    plain: Checkpoint,
    prompt: Vec<u32>,
    _dirs: [TempDir; 2],
}

fn pair(
    name: &str,
    change: impl FnOnce(&mut Source),
    edit: impl FnOnce(&mut Value),
    choose: impl Fn(&str, &[usize]) -> Layout,
) -> Pair {
    let dir = data(&format!("oracle/{name}"));
    let prompt = Golden::open(&dir.join("golden.safetensors")).ids("input_ids");
    let mut source = Source::open(&dir);
    change(&mut source);
    let dirs = copies(&dir, &source, edit, choose);
    let [packed, plain] = [0, 1].map(|i| Checkpoint::open(dirs[i].path()).unwrap());
    Pair { packed, plain, prompt, _dirs: dirs }
}

/// Whether a layout with blocks of 32 can store a tensor of this name.
fn matrix(name: &str, shape: &[usize]) -> bool {
    name.ends_with(".weight")
        && !name.contains("conv")
        && shape.len() >= 2
        && shape[shape.len() - 1].is_multiple_of(32)
}

fn logits(model: &Checkpoint, prompt: &[u32], threads: usize, isa: Isa, chunk: usize) -> Vec<Vec<f32>> {
    let options = EngineOptions { max_rows: 300, max_outs: 300, ..options(threads) };
    let mut engine = open(model, EngineOptions { devices: cpu(threads, isa), ..options });
    logits_in_chunks(&mut engine, prompt, &[chunk])
}

/// The quantised copy alone: the same bits whatever the chunks, threads and instruction set.
fn rows_are_invariant(p: &Pair) -> Vec<Vec<f32>> {
    let prompt = &p.prompt[..p.prompt.len().min(70)];
    let want = logits(&p.packed, prompt, 1, Isa::detect(), prompt.len());
    for (threads, isa, chunk) in
        [(2, Isa::detect(), 1), (2, Isa::detect(), 7), (2, Isa::Scalar, prompt.len())]
    {
        let got = logits(&p.packed, prompt, threads, isa, chunk);
        assert!(bits(&got) == bits(&want), "{threads} threads, {isa:?}, chunks of {chunk}");
    }
    want
}

/// FP8 takes activations in f32 and decodes to the twin's weights, so every logit has the same bits (which is also within
/// the 1e-4 that the f32 path may differ from transformers).
fn equal_logits(p: &Pair) {
    let whole = p.prompt.len();
    let [packed, plain] = [&p.packed, &p.plain].map(|m| logits(m, &p.prompt, 2, Isa::detect(), whole));
    assert!(plain.iter().flatten().all(|x| x.is_finite()));
    assert!(bits(&packed) == bits(&plain), "{}", max_difference(&packed, &plain));
    rows_are_invariant(p);
}

/// Mean difference from the twin's logits, as a part of their mean size.
fn close_logits(p: &Pair, tolerance: f64) {
    let packed = rows_are_invariant(p);
    let plain = logits(&p.plain, &p.prompt[..packed.len()], 2, Isa::detect(), packed.len());
    let worst = max_difference(&packed, &plain);
    let all = || packed.iter().flatten().zip(plain.iter().flatten());
    let size: f64 = all().map(|(_, b)| f64::from(b.abs())).sum();
    let mean = all().map(|(a, b)| f64::from((a - b).abs())).sum::<f64>() / size;
    println!("mean difference {mean:.5} of the size, largest {worst}");
    assert!(mean > 0.0 && mean <= tolerance, "{mean}");
}

/// GLM's style: `weight_scale_inv` in F32, here for squares of 32 by 64 so that tensors have several.
#[test]
fn fp8_with_inverse_scales() {
    let quantisation = json!({"quant_method": "fp8", "weight_block_size": [32, 64]});
    let edit = |config: &mut Value| config["quantization_config"] = quantisation;
    let p = pair(
        "glm5_next",
        |_| (),
        edit,
        |name, shape| match matrix(name, shape) && !name.contains("visual") {
            true => Layout::Fp8Inverse(32, 64),
            false => Layout::Plain,
        },
    );
    assert!(same_weights(&p.packed, &p.plain) > 40);
    equal_logits(&p);
}

/// DeepSeek's style: `scale` in E8M0 for squares of 128.
#[test]
fn fp8_with_exponents() {
    let p = pair(
        "deepseek_v4",
        |_| (),
        |_| (),
        |name, shape| match matrix(name, shape) {
            true => Layout::Fp8Exponent(128, 128),
            false => Layout::Plain,
        },
    );
    assert!(same_weights(&p.packed, &p.plain) > 40);
    equal_logits(&p);
}

/// DeepSeek's own files: routed experts in FP4, the rest in FP8. Products with FP4 round activations to int8.
#[test]
fn fp4_experts_among_fp8() {
    let p = pair(
        "deepseek_v4",
        |_| (),
        |_| (),
        |name, shape| match matrix(name, shape) {
            true if name.contains(".experts.") => Layout::Fp4,
            true => Layout::Fp8Exponent(128, 128),
            false => Layout::Plain,
        },
    );
    let quantised = same_weights(&p.packed, &p.plain);
    let graph = minfer_model::load(&p.packed).unwrap().graph(&p.packed, 8).unwrap();
    let fp4 = graph.weights.iter().filter(|w| w.ty == BlockType::MXFP4).count();
    assert!(
        fp4 == 10 && quantised > 40,
        "gate and up of 5 layers; rows of 48 do not fit: {fp4} of {quantised}"
    );
    close_logits(&p, 0.03);
}

/// MLX's packs of every width, and its one tensor for all experts of a layer. The products round activations to int8.
#[test]
fn mlx_affine() {
    let widths = [2, 3, 4, 5, 6, 8];
    let choose = |name: &str, shape: &[usize]| {
        let (bits, dtype) = (widths[name.len() % 6], [Dtype::F32, Dtype::BF16][name.len() % 2]);
        match matrix(name, shape) {
            true => {
                Layout::Affine(bits, if shape[shape.len() - 1].is_multiple_of(128) { 128 } else { 32 }, dtype)
            }
            false => Layout::Plain,
        }
    };
    let quantisation = json!({"group_size": 32, "bits": 4, "mode": "affine"});
    let edit = |config: &mut Value| config["quantization"] = quantisation;
    let p = pair("qwen4_exp", |s| s.stack_experts(8, 64), edit, choose);
    assert!(same_weights(&p.packed, &p.plain) > 40);
    let graph = minfer_model::load(&p.packed).unwrap().graph(&p.packed, 8).unwrap();
    let stacks = graph.weights.iter().filter(|w| w.name.contains("switch_mlp")).count();
    assert_eq!(stacks, 8, "gate and up of 4 layers");
    for ty in [BlockType::AFFINE4, BlockType::AFFINE8] {
        assert!(graph.weights.iter().any(|w| w.ty == ty), "{ty}");
    }
    close_logits(&p, 0.03);
}

/// A tied embedding in eight bits (rows and head), the rest in MLX's mxfp4.
#[test]
fn mlx_mxfp4() {
    let p = pair(
        "qwen3",
        |_| (),
        |_| (),
        |name, shape| match matrix(name, shape) {
            true if name.contains("embed") => Layout::Affine(8, 64, Dtype::BF16),
            true => Layout::Mxfp4,
            false => Layout::Plain,
        },
    );
    assert!(same_weights(&p.packed, &p.plain) > 15);
    close_logits(&p, 0.03);
}
