"""Published names of DeepSeek V4's tensors, which transformers changes on loading and on saving."""
import torch

WHOLE = {
    "embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight", "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base", "hc_head.hc_scale": "hc_head_scale"}
PIECES = [
    (".self_attn.compressor.indexer.scorer.weights_proj", ".attn.indexer.weights_proj"),
    (".self_attn.compressor.indexer.q_b_proj", ".attn.indexer.wq_b"),
    (".self_attn.compressor.indexer.", ".attn.indexer.compressor."), (".self_attn.", ".attn."), (".mlp.", ".ffn."),
    (".input_layernorm.", ".attn_norm."), (".post_attention_layernorm.", ".ffn_norm."), (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"), (".q_a_proj.", ".wq_a."), (".q_a_norm.", ".q_norm."), (".q_b_proj.", ".wq_b."),
    (".o_a_proj.", ".wo_a."), (".o_b_proj.", ".wo_b."), (".sinks", ".attn_sink"), (".position_bias", ".ape"),
    ("compressor.kv_norm.", "compressor.norm."), (".compressor.gate_proj.", ".compressor.wgate."),
    (".kv_proj.", ".wkv."), ("gate.e_score_correction_bias", "gate.bias"), ("shared_experts.gate_proj", "shared_experts.w1"),
    ("shared_experts.down_proj", "shared_experts.w2"), ("shared_experts.up_proj", "shared_experts.w3")]


def published(state):
    """Tensors under the names of published checkpoints, one per expert."""
    out = {}
    for name, x in state.items():
        name = name.removeprefix("model.")
        for old, new in [] if name in WHOLE else PIECES:
            name = name.replace(old, new)
        name = WHOLE.get(name, name)
        if name.endswith("experts.gate_up_proj"):
            for e in range(x.shape[0]):
                for part, half in zip(["w1", "w3"], x[e].chunk(2, 0)):
                    out[name.replace("gate_up_proj", f"{e}.{part}.weight")] = half
        elif name.endswith("experts.down_proj"):
            for e in range(x.shape[0]):
                out[name.replace("down_proj", f"{e}.w2.weight")] = x[e]
        else:
            out[name] = x.to(torch.int64) if name.endswith("tid2eid") else x
    return {name: x.clone().contiguous() for name, x in out.items()}
