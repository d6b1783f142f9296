//! Qwen2 and Qwen2.5: LLaMA with biases on q, k and v (Yang et al. 2024).

use minfer_graph::{Graph, RopeStyle};

use crate::Model;
use crate::checkpoint::Checkpoint;
use crate::decoder::{ATTN_NORM, AttentionStyle, Decoder, FFN_NORM};
use crate::error::ModelError;
use crate::hyper::Hyper;

struct Qwen2 {
    hyper: Hyper,
}

pub(crate) fn load(ck: &Checkpoint) -> Result<Box<dyn Model>, ModelError> {
    Ok(Box::new(Qwen2 { hyper: Hyper::read(ck, "qwen2", false)? }))
}

impl Model for Qwen2 {
    fn hyper(&self) -> &Hyper {
        &self.hyper
    }

    fn graph(&self, ck: &Checkpoint, page_table: usize) -> Result<Graph, ModelError> {
        let style = AttentionStyle { rope: RopeStyle::HalfSplit, qk_norm: false, qkv_bias: true };
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
