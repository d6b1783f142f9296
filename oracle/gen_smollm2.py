"""Exact logits of the real SmolLM2 file: its 4-bit weights, expanded to f32, in f32 arithmetic.

usage: gen_smollm2.py MODEL.gguf PROMPTS.json OUT.json

PROMPTS.json is a list of objects with `prompt` and `prompt_ids`. OUT.json repeats them and adds
`top10_last` ([id, logit] of the last position), `greedy_ids` (up to 48; the end token 2 stops it and is
left out) and `greedy_margins`: for each greedy id, the end token included, how far its logit is above
the second best. An engine whose logits are off by e may choose another id only where the margin is
below 2e; from there on its text may differ.
"""
import json
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from transformers import AutoModelForCausalLM

STEPS, END = 48, 2


@torch.no_grad()
def answer(model, prompt, ids):
    logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
    top = logits.topk(10)
    greedy, margins, cache, step = [], [], None, torch.tensor([ids])
    for _ in range(STEPS):
        out = model(input_ids=step, cache=cache, use_cache=True)
        cache, best = out.cache, out.logits[0, -1].topk(2)
        margins.append(round(float(best.values[0] - best.values[1]), 4))
        token = int(best.indices[0])
        if token == END:
            break
        greedy.append(token)
        step = torch.tensor([[token]])
    return {
        "prompt": prompt,
        "prompt_ids": ids,
        "top10_last": [[int(i), round(float(v), 4)] for v, i in zip(top.values, top.indices)],
        "greedy_ids": greedy,
        "greedy_margins": margins,
    }


def main(gguf_file, prompts_file, out_file):
    folder, name = os.path.split(os.path.abspath(gguf_file))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32,
                                                 attn_implementation="eager").eval()
    with open(prompts_file) as f:
        prompts = json.load(f)
    answers = [answer(model, p["prompt"], p["prompt_ids"]) for p in prompts]
    with open(out_file, "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(a, ensure_ascii=False) for a in answers) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
