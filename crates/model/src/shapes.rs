//! Shapes of well-known models, so that speed and memory can be measured before anything is downloaded.

use std::fmt;
use std::fs::File;

use minfer_format::table::{RowTable, TableOptions, TablePart};
use minfer_format::{BlockType, Error, synth};
use minfer_graph::WeightDecl;
use serde_json::Value as Json;

use crate::error::ModelError;
use crate::ngram::Recipe;

/// A published model.
#[derive(Debug)]
pub struct Preset {
    /// What it is called on the command line.
    pub name: &'static str,
    /// Architecture as in GGUF files.
    pub arch: &'static str,
    /// Whether the embedding is also the head.
    pub(crate) tied: bool,
    /// `config.json`, as far as the architecture reads it.
    config: &'static str,
}

macro_rules! preset {
    ($name:literal, $arch:literal, layers $l:literal, hidden $h:literal, ffn $f:literal, heads $q:literal/$kv:literal x $d:literal, vocab $v:literal, context $c:literal, theta $t:literal, tied $tied:literal, experts [$e:literal, $used:literal, $width:literal]) => {
        Preset {
            name: $name,
            arch: $arch,
            tied: $tied,
            config: concat!(
                r#"{"num_hidden_layers":"#, $l, r#","hidden_size":"#, $h, r#","intermediate_size":"#, $f,
                r#","num_attention_heads":"#, $q, r#","num_key_value_heads":"#, $kv, r#","head_dim":"#, $d,
                r#","vocab_size":"#, $v, r#","max_position_embeddings":"#, $c, r#","rope_theta":"#, $t,
                r#","num_experts":"#, $e, r#","num_experts_per_tok":"#, $used,
                r#","moe_intermediate_size":"#, $width, r#","norm_topk_prob":true}"#
            ),
        }
    };
}

const fn config(name: &'static str, arch: &'static str, config: &'static str) -> Preset {
    Preset { name, arch, tied: false, config }
}

