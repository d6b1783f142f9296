"""Tiny Qwen3-MoE: 8 experts, 2 per token, their weights renormalised; layer 1 is dense (mlp_only_layers)."""
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

import common

a = common.args("qwen3_moe")
config = Qwen3MoeConfig(
    vocab_size=97, hidden_size=64, intermediate_size=112, moe_intermediate_size=48,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8,
    num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[1],
    max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    tie_word_embeddings=False, attn_implementation="eager")
model = Qwen3MoeForCausalLM(config).eval()
common.randomise(model, a.seed)
ids = common.ids_for(97, a.len, a.seed)
out, report = common.run(model, ids, a.decode, a.chunk, lambda: DynamicCache(config=config))
common.finish(a.out, model, out, report, ids)
