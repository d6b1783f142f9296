//! Sizes of DeepSeek V4, read from `config.json` or a GGUF file's keys, and checked.

use minfer_format::Metadata;
use minfer_format::gguf::Value;
use serde_json::Value as Json;

use super::{ARCH, DeepseekV4};
use crate::checkpoint::{Checkpoint, Names};
use crate::decoder::EMBED_BARE;
use crate::error::ModelError;
use crate::hyper::{Config, Experts, Hyper, fits_pages};
use crate::rope::{Scaling, positive, scaling_from_gguf};

/// Sizes beyond those of [`Hyper`].
pub(super) struct Sizes {
    /// Residual streams.
    pub(super) streams: usize,
    pub(super) sinkhorn: usize,
    pub(super) hyper_eps: f32,
    pub(super) q_rank: usize,
    /// Groups of the output projection, and the rank of each.
    pub(super) groups: usize,
    pub(super) o_rank: usize,
    /// Positions that a row attends to directly.
    pub(super) window: usize,
    /// Positions per compressed row of each layer; 0: none.
    pub(super) ratios: Vec<usize>,
    pub(super) index_heads: usize,
    pub(super) index_dim: usize,
    /// Compressed rows that the indexer chooses.
    pub(super) top: usize,
    /// First layers, whose experts depend on the token alone.
    pub(super) hash_layers: usize,
    pub(super) swiglu_limit: f32,
    /// Factor on the routed experts.
    pub(super) routed_scale: f32,
    pub(super) shared_ffn: usize,
    /// Settings of a DSpark draft head, where the configuration has them.
    pub(super) dspark: Option<Dspark>,
    /// Rotation in layers with compressed rows.
    pub(super) compress_theta: f32,
    pub(super) compress_scaling: Scaling,
}

/// Settings of a DSpark draft head.
pub(super) struct Dspark {
    /// Drafts per block.
    pub(super) size: usize,
    /// Layers whose streams the head's keys are made from.
    pub(super) targets: Vec<usize>,
    /// Rank of the correction.
    pub(super) rank: usize,
    pub(super) noise: u32,
}

impl Dspark {
    fn from_hf(c: &Config<'_>, hyper: &Hyper) -> Result<Option<Dspark>, ModelError> {
        let targets = c.list("dspark_target_layer_ids")?;
        if targets.is_empty() {
            return Ok(None);
        }
        let within = |key: &str, range: std::ops::Range<usize>| match c.need(key)? {
            n if range.contains(&n) => Ok(n),
            n => Err(c.ck.bad(&format!("config.json: {key}"), format!("is {n}, outside {range:?}"))),
        };
        if targets.iter().any(|&t| t >= hyper.layers) || !targets.is_sorted_by(|a, b| a < b) {
            let why = format!("is {targets:?}, not an ascending list of the {} layers", hyper.layers);
            return Err(c.ck.bad("config.json: dspark_target_layer_ids", why));
        }
        Ok(Some(Dspark {
            size: within("dspark_block_size", 1..64)?,
            targets,
            rank: within("dspark_markov_rank", 1..1 << 16)?,
            noise: within("dspark_noise_token_id", 0..hyper.vocab)? as u32,
        }))
    }
}

/// The ratio whose windows overlap, and whose compressed rows are chosen by an indexer.
pub(super) const SPARSE: usize = 4;

impl DeepseekV4 {
    pub(super) fn from_hf(ck: &Checkpoint, json: &Json) -> Result<DeepseekV4, ModelError> {
        let c = Config { ck, json };
        let text = |key: &str| json.get(key).and_then(Json::as_str);
        if text("scoring_func").is_some_and(|s| s != "sqrtsoftplus") {
            return Err(ck.bad("config.json: scoring_func", "is not 'sqrtsoftplus'"));
        }
        if json.get("norm_topk_prob").and_then(Json::as_bool) == Some(false) {
            return Err(ck.bad("config.json: norm_topk_prob", "is false, which is not supported"));
        }
        let hyper = hyper(&c)?;
        let mut ratios = c.list("compress_ratios")?;
        if ratios.len() < hyper.layers {
            let why = format!("has {} entries for {} layers", ratios.len(), hyper.layers);
            return Err(ck.bad("config.json: compress_ratios", why));
        }
        // The rest belongs to draft layers.
        ratios.truncate(hyper.layers);
        let float = |key: &str, default: f32| Ok::<_, ModelError>(c.float(key)?.unwrap_or(default));
        let sizes = Sizes {
            streams: c.need("hc_mult")?,
            sinkhorn: c.need("hc_sinkhorn_iters")?,
            hyper_eps: float("hc_eps", 1e-6)?,
            q_rank: c.need("q_lora_rank")?,
            groups: c.need("o_groups")?,
            o_rank: c.need("o_lora_rank")?,
            window: c.need("sliding_window")?,
            ratios,
            index_heads: c.need("index_n_heads")?,
            index_dim: c.need("index_head_dim")?,
            top: c.need("index_topk")?,
            hash_layers: c.need("num_hash_layers")?,
            swiglu_limit: float("swiglu_limit", f32::INFINITY)?,
            routed_scale: float("routed_scaling_factor", 1.0)?,
            shared_ffn: c.opt("n_shared_experts", 1)?.saturating_mul(hyper.ffn),
            dspark: Dspark::from_hf(&c, &hyper)?,
            compress_theta: float("compress_rope_theta", 160_000.0)?,
            compress_scaling: compress_scaling(&c)?,
        };
        let model = DeepseekV4 { hyper, sizes, official_rounding: false };
        model.check(ck)?;
        Ok(model)
    }

