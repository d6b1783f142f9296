"""Tiny Llama: grouped-query attention, no biases.

Default: llama3 rope scaling and an untied head. The 8 wavelengths of head_dim 16 at theta 10000 are
6.3 20 63 199 628 1987 6283 19869 tokens. With an original context of 64 and factors 1 and 4, those
under 64/4 = 16 keep their frequency, those over 64/1 are divided by 8, and the two between are
blended, so each band of the rule occurs. The sequence of 96 tokens passes the original context.

--plain: no scaling, tied head, and a rope_theta of 500000.
"""
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import common

p = common.parser("llama", length=96)
p.add_argument("--plain", action="store_true", help="no rope scaling, tied head")
a = p.parse_args()
ORIGINAL_CONTEXT, FACTOR = 64, 8.0
llama3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": FACTOR, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL_CONTEXT}
plain = {"rope_type": "default", "rope_theta": 500000.0}
config = LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=112, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5,
    max_position_embeddings=int(ORIGINAL_CONTEXT * FACTOR), rope_parameters=plain if a.plain else llama3,
    tie_word_embeddings=a.plain, attn_implementation="eager")
model = LlamaForCausalLM(config).eval()
common.randomise(model, a.seed)
model.tie_weights()
ids = common.ids_for(97, a.len, a.seed)
out, report = common.run(model, ids, a.decode, a.chunk, lambda: DynamicCache(config=config))
common.finish(a.out, model, out, report, ids)
