//! Sizes of GLM-5.3-Flash, read from `config.json` or a GGUF file's keys, and checked.

use minfer_format::Metadata;
use minfer_graph::{DeltaRule, HyperMix};
use serde_json::Value as Json;

use super::{ARCH, DELTA_DECAY, Glm5Next};
use crate::checkpoint::Checkpoint;
use crate::decoder::EMBED;
use crate::error::ModelError;
use crate::hyper::{Config, Experts, Hyper, fits_pages, layer_types};
use crate::rope::Scaling;

/// Sizes beyond those of [`Hyper`].
pub(super) struct Sizes {
    /// Residual streams and how they are mixed.
    pub(super) mix: HyperMix,
    /// Whether each layer attends; the others are Kimi delta attention.
    pub(super) attends: Vec<bool>,
    pub(super) delta: DeltaRule,
    pub(super) conv: usize,
    /// Log-decays are between this number and 0.
    pub(super) lower_bound: f32,
    /// Ranks of the low-rank projections of queries, and of keys and values.
    pub(super) q_rank: usize,
    pub(super) latent: usize,
    /// Numbers per head of queries and keys, and of values.
    pub(super) k_dim: usize,
    pub(super) v_dim: usize,
    pub(super) index_heads: usize,
    pub(super) index_dim: usize,
    /// Positions per block of keys.
    pub(super) block: usize,
    /// Blocks that a row attends to.
    pub(super) top: usize,
    /// Of the norm of the indexer's keys.
    pub(super) index_eps: f32,
    /// Largest number that SwiGLU's inputs may have; infinite where there is no bound.
    pub(super) limit: f32,
    pub(super) shared_ffn: usize,
    /// Factor on the experts' weights.
    pub(super) routed_scale: f32,
}

impl Glm5Next {
    pub(super) fn from_hf(ck: &Checkpoint, json: &Json) -> Result<Glm5Next, ModelError> {
        let c = Config { ck, json };
        refuse_variants(&c)?;
        let mut hyper = hyper(&c)?;
        hyper.check(ck)?;
        let experts = experts(&c, hyper.layers)?;
        let block = c.need("index_kpool")?;
        let sizes = Sizes {
            mix: HyperMix {
                n: c.need("hc_mult")?,
                iterations: c.need("hc_sinkhorn_iters")?,
                eps: c.float("hc_eps")?.unwrap_or(1e-6),
            },
            attends: layer_types(&c, hyper.layers)?,
            delta: delta_rule(&c)?,
            conv: linear_size(&c, "short_conv_kernel_size", "linear_conv_kernel_dim", 4)?,
            lower_bound: lower_bound(&c)?,
            q_rank: c.need("q_lora_rank")?,
            latent: c.need("kv_lora_rank")?,
            k_dim: c.need("qk_nope_head_dim")?,
            v_dim: c.need("v_head_dim")?,
            index_heads: c.need("index_n_heads")?,
            index_dim: c.need("index_head_dim")?,
            block,
            // In no configuration.
            index_eps: 1e-6,
            top: c.need("index_topk")? / block.max(1),
            limit: c.float("swiglu_limit")?.unwrap_or(10.0),
            shared_ffn: c.opt("n_shared_experts", 1)?.saturating_mul(experts.ffn),
            routed_scale: c.float("routed_scaling_factor")?.unwrap_or(1.0),
        };
        hyper.experts = Some(experts.clone());
        let model = Glm5Next { hyper, experts, sizes };
        model.check(ck)?;
        Ok(model)
    }

