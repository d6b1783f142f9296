"""Tiny GLM-5.3-Flash: three layers of Kimi delta attention and two of latent attention under hyper-connections.

Every branch binds: decays are bounded and differ by channel, the indexer keeps 2 blocks of 4 positions (so it chooses
from 12 positions on, with an incomplete block behind) and has 32 heads (with few, many scores are exactly 0 and ties
decide), the first feed-forward block is dense, routing scores have a bias that changes choices, SwiGLU's bound of 1.5
clips. The vision tower is random and not run; `slim.py` leaves it out.
"""
import torch
from transformers import DynamicCache
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

import common


def special(name, tensor, generator):
    """Values for which gates, decays and biases show; `None` leaves the common rule."""
    if "visual" in name:
        return tensor.clone()
    normal = torch.randn(tensor.shape, generator=generator)
    if name.endswith("A_log"):
        return torch.log(0.2 + 2 * torch.rand(tensor.shape, generator=generator))
    if name.endswith("dt_bias"):
        return normal - 1.0
    if name.endswith(("e_score_correction_bias", "k_norm.bias")):
        return 0.3 * normal
    if name.endswith("index_kpool_compress_ape"):
        return normal
    if name.endswith(".base"):
        return 0.5 * normal
    if name.endswith(".scale"):
        return 1 + 0.2 * normal
    return None


def margin(scores, kept):
    """Smallest gap between the last kept and the first refused score, over rows with more than `kept` of them."""
    ranked = scores.reshape(-1, scores.shape[-1]).sort(dim=-1, descending=True).values
    gaps = ranked[:, kept - 1] - ranked[:, kept]
    return float(gaps[torch.isfinite(gaps)].min())


def index_margin(indexer, x, r):
    """The same for the blocks that an indexer scores, from its inputs."""
    block, rows = indexer.index_kpool, x.shape[1]
    blocks = rows // block
    keys = indexer.k_norm(indexer.wk(x))[0, :blocks * block].view(blocks, block, -1)
    gates = torch.nn.functional.linear(x, indexer.index_kpool_compress_gate)[0, :blocks * block]
    gates = (gates.view(blocks, block, -1) + indexer.index_kpool_compress_ape).softmax(1)
    queries = indexer.wq_b(r).view(rows, indexer.n_heads, indexer.head_dim)
    products = torch.einsum("shd,bd->shb", queries, (gates * keys).sum(1)) * indexer.softmax_scale
    weights = indexer.weights_proj(x)[0] * indexer.n_heads ** -0.5
    scores = torch.einsum("sh,shb->sb", weights, products.relu())
    seen = torch.arange(blocks)[None] * block + block - 1 <= torch.arange(rows)[:, None]
    return margin(scores.masked_fill(~seen, float("-inf")), indexer.index_topk // block)


a = common.args("glm5_next", length=70, decode=10, seed=4)
linear, full = "linear_attention", "full_attention"
text = dict(
    vocab_size=131, hidden_size=64, intermediate_size=96, moe_intermediate_size=40, num_hidden_layers=5,
    num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8,
    routed_scaling_factor=2.5, kv_lora_rank=24, q_lora_rank=40, qk_rope_head_dim=0, v_head_dim=20,
    qk_nope_head_dim=16, n_group=1, topk_group=1, num_experts_per_tok=2, norm_topk_prob=True,
    max_position_embeddings=512, rms_norm_eps=1e-5, pad_token_id=None, eos_token_id=1, bos_token_id=None,
    mlp_layer_types=["dense"] + ["sparse"] * 4, index_topk=8, index_head_dim=16, index_n_heads=32,
    layer_types=[linear, full, linear, full, linear], indexer_types=["full"] * 5, swiglu_limit=1.5,
    linear_head_dim=16, linear_num_heads=4, linear_conv_kernel_dim=4, linear_lower_bound=-5.0, hc_mult=4,
    hc_eps=1e-6, hc_sinkhorn_iters=20, index_kpool=4, index_kpool_always_select_tail=True)
vision = dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=48, out_hidden_size=64, patch_size=14,
              image_size=56, projection_intermediate_size=64)
config = Glm5NextConfig(
    text_config=text, vision_config=vision, image_token_id=128, video_token_id=129, image_start_token_id=120,
    image_end_token_id=121, video_start_token_id=122, video_end_token_id=123)
config._attn_implementation = "eager"
config.text_config._attn_implementation = "eager"
config.text_config._experts_implementation = "eager"
model = Glm5NextForConditionalGeneration(config).eval()
common.randomise(model, a.seed, special)

margins = []


def measure(module, args, kwargs, output):
    """Only without a cache, where an indexer sees the whole sequence."""
    if kwargs.get("cache") is None:
        margins.append(index_margin(module, kwargs["hidden_states"], kwargs["q_resid"]))


hooks = [module.register_forward_hook(measure, with_kwargs=True)
         for name, module in model.named_modules() if name.endswith("self_attn.indexer")]
ids = common.ids_for(115, a.len, a.seed)
out, report = common.run(
    model, ids, a.decode, a.chunk, lambda: DynamicCache(config=config),
    lambda name: name.startswith("model.language_model.") and name.count(".") <= 5)
for hook in hooks:
    hook.remove()
report["index_margin"] = min(margins)
report["router_margin"] = min(
    margin(out[f"full/{name}.0"].sigmoid() + module.e_score_correction_bias, 2)
    for name, module in model.named_modules() if name.endswith("mlp.gate"))
common.finish(a.out, model, out, report, ids)
