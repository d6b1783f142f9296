"""Shared helpers of the tiny random-weight oracles.

Every gen_<family>.py builds a tiny model with transformers, fills *every* parameter and persistent
buffer with random numbers (so that no branch is a no-op), runs it in three ways, saves the
checkpoint, loads it again and compares.

In:  command-line options (see `args`).
Out: <out>/config.json, model.safetensors   the checkpoint, under Hugging Face names
     <out>/golden.safetensors               ids, logits and the outputs of the sub-modules
     <out>/report.json                      maximum differences between the three ways
     <out>/tensors.txt                      name, shape and dtype of each tensor
slim.py then keeps the part that the tests read.
"""
import argparse
import hashlib
import json
import math
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
import torch
from safetensors import safe_open
from safetensors.torch import save_file

torch.set_num_threads(2)
torch.use_deterministic_algorithms(True, warn_only=True)


def parser(family, length=48, decode=8, seed=1):
    """Options that all generators share."""
    p = argparse.ArgumentParser()
    p.add_argument("--out", default=f"out/{family}")
    p.add_argument("--len", type=int, default=length, help="tokens of the sequence")
    p.add_argument("--decode", type=int, default=decode, help="how many of them are decoded one by one")
    p.add_argument("--seed", type=int, default=seed)
    p.add_argument("--chunk", type=int, default=13, help="tokens per chunk of the chunked prefill")
    return p


def args(family, **defaults):
    return parser(family, **defaults).parse_args()


@torch.no_grad()
def randomise(model, seed, special=lambda name, tensor, generator: None):
    """Fill every parameter and persistent buffer from a generator keyed by its name.

    Keyed by name, so that one more tensor does not shift the others. Matrices: N(0, 1/fan_in), the
    embedding N(0, 1); norm weights 1 + 0.2 N; biases 0.3 N. `special` may return other values.
    """
    buffers = [(n, b) for n, b in model.named_buffers() if n in model.state_dict()]
    for name, tensor in list(model.named_parameters()) + buffers:
        if not tensor.is_floating_point():
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7]
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        x = special(name, tensor, generator)
        if x is not None:
            tensor.copy_(x)
            continue
        x = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        if tensor.ndim >= 2:
            x = x if "embed_tokens" in name else x / math.sqrt(tensor.shape[-1])
        elif "norm" in name and name.endswith("weight"):
            x = 1.0 + 0.2 * x
        else:
            x = 0.3 * x
        tensor.copy_(x)


class Tap:
    """Records the outputs of the sub-modules that `pick(name)` chooses, until `close`.

    A tuple output gets `.0 .1 ...`; the second and later calls get `#1 #2 ...`.
    """

    def __init__(self, model, pick):
        self.data = {}
        self.hooks = [
            module.register_forward_hook(self._hook(name))
            for name, module in model.named_modules()
            if pick(name)
        ]

    def _put(self, key, value):
        if isinstance(value, torch.Tensor):
            n = sum(1 for k in self.data if k == key or k.startswith(key + "#"))
            self.data[key if n == 0 else f"{key}#{n}"] = value.detach().clone().contiguous()
        elif isinstance(value, (tuple, list)):
            for i, e in enumerate(value):
                self._put(f"{key}.{i}", e)

    def _hook(self, name):
        return lambda module, inputs, output: self._put(name, output)

    def close(self):
        for hook in self.hooks:
            hook.remove()


def modules(name):
    """The sub-modules whose outputs are recorded: down to the projections of a layer."""
    return name != "" and name.count(".") <= 4


def ids_for(vocab, n, seed):
    """[1, n] random token ids."""
    generator = torch.Generator().manual_seed(seed + 7919)
    return torch.randint(0, vocab, (1, n), generator=generator)


def maxdiff(a, b):
    return float((a.float() - b.float()).abs().max())


@torch.no_grad()
def run(model, ids, n_decode, chunk, new_cache, pick=modules):
    """Three ways through one sequence: no cache; prefill, then token by token; prefill in chunks."""
    total = ids.shape[1]
    tap = Tap(model, pick)
    full = model(input_ids=ids, use_cache=False).logits
    tap.close()

    def cached(cuts):
        cache, logits = new_cache(), []
        for start, end in zip(cuts, cuts[1:]):
            step = model(input_ids=ids[:, start:end], cache=cache, use_cache=True)
            logits.append(step.logits)
        return torch.cat(logits, 1)

    decode = cached([0] + list(range(total - n_decode, total + 1)))
    chunked = cached(list(range(0, total, chunk)) + [total])
    out = {"input_ids": ids, "full.logits": full, "decode.logits": decode, "chunked.logits": chunked}
    out.update({f"full/{k}": v for k, v in tap.data.items()})
    report = {
        "max|full-decode|": maxdiff(full, decode),
        "max|full-chunked|": maxdiff(full, chunked),
        "logits_std": float(full.std()),
        "argmax_decode_equal": bool((full.argmax(-1) == decode.argmax(-1)).all()),
    }
    return out, report


def finish(out_dir, model, out, report, ids):
    """Save the checkpoint, load it again (which finds renamed tensors), write goldens and report."""
    os.makedirs(out_dir, exist_ok=True)
    model.save_pretrained(out_dir)
    again = type(model).from_pretrained(out_dir, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        report["max|orig-reloaded|"] = maxdiff(
            out["full.logits"], again(input_ids=ids, use_cache=False).logits)
    save_file({k: v.detach().clone().contiguous() for k, v in out.items()},
              os.path.join(out_dir, "golden.safetensors"))
    report["params"] = sum(p.numel() for p in model.parameters())
    with open(os.path.join(out_dir, "report.json"), "w") as f:
        json.dump(report, f, indent=1)
    with safe_open(os.path.join(out_dir, "model.safetensors"), "pt") as f:
        lines = [f"{k} {list(f.get_slice(k).get_shape())} {f.get_slice(k).get_dtype()}" for k in f.keys()]
    with open(os.path.join(out_dir, "tensors.txt"), "w") as f:
        f.write("\n".join(sorted(lines)) + "\n")
    print(os.path.basename(out_dir), json.dumps(report))
