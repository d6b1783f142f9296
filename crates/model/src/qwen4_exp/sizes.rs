//! Sizes of Qwen4-Exp, read from `config.json` or a GGUF file's keys, and checked.

use minfer_format::Metadata;
use minfer_graph::{ActKind, Conv1d, DeltaRule};
use serde_json::Value as Json;

use super::{ARCH, DELTA_DECAY, PLE_TABLE, Qwen4Exp};
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::hyper::{Config, Experts, Hyper, fits_pages, layer_types};
use crate::ngram::{Geometry, Ngram, Recipe};

/// Sizes beyond those of [`Hyper`].
pub(super) struct Sizes {
    /// Residual streams.
    pub(super) streams: usize,
    /// Rank of the hyper-connections' gates.
    pub(super) rank: usize,
    /// Whether each layer attends; the others are gated DeltaNet.
    pub(super) attends: Vec<bool>,
    pub(super) delta: DeltaRule,
    pub(super) delta_conv: usize,
    /// What the output gate of DeltaNet goes through.
    pub(super) delta_gate: ActKind,
    pub(super) index_heads: usize,
    pub(super) index_dim: usize,
    /// Positions per block of keys.
    pub(super) block: usize,
    /// Blocks that a row attends to.
    pub(super) top: usize,
    pub(super) shared_ffn: usize,
    pub(super) ple: Option<Ple>,
}

/// The layer that n-grams are embedded into.
#[derive(Clone, Copy)]
pub(super) struct Ple {
    pub(super) layer: usize,
    /// Table rows per token, and numbers per table row.
    pub(super) heads: usize,
    pub(super) width: usize,
    pub(super) conv: Conv1d,
}

impl Qwen4Exp {
    pub(super) fn from_hf(ck: &Checkpoint, json: &Json) -> Result<Qwen4Exp, ModelError> {
        let c = Config { ck, json };
        let hyper = Hyper::read(ck, ARCH, true)?;
        let experts = Experts::from_hf(&c)?;
        let ngram_size = c.opt("ngram_size", 2)?;
        let ple = match c.list("ple_layer_ids")?[..] {
            [] => None,
            [layer] if layer >= 1 => {
                let heads = ngram_size.saturating_sub(1).saturating_mul(c.need("heads_per_ngram")?);
                let conv = Conv1d { kernel: c.need("ple_conv_kernel_size")?, dilation: ngram_size };
                Some(Ple { layer: layer - 1, heads, width: c.need("ple_embed_dim")? / heads.max(1), conv })
            }
            _ => return Err(ck.bad("config.json: ple_layer_ids", "is not one layer, counted from 1")),
        };
        let block = c.need("indexer_compress_ratio")?;
        if c.opt("indexer_kv_heads", 1)? != 1 {
            return Err(ck.bad("config.json: indexer_kv_heads", "is not 1"));
        }
        let sizes = Sizes {
            streams: c.need("hc_count")?,
            rank: c.need("hc_lowrank")?,
            attends: layer_types(&c, hyper.layers)?,
            delta: DeltaRule {
                k_heads: c.need("linear_num_key_heads")?,
                v_heads: c.need("linear_num_value_heads")?,
                k_dim: c.need("linear_key_head_dim")?,
                v_dim: c.need("linear_value_head_dim")?,
                // The order of GGUF files, whose names a shape has too.
                tiled: !ck.is_hf(),
                per_channel: false,
            },
            delta_conv: c.need("linear_conv_kernel_dim")?,
            delta_gate: match json.get("output_gate_type").and_then(Json::as_str) {
                Some("sigmoid") => ActKind::Sigmoid,
                None | Some("silu") => ActKind::Silu,
                Some(other) => return Err(ck.bad("config.json: output_gate_type", format!("is '{other}'"))),
            },
            index_heads: c.need("indexer_n_heads")?,
            index_dim: c.need("indexer_head_dim")?,
            block,
            top: c.need("indexer_budget")? / block.max(1),
            shared_ffn: c.need("shared_expert_intermediate_size")?,
            ple,
        };
        let mut model = Qwen4Exp { hyper, experts, sizes, ngram: None };
        model.check(ck)?;
        model.ngram = model.ngram_from_hf(&c)?;
        Ok(model)
    }

    fn ngram_from_hf(&self, c: &Config<'_>) -> Result<Option<Ngram>, ModelError> {
        let Some(p) = self.sizes.ple else { return Ok(None) };
        let end = match c.json.get("eos_token_id") {
            Some(Json::Array(list)) => list.first(),
            one => one,
        };
        let Some(segment_end) = end.and_then(Json::as_u64).and_then(|id| u32::try_from(id).ok()) else {
            return Err(c.ck.bad("config.json: eos_token_id", "is not a token id"));
        };
        let geometry = self.geometry(c.ck, p, segment_end)?;
        let recipe = Recipe {
            vocab: self.hyper.vocab,
            vocab_base: c.need("ngram_vocab_size_base")?,
            seed: c.opt("seed", 1234)? as u64,
        };
        let stem = c.ck.full_name(("", "ple.ple_embedding"), Some(p.layer), "");
        match c.ck {
            Checkpoint::Hf(dir) => Ngram::from_hf(c.ck, dir, &stem, geometry, recipe).map(Some),
            _ => Ngram::from_recipe(c.ck, &stem, geometry, recipe).map(Some),
        }
    }

    fn geometry(&self, ck: &Checkpoint, p: Ple, segment_end: u32) -> Result<Geometry, ModelError> {
        let ngram_size = p.conv.dilation;
        let rows = ck.table(PLE_TABLE, p.layer, p.width)?.shape[0];
        Ok(Geometry { ngram_size, heads_per_ngram: p.heads / (ngram_size - 1), rows, segment_end })
    }