/// Every preset; sizes are those of the published configurations (those called `small` are ours, for measuring).
#[rustfmt::skip]
pub const SHAPES: [Preset; 14] = [
    preset!("qwen3-0.6b", "qwen3", layers 28, hidden 1024, ffn 3072, heads 16/8 x 128, vocab 151936, context 40960, theta 1e6, tied true, experts [0, 0, 0]),
    preset!("qwen3-1.7b", "qwen3", layers 28, hidden 2048, ffn 6144, heads 16/8 x 128, vocab 151936, context 40960, theta 1e6, tied true, experts [0, 0, 0]),
    preset!("qwen3-8b", "qwen3", layers 36, hidden 4096, ffn 12288, heads 32/8 x 128, vocab 151936, context 40960, theta 1e6, tied false, experts [0, 0, 0]),
    preset!("qwen3-30b-a3b", "qwen3moe", layers 48, hidden 2048, ffn 6144, heads 32/4 x 128, vocab 151936, context 40960, theta 1e6, tied false, experts [128, 8, 768]),
    preset!("qwen3moe-small", "qwen3moe", layers 24, hidden 1024, ffn 3072, heads 16/4 x 128, vocab 32000, context 32768, theta 1e6, tied false, experts [32, 4, 512]),
    preset!("qwen2.5-0.5b", "qwen2", layers 24, hidden 896, ffn 4864, heads 14/2 x 64, vocab 151936, context 32768, theta 1e6, tied true, experts [0, 0, 0]),
    preset!("llama-3.2-1b", "llama", layers 16, hidden 2048, ffn 8192, heads 32/8 x 64, vocab 128256, context 131072, theta 5e5, tied true, experts [0, 0, 0]),
    preset!("smollm2-135m", "llama", layers 30, hidden 576, ffn 1536, heads 9/3 x 64, vocab 49152, context 8192, theta 1e5, tied true, experts [0, 0, 0]),
    config("qwen3.8-flash-next", "qwen4exp", include_str!("shapes/qwen3.8-flash-next.json")),
    config("qwen4exp-small", "qwen4exp", include_str!("shapes/qwen4exp-small.json")),
    config("deepseek-v4-flash", "deepseek4", include_str!("shapes/deepseek-v4-flash.json")),
    config("deepseek4-small", "deepseek4", include_str!("shapes/deepseek4-small.json")),
    config("glm-5.3-flash", "glm5-next", include_str!("shapes/glm-5.3-flash.json")),
    config("glm5-next-small", "glm5-next", include_str!("shapes/glm5-next-small.json")),
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
    /// The model.
    pub preset: &'static Preset,
    config: Json,
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
        let damaged = |e: serde_json::Error| ModelError::BadSetting {
            source_name: preset.name.to_string(),
            key: "the preset".to_string(),
            why: e.to_string(),
        };
        let config = serde_json::from_str(preset.config).map_err(damaged)?;
        Ok(Shape { preset, config, mix, seed: 1 })
    }

    /// The published `config.json`.
    pub(crate) fn config(&self) -> &Json {
        &self.config
    }

    /// Whether there is such a tensor, of those that models may have or not: the parts of a draft head.
    pub(crate) fn has(&self, tensor: &str) -> bool {
        let drafts = self.number("num_nextn_predict_layers") + self.number("mtp_num_hidden_layers") > 0;
        drafts && tensor.starts_with(&format!("blk.{}.nextn.", self.layers())) && tensor.ends_with(".weight")
    }

    fn number(&self, key: &str) -> usize {
        self.config.get(key).and_then(Json::as_u64).map_or(0, |n| n as usize)
    }

    /// Rows of the embedding, or of the table of n-grams.
    pub(crate) fn rows(&self, tensor: &str) -> usize {
        let vocab = self.number("vocab_size");
        if tensor != NGRAM_TABLE {
            return vocab;
        }
        let (vocab_base, seed) = (self.number("ngram_vocab_size_base"), self.number("seed") as u64);
        let heads = self.number("ngram_size").saturating_sub(1) * self.number("heads_per_ngram");
        let rows = Recipe { vocab, vocab_base, seed }.rows(heads);
        rows.next_multiple_of(self.number("make_ngram_vocab_size_divisible_by").max(1))
    }

    /// A table of expert ids: each row has different ones.
    pub(crate) fn ids(&self, decl: &WeightDecl) -> Vec<i64> {
        let (count, used) = (self.number("n_routed_experts").max(1), decl.shape.last().copied().unwrap_or(1));
        let ids = decl.shape.iter().product::<usize>();
        // Rows that follow each other share no expert as long as there are enough.
        (0..ids).map(|i| (i % count.max(used)) as i64 % count as i64).collect()
    }

    /// The type that llama.cpp's quantizer would give this tensor, as far as these mixes go.
    pub(crate) fn tensor_type(&self, name: &str, shape: &[usize]) -> BlockType {
        let k = shape.last().copied().unwrap_or(0);
        let is = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        if shape.len() < 2 || is(&FULL) {
            return BlockType::F32;
        }
        let glm = self.preset.arch == "glm5-next";
        let head = name.starts_with("output.") || (name.starts_with("token_embd") && self.preset.tied);
        let ty = match self.mix {
            Mix::Plain(ty) if !ty.is_quantized() => return ty,
            _ if glm && is(&GLM_HALF) => BlockType::BF16,
            _ if glm && is(&["attn_q_a", "attn_q_b"]) => BlockType::Q8_0,
            Mix::Plain(ty) if ty != BlockType::Q8_0 && head => BlockType::Q6_K,
            Mix::Plain(ty) => ty,
            Mix::Q4KM if head || self.more_bits(name) => BlockType::Q6_K,
            Mix::Q4KM => BlockType::Q4_K,
        };
        if ty.row_bytes(k).is_some() { ty } else { short_rows(ty, k) }
    }

    /// Norm weights are one, decay rates minus one; matrices have a deviation that keeps activations near one.
    pub(crate) fn fill(&self, decl: &WeightDecl, out: &mut [u8]) {
        let seed = decl.name.bytes().fold(self.seed, |h, b| h.wrapping_mul(0x100_0000_01b3) ^ u64::from(b));
        let constant = match &decl.name {
            name if name.ends_with("norm.weight") => Some(1f32),
            name if name.ends_with("ssm_a") => Some(-1.0),
            _ => None,
        };
        if let Some(x) = constant {
            out.chunks_exact_mut(4).for_each(|c| c.copy_from_slice(&x.to_le_bytes()));
            return;
        }
        let k = decl.shape.last().copied().unwrap_or(1).max(1);
        let std = if decl.name.starts_with("token_embd") { 1.0 } else { 1.0 / (k as f32).sqrt() };
        synth::fill_random(decl.ty, seed, std, out);
    }

    /// A table of zeros in a file without contents, since the real one may be larger than memory and disk. The file
    /// has no name any more once it is open.
    pub(crate) fn row_table(decl: &WeightDecl, options: TableOptions) -> Result<RowTable, Error> {
        let (rows, width) = (decl.shape.first().copied(), decl.shape.last().copied().unwrap_or(0));
        // No other table of this process has the same declaration.
        let path = std::env::temp_dir().join(format!("minfer-shape-{}-{decl:p}", std::process::id()));
        let io = |source| Error::Io { file: path.clone(), source };
        let file = File::create_new(&path).map_err(io)?;
        file.set_len(decl.bytes().unwrap_or(usize::MAX) as u64).map_err(io)?;
        let part = TablePart::File { path: path.clone(), offset: 0, rows: rows.unwrap_or(0) };
        let table = RowTable::open(vec![part], decl.ty, width, options);
        std::fs::remove_file(&path).map_err(io)?;
        table
    }

    fn layers(&self) -> usize {
        self.number("num_hidden_layers")
    }

    /// The layers whose `attn_v` and `ffn_down` get more bits: the first and last eighth, every third between.
    fn more_bits(&self, name: &str) -> bool {
        let (n, layer) = (self.layers(), name.split('.').nth(1).and_then(|l| l.parse::<usize>().ok()));
        let Some(i) = layer else { return false };
        let chosen = i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
        chosen && (name.contains("attn_v") || name.contains("ffn_down"))
    }
}

/// The table of n-grams, which belongs to no layer.
const NGRAM_TABLE: &str = "per_layer_token_embd.weight";

/// Small weights on which choices and state hang: never quantised.
const FULL: [&str; 5] = ["ffn_gate_inp", "conv1d", "_ape", "hc_attn_fn", "hc_ffn_fn"];

/// What the quantizer leaves as it is in files of GLM.
const GLM_HALF: [&str; 9] = [
    "indexer.",
    "indexer_compressor",
    "ssm_f_",
    "ssm_g_",
    "ssm_beta",
    "attn_kv_a_mqa",
    "attn_k_b",
    "attn_v_b",
    "output_hc",
];

/// What rows that are not whole blocks of `ty` get instead.
fn short_rows(ty: BlockType, k: usize) -> BlockType {
    let instead = match ty {
        BlockType::Q2_K | BlockType::Q3_K | BlockType::IQ4_XS => BlockType::IQ4_NL,
        BlockType::Q4_K => BlockType::Q5_0,
        BlockType::Q5_K => BlockType::Q5_1,
        _ => BlockType::Q8_0,
    };
    if instead.row_bytes(k).is_some() { instead } else { BlockType::F32 }
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
