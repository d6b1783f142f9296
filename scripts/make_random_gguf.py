#!/usr/bin/env python3
"""Writes a GGUF file with random weights, a true model's shape and, if given, a true tokenizer.

usage: make_random_gguf.py --preset NAME --out FILE [--outtype bf16|f16|f32] [--vocab-gguf FILE]
                           [--vocab-size N] [--seed S]

For speed measurements (the preset has the true shape) and for comparing two engines on the same
weights (the *-tiny presets). Needs numpy and gguf from PyPI.

The tokenizer comes from a vocabulary-only GGUF of the Qwen2 byte-level BPE; without one the tokens
are made-up names, which is enough for runs on ids. A --vocab-size below the full one keeps the first
tokens and the merges among them.

Weights: N(0, 1/fan_in) for matrices, N(0, 0.02) for the embedding, 1 + N(0, 0.1) for norms, N(0, 0.1)
for biases. With these the last hidden state is not dominated by the input embedding, which would make
a model with a tied head repeat its input. All numbers are rounded to bf16 first, so one seed gives the
same weights in f32 and bf16. Each tensor has its own stream, seeded by (seed, crc32 of its name).
"""
import argparse
import math
import struct
import zlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

BASE_TOKENS = 151643  # of the Qwen2 vocabulary, before the added ones
SCALAR_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def shape(arch, hidden, layers, heads, kv_heads, head_dim, ffn, vocab, ctx, theta=1e6, eps=1e-6, tied=True, **more):
    return dict(arch=arch, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn,
                vocab=vocab, ctx=ctx, theta=theta, eps=eps, tied=tied, **more)


def tiny(arch, **more):
    return shape(arch, 256, 4, 4, 2, 64, 768, 4096, 4096, **more)


