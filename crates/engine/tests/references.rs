//! Real models and other programs as references. These need files that are not in the repository, so they
//! are ignored by default; each says which environment variable names its files and how to get them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Golden, argmax, data, logits_in_chunks, max_difference, open, options, path_from_env};
use minfer_engine::{Checkpoint, Engine, Text};
use serde_json::Value as Json;

fn numbers(v: &Json) -> Vec<f32> {
    v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn ids(v: &Json) -> Vec<u32> {
    v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect()
}

/// Greedy continuation of `n` tokens.
fn greedy(engine: &mut Engine, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut session = engine.session();
    let mut logits = session.append(prompt, &mut || true).unwrap().unwrap();
    let mut out = Vec::new();
    for _ in 0..n {
        out.push(argmax(&logits));
        logits = session.append(&out[out.len() - 1..], &mut || true).unwrap().unwrap();
    }
    out
}

/// llama.cpp's logits of tiny random models: `scripts/peer-logits.sh DIR`, then `MINFER_PEER_LOGITS=DIR`.
/// Float files: 1e-3 as the issue asks, though they agree far better; quantised ones: activations are rounded
/// to 8 bits differently, so the mean difference is bounded instead (0.05; logits have a deviation of 1 to 4).
/// llama.cpp's graphs of `deepseek4` and `glm5-next` leave out the scales, and biases of q, k and v, that its own files
/// of them hold (the script checks that its logits are the same, byte for byte, without): there the files that have them
/// must differ, and those where they stand for nothing agree. Its graph of `qwen4exp` is no reference by its own account;
/// that file must run.
#[test]
#[ignore = "needs MINFER_PEER_LOGITS"]
fn llama_cpp_logits() {
    let dir = path_from_env("MINFER_PEER_LOGITS");
    let names = std::fs::read_to_string(dir.join("names")).unwrap();
    let mut checked = 0;
    for name in names.split_whitespace() {
        let model = Checkpoint::open(&dir.join(format!("{name}.gguf"))).unwrap();
        if name == "llama-moe" {
            let error = minfer_model::load(&model).err().unwrap().to_string();
            assert!(error.contains("llama.expert_count"), "{error}");
            continue;
        }
        let ids = std::fs::read_to_string(dir.join(format!("{name}.ids"))).unwrap();
        let ids: Vec<u32> = ids.split_whitespace().map(|t| t.parse().unwrap()).collect();
        let bytes = std::fs::read(dir.join(format!("{name}.f32"))).unwrap();
        let want: Vec<f32> =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let want: Vec<Vec<f32>> = want.chunks(want.len() / ids.len()).map(<[f32]>::to_vec).collect();
        let got = logits_in_chunks(&mut open(&model, options(2)), &ids, &[13]);
        checked += 1;
        if name == "qwen4exp" {
            assert!(got.iter().flatten().all(|x| x.is_finite()), "{name}");
            continue;
        }
        let worst = max_difference(&got, &want);
        let all = || got.iter().flatten().zip(want.iter().flatten());
        let mean = all().map(|(a, b)| f64::from((a - b).abs())).sum::<f64>() / all().count() as f64;
        println!("{name}: largest difference {worst:.1e}, mean {mean:.1e}");
        if ["deepseek4", "glm5-next"].contains(&name) {
            assert!(worst > 0.1, "{name}: scales do not count: {worst}");
        } else if name.contains("_") && name.contains("-Q") {
            assert!(mean <= 0.05, "{name}: {mean}");
        } else {
            assert!(worst <= 1e-3, "{name}: {worst}");
        }
    }
    assert!(checked >= 27, "only {checked} models");
}

/// transformers' logits of our own demo model in f32 arithmetic on its bf16 weights, every logit within 1e-4,
/// and its greedy continuations: `MINFER_NANO_DIR=../shared/models/nano`.
#[test]
#[ignore = "needs MINFER_NANO_DIR"]
fn nano_goldens() {
    let model = Checkpoint::open(&path_from_env("MINFER_NANO_DIR")).unwrap();
    let golden = Golden::open(&data("nano/golden.safetensors"));
    let text = Text::open(&model).unwrap();
    let json: Json = serde_json::from_slice(&std::fs::read(data("nano/golden.json")).unwrap()).unwrap();
    for i in 0..5 {
        let prompt = golden.ids(&format!("ids_{i}"));
        let written = json["prompts"][i]["prompt"].as_str().unwrap();
        assert_eq!(text.encode_raw(written).unwrap(), prompt, "tokens of prompt {i}");
        let want = golden.f32(&format!("logits_{i}"));
        let mut engine = open(&model, options(2));
        for chunks in [vec![prompt.len()], vec![prompt.len() - 4, 1], vec![13]] {
            let worst = max_difference(&logits_in_chunks(&mut engine, &prompt, &chunks), &want);
            println!("nano, prompt {i}, chunks {chunks:?}: largest difference {worst:e}");
            assert!(worst <= 1e-4, "prompt {i}: {worst}");
        }
        assert_eq!(greedy(&mut engine, &prompt, 64), golden.ids(&format!("greedy_{i}")), "prompt {i}");
    }
}

/// KL divergence in nats between the distributions over the listed ids, reference first.
fn kl(reference: &[(u32, f32)], logits: &[f32]) -> f64 {
    let softmax = |x: Vec<f64>| {
        let max = x.iter().copied().fold(f64::MIN, f64::max);
        let e: Vec<f64> = x.iter().map(|v| (v - max).exp()).collect();
        let sum: f64 = e.iter().sum();
        e.into_iter().map(|v| v / sum).collect::<Vec<_>>()
    };
    let p = softmax(reference.iter().map(|r| f64::from(r.1)).collect());
    let q = softmax(reference.iter().map(|r| f64::from(logits[r.0 as usize])).collect());
    p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum()
}

fn top10(entry: &Json) -> Vec<(u32, f32)> {
    let pair = |p: &Json| (p[0].as_u64().unwrap() as u32, p[1].as_f64().unwrap() as f32);
    entry["top10_last"].as_array().unwrap().iter().map(pair).collect()
}

/// SmolLM2-135M-Instruct, 4-bit (`scripts/fetch-models.sh`, `MINFER_SMOLLM2=FILE`): tokens of the five prompts,
/// first token and KL against the exact f32 reference and against llama.cpp, and the reference's choice at every
/// position where its margin is 0.5 or more.
#[test]
#[ignore = "needs MINFER_SMOLLM2"]
fn smollm2() {
    let model = Checkpoint::open(&path_from_env("MINFER_SMOLLM2")).unwrap();
    let text = Text::open(&model).unwrap();
    let load = |name: &str| -> Vec<Json> {
        serde_json::from_slice(&std::fs::read(data("smollm2").join(name)).unwrap()).unwrap()
    };
    let (exact, peer) = (load("exact.json"), load("golden.json"));
    assert_eq!(exact.len(), 5);
    let mut engine = open(&model, options(2));
    let (mut positions, mut flips) = (0, 0);
    for (exact, peer) in exact.iter().zip(&peer) {
        let prompt = ids(&exact["prompt_ids"]);
        assert_eq!(text.encode_raw(exact["prompt"].as_str().unwrap()).unwrap(), prompt);
        let chosen = ids(&exact["greedy_ids"]);
        let all: Vec<u32> = prompt.iter().chain(&chosen).copied().collect();
        let logits = logits_in_chunks(&mut engine, &all, &[64]);
        let last = &logits[prompt.len() - 1];
        assert_eq!(argmax(last), ids(&peer["greedy_ids"])[0], "first token as llama.cpp's");
        let (to_exact, to_peer) = (kl(&top10(exact), last), kl(&top10(peer), last));
        let peers_own = kl(&top10(exact), &{
            let mut dense = vec![-1e9f32; last.len()];
            top10(peer).iter().for_each(|&(id, x)| dense[id as usize] = x);
            top10(exact).iter().for_each(|&(id, x)| {
                if dense[id as usize] < -1e8 {
                    dense[id as usize] = x;
                }
            });
            dense
        });
        println!("{:?}", exact["prompt"].as_str().unwrap());
        println!(
            "  KL to exact {to_exact:.1e}, to llama.cpp {to_peer:.1e}; llama.cpp to exact {peers_own:.1e}"
        );
        assert!(to_exact <= 0.02 && to_peer <= 0.05, "KL {to_exact} {to_peer}");
        for (i, (&id, margin)) in chosen.iter().zip(numbers(&exact["greedy_margins"])).enumerate() {
            let got = argmax(&logits[prompt.len() - 1 + i]);
            positions += 1;
            if got != id {
                flips += 1;
                println!("  position {i}: {got} instead of {id}, margin {margin}");
                assert!(margin < 0.5, "position {i}: {got} instead of {id} at margin {margin}");
            }
        }
        let mine = greedy(&mut engine, &prompt, 48);
        let end = mine.iter().position(|t| text.tokenizer.end_tokens().contains(t)).unwrap_or(mine.len());
        println!("  llama.cpp: {:?}", peer["greedy_text"].as_str().unwrap());
        println!("  minfer:    {:?}", text.tokenizer.decode(&mine[..end], true));
    }
    println!("{flips} of {positions} choices differ from the exact reference");
}