    pub(super) fn from_gguf(ck: &Checkpoint, m: &Metadata) -> Result<DeepseekV4, ModelError> {
        let k = Keys { ck, m };
        k.refuse_variants()?;
        let hyper = k.hyper()?;
        let ratios = m.i32s(&key("attention.compress_ratios"))?;
        if ratios.len() < hyper.layers {
            let why = format!("has {} entries for {} layers", ratios.len(), hyper.layers);
            return Err(ck.bad(&key("attention.compress_ratios"), why));
        }
        // The rest belongs to draft layers. What does not fit is refused as too large.
        let ratio = |&r: &i32| usize::try_from(r).unwrap_or(usize::MAX);
        let sizes = Sizes {
            streams: k.need("hyper_connection.count")?,
            sinkhorn: k.need("hyper_connection.sinkhorn_iterations")?,
            hyper_eps: k.float("hyper_connection.epsilon")?,
            q_rank: k.need("attention.q_lora_rank")?,
            groups: k.need("attention.output_group_count")?,
            o_rank: k.need("attention.output_lora_rank")?,
            window: k.need("attention.sliding_window")?,
            ratios: ratios.iter().take(hyper.layers).map(ratio).collect(),
            index_heads: k.need("attention.indexer.head_count")?,
            index_dim: k.need("attention.indexer.key_length")?,
            top: k.need("attention.indexer.top_k")?,
            hash_layers: k.need("hash_layer_count")?,
            swiglu_limit: k.limit()?,
            // Files have 0 where there is no scale.
            routed_scale: m.opt_f32(&key("expert_weights_scale"))?.filter(|&s| s != 0.0).unwrap_or(1.0),
            shared_ffn: m.opt_usize(&key("expert_shared_count"))?.unwrap_or(1).saturating_mul(hyper.ffn),
            // Files of draft heads are of another architecture.
            dspark: None,
            compress_theta: k.float("attention.compress_rope_freq_base")?,
            compress_scaling: k.compress_scaling()?,
        };
        let model = DeepseekV4 { hyper, sizes, official_rounding: false };
        model.check(ck)?;
        Ok(model)
    }