PRESETS = {
    "qwen3-0.6b": shape("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, 40960),
    "qwen3-1.7b": shape("qwen3", 2048, 28, 16, 8, 128, 6144, 151936, 40960),
    "qwen3-8b": shape("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, 40960, tied=False),
    "qwen2.5-0.5b": shape("qwen2", 896, 24, 14, 2, 64, 4864, 151936, 32768),
    "qwen3-30b-a3b": shape("qwen3moe", 2048, 48, 32, 4, 128, 6144, 151936, 40960, tied=False,
                           experts=128, experts_used=8, expert_ffn=768),
    # Shapes that no published model has.
    "qwen3moe-small": shape("qwen3moe", 1024, 12, 16, 4, 128, 3072, 151936, 40960,
                            experts=32, experts_used=4, expert_ffn=512),
    "llama-tiny": tiny("llama", theta=1e4, eps=1e-5, tied=False, llama3=dict(factor=8.0, low=1.0, high=4.0, original=64)),
    "qwen2-tiny": tiny("qwen2"),
    "qwen3-tiny": tiny("qwen3"),
    "qwen3moe-tiny": tiny("qwen3moe", experts=8, experts_used=2, expert_ffn=256),
}
# Added tokens of Qwen2.5 and Qwen3 in id order; True: a control token.
ADDED = [("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<|object_ref_start|>", True),
         ("<|object_ref_end|>", True), ("<|box_start|>", True), ("<|box_end|>", True), ("<|quad_start|>", True),
         ("<|quad_end|>", True), ("<|vision_start|>", True), ("<|vision_end|>", True), ("<|vision_pad|>", True),
         ("<|image_pad|>", True), ("<|video_pad|>", True), ("<tool_call>", False), ("</tool_call>", False),
         ("<|fim_prefix|>", False), ("<|fim_middle|>", False), ("<|fim_suffix|>", False), ("<|fim_pad|>", False),
         ("<|repo_name|>", False), ("<|file_sep|>", False), ("<tool_response>", False), ("</tool_response>", False),
         ("<think>", False), ("</think>", False)]


class Metadata:
    """Reads the key-value block of a GGUF v3 file; much faster than gguf.GGUFReader on 300,000 strings."""

    def __init__(self, path):
        with open(path, "rb") as f:
            self.bytes = f.read()
        self.at = 24
        self.values = {}
        for _ in range(struct.unpack_from("<Q", self.bytes, 16)[0]):
            key = self.value(8)
            self.values[key] = self.value(self.scalar("<I"))

    def scalar(self, fmt):
        self.at += struct.calcsize(fmt)
        return struct.unpack_from(fmt, self.bytes, self.at - struct.calcsize(fmt))[0]

    def value(self, kind):
        if kind == 8:
            n = self.scalar("<Q")
            self.at += n
            return self.bytes[self.at - n:self.at].decode("utf-8")
        if kind == 9:
            element, n = self.scalar("<I"), self.scalar("<Q")
            return [self.value(element) for _ in range(n)]
        return self.scalar(SCALAR_FORMATS[kind])


def vocabulary(path, size):
    """(tokens, token types, merges, id of the first added token) of a vocabulary of `size` tokens."""
    n_base = min(size - len(ADDED), BASE_TOKENS)
    if n_base < 1:
        raise SystemExit(f"--vocab-size {size} leaves no room beside the {len(ADDED)} added tokens")
    if path is None:
        tokens, merges = [f"t{i}" for i in range(n_base)], []
    else:
        values = Metadata(path).values
        tokens = values["tokenizer.ggml.tokens"][:n_base]
        kept = set(tokens)
        merges = [m for m in values["tokenizer.ggml.merges"] if kept.issuperset([*m.split(" "), m.replace(" ", "")])]
    tokens = tokens + [t for t, _ in ADDED]
    types = [gguf.TokenType.NORMAL] * n_base
    types += [gguf.TokenType.CONTROL if control else gguf.TokenType.USER_DEFINED for _, control in ADDED]
    for i in range(len(tokens), size):
        tokens.append(f"[PAD{i}]")
        types.append(gguf.TokenType.UNUSED)
    return tokens, types, merges, n_base


def rope_factors(head_dim, theta, factor, low, high, original):
    """The divisors of the rope frequencies by which GGUF files express llama3 scaling (rope_freqs.weight)."""
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        keep = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / (keep + (1 - keep) / factor))
    return np.array(factors, dtype=np.float32)


def tensor_specs(p):
    """(name, shape as rows x columns, kind) of each tensor, in file order."""
    arch, h, v, d = p["arch"], p["hidden"], p["vocab"], p["head_dim"]
    q, kv = p["heads"] * d, p["kv_heads"] * d
    yield "token_embd.weight", (v, h), "embedding"
    yield "output_norm.weight", (h,), "norm"
    if not p["tied"]:
        yield "output.weight", (v, h), "matrix"
    if "llama3" in p:
        yield "rope_freqs.weight", (d // 2,), "rope"
    for i in range(p["layers"]):
        b = f"blk.{i}."
        yield b + "attn_norm.weight", (h,), "norm"
        yield b + "attn_q.weight", (q, h), "matrix"
        yield b + "attn_k.weight", (kv, h), "matrix"
        yield b + "attn_v.weight", (kv, h), "matrix"
        yield b + "attn_output.weight", (h, q), "matrix"
        yield b + "ffn_norm.weight", (h,), "norm"
        if arch == "qwen2":
            for name, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
                yield b + name + ".bias", (rows,), "bias"
        if arch in ("qwen3", "qwen3moe"):
            yield b + "attn_q_norm.weight", (d,), "norm"
            yield b + "attn_k_norm.weight", (d,), "norm"
        experts, f = ((p["experts"],), p["expert_ffn"]) if "experts" in p else ((), p["ffn"])
        suffix = "_exps" if experts else ""
        if experts:
            yield b + "ffn_gate_inp.weight", (*experts, h), "router"
        yield b + f"ffn_gate{suffix}.weight", (*experts, f, h), "matrix"
        yield b + f"ffn_up{suffix}.weight", (*experts, f, h), "matrix"
        yield b + f"ffn_down{suffix}.weight", (*experts, h, f), "matrix"


def round_to_bf16(x):
    """Nearest bf16, ties to even, as f32."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def weights(p, name, dims, kind, seed):
    if kind == "rope":
        return rope_factors(p["head_dim"], p["theta"], **p["llama3"])
    x = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(dims, dtype=np.float32)
    if kind in ("matrix", "router"):
        x *= np.float32(1 / np.sqrt(dims[-1]))
    elif kind == "norm":
        x = 1 + np.float32(0.1) * x
    else:
        x *= np.float32({"embedding": 0.02, "bias": 0.1}[kind])
    return round_to_bf16(x)


def write_metadata(w, p, file_type, vocab_gguf):
    w.add_type("model")
    w.add_description("random weights, for measurements and comparisons only")
    w.add_file_type(file_type)
    w.add_quantization_version(2)
    w.add_block_count(p["layers"])
    w.add_context_length(p["ctx"])
    w.add_embedding_length(p["hidden"])
    w.add_feed_forward_length(p["ffn"])
    w.add_head_count(p["heads"])
    w.add_head_count_kv(p["kv_heads"])
    w.add_rope_freq_base(p["theta"])
    w.add_layer_norm_rms_eps(p["eps"])
    w.add_vocab_size(p["vocab"])
    w.add_key_length(p["head_dim"])
    w.add_value_length(p["head_dim"])
    if "experts" in p:
        w.add_expert_count(p["experts"])
        w.add_expert_used_count(p["experts_used"])
        w.add_expert_feed_forward_length(p["expert_ffn"])
    tokens, types, merges, end_of_text = vocabulary(vocab_gguf, p["vocab"])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    w.add_bos_token_id(end_of_text)
    w.add_eos_token_id(end_of_text + 2)
    w.add_pad_token_id(end_of_text)
    w.add_add_bos_token(False)


def write(path, preset, p, outtype, seed, vocab_gguf):
    """Two passes, headers and then data, so that one tensor at a time is in memory."""
    w = gguf.GGUFWriter(path, p["arch"], use_temp_file=False)
    w.add_name(f"random-{preset}")
    file_type = {"f32": 0, "f16": 1, "bf16": 32}[outtype]
    write_metadata(w, p, file_type, vocab_gguf)
    narrow = ("matrix", "embedding")  # everything else stays f32
    specs = list(tensor_specs(p))
    for name, dims, kind in specs:
        count = int(np.prod(dims))
        if kind in narrow and outtype == "bf16":
            w.add_tensor_info(name, (*dims[:-1], dims[-1] * 2), np.dtype(np.uint8), count * 2, raw_dtype=Type.BF16)
        else:
            dtype = np.dtype(np.float16 if kind in narrow and outtype == "f16" else np.float32)
            w.add_tensor_info(name, dims, dtype, count * dtype.itemsize)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for name, dims, kind in specs:
        x = weights(p, name, dims, kind, seed)
        if kind in narrow and outtype == "bf16":
            x = (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        elif kind in narrow and outtype == "f16":
            x = x.astype(np.float16)
        w.write_tensor_data(np.ascontiguousarray(x))
    w.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--outtype", choices=["f32", "f16", "bf16"], default="bf16")
    parser.add_argument("--vocab-gguf", help="a vocabulary-only GGUF, e.g. llama.cpp's ggml-vocab-qwen2.gguf")
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--seed", type=int, default=42)
    a = parser.parse_args()
    p = dict(PRESETS[a.preset])
    if a.vocab_size:
        p["vocab"] = a.vocab_size
    write(a.out, a.preset, p, a.outtype, a.seed, a.vocab_gguf)


if __name__ == "__main__":
    main()