    pub(super) fn from_gguf(ck: &Checkpoint, m: &Metadata) -> Result<Qwen4Exp, ModelError> {
        let key = |suffix: &str| format!("{ARCH}.{suffix}");
        let need = |suffix: &str| m.usize(&key(suffix));
        let hyper = Hyper::read(ck, ARCH, true)?;
        let experts = Experts::from_gguf(m, ARCH)?;
        let v_heads = need("ssm.time_step_rank")?;
        let ratios = m.i32s(&key("attention.compress_ratios"))?;
        let Some(block) = ratios.iter().filter_map(|&r| usize::try_from(r).ok()).find(|&r| r > 0) else {
            return Err(ck.bad(&key("attention.compress_ratios"), "has no positive number"));
        };
        let attends = (0..hyper.layers).map(|i| Ok(!ck.has(DELTA_DECAY, Some(i), "")?));
        let sizes = Sizes {
            streams: need("hyper_connection.count")?,
            rank: need("hyper_connection.low_rank")?,
            attends: attends.collect::<Result<_, ModelError>>()?,
            delta: DeltaRule {
                k_heads: need("ssm.group_count")?,
                v_heads,
                k_dim: need("ssm.state_size")?,
                v_dim: need("ssm.inner_size")? / v_heads.max(1),
                tiled: true,
                per_channel: false,
            },
            delta_conv: need("ssm.conv_kernel")?,
            delta_gate: ActKind::Sigmoid,
            index_heads: need("attention.indexer.head_count")?,
            index_dim: need("attention.indexer.key_length")?,
            block,
            top: need("attention.indexer.top_k")? / block,
            shared_ffn: need("expert_shared_feed_forward_length")?,
            ple: Ple::from_gguf(ck, m)?,
        };
        let mut model = Qwen4Exp { hyper, experts, sizes, ngram: None };
        model.check(ck)?;
        if let Some(p) = model.sizes.ple {
            let geometry = model.geometry(ck, p, m.u32(&key("ple.eos_token_id"))?)?;
            model.ngram = Some(Ngram::from_gguf(ck, m, ARCH, geometry)?);
        }
        Ok(model)
    }

    /// Sizes whose products must fit, and divisions that must be exact.
    fn check(&self, ck: &Checkpoint) -> Result<(), ModelError> {
        let s = &self.sizes;
        let sizes = [
            ("residual stream count", s.streams, 64),
            ("hyper-connection rank", s.rank, 1 << 20),
            ("DeltaNet key head count", s.delta.k_heads, 1 << 12),
            ("DeltaNet value head count", s.delta.v_heads, 1 << 12),
            ("DeltaNet key size", s.delta.k_dim, 1 << 12),
            ("DeltaNet value size", s.delta.v_dim, 1 << 12),
            ("DeltaNet convolution kernel", s.delta_conv, 64),
            ("indexer head count", s.index_heads, 1 << 12),
            ("indexer head size", s.index_dim, 1 << 12),
            ("indexer block", s.block, minfer_graph::PAGE),
            ("indexer blocks per row", s.top, 1 << 20),
            ("shared expert size", s.shared_ffn, 1 << 28),
        ];
        let none = Ple { layer: 0, heads: 1, width: 1, conv: Conv1d { kernel: 1, dilation: 2 } };
        let p = s.ple.unwrap_or(none);
        let ple = [
            ("n-gram heads", p.heads, 1 << 12),
            ("n-gram row size", p.width, 1 << 16),
            ("n-gram convolution kernel", p.conv.kernel, 64),
            ("n-gram size", p.conv.dilation, 16),
        ];
        if let Some((what, n, most)) = sizes.iter().chain(&ple).find(|(_, n, most)| !(1..=*most).contains(n))
        {
            return Err(ck.bad(what, format!("is {n}, outside 1..={most}")));
        }
        fits_pages(ck, "indexer block", s.block)?;
        if !s.delta.v_heads.is_multiple_of(s.delta.k_heads) {
            return Err(ck.bad("DeltaNet value head count", "is not a multiple of the key head count"));
        }
        if p.conv.dilation < 2 || p.layer >= self.hyper.layers {
            let why = format!("is of size {} in layer {}", p.conv.dilation, p.layer);
            return Err(ck.bad("n-gram embedding", why));
        }
        if self.hyper.rope_dims > s.index_dim {
            return Err(ck.bad("rotated dimension count", "is above the indexer's head size"));
        }
        Ok(())
    }
}

impl Ple {
    fn from_gguf(ck: &Checkpoint, m: &Metadata) -> Result<Option<Ple>, ModelError> {
        let key = |suffix: &str| format!("{ARCH}.{suffix}");
        let layers = m.opt_i32s(&key("ple.layers"))?.unwrap_or_default();
        let layer = match layers[..] {
            [] => return Ok(None),
            [layer] => usize::try_from(layer).ok(),
            _ => None,
        };
        let Some(layer) = layer else { return Err(ck.bad(&key("ple.layers"), "is not one layer")) };
        let dilation = m.usize(&key("ple.ngram_size"))?;
        let heads = dilation.saturating_sub(1).saturating_mul(m.usize(&key("ple.heads_per_ngram"))?);
        let conv = Conv1d { kernel: m.usize(&key("ple.conv_kernel"))?, dilation };
        Ok(Some(Ple { layer, heads, width: m.usize(&key("embedding_length_per_layer_input"))?, conv }))
    }
}