    /// Sizes whose products must fit, and divisions that must be exact.
    fn check(&self, ck: &Checkpoint) -> Result<(), ModelError> {
        self.hyper.check(ck)?;
        let (h, s) = (&self.hyper, &self.sizes);
        let sizes = [
            ("residual stream count", s.streams, 64),
            ("Sinkhorn iterations", s.sinkhorn, 1 << 10),
            ("query rank", s.q_rank, 1 << 20),
            ("output group count", s.groups, 1 << 12),
            ("output rank", s.o_rank, 1 << 20),
            ("sliding window", s.window, 1 << 24),
            ("indexer head count", s.index_heads, 1 << 12),
            ("indexer head size", s.index_dim, 1 << 12),
            ("indexer rows", s.top, 1 << 20),
            ("shared expert size", s.shared_ffn, 1 << 28),
            ("head size", h.head_dim, 1 << 16),
        ];
        if let Some((what, n, most)) = sizes.iter().find(|(_, n, most)| !(1..=*most).contains(n)) {
            return Err(ck.bad(what, format!("is {n}, outside 1..={most}")));
        }
        if let Some(ratio) = s.ratios.iter().find(|r| **r > 1 << 12) {
            return Err(ck.bad("compression ratio", format!("is {ratio}, above {}", 1 << 12)));
        }
        for &ratio in s.ratios.iter().filter(|&&r| r > 0) {
            fits_pages(ck, "compression ratio", ratio)?;
        }
        let numbers = [
            ("hyper-connection epsilon", s.hyper_eps, s.hyper_eps >= 0.0),
            ("routed experts' scale", s.routed_scale, s.routed_scale > 0.0),
            ("rope theta of compressed rows", s.compress_theta, s.compress_theta > 0.0),
        ];
        if let Some((what, x, _)) = numbers.iter().find(|(_, x, fits)| !(x.is_finite() && *fits)) {
            return Err(ck.bad(what, format!("is {x}")));
        }
        // Infinite where a GGUF file has none.
        if s.swiglu_limit.is_nan() || s.swiglu_limit <= 0.0 {
            return Err(ck.bad("swiglu_limit", format!("is {}", s.swiglu_limit)));
        }
        // The engine gives recurrent state to models that declare some.
        if s.ratios.iter().all(|&r| r == 0) {
            return Err(ck.bad("compress_ratios", "names no layer with compressed rows"));
        }
        if !h.heads.is_multiple_of(s.groups) {
            return Err(ck.bad("output group count", format!("does not divide {} heads", h.heads)));
        }
        if h.rope_dims > s.index_dim || h.rope_dims == 0 {
            return Err(ck.bad("rotated dimension count", "is zero or above the indexer's head size"));
        }
        Ok(())
    }
}

fn hyper(c: &Config<'_>) -> Result<Hyper, ModelError> {
    let ffn = c.need("moe_intermediate_size")?;
    if c.opt("num_key_value_heads", 1)? != 1 {
        return Err(c.ck.bad("config.json: num_key_value_heads", "is not 1"));
    }
    Ok(Hyper {
        arch: ARCH,
        layers: c.need("num_hidden_layers")?,
        hidden: c.need("hidden_size")?,
        ffn,
        heads: c.need("num_attention_heads")?,
        kv_heads: 1,
        head_dim: c.need("head_dim")?,
        vocab: c.ck.rows_of(EMBED_BARE)?,
        context: c.need("max_position_embeddings")?,
        norm_eps: c.float("rms_norm_eps")?.unwrap_or(1e-6),
        rope_theta: c.float("rope_theta")?.unwrap_or(10_000.0),
        rope_dims: c.need("qk_rope_head_dim")?,
        scaling: Scaling::None,
        experts: Some(Experts {
            count: c.need("n_routed_experts")?,
            used: c.need("num_experts_per_tok")?,
            ffn,
            renormalise: true,
            dense_layers: vec![],
        }),
    })
}

/// YaRN, or nothing.
fn compress_scaling(c: &Config<'_>) -> Result<Scaling, ModelError> {
    let Some(rope) = c.json.get("rope_scaling").filter(|r| r.is_object()) else { return Ok(Scaling::None) };
    let kind = rope.get("rope_type").or(rope.get("type")).and_then(Json::as_str).unwrap_or("default");
    match kind {
        "default" => return Ok(Scaling::None),
        "yarn" => {}
        other => {
            let why = format!("is '{other}'; this architecture is supported with 'yarn' only");
            return Err(c.ck.bad("config.json: rope_scaling type", why));
        }
    }
    let number = |key: &str, default: f64| {
        let x = rope.get(key).and_then(Json::as_f64).unwrap_or(default);
        positive(c.ck, &format!("config.json: rope_scaling {key}"), x as f32)
    };
    Ok(Scaling::Yarn {
        factor: number("factor", 1.0)?,
        beta_fast: number("beta_fast", 32.0)?,
        beta_slow: number("beta_slow", 1.0)?,
        original_context: number("original_max_position_embeddings", 0.0)?,
    })
}

/// In draft layers, which follow the model's.
const DRAFT_LAYER: Names = ("nextn.eh_proj", "");

fn key(suffix: &str) -> String {
    format!("{ARCH}.{suffix}")
}

/// A GGUF file's keys.
struct Keys<'a> {
    ck: &'a Checkpoint,
    m: &'a Metadata,
}

