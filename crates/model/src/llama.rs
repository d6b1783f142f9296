//! LLaMA: pre-norm decoder, grouped-query attention, SwiGLU (Touvron et al. 2023; Llama 3's rope scaling).

use minfer_graph::{Graph, RopeStyle};

use crate::Model;
use crate::checkpoint::Checkpoint;
use crate::decoder::{ATTN_NORM, AttentionStyle, Decoder, FFN_NORM};
use crate::error::ModelError;
use crate::hyper::Hyper;

struct Llama {
    hyper: Hyper,
}

pub(crate) fn load(ck: &Checkpoint) -> Result<Box<dyn Model>, ModelError> {
    Ok(Box::new(Llama { hyper: Hyper::read(ck, "llama", false)? }))
}

impl Model for Llama {
    fn hyper(&self) -> &Hyper {
        &self.hyper
    }

    fn graph(&self, ck: &Checkpoint, page_table: usize) -> Result<Graph, ModelError> {
        // GGUF files of this architecture store q and k so that rotated pairs are neighbours.
        let rope = if ck.is_hf() { RopeStyle::HalfSplit } else { RopeStyle::Interleaved };
        let style = AttentionStyle { rope, qk_norm: false, qkv_bias: false };
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