    pub(super) fn from_gguf(ck: &Checkpoint, m: &Metadata) -> Result<Glm5Next, ModelError> {
        let key = |suffix: &str| format!("{ARCH}.{suffix}");
        let need = |suffix: &str| m.usize(&key(suffix));
        let refuse = |suffix: &str, why: &str| Err(ck.bad(&key(suffix), why));
        if need("expert_gating_func")? != 2 {
            return refuse("expert_gating_func", "is not 2 (sigmoid), the one that is supported");
        }
        if m.opt_usize(&key("expert_group_count"))?.unwrap_or(0) > 1 {
            return refuse("expert_group_count", "is above 1, which is not supported");
        }
        if m.opt_bool(&key("attention.indexer.kpool_select_tail"))? == Some(false) {
            return refuse("attention.indexer.kpool_select_tail", "is false, which is not supported");
        }
        let mut hyper = hyper_from_gguf(ck, m)?;
        hyper.check(ck)?;
        let experts = Experts {
            count: need("expert_count")?,
            used: need("expert_used_count")?,
            ffn: need("expert_feed_forward_length")?,
            renormalise: m.opt_bool(&key("expert_weights_norm"))?.unwrap_or(true),
            dense_layers: (0..need("leading_dense_block_count")?.min(hyper.layers)).collect(),
        };
        let attends = (0..hyper.layers).map(|i| Ok(!ck.has(DELTA_DECAY, Some(i), "")?));
        let (block, dim) = (need("attention.indexer.kpool")?, need("kda.head_dim")?);
        let sizes = Sizes {
            mix: HyperMix {
                n: need("hyper_connection.count")?,
                iterations: need("hyper_connection.sinkhorn_iterations")?,
                eps: m.f32(&key("hyper_connection.epsilon"))?,
            },
            attends: attends.collect::<Result<_, ModelError>>()?,
            delta: kimi(hyper.heads, dim),
            conv: need("ssm.conv_kernel")?,
            lower_bound: m.f32(&key("kda.gate_lower_bound"))?,
            q_rank: need("attention.q_lora_rank")?,
            latent: need("attention.kv_lora_rank")?,
            k_dim: need("attention.key_length_mla")?,
            v_dim: need("attention.value_length_mla")?,
            index_heads: need("attention.indexer.head_count")?,
            index_dim: need("attention.indexer.key_length")?,
            block,
            top: need("attention.indexer.top_k")? / block.max(1),
            index_eps: m.opt_f32(&key("attention.layer_norm_epsilon"))?.unwrap_or(1e-6),
            limit: limit_from_gguf(ck, m)?,
            shared_ffn: m.opt_usize(&key("expert_shared_count"))?.unwrap_or(1).saturating_mul(experts.ffn),
            // Files have 0 where there is no scale.
            routed_scale: m.opt_f32(&key("expert_weights_scale"))?.filter(|&s| s != 0.0).unwrap_or(1.0),
        };
        hyper.experts = Some(experts.clone());
        let model = Glm5Next { hyper, experts, sizes };
        model.check(ck)?;
        Ok(model)
    }

    /// Sizes whose products must fit, and numbers that must be some.
    fn check(&self, ck: &Checkpoint) -> Result<(), ModelError> {
        self.hyper.check(ck)?;
        let s = &self.sizes;
        let sizes = [
            ("residual stream count", s.mix.n, 64),
            ("Sinkhorn iteration count", s.mix.iterations, 1 << 10),
            ("linear head count", s.delta.v_heads, 1 << 12),
            ("linear head size", s.delta.k_dim, 1 << 12),
            ("linear convolution kernel", s.conv, 64),
            ("query rank", s.q_rank, 1 << 20),
            ("latent size", s.latent, 1 << 16),
            ("key size", s.k_dim, 1 << 16),
            ("value size", s.v_dim, 1 << 16),
            ("indexer head count", s.index_heads, 1 << 12),
            ("indexer head size", s.index_dim, 1 << 12),
            ("indexer block", s.block, minfer_graph::PAGE),
            ("indexer blocks per row", s.top, 1 << 20),
            ("shared expert size", s.shared_ffn, 1 << 28),
        ];
        if let Some((what, n, most)) = sizes.iter().find(|(_, n, most)| !(1..=*most).contains(n)) {
            return Err(ck.bad(what, format!("is {n}, outside 1..={most}")));
        }
        fits_pages(ck, "indexer block", s.block)?;
        let numbers = [
            ("hyper-connection epsilon", s.mix.eps, s.mix.eps >= 0.0),
            ("linear_lower_bound", s.lower_bound, s.lower_bound < 0.0),
            ("indexer norm epsilon", s.index_eps, s.index_eps >= 0.0),
            ("routed_scaling_factor", s.routed_scale, true),
        ];
        // Infinite where a GGUF file has none.
        if s.limit.is_nan() || s.limit <= 0.0 {
            return Err(ck.bad("swiglu_limit", format!("is {}", s.limit)));
        }
        match numbers.iter().find(|(_, x, fits)| !(x.is_finite() && *fits)) {
            Some((what, x, _)) => Err(ck.bad(what, format!("is {x}"))),
            None => Ok(()),
        }
    }
}

