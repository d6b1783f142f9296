"""Copies one oracle's output with the part of its goldens that the tests read.

usage: slim.py IN OUT    (folders; OUT/<files> are overwritten)

Keeps config.json, model.safetensors, report.json and, of golden.safetensors, the ids, the logits of
the three ways, for mixture-of-experts families the router's outputs
`full/model.layers.N.mlp.gate.{0 logits, 1 weights, 2 expert ids}`, and for hybrid families the outputs of each
layer's parts and the rows of the n-gram table. Adds to report.json the smallest
gap between the last chosen and the first refused expert: a test may ask for equal expert ids only
while the arithmetic differs by far less than this gap.

Families that also see images keep their decoder one level deeper (`model.language_model`); their vision tower stays
behind.

Also writes config.legacy.json, the same configuration under the names that published checkpoints
use (transformers before 5): rope_theta and rope_scaling, torch_dtype, num_experts. Newer families have none.
"""
import json
import os
import re
import shutil
import sys

from safetensors import safe_open
from safetensors.torch import save_file

ROUTER = re.compile(r"full/model\.layers\.\d+\.mlp\.gate\.[012]$")
# What a hybrid layer's parts give: reads of the residual streams, attention, selection, n-grams, experts.
PARTS = re.compile(
    r"full/(ngram_row_ids|model\.embed_tokens|model\.hyper_connection_mixer|model\.layers\.\d+"
    r"(\.(attn_hyper_connection\.[02]|linear_attn|self_attn\.0|self_attn\.indexer|ple|mlp))?)$")
# The same under `model.language_model`.
NESTED = re.compile(
    r"full/model\.language_model\.(norm|layers\.\d+\."
    r"(attn_hc\.[01]|self_attn|self_attn\.0|self_attn\.indexer|mlp|mlp\.gate\.[012]))$")
# The same for DeepSeek V4: stream weights, attention, compressed rows and which are chosen, experts.
PARTS_DEEPSEEK = re.compile(
    r"full/model\.(hc_head|layers\.\d+\.(attn_hc\.[01]|self_attn\.0|self_attn\.compressor\.(0|indexer))"
    r"|layers\.[02]\.mlp)$")
LEGACY = ["llama", "qwen2", "qwen3", "qwen3_moe"]
LOGITS = ["input_ids", "full.logits", "decode.logits", "chunked.logits"]


def legacy(config):
    """The configuration as transformers 4 wrote it."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    old["torch_dtype"] = old.pop("dtype")
    if "num_local_experts" in old:
        old["num_experts"] = old.pop("num_local_experts")
    return old


def router_margin(golden, n_used):
    """Smallest gap between the n_used-th and the next router logit, over all tokens and layers."""
    gaps = []
    for key in golden:
        if key.endswith(".mlp.gate.0"):
            ranked = golden[key].float().sort(dim=-1, descending=True).values
            gaps.append(float((ranked[:, n_used - 1] - ranked[:, n_used]).min()))
    return min(gaps) if gaps else None


def main(source, target):
    os.makedirs(target, exist_ok=True)
    with open(os.path.join(source, "config.json")) as f:
        config = json.load(f)
    hybrid = config["model_type"] not in LEGACY
    nested = "text_config" in config
    parts = NESTED if nested else PARTS_DEEPSEEK if config["model_type"] == "deepseek_v4" else PARTS
    keep = lambda k: k in LOGITS or ROUTER.match(k) or hybrid and parts.match(k)
    with safe_open(os.path.join(source, "golden.safetensors"), "pt") as f:
        golden = {k: f.get_tensor(k) for k in f.keys() if keep(k)}
    save_file(golden, os.path.join(target, "golden.safetensors"))
    shutil.copyfile(os.path.join(source, "config.json"), os.path.join(target, "config.json"))
    with safe_open(os.path.join(source, "model.safetensors"), "pt") as f:
        tensors = {k: f.get_tensor(k) for k in f.keys() if not k.startswith("model.visual.")}
        if len(tensors) < len(f.keys()):
            save_file(tensors, os.path.join(target, "model.safetensors"), f.metadata())
        else:
            shutil.copyfile(os.path.join(source, "model.safetensors"), os.path.join(target, "model.safetensors"))
    if not hybrid:
        with open(os.path.join(target, "config.legacy.json"), "w") as f:
            json.dump(legacy(config), f, indent=2)
            f.write("\n")
    with open(os.path.join(source, "report.json")) as f:
        report = json.load(f)
    margin = router_margin(golden, config.get("num_experts_per_tok", 0))
    # A report with margins has them of the biased scores, by which experts are chosen there.
    if margin is not None and not nested and "margins" not in report:
        report["router_margin"] = margin
    with open(os.path.join(target, "report.json"), "w") as f:
        json.dump(report, f, indent=1)
        f.write("\n")
    print(target, json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
