//! Hyper-parameters of decoder models, read from any source.

use minfer_format::Metadata;
use minfer_graph::{PAGE, PagedPart, Router, Scoring};
use serde_json::Value as Json;

use crate::checkpoint::Checkpoint;
use crate::decoder::EMBED;
use crate::error::ModelError;
use crate::rope::{self, Scaling};

/// Sizes and settings of a decoder with grouped-query attention.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Hyper {
    /// Architecture as in GGUF files.
    pub arch: &'static str,
    pub layers: usize,
    pub hidden: usize,
    /// Width of a dense feed-forward block.
    pub ffn: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    /// Longest context that the model was made for.
    pub context: usize,
    pub norm_eps: f32,
    pub rope_theta: f32,
    /// Dimensions of each head that are rotated.
    pub rope_dims: usize,
    pub(crate) scaling: Scaling,
    pub experts: Option<Experts>,
}

/// Sizes of mixture-of-experts layers.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Experts {
    pub count: usize,
    /// Experts per token.
    pub used: usize,
    /// Width of one expert.
    pub ffn: usize,
    /// Whether the chosen experts' weights are divided by their sum.
    pub renormalise: bool,
    /// Layers that have a dense block instead.
    pub dense_layers: Vec<usize>,
}

/// Sizes beyond which a setting is a damaged file, not a model; products of two of them fit 64 bits.
const LIMIT: usize = 1 << 28;

impl Hyper {
    pub(crate) fn read(ck: &Checkpoint, arch: &'static str, moe: bool) -> Result<Hyper, ModelError> {
        let mut h = match ck {
            Checkpoint::Gguf(g) => Hyper::from_gguf(ck, g.metadata(), arch, moe)?,
            Checkpoint::Hf(d) => Hyper::from_hf(ck, text_config(d.config()), arch, moe)?,
            Checkpoint::Shape(s) => Hyper::from_hf(ck, s.config(), arch, moe)?,
        };
        h.vocab = ck.rows_of(EMBED)?;
        h.check(ck)?;
        Ok(h)
    }

    fn from_gguf(ck: &Checkpoint, m: &Metadata, arch: &'static str, moe: bool) -> Result<Hyper, ModelError> {
        let key = |suffix: &str| format!("{arch}.{suffix}");
        let need = |suffix: &str| m.usize(&key(suffix));
        let opt =
            |suffix: &str, default: usize| Ok::<_, ModelError>(m.opt_usize(&key(suffix))?.unwrap_or(default));
        let (hidden, heads) = (need("embedding_length")?, need("attention.head_count")?);
        let head_dim = opt("attention.key_length", hidden / heads.max(1))?;
        if opt("attention.value_length", head_dim)? != head_dim {
            return Err(
                ck.bad(&key("attention.value_length"), "differs from the key length, which is not supported")
            );
        }
        let experts = if moe { Some(Experts::from_gguf(m, arch)?) } else { None };
        if !moe && opt("expert_count", 0)? > 0 {
            return Err(ck.bad(
                &key("expert_count"),
                "is not zero: this architecture is supported without experts only",
            ));
        }
        if m.opt_bool(&key("attention.causal"))? == Some(false) {
            return Err(ck.bad(&key("attention.causal"), "is false: only causal models are supported"));
        }
        if opt("expert_group_count", 0)? > 1 {
            return Err(ck.bad(&key("expert_group_count"), "is above 1, which is not supported"));
        }
        // Draft heads count as blocks in the file.
        let layers = need("block_count")?.saturating_sub(opt("nextn_predict_layers", 0)?);
        Ok(Hyper {
            arch,
            layers,
            hidden,
            // Models of experts only may have no dense width.
            ffn: match &experts {
                Some(e) => opt("feed_forward_length", e.ffn)?,
                None => need("feed_forward_length")?,
            },
            heads,
            kv_heads: opt("attention.head_count_kv", heads)?,
            head_dim,
            vocab: 0,
            context: need("context_length")?,
            norm_eps: m.f32(&key("attention.layer_norm_rms_epsilon"))?,
            rope_theta: m.opt_f32(&key("rope.freq_base"))?.unwrap_or(10_000.0),
            rope_dims: opt("rope.dimension_count", head_dim)?,
            scaling: rope::scaling_from_gguf(ck, m, arch)?,
            experts,
        })
    }