/// What the architecture's configuration could say and this file does not implement.
fn refuse_variants(c: &Config<'_>) -> Result<(), ModelError> {
    let refuse = |key: &str, why: String| Err(c.ck.bad(&format!("config.json: {key}"), why));
    for (key, only) in [("n_group", 1), ("topk_group", 1), ("qk_rope_head_dim", 0)] {
        let n = c.opt(key, only)?;
        if n != only {
            return refuse(key, format!("is {n}; only {only} is supported"));
        }
    }
    if c.json.get("index_kpool_always_select_tail").and_then(Json::as_bool) == Some(false) {
        return refuse("index_kpool_always_select_tail", "is false, which is not supported".to_string());
    }
    if let Some(act) = c.json.get("hidden_act").and_then(Json::as_str).filter(|a| *a != "silu") {
        return refuse("hidden_act", format!("is '{act}'; only 'silu' is supported"));
    }
    let kinds = c.json.get("indexer_types").and_then(Json::as_array).map_or(&[][..], Vec::as_slice);
    if let Some(kind) = kinds.iter().find(|kind| kind.as_str() != Some("full")) {
        return refuse("indexer_types", format!("has {kind}; only \"full\" is supported"));
    }
    Ok(())
}

fn hyper(c: &Config<'_>) -> Result<Hyper, ModelError> {
    let heads = c.need("num_attention_heads")?;
    Ok(Hyper {
        arch: ARCH,
        layers: c.need("num_hidden_layers")?,
        hidden: c.need("hidden_size")?,
        ffn: c.need("intermediate_size")?,
        heads,
        kv_heads: heads,
        head_dim: c.need("qk_nope_head_dim")?,
        vocab: c.ck.rows_of(EMBED)?,
        context: c.need("max_position_embeddings")?,
        norm_eps: c.float("rms_norm_eps")?.unwrap_or(1e-5),
        // Positions are known to the recurrent layers alone: nothing is rotated.
        rope_theta: 10_000.0,
        rope_dims: 0,
        scaling: Scaling::None,
        experts: None,
    })
}

fn experts(c: &Config<'_>, layers: usize) -> Result<Experts, ModelError> {
    let bad = |why: String| c.ck.bad("config.json: mlp_layer_types", why);
    let dense_layers = match c.json.get("mlp_layer_types").and_then(Json::as_array) {
        // The published models' first layers.
        None => (0..layers.min(3)).collect(),
        Some(kinds) if kinds.len() == layers => {
            let known = |kind: &Json| matches!(kind.as_str(), Some("dense" | "sparse"));
            if let Some(kind) = kinds.iter().find(|kind| !known(kind)) {
                return Err(bad(format!("has {kind}, neither dense nor sparse")));
            }
            (0..layers).filter(|&i| kinds[i].as_str() == Some("dense")).collect()
        }
        Some(kinds) => return Err(bad(format!("has {} entries for {layers} layers", kinds.len()))),
    };
    Ok(Experts {
        count: c.need("n_routed_experts")?,
        used: c.need("num_experts_per_tok")?,
        ffn: c.need("moe_intermediate_size")?,
        renormalise: c.json.get("norm_topk_prob").and_then(Json::as_bool).unwrap_or(true),
        dense_layers,
    })
}

