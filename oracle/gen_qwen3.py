"""Tiny Qwen3: dense, RMSNorm on each head of q and k, head_dim unequal to hidden / heads, tied head."""
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

import common

a = common.args("qwen3")
config = Qwen3Config(
    vocab_size=97, hidden_size=64, intermediate_size=112, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    tie_word_embeddings=True, attn_implementation="eager")
model = Qwen3ForCausalLM(config).eval()
common.randomise(model, a.seed)
model.tie_weights()
ids = common.ids_for(97, a.len, a.seed)
out, report = common.run(model, ids, a.decode, a.chunk, lambda: DynamicCache(config=config))
common.finish(a.out, model, out, report, ids)
