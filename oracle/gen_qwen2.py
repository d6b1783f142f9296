"""Tiny Qwen2: dense, biases on q, k and v, grouped-query attention, untied head."""
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

import common

a = common.args("qwen2")
config = Qwen2Config(
    vocab_size=97, hidden_size=64, intermediate_size=112, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    tie_word_embeddings=False, use_sliding_window=False, attn_implementation="eager")
model = Qwen2ForCausalLM(config).eval()
common.randomise(model, a.seed)
ids = common.ids_for(97, a.len, a.seed)
out, report = common.run(model, ids, a.decode, a.chunk, lambda: DynamicCache(config=config))
common.finish(a.out, model, out, report, ids)
