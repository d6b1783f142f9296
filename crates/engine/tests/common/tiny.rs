//! Tiny models with random weights of a chosen type, as GGUF bytes.

use minfer_engine::Checkpoint;
use minfer_format::gguf::Value;
use minfer_format::{BlockType, Gguf, GgufWriter, TensorBytes, bytes::AlignedBuf, synth};

pub const VOCAB: usize = 320;
const HIDDEN: usize = 256;
const HEAD_DIM: usize = 64;
const FFN: usize = 512;
pub const LAYERS: usize = 2;
const EXPERTS: usize = 4;
const EXPERT_FFN: usize = 256;

/// Key-value pairs and tensors under construction.
pub struct Tiny {
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<(String, BlockType, Vec<usize>, AlignedBuf)>,
}

impl Tiny {
    fn number(&mut self, key: &str, value: usize) {
        self.metadata.push((key.to_string(), Value::U32(value as u32)));
    }

    fn tensor(&mut self, name: &str, ty: BlockType, shape: &[usize]) {
        let bytes =
            ty.row_bytes(*shape.last().unwrap()).unwrap() * shape.iter().rev().skip(1).product::<usize>();
        let mut data = AlignedBuf::zeroed(bytes);
        let seed = name.bytes().fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
        if name.ends_with("norm.weight") {
            data.chunks_exact_mut(4).for_each(|c| c.copy_from_slice(&1.0f32.to_le_bytes()));
        } else {
            let std = if name.starts_with("token_embd") {
                1.0
            } else {
                1.5 / (shape[shape.len() - 1] as f32).sqrt()
            };
            synth::fill_random(ty, seed, std, &mut data);
        }
        self.tensors.push((name.to_string(), ty, shape.to_vec(), data));
    }

    fn attention(&mut self, i: usize, ty: BlockType) {
        let f = BlockType::F32;
        self.tensor(&format!("blk.{i}.attn_norm.weight"), f, &[HIDDEN]);
        self.tensor(&format!("blk.{i}.attn_q.weight"), ty, &[4 * HEAD_DIM, HIDDEN]);
        self.tensor(&format!("blk.{i}.attn_k.weight"), ty, &[2 * HEAD_DIM, HIDDEN]);
        self.tensor(&format!("blk.{i}.attn_v.weight"), ty, &[2 * HEAD_DIM, HIDDEN]);
        self.tensor(&format!("blk.{i}.attn_output.weight"), ty, &[HIDDEN, 4 * HEAD_DIM]);
        self.tensor(&format!("blk.{i}.attn_q_norm.weight"), f, &[HEAD_DIM]);
        self.tensor(&format!("blk.{i}.attn_k_norm.weight"), f, &[HEAD_DIM]);
        self.tensor(&format!("blk.{i}.ffn_norm.weight"), f, &[HIDDEN]);
    }

    /// Qwen3 with all matrices of type `ty`; with `moe`, Qwen3-MoE with 4 experts, 2 per token.
    pub fn new(ty: BlockType, moe: bool) -> Tiny {
        let arch = if moe { "qwen3moe" } else { "qwen3" };
        let mut t = Tiny { metadata: Vec::new(), tensors: Vec::new() };
        t.metadata.push(("general.architecture".to_string(), Value::String(arch.to_string())));
        for (key, value) in [
            ("block_count", LAYERS),
            ("context_length", 2048),
            ("embedding_length", HIDDEN),
            ("feed_forward_length", FFN),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
            ("attention.key_length", HEAD_DIM),
            ("attention.value_length", HEAD_DIM),
            ("expert_count", if moe { EXPERTS } else { 0 }),
            ("expert_used_count", if moe { 2 } else { 0 }),
            ("expert_feed_forward_length", EXPERT_FFN),
        ] {
            t.number(&format!("{arch}.{key}"), value);
        }
        t.metadata.push((format!("{arch}.attention.layer_norm_rms_epsilon"), Value::F32(1e-6)));
        t.metadata.push((format!("{arch}.rope.freq_base"), Value::F32(1e6)));
        t.tensor("token_embd.weight", ty, &[VOCAB, HIDDEN]);
        t.tensor("output_norm.weight", BlockType::F32, &[HIDDEN]);
        for i in 0..LAYERS {
            t.attention(i, ty);
            if moe {
                t.tensor(&format!("blk.{i}.ffn_gate_inp.weight"), BlockType::F32, &[EXPERTS, HIDDEN]);
                t.tensor(&format!("blk.{i}.ffn_gate_exps.weight"), ty, &[EXPERTS, EXPERT_FFN, HIDDEN]);
                t.tensor(&format!("blk.{i}.ffn_up_exps.weight"), ty, &[EXPERTS, EXPERT_FFN, HIDDEN]);
                t.tensor(&format!("blk.{i}.ffn_down_exps.weight"), ty, &[EXPERTS, HIDDEN, EXPERT_FFN]);
            } else {
                t.tensor(&format!("blk.{i}.ffn_gate.weight"), ty, &[FFN, HIDDEN]);
                t.tensor(&format!("blk.{i}.ffn_up.weight"), ty, &[FFN, HIDDEN]);
                t.tensor(&format!("blk.{i}.ffn_down.weight"), ty, &[HIDDEN, FFN]);
            }
        }
        t
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = GgufWriter::new();
        for (key, value) in &self.metadata {
            writer.set(key, value.clone());
        }
        for (name, ty, shape, data) in &self.tensors {
            writer.tensor(name, *ty, shape, data).unwrap();
        }
        writer.to_bytes()
    }

    pub fn open(&self) -> Checkpoint {
        let bytes = AlignedBuf::from(&self.to_bytes()[..]);
        Checkpoint::Gguf(Gguf::from_bytes("tiny", TensorBytes::from(bytes)).unwrap())
    }
}

/// `n` token ids from a seed.
pub fn tokens(n: usize, seed: u64) -> Vec<u32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x % VOCAB as u64) as u32
        })
        .collect()
}