/// A size of the linear layers: published files may have them in a group of their own, which wins.
fn linear_size(c: &Config<'_>, grouped: &str, plain: &str, default: usize) -> Result<usize, ModelError> {
    let own = c.opt(plain, default)?;
    match c.json.get("linear_attn_config") {
        Some(group) => Config { ck: c.ck, json: group }.opt(grouped, own),
        None => Ok(own),
    }
}

fn delta_rule(c: &Config<'_>) -> Result<DeltaRule, ModelError> {
    let heads = linear_size(c, "num_heads", "linear_num_heads", 64)?;
    Ok(kimi(heads, linear_size(c, "head_dim", "linear_head_dim", 128)?))
}

/// The delta rule of Kimi delta attention.
fn kimi(heads: usize, dim: usize) -> DeltaRule {
    DeltaRule { k_heads: heads, v_heads: heads, k_dim: dim, v_dim: dim, tiled: false, per_channel: true }
}

fn hyper_from_gguf(ck: &Checkpoint, m: &Metadata) -> Result<Hyper, ModelError> {
    let key = |suffix: &str| format!("{ARCH}.{suffix}");
    let need = |suffix: &str| m.usize(&key(suffix));
    let heads = need("attention.head_count")?;
    // Draft heads count as blocks in the file.
    let drafts = m.opt_usize(&key("nextn_predict_layers"))?.unwrap_or(0);
    Ok(Hyper {
        arch: ARCH,
        layers: need("block_count")?.saturating_sub(drafts),
        hidden: need("embedding_length")?,
        ffn: need("feed_forward_length")?,
        heads,
        kv_heads: heads,
        head_dim: need("attention.key_length_mla")?,
        vocab: ck.rows_of(EMBED)?,
        context: need("context_length")?,
        norm_eps: m.f32(&key("attention.layer_norm_rms_epsilon"))?,
        rope_theta: 10_000.0,
        rope_dims: 0,
        scaling: Scaling::None,
        experts: None,
    })
}

/// The one bound of all layers, of experts and others alike; files have 0 where there is none.
fn limit_from_gguf(ck: &Checkpoint, m: &Metadata) -> Result<f32, ModelError> {
    let mut limits = vec![];
    for suffix in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
        limits.extend_from_slice(m.opt_f32s(&format!("{ARCH}.{suffix}"))?.unwrap_or_default());
    }
    match limits.split_first() {
        Some((first, rest)) if rest.iter().any(|limit| limit != first) => {
            let why = "has different numbers for different layers, which is not supported";
            Err(ck.bad(&format!("{ARCH}.swiglu_clamp_exp"), why))
        }
        Some((&first, _)) if first != 0.0 => Ok(first),
        _ => Ok(f32::INFINITY),
    }
}

/// The bound of the log-decays, -5 unless said otherwise.
fn lower_bound(c: &Config<'_>) -> Result<f32, ModelError> {
    let group = c.json.get("linear_attn_config");
    let grouped = group.and_then(|g| g.get("gate_lower_bound")).filter(|v| !v.is_null());
    match grouped.or(c.json.get("linear_lower_bound")) {
        Some(Json::Null) if group.is_none() => {
            Err(c.ck.bad("config.json: linear_lower_bound", "is null: unbounded decays are not supported"))
        }
        None | Some(Json::Null) => Ok(-5.0),
        Some(v) => match v.as_f64() {
            Some(x) => Ok(x as f32),
            None => Err(c.ck.bad("config.json: linear_lower_bound", format!("is {v}, not a number"))),
        },
    }
}