    fn from_hf(ck: &Checkpoint, c: &Json, arch: &'static str, moe: bool) -> Result<Hyper, ModelError> {
        let config = Config { ck, json: c };
        let (hidden, heads) = (config.need("hidden_size")?, config.need("num_attention_heads")?);
        if let Some(act) = c.get("hidden_act").and_then(Json::as_str).filter(|a| *a != "silu") {
            return Err(ck.bad("config.json: hidden_act", format!("is '{act}'; only 'silu' is supported")));
        }
        if c.get("use_sliding_window").and_then(Json::as_bool) == Some(true) {
            return Err(ck.bad("config.json: use_sliding_window", "is true, which is not supported"));
        }
        let head_dim = config.opt("head_dim", hidden / heads.max(1))?;
        let (rope_theta, scaling) = rope::scaling_from_hf(ck, c)?;
        let experts = if moe { Some(Experts::from_hf(&config)?) } else { None };
        Ok(Hyper {
            arch,
            layers: config.need("num_hidden_layers")?,
            hidden,
            ffn: match &experts {
                Some(e) => config.opt("intermediate_size", e.ffn)?,
                None => config.need("intermediate_size")?,
            },
            heads,
            kv_heads: config.opt("num_key_value_heads", heads)?,
            head_dim,
            vocab: 0,
            context: config.need("max_position_embeddings")?,
            norm_eps: config.float("rms_norm_eps")?.unwrap_or(1e-6),
            rope_theta,
            rope_dims: (head_dim as f64 * rope::rotated_fraction(c)) as usize,
            scaling,
            experts,
        })
    }

    pub(crate) fn check(&self, ck: &Checkpoint) -> Result<(), ModelError> {
        let sizes = [
            ("layer count", self.layers),
            ("hidden size", self.hidden),
            ("feed-forward size", self.ffn),
            ("head count", self.heads),
            ("KV head count", self.kv_heads),
            ("head size", self.head_dim),
            ("vocabulary size", self.vocab),
            ("context length", self.context),
        ];
        if let Some((what, n)) = sizes.iter().find(|(_, n)| !(1..=LIMIT).contains(n)) {
            return Err(ck.bad(what, format!("is {n}, outside 1..={LIMIT}")));
        }
        if self.layers > 4096 {
            return Err(ck.bad("layer count", format!("is {}, more than 4096", self.layers)));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let why = format!("is {}, which does not divide {} heads", self.kv_heads, self.heads);
            return Err(ck.bad("KV head count", why));
        }
        if self.rope_dims > self.head_dim || !self.rope_dims.is_multiple_of(2) {
            let why = format!("is {}, not an even number up to {}", self.rope_dims, self.head_dim);
            return Err(ck.bad("rotated dimension count", why));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            return Err(ck.bad("norm epsilon", format!("is {}", self.norm_eps)));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 0.0) {
            return Err(ck.bad("rope theta", format!("is {}", self.rope_theta)));
        }
        match &self.experts {
            Some(e)
                if !(1..=e.count).contains(&e.used) || e.count > 65536 || !(1..=LIMIT).contains(&e.ffn) =>
            {
                let why = format!("are {} of {} with width {}", e.used, e.count, e.ffn);
                Err(ck.bad("experts per token", why))
            }
            _ => Ok(()),
        }
    }
}

impl Experts {
    /// The choice by softmax probability.
    pub(crate) fn softmax_router(&self) -> Router {
        let scoring = Scoring::Softmax;
        Router { scoring, top_k: self.used, renormalise: self.renormalise, biased: false, scale: 1.0 }
    }

    pub(crate) fn from_gguf(m: &Metadata, arch: &str) -> Result<Experts, ModelError> {
        let key = |suffix: &str| format!("{arch}.{suffix}");
        let used = m.usize(&key("expert_used_count"))?;
        Ok(Experts {
            count: m.usize(&key("expert_count"))?,
            used,
            ffn: m.usize(&key("expert_feed_forward_length"))?,
            // Files of this architecture do not say so: it is part of its definition there.
            renormalise: true,
            dense_layers: vec![],
        })
    }

