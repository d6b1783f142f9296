//! Sizes of DeepSeek V4, read from `config.json`, and checked.

use serde_json::Value as Json;

use super::{ARCH, DeepseekV4};
use crate::checkpoint::Checkpoint;
use crate::decoder::EMBED_BARE;
use crate::error::ModelError;
use crate::hyper::{Config, Experts, Hyper};
use crate::rope::{Scaling, positive};

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
            swiglu_limit: positive(ck, "config.json: swiglu_limit", float("swiglu_limit", f32::MAX)?)?,
            routed_scale: positive(
                ck,
                "config.json: routed_scaling_factor",
                float("routed_scaling_factor", 1.0)?,
            )?,
            shared_ffn: c.opt("n_shared_experts", 1)?.saturating_mul(hyper.ffn),
            dspark: Dspark::from_hf(&c, &hyper)?,
            compress_theta: positive(
                ck,
                "config.json: compress_rope_theta",
                float("compress_rope_theta", 160_000.0)?,
            )?,
            compress_scaling: compress_scaling(&c)?,
        };
        let model = DeepseekV4 { hyper, sizes };
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
        // The engine gives recurrent state to models that declare some.
        if s.ratios.iter().all(|&r| r == 0) {
            return Err(ck.bad("config.json: compress_ratios", "names no layer with compressed rows"));
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