impl Keys<'_> {
    fn need(&self, suffix: &str) -> Result<usize, ModelError> {
        Ok(self.m.usize(&key(suffix))?)
    }

    fn float(&self, suffix: &str) -> Result<f32, ModelError> {
        Ok(self.m.f32(&key(suffix))?)
    }

    /// What files of this architecture could say and the graph does not honour.
    fn refuse_variants(&self) -> Result<(), ModelError> {
        let refuse = |suffix: &str, why: &str| Err(self.ck.bad(&key(suffix), why));
        if self.need("expert_gating_func")? != 4 {
            return refuse(
                "expert_gating_func",
                "is not 4 (the root of softplus), the one that is supported",
            );
        }
        if self.m.opt_bool(&key("expert_weights_norm"))? == Some(false) {
            return refuse("expert_weights_norm", "is false, which is not supported");
        }
        if self.m.opt_usize(&key("expert_group_count"))?.unwrap_or(0) > 1 {
            return refuse("expert_group_count", "is above 1, which is not supported");
        }
        if self.need("attention.head_count_kv")? != 1 {
            return refuse("attention.head_count_kv", "is not 1");
        }
        let head_dim = self.need("attention.key_length")?;
        if self.m.opt_usize(&key("attention.value_length"))?.unwrap_or(head_dim) != head_dim {
            return refuse("attention.value_length", "differs from the key length, which is not supported");
        }
        Ok(())
    }

    fn hyper(&self) -> Result<Hyper, ModelError> {
        let ffn = self.need("expert_feed_forward_length")?;
        Ok(Hyper {
            arch: ARCH,
            layers: self.layers()?,
            hidden: self.need("embedding_length")?,
            ffn,
            heads: self.need("attention.head_count")?,
            kv_heads: 1,
            head_dim: self.need("attention.key_length")?,
            vocab: self.ck.rows_of(EMBED_BARE)?,
            context: self.need("context_length")?,
            norm_eps: self.float("attention.layer_norm_rms_epsilon")?,
            rope_theta: self.m.opt_f32(&key("rope.freq_base"))?.unwrap_or(10_000.0),
            rope_dims: self.need("rope.dimension_count")?,
            scaling: Scaling::None,
            experts: Some(Experts {
                count: self.need("expert_count")?,
                used: self.need("expert_used_count")?,
                ffn,
                renormalise: true,
                dense_layers: vec![],
            }),
        })
    }

    /// Draft layers count as blocks where they are in the file; some files name them and leave them out.
    fn layers(&self) -> Result<usize, ModelError> {
        let blocks = self.need("block_count")?;
        let drafts = self.m.opt_usize(&key("nextn_predict_layers"))?.unwrap_or(0);
        let model = blocks.saturating_sub(drafts);
        Ok(if self.ck.has(DRAFT_LAYER, Some(model), "weight")? { model } else { blocks })
    }

    /// The one bound of all layers, of routed and shared experts alike; files have 0 where there is none.
    fn limit(&self) -> Result<f32, ModelError> {
        let mut limits = vec![];
        for suffix in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
            match self.m.get(&key(suffix)) {
                Some(Value::Array(_)) => limits.extend_from_slice(self.m.f32s(&key(suffix))?),
                _ => limits.extend(self.m.opt_f32(&key(suffix))?),
            }
        }
        match limits.split_first() {
            Some((first, rest)) if rest.iter().any(|limit| limit != first) => {
                let why = "has different numbers for different layers, which is not supported";
                Err(self.ck.bad(&key("swiglu_clamp_exp"), why))
            }
            Some((&first, _)) if first != 0.0 => Ok(first),
            _ => Ok(f32::INFINITY),
        }
    }

    /// Scaling of the rotation in layers with compressed rows; the others have none.
    fn compress_scaling(&self) -> Result<Scaling, ModelError> {
        let (ck, m) = (self.ck, self.m);
        if m.opt_string(&key("rope.scaling.type"))? != Some("yarn") {
            return scaling_from_gguf(ck, m, ARCH);
        }
        // Below zero: as the type says.
        let mix = m.opt_f32(&key("rope.scaling.yarn_ext_factor"))?.filter(|&x| x >= 0.0).unwrap_or(1.0);
        if mix != 1.0 {
            return Err(
                ck.bad(&key("rope.scaling.yarn_ext_factor"), format!("is {mix}; only 1 is supported"))
            );
        }
        let number = |suffix: &str, default: f32| {
            let key = key(&format!("rope.scaling.{suffix}"));
            positive(ck, &key, m.opt_f32(&key)?.unwrap_or(default))
        };
        let context = m.opt_usize(&key("rope.scaling.original_context_length"))?;
        Ok(Scaling::Yarn {
            factor: number("factor", 1.0)?,
            beta_fast: number("yarn_beta_fast", 32.0)?,
            beta_slow: number("yarn_beta_slow", 1.0)?,
            original_context: context.map_or_else(|| self.need("context_length"), Ok)? as f32,
        })
    }
}
