"""Tiny DeepSeek V4: two layers with a window only, two with overlapping compressed windows of 4 and an indexer, one with
windows of 128.

Every branch binds: the sequence is longer than the window (32), than two windows of 128 and than what the indexer keeps
(8 compressed rows of 72); the first two layers' experts depend on the token; the SwiGLU limit clips; sinks, biases and
hyper-connection weights are not trivial. 32 index heads make a score of exactly zero, and with it a tie, unlikely.

With --official: a smaller model, one layer of each compressed kind, whose sizes fit the round trips of DeepSeek's own graph,
which are applied (`official_rounding`); of its goldens only the logits are kept. `report.json` has the margins to ties.

The checkpoint is written under the names of the published ones, which transformers changes on loading and on saving.
"""
import hashlib
import json
import os

import torch
from safetensors.torch import save_file
from transformers import DynamicCache
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

import common
import official_rounding
from deepseek_names import published

YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
PUBLISHED = dict(
    vocab_size=131, hidden_size=64, moe_intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=1, head_dim=32, qk_rope_head_dim=8, q_lora_rank=24, num_experts_per_tok=2,
    n_routed_experts=8, n_shared_experts=1, scoring_func="sqrtsoftplus", norm_topk_prob=True,
    routed_scaling_factor=1.5, max_position_embeddings=4096, rope_theta=10000.0, compress_rope_theta=160000.0,
    compress_ratios=[0, 0, 4, 128, 4], num_hash_layers=2, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
    swiglu_limit=1.5, sliding_window=32, o_groups=2, o_lora_rank=16, index_n_heads=32, index_head_dim=16,
    index_topk=8, num_nextn_predict_layers=0, rms_norm_eps=1e-6)
# Few rows that could be near a tie; 64 numbers of a head are not rotated.
OFFICIAL = dict(
    vocab_size=67, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=72,
    q_lora_rank=16, n_routed_experts=4, compress_ratios=[4, 128], num_hash_layers=1, hc_mult=2, o_lora_rank=8,
    index_n_heads=16, index_head_dim=32)


def special(name, tensor, generator):
    """Values for which biases and sinks show; `None` leaves the common rule."""
    sizes = {"e_score_correction_bias": 0.3, "sinks": 1, "position_bias": 1, ".base": 0.5, "hc_base": 0.5}
    for end, size in sizes.items():
        if name.endswith(end):
            return size * torch.randn(tensor.shape, generator=generator)
    if name.endswith((".scale", "hc_scale")):
        return 1 + 0.2 * torch.randn(tensor.shape, generator=generator)
    return None


def choose_experts_by_token(model, seed):
    """Different experts for each token."""
    for name, table in model.state_dict().items():
        if name.endswith("tid2eid"):
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7]
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            rows = [torch.randperm(EXPERTS, generator=generator)[:USED] for _ in range(table.shape[0])]
            table.copy_(torch.stack(rows))


def gap(scores, k):
    """Smallest gap between the k-th and the next of a row's finite scores."""
    ranked = scores.flatten(0, -2).sort(dim=-1, descending=True).values
    gaps = ranked[:, k - 1] - ranked[:, k]
    return float(gaps[gaps.isfinite()].min())


def watch_gaps(model, gaps, length):
    """Records how close refused experts and compressed rows come to chosen ones, in runs of the whole sequence."""

    def router(module, inputs, output):
        if output[0].shape[0] == length:
            scores = torch.nn.functional.softplus(output[0]).sqrt() + module.e_score_correction_bias
            gaps["router"].append(gap(scores, USED))

    def index(module, inputs, output):
        if output.shape[1] == length:
            complete = (torch.arange(length) + 1) // 4
            late = torch.arange(output.shape[-1])[None] >= complete[:, None]
            gaps["index"].append(gap(output.masked_fill(late[None], float("-inf")), TOP))

    for name, module in model.named_modules():
        if name.endswith("mlp.gate") and hasattr(module, "e_score_correction_bias"):
            module.register_forward_hook(router)
        if name.endswith("indexer.scorer"):
            module.register_forward_hook(index)


p = common.parser("deepseek_v4", length=290, decode=20, seed=3)
p.add_argument("--official", action="store_true", help="the smaller model, with the round trips of DeepSeek's own graph")
a = p.parse_args()
if a.official:
    PUBLISHED.update(OFFICIAL)
EXPERTS, USED, TOP = PUBLISHED["n_routed_experts"], PUBLISHED["num_experts_per_tok"], PUBLISHED["index_topk"]
config = DeepseekV4Config(**PUBLISHED, rope_scaling={"rope_type": "yarn", **YARN})
config._attn_implementation = "eager"
config._experts_implementation = "eager"
model = DeepseekV4ForCausalLM(config).eval()
with torch.no_grad():
    common.randomise(model, a.seed, special)
    choose_experts_by_token(model, a.seed)
gaps = {"router": [], "index": []}
watch_gaps(model, gaps, a.len)
rounding = official_rounding.install(config) if a.official else {}
ids = common.ids_for(PUBLISHED["vocab_size"], a.len, a.seed)
pick = lambda name: not a.official and (common.modules(name) or name.endswith("compressor.indexer"))
out, report = common.run(model, ids, a.decode, a.chunk, lambda: DynamicCache(config=config), pick)
report["margins"] = {kind: min(found) for kind, found in {**gaps, **rounding}.items()}
common.finish(a.out, model, out, report, ids)
save_file(published(model.state_dict()), os.path.join(a.out, "model.safetensors"))
with open(os.path.join(a.out, "config.json"), "w") as f:
    json.dump({"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], **PUBLISHED,
               "tie_word_embeddings": False, "rope_scaling": YARN}, f, indent=1)
    f.write("\n")
