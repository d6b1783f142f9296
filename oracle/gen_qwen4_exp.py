"""Tiny Qwen4-Exp (Qwen3.8-Flash-Next): three gated DeltaNet layers and one of block-sparse attention.

Every branch binds: n-grams are embedded at layer index 1 (`ple_layer_ids` counts from 1) and end tokens in the
sequence close their segments, the indexer keeps 2 blocks of 4 positions (so it chooses from 12 positions on, with an
incomplete block behind), a quarter of each head is rotated, the DeltaNet gate is a sigmoid, routing weights are
renormalised, the shared expert has a gate.
"""
import math

import torch
from transformers import DynamicCache
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

import common

END = 5


def special(name, tensor, generator):
    """Values for which gates, decays and zero-centred norms show; `None` leaves the common rule."""
    if name.endswith("A_log"):
        return torch.log(0.05 + 4 * torch.rand(tensor.shape, generator=generator))
    if name.endswith("dt_bias"):
        return 0.5 * torch.randn(tensor.shape, generator=generator)
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * torch.randn(tensor.shape, generator=generator)
    if "norm" in name and name.endswith("weight") and tensor.ndim == 1:
        return 0.2 * torch.randn(tensor.shape, generator=generator)
    if name.endswith("ngram_embedding.weight"):
        return torch.randn(tensor.shape, generator=generator)
    if name.endswith("block_inject_weight.weight"):
        return 4 * torch.randn(tensor.shape, generator=generator) / math.sqrt(tensor.shape[-1])
    return None


a = common.args("qwen4_exp", length=60, decode=9, seed=2)
config = Qwen4ExpTextConfig(
    vocab_size=131, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25,
                     "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
    linear_num_value_heads=4, moe_intermediate_size=24, shared_expert_intermediate_size=40,
    num_experts_per_tok=3, num_experts=8, norm_topk_prob=True,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    hc_count=4, hc_lowrank=12, ple_layer_ids=[2], ple_embed_dim=64, ple_conv_kernel_size=4, ngram_size=3,
    heads_per_ngram=4, ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=16, seed=1234,
    split_ngram_parts=4, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8,
    indexer_compress_ratio=4, output_gate_type="sigmoid", eos_token_id=END)
config._attn_implementation = "eager"
config._experts_implementation = "eager"
model = Qwen4ExpForCausalLM(config).eval()
common.randomise(model, a.seed, special)
ids = common.ids_for(131, a.len, a.seed)
ids[0, [11, 12, 37, 55]] = END
out, report = common.run(model, ids, a.decode, a.chunk, lambda: DynamicCache(config=config))

rows = []
table = model.model.layers[1].ple.ple_embedding.ngram_embedding
hook = table.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].clone()))
with torch.no_grad():
    model(input_ids=ids, use_cache=False)
hook.remove()
out["full/ngram_row_ids"] = rows[0]
common.finish(a.out, model, out, report, ids)
