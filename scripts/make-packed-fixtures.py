#!/usr/bin/env python3
"""Writes crates/format/tests/fixtures/packed: a model directory with one quantised weight per layout that
minfer_format::hf::packed reads, and beside each weight NAME.weight the numbers that it stands for, NAME.expected.

FP8 and E8M0 numbers are torch's. MLX packs come out of `mlx.core.quantize`; what they stand for is worked out from their
bits with numpy, after a check that `mlx.core.dequantize` agrees to its own rounding. The seed is fixed: a second run
writes the same bytes.

usage: make-packed-fixtures.py [OUTPUT DIRECTORY]
"""

import json
import pathlib
import struct
import sys
from importlib.metadata import version

import mlx.core as mx
import numpy as np
import torch

BLOCK = (16, 64)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype="<f4")


def save(path, tensors):
    """`tensors`: name -> (dtype, shape, bytes)."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(t[2] for t in tensors.values()))


def put(tensors, name, dtype, x):
    tensors[name] = (dtype, x.shape, np.ascontiguousarray(x).tobytes())


def as_torch(x, dtype):
    """Bytes or words as numbers of a dtype of torch, in single precision."""
    return torch.from_numpy(x.copy()).view(dtype).to(torch.float32).numpy()


def fp8(rng, tensors, name, shape, side, dtype):
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x01
    *outer, n, k = shape
    squares = (*outer, -(-n // BLOCK[0]), -(-k // BLOCK[1]))
    if dtype == "F8_E8M0":
        stored = rng.integers(0, 240, squares, dtype=np.uint8)
        scales = as_torch(stored, torch.float8_e8m0fnu)
    else:
        scales = rng.normal(0, 0.01, squares).astype("<f4")
        if dtype == "BF16":
            stored = (scales.view("<u4") >> 16).astype("<u2")
            scales = (stored.astype("<u4") << 16).view("<f4")
        else:
            stored = scales
    spread = scales.repeat(BLOCK[0], axis=-2).repeat(BLOCK[1], axis=-1)[..., :n, :k]
    put(tensors, f"{name}.weight", "F8_E4M3", codes)
    put(tensors, f"{name}.{side}", dtype, stored)
    put(tensors, f"{name}.expected", "F32", as_torch(codes, torch.float8_e4m3fn) * spread)


def fp4_numbers(packed, exponents):
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = np.where(nibbles & 8, -E2M1[nibbles & 7], E2M1[nibbles & 7]).astype("<f4")
    # A block of MXFP4 has no minus zero.
    return values * as_torch(exponents, torch.float8_e8m0fnu).repeat(32, axis=-1) + np.float32(0)


def fp4(rng, tensors, name, n, k):
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    exponents = rng.integers(0, 253, (n, k // 32), dtype=np.uint8)
    exponents[0, :2] = [0, 252]
    put(tensors, f"{name}.weight", "I8", packed)
    put(tensors, f"{name}.scale", "F8_E8M0", exponents)
    put(tensors, f"{name}.expected", "F32", fp4_numbers(packed, exponents))


def bits_of(packed, bits):
    """Codes of a row's little-endian stream of bits."""
    stream = np.unpackbits(packed.view(np.uint8), axis=-1, bitorder="little")
    codes = stream.reshape(*packed.shape[:-1], -1, bits)
    return (codes.astype("<u4") << np.arange(bits, dtype="<u4")).sum(axis=-1)


def affine(rng, tensors, name, shape, bits, group, dtype):
    w = mx.array(rng.normal(0, 0.05, shape).astype("<f4")).astype(dtype)
    stored = mx.quantize(w, group_size=group, bits=bits)
    reference = np.array(mx.dequantize(*stored, group_size=group, bits=bits).astype(mx.float32))
    packed = np.array(stored[0])
    scales, biases = (np.array(x.astype(mx.float32)) for x in stored[1:])
    numbers = scales.repeat(group, axis=-1) * bits_of(packed, bits).astype("<f4") + biases.repeat(group, axis=-1)
    rounding = {mx.float32: 2e-7, mx.float16: 2e-3, mx.bfloat16: 1e-2}[dtype]
    assert np.abs(numbers - reference).max() <= rounding * np.abs(reference).max(), name
    put(tensors, f"{name}.weight", "U32", packed)
    for side, x in zip(("scales", "biases"), stored[1:]):
        word = np.array(x) if dtype == mx.float32 else np.array(x.view(mx.uint16))
        put(tensors, f"{name}.{side}", {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}[dtype], word)
    put(tensors, f"{name}.expected", "F32", numbers)


def mxfp4(rng, tensors, name, n, k):
    w = mx.array(rng.normal(0, 0.05, (n, k)).astype("<f4"))
    stored = mx.quantize(w, group_size=32, bits=4, mode="mxfp4")
    reference = np.array(mx.dequantize(*stored, group_size=32, bits=4, mode="mxfp4").astype(mx.float32))
    packed, exponents = (np.array(x) for x in stored)
    numbers = fp4_numbers(packed.view(np.uint8), exponents)
    assert (numbers == reference).all(), name
    put(tensors, f"{name}.weight", "U32", packed)
    put(tensors, f"{name}.scales", "U8", exponents)
    put(tensors, f"{name}.expected", "F32", numbers)


def main():
    here = pathlib.Path(__file__).resolve().parent.parent
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "crates/format/tests/fixtures/packed"
    out.mkdir(parents=True, exist_ok=True)
    rng, tensors = np.random.default_rng(20240517), {}
    fp8(rng, tensors, "fp8", (20, 160), "weight_scale_inv", "F32")
    fp8(rng, tensors, "fp8_bf16", (16, 64), "weight_scale_inv", "BF16")
    fp8(rng, tensors, "fp8_e8m0", (33, 96), "scale", "F8_E8M0")
    fp8(rng, tensors, "fp8_stack", (3, 17, 96), "weight_scale_inv", "F32")
    fp4(rng, tensors, "fp4", 5, 96)
    for bits, group, dtype in [
        (2, 32, mx.float32),
        (3, 64, mx.float16),
        (4, 64, mx.bfloat16),
        (5, 32, mx.bfloat16),
        (6, 128, mx.float32),
        (8, 64, mx.float16),
    ]:
        affine(rng, tensors, f"affine{bits}", (3, 128), bits, group, dtype)
    affine(rng, tensors, "affine_stack", (2, 3, 192), 4, 32, mx.bfloat16)
    mxfp4(rng, tensors, "mxfp4", 3, 64)
    config = {"model_type": "fixture", "quantization_config": {"quant_method": "fp8", "weight_block_size": BLOCK}}
    (out / "config.json").write_text(json.dumps(config) + "\n")
    save(out / "model.safetensors", tensors)
    print(f"torch {torch.__version__}, mlx {version('mlx')}, numpy {np.__version__}")


main()
