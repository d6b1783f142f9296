//! Qwen3: per-head RMS norm of queries and keys, no biases (Yang et al. 2025).

use minfer_graph::{Graph, RopeStyle};

use crate::Model;
use crate::checkpoint::Checkpoint;
use crate::decoder::{ATTN_NORM, AttentionStyle, Decoder, FFN_NORM};
use crate::error::ModelError;
use crate::hyper::Hyper;

struct Qwen3 {
    hyper: Hyper,
}

pub(crate) fn load(ck: &Checkpoint) -> Result<Box<dyn Model>, ModelError> {
    Ok(Box::new(Qwen3 { hyper: Hyper::read(ck, "qwen3", false)? }))
}

impl Model for Qwen3 {
    fn hyper(&self) -> &Hyper {
        &self.hyper
    }

    fn graph(&self, ck: &Checkpoint, page_table: usize) -> Result<Graph, ModelError> {
        let style = AttentionStyle { rope: RopeStyle::HalfSplit, qk_norm: true, qkv_bias: false };
        let (mut d, mut x) = Decoder::start(ck, &self.hyper, page_table)?;
        for layer in 0..self.hyper.layers {
            d.enter(layer);
            let h = d.norm(x, ATTN_NORM)?;
            let attended = d.attention(h, style)?;
            x = d.residual(x, attended, true);
            let h = d.norm(x, FFN_NORM)?;
            let fed = d.swiglu(h)?;
            x = d.residual(x, fed, false);
        }
        d.finish(x)
    }
}
