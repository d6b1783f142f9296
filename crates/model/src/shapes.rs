//! Shapes of well-known models, so that speed and memory can be measured before anything is downloaded.

use std::fmt;

use minfer_format::BlockType;

use crate::error::ModelError;

/// Sizes of a published model.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Preset {
    pub name: &'static str,
    /// Architecture as in GGUF files.
    pub arch: &'static str,
    pub layers: usize,
    pub hidden: usize,
    pub ffn: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub context: usize,
    pub rope_theta: f32,
    pub tied: bool,
    /// Experts, experts per token, expert width; zeros for a dense model.
    pub experts: [usize; 3],
}

macro_rules! preset {
    ($name:literal, $arch:literal, layers $l:literal, hidden $h:literal, ffn $f:literal, heads $q:literal/$kv:literal x $d:literal, vocab $v:literal, context $c:literal, theta $t:literal, tied $tied:literal, experts $e:expr) => {
        Preset {
            name: $name,
            arch: $arch,
            layers: $l,
            hidden: $h,
            ffn: $f,
            heads: $q,
            kv_heads: $kv,
            head_dim: $d,
            vocab: $v,
            context: $c,
            rope_theta: $t,
            tied: $tied,
            experts: $e,
        }
    };
}

/// Every preset; sizes are those of the published configurations (`qwen3moe-small` is ours, for measuring).
#[rustfmt::skip]
pub const SHAPES: [Preset; 8] = [
    preset!("qwen3-0.6b", "qwen3", layers 28, hidden 1024, ffn 3072, heads 16/8 x 128, vocab 151936, context 40960, theta 1e6, tied true, experts [0; 3]),
    preset!("qwen3-1.7b", "qwen3", layers 28, hidden 2048, ffn 6144, heads 16/8 x 128, vocab 151936, context 40960, theta 1e6, tied true, experts [0; 3]),
    preset!("qwen3-8b", "qwen3", layers 36, hidden 4096, ffn 12288, heads 32/8 x 128, vocab 151936, context 40960, theta 1e6, tied false, experts [0; 3]),
    preset!("qwen3-30b-a3b", "qwen3moe", layers 48, hidden 2048, ffn 6144, heads 32/4 x 128, vocab 151936, context 40960, theta 1e6, tied false, experts [128, 8, 768]),
    preset!("qwen3moe-small", "qwen3moe", layers 24, hidden 1024, ffn 3072, heads 16/4 x 128, vocab 32000, context 32768, theta 1e6, tied false, experts [32, 4, 512]),
    preset!("qwen2.5-0.5b", "qwen2", layers 24, hidden 896, ffn 4864, heads 14/2 x 64, vocab 151936, context 32768, theta 1e6, tied true, experts [0; 3]),
    preset!("llama-3.2-1b", "llama", layers 16, hidden 2048, ffn 8192, heads 32/8 x 64, vocab 128256, context 131072, theta 5e5, tied true, experts [0; 3]),
    preset!("smollm2-135m", "llama", layers 30, hidden 576, ffn 1536, heads 9/3 x 64, vocab 49152, context 8192, theta 1e5, tied true, experts [0; 3]),
];

/// Which type each tensor of a shape gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mix {
    /// All matrices of one type.
    Plain(BlockType),
    /// llama.cpp's Q4_K_M: Q4_K, with Q6_K for the head and for part of `attn_v` and `ffn_down`.
    Q4KM,
}

/// A preset with a type and a seed, such as `qwen3-0.6b:q4_0`.
#[derive(Debug)]
pub struct Shape {
    /// The sizes.
    pub preset: &'static Preset,
    mix: Mix,
    /// Seed of the weights.
    pub seed: u64,
}

impl Shape {
    /// Parses `NAME:TYPE`, for example `qwen3-0.6b:q4_k_m`.
    ///
    /// # Errors
    /// An unknown name or type, with the known ones.
    pub fn parse(text: &str) -> Result<Shape, ModelError> {
        let unknown = || {
            let names: Vec<_> = SHAPES.iter().map(|p| p.name).collect();
            let known =
                format!("{}; each with a type, as in qwen3-0.6b:q4_0 ({})", names.join(", "), types());
            ModelError::UnknownShape { name: text.to_string(), known }
        };
        let (name, ty) = text.split_once(':').ok_or_else(unknown)?;
        let preset = SHAPES.iter().find(|p| p.name.eq_ignore_ascii_case(name)).ok_or_else(unknown)?;
        let mix = match ty.to_ascii_lowercase().as_str() {
            "q4_k_m" => Mix::Q4KM,
            other => Mix::Plain(BlockType::from_name(other).ok_or_else(unknown)?),
        };
        Ok(Shape { preset, mix, seed: 1 })
    }

    /// The type that llama.cpp's quantizer would give this tensor, as far as these mixes go; a row that is
    /// not whole blocks falls back to Q8_0, which every row of these shapes fits.
    pub(crate) fn tensor_type(&self, name: &str, shape: &[usize]) -> BlockType {
        let k = shape.last().copied().unwrap_or(0);
        if shape.len() < 2 || name.contains("ffn_gate_inp") {
            return BlockType::F32;
        }
        let head = name.starts_with("output.") || (name.starts_with("token_embd") && self.preset.tied);
        let ty = match self.mix {
            Mix::Plain(ty) if ty.is_quantized() && ty != BlockType::Q8_0 && head => BlockType::Q6_K,
            Mix::Plain(ty) => ty,
            Mix::Q4KM if head || self.more_bits(name) => BlockType::Q6_K,
            Mix::Q4KM => BlockType::Q4_K,
        };
        if ty.row_bytes(k).is_some() { ty } else { BlockType::Q8_0 }
    }

    /// The layers whose `attn_v` and `ffn_down` get more bits: the first and last eighth, every third between.
    fn more_bits(&self, name: &str) -> bool {
        let (n, layer) = (self.preset.layers, name.split('.').nth(1).and_then(|l| l.parse::<usize>().ok()));
        let Some(i) = layer else { return false };
        let chosen = i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
        chosen && (name.contains("attn_v") || name.contains("ffn_down"))
    }
}

fn types() -> String {
    let plain = BlockType::all().map(|t| t.name().to_ascii_lowercase());
    plain.chain(["q4_k_m".to_string()]).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ty = match self.mix {
            Mix::Plain(ty) => ty.name().to_ascii_lowercase(),
            Mix::Q4KM => "q4_k_m".to_string(),
        };
        write!(f, "{}:{ty}", self.preset.name)
    }
}