    pub(crate) fn from_hf(c: &Config<'_>) -> Result<Experts, ModelError> {
        let count = match c.json.get("num_experts") {
            Some(_) => c.need("num_experts")?,
            None => c.need("num_local_experts")?,
        };
        let step = c.opt("decoder_sparse_step", 1)?.max(1);
        let layers = c.need("num_hidden_layers")?.min(4096);
        let listed = c.list("mlp_only_layers")?;
        let dense = |l: &usize| listed.contains(l) || !(l + 1).is_multiple_of(step);
        Ok(Experts {
            count,
            used: c.need("num_experts_per_tok")?,
            ffn: c.need("moe_intermediate_size")?,
            renormalise: c.json.get("norm_topk_prob").and_then(Json::as_bool).unwrap_or(false),
            dense_layers: (0..layers).filter(dense).collect(),
        })
    }
}

/// The decoder's part of a configuration: models that also see images have it one level deeper.
pub(crate) fn text_config(json: &Json) -> &Json {
    json.get("text_config").unwrap_or(json)
}

/// `config.json` with errors that name the key.
pub(crate) struct Config<'a> {
    pub(crate) ck: &'a Checkpoint,
    pub(crate) json: &'a Json,
}

impl Config<'_> {
    /// A list of whole numbers, empty where it is absent.
    pub(crate) fn list(&self, key: &str) -> Result<Vec<usize>, ModelError> {
        match self.json.get(key) {
            None | Some(Json::Null) => Ok(vec![]),
            Some(list) => serde_json::from_value(list.clone())
                .map_err(|e| self.ck.bad(&format!("config.json: {key}"), e.to_string())),
        }
    }

    pub(crate) fn need(&self, key: &str) -> Result<usize, ModelError> {
        match self.get(key)? {
            Some(n) => Ok(n),
            None => Err(self.ck.bad(&format!("config.json: {key}"), "is missing")),
        }
    }

    pub(crate) fn opt(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        Ok(self.get(key)?.unwrap_or(default))
    }

    fn get(&self, key: &str) -> Result<Option<usize>, ModelError> {
        match self.json.get(key) {
            None | Some(Json::Null) => Ok(None),
            Some(v) => match v.as_u64().and_then(|n| usize::try_from(n).ok()) {
                Some(n) => Ok(Some(n)),
                None => {
                    Err(self.ck.bad(&format!("config.json: {key}"), format!("is {v}, not a whole number")))
                }
            },
        }
    }

    pub(crate) fn float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        match self.json.get(key) {
            None | Some(Json::Null) => Ok(None),
            Some(v) => match v.as_f64() {
                Some(x) => Ok(Some(x as f32)),
                None => Err(self.ck.bad(&format!("config.json: {key}"), format!("is {v}, not a number"))),
            },
        }
    }
}

/// Whether each layer attends, from `layer_types`, which published files and transformers spell differently; every fourth layer attends
/// where the list is absent.
pub(crate) fn layer_types(c: &Config<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let bad = |why: String| c.ck.bad("config.json: layer_types", why);
    let Some(list) = c.json.get("layer_types").filter(|v| !v.is_null()) else {
        return Ok((1..=layers).map(|i| i.is_multiple_of(4)).collect());
    };
    let kinds = list.as_array().filter(|l| l.len() == layers);
    let kinds = kinds.ok_or_else(|| bad(format!("is not a list of {layers}")))?;
    let attends = |kind: &Json| match kind.as_str() {
        Some("linear_attention") => Ok(false),
        Some("full_attention" | "indexed_attention") => Ok(true),
        _ => Err(bad(format!("has {kind}, neither linear_attention nor full_attention"))),
    };
    kinds.iter().map(attends).collect()
}

/// Fails unless rows for every so many positions can be kept in pages.
pub(crate) fn fits_pages(ck: &Checkpoint, what: &str, every: usize) -> Result<(), ModelError> {
    if PagedPart::fits(every) {
        return Ok(());
    }
    let why = format!("is {every}, which neither divides a page of {PAGE} positions nor is a multiple of it");
    Err(ck.bad(what, why))
}
