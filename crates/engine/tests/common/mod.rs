//! What the engine's integration tests share: fixtures, engines, comparisons.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod chain;
pub mod flaky;
pub mod parts;
pub mod play;
pub mod quantised;
pub mod schedule;
pub mod tiny;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use minfer_cpu::{CpuDevice, Isa};
use minfer_engine::{Checkpoint, Chunk, Engine, EngineOptions, KvFormat, Outs};
use minfer_runtime::Device;
use safetensors::SafeTensors;

/// A file or folder of `tests-data/`.
pub fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data").join(path)
}

/// The file or folder that an environment variable names, relative to the repository as the README's commands are.
pub fn path_from_env(name: &str) -> PathBuf {
    let path =
        std::env::var_os(name).unwrap_or_else(|| panic!("set {name}; see the comment above this test"));
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

pub fn cpu(threads: usize, isa: Isa) -> Vec<Arc<dyn Device>> {
    vec![Arc::new(CpuDevice::new(threads, isa).unwrap())]
}

/// Options for exact comparisons: f32 keys and values, all rows of a prompt may be asked for.
pub fn options(threads: usize) -> EngineOptions {
    EngineOptions {
        kv_format: KvFormat::F32,
        max_rows: 128,
        max_outs: 128,
        ..EngineOptions::new(cpu(threads, Isa::detect()))
    }
}

pub fn open(model: &Checkpoint, options: EngineOptions) -> Engine {
    Engine::open(model, options, &mut |_, _| ()).unwrap()
}

/// Tensors of a golden file.
pub struct Golden(Vec<u8>);

impl Golden {
    pub fn open(path: &Path) -> Golden {
        Golden(std::fs::read(path).unwrap())
    }

    fn tensor(&self, name: &str) -> (Vec<usize>, Vec<u8>) {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let t = file.tensor(name).unwrap();
        (t.shape().to_vec(), t.data().to_vec())
    }

    /// `[rows, width]` floats: the last dimension is the width.
    pub fn f32(&self, name: &str) -> Vec<Vec<f32>> {
        let (shape, bytes) = self.tensor(name);
        let numbers: Vec<f32> =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        numbers.chunks(*shape.last().unwrap()).map(<[f32]>::to_vec).collect()
    }

    /// All numbers of an i64 tensor.
    pub fn ids(&self, name: &str) -> Vec<u32> {
        let (_, bytes) = self.tensor(name);
        bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect()
    }

    /// All numbers of an i32 tensor.
    pub fn i32s(&self, name: &str) -> Vec<i32> {
        parts::integers(&self.tensor(name).1)
    }

    /// All truth values of a boolean tensor.
    pub fn bools(&self, name: &str) -> Vec<bool> {
        self.tensor(name).1.iter().map(|&b| b != 0).collect()
    }

    pub fn has(&self, name: &str) -> bool {
        SafeTensors::deserialize(&self.0).unwrap().tensor(name).is_ok()
    }
}

/// A tiny checkpoint and its draft head, as one directory of two shards. A DSpark head gets the settings of the
/// reference (`oracle/gen_deepseek_v4_mtp.py`).
pub fn with_head(dir: &Path, family: &str, head: &str) -> PathBuf {
    let from = data(&format!("oracle/{family}"));
    let mut map = serde_json::Map::new();
    for (file, shard) in [("model.safetensors", "a.safetensors"), (head, "b.safetensors")] {
        std::fs::copy(from.join(file), dir.join(shard)).unwrap();
        let tensors = minfer_format::hf::Safetensors::open(&from.join(file)).unwrap();
        for t in tensors.tensors() {
            map.insert(t.name.clone(), shard.into());
        }
    }
    let config = std::fs::read(from.join("config.json")).unwrap();
    let mut config: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&config).unwrap();
    if head.starts_with("dspark") {
        let settings = [("block_size", 5), ("markov_rank", 12), ("noise_token_id", 130)];
        config.extend(settings.map(|(key, n)| (format!("dspark_{key}"), n.into())));
        config.insert("dspark_target_layer_ids".to_string(), vec![2, 3, 4].into());
    }
    std::fs::write(dir.join("config.json"), serde_json::to_string(&config).unwrap()).unwrap();
    let index = serde_json::json!({ "weight_map": map });
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    dir.to_path_buf()
}

/// Logits of every token, processed in chunks of the given sizes (the last size repeats).
pub fn logits_in_chunks(engine: &mut Engine, tokens: &[u32], sizes: &[usize]) -> Vec<Vec<f32>> {
    let sequence = engine.new_sequence();
    let mut logits = Vec::new();
    let (mut rest, mut step) = (tokens, 0);
    while !rest.is_empty() {
        let size = sizes[step.min(sizes.len() - 1)].min(rest.len());
        let (tokens, tail) = rest.split_at(size);
        let out = engine.step(&[Chunk { sequence, tokens, outs: Outs::All, window: false }]).unwrap();
        logits.extend((0..out.len()).map(|i| out.row(i).to_vec()));
        (rest, step) = (tail, step + 1);
    }
    engine.release(sequence).unwrap();
    logits
}

pub fn max_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len(), "number of rows");
    let mut worst = 0.0f32;
    for (a, b) in a.iter().zip(b) {
        assert_eq!(a.len(), b.len(), "row width");
        for (x, y) in a.iter().zip(b) {
            let d = (x - y).abs();
            assert!(d.is_finite(), "{x} against {y}");
            worst = worst.max(d);
        }
    }
    worst
}

/// Index of the largest number.
pub fn argmax(row: &[f32]) -> u32 {
    row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0))).unwrap().0 as u32
}

/// Bit patterns, for exact comparisons that also hold for NaN and zero signs.
pub fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|r| r.iter().map(|x| x.to_bits()).collect()).collect()
}

/// The rows of a model's n-gram table, as the graph's input takes them.
pub fn ngram_bits(model: &Checkpoint, rows: &[i32]) -> Vec<i32> {
    let decl = minfer_model::load(model).unwrap().ngram_table(model).unwrap().unwrap();
    let table = model.row_table(&decl, Default::default()).unwrap();
    let mut numbers = Vec::new();
    table.read(rows, &mut numbers).unwrap();
    numbers.iter().map(|x| x.to_bits() as i32).collect()
}
