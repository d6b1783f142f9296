#!/usr/bin/env python3
"""Writes crates/format/tests/fixtures/blocks: stored blocks of every type, and what they decode to.

The reference is `gguf.quants.dequantize` of the PyPI package `gguf`; torch's float8_e4m3fn and numpy for the types that
GGUF files do not have. Per type TYPE there are two files:
TYPE.blocks, whole blocks as they stand in a model file, and TYPE.f32, the decoded numbers
(little-endian). Everything comes from a fixed seed, so that a second run writes the same bytes.

usage: make-block-fixtures.py [OUTPUT DIRECTORY]
"""

import pathlib
import sys
from importlib.metadata import version

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type

BLOCKS = 96
FLOATS = 2048

# Half-precision scales that find mistakes: zeros of both signs, the smallest and largest subnormal and
# normal numbers, one.
EDGES = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF]
# Places of the half-precision numbers in a block.
HALVES = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
    Type.IQ4_NL: [0],
    Type.IQ4_XS: [0],
    Type.MXFP4: [],
}
# Exponents of MXFP4 at the borders of subnormal, one, and the end of the range.
EXPONENTS = [0, 1, 2, 3, 126, 127, 128, 253, 254, 255]


def finite_halves(rng, n):
    """Random half-precision bits, without infinities and NaNs."""
    bits = rng.integers(0, 1 << 16, n, dtype=np.uint16)
    return np.where((bits & 0x7C00) == 0x7C00, bits & 0xBFFF, bits).astype("<u2")


def quantised(rng, ty):
    """BLOCKS blocks: per edge scale one of all-zero, one of all-one and one of random bits; then random."""
    size = GGML_QUANT_SIZES[ty][1]
    edges = EDGES if HALVES[ty] else EXPONENTS
    blocks = rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
    blocks[: 3 * len(edges) : 3] = 0
    blocks[1 : 3 * len(edges) : 3] = 0xFF
    for place in HALVES[ty]:
        halves = finite_halves(rng, BLOCKS)
        if place == HALVES[ty][0]:
            halves[: 3 * len(edges)] = np.repeat(np.array(edges, dtype="<u2"), 3)
        blocks[:, place : place + 2] = halves.reshape(-1, 1).view(np.uint8)
    if not HALVES[ty]:
        blocks[: 3 * len(edges), 0] = np.repeat(np.array(edges, dtype=np.uint8), 3)
    return blocks


def floats(rng, ty):
    """FLOATS random numbers of finite bits, led by zeros, subnormals and the largest."""
    if ty == Type.F32:
        bits = rng.integers(0, 1 << 32, FLOATS, dtype=np.uint32)
        bits = np.where((bits & 0x7F800000) == 0x7F800000, bits & 0xBFFFFFFF, bits).astype("<u4")
        bits[:8] = [0, 1 << 31, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF]
    elif ty == Type.F16:
        bits = finite_halves(rng, FLOATS)
        bits[: len(EDGES)] = EDGES
    else:
        bits = rng.integers(0, 1 << 16, FLOATS, dtype=np.uint16)
        bits = np.where((bits & 0x7F80) == 0x7F80, bits & 0xBFFF, bits).astype("<u2")
        bits[:8] = [0, 1 << 15, 1, 0x8001, 0x007F, 0x0080, 0x7F7F, 0xFF7F]
    return bits.reshape(1, -1).view(np.uint8)


def wide_scales(rng, n):
    """Single-precision scales: edges (zeros, subnormal, one, large), then random ones of weights' size."""
    scales = rng.normal(0, 0.01, n).astype("<f4")
    scales[:8] = [0.0, -0.0, 1e-45, 1e-40, 1.0, -1.0, 2.0**118, 1.1754943508222875e-38]
    return scales


def float8(rng):
    """F8_E4M3: scale, 32 bytes. Every byte but the NaNs occurs under a scale of one."""
    codes = rng.integers(0, 256, (BLOCKS, 32), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    every = np.array([b for b in range(256) if b & 0x7F != 0x7F] + [0, 0x80], dtype=np.uint8)
    codes[8:16] = every.reshape(8, 32)
    scales = wide_scales(rng, BLOCKS)
    scales[8:16] = 1.0
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32)
    numbers = values * torch.from_numpy(scales).reshape(-1, 1)
    return np.hstack([scales.reshape(-1, 1).view(np.uint8), codes]), numbers.numpy()


def affine(rng, bits):
    """AFFINE4 and AFFINE8: scale, bias, codes."""
    codes = rng.integers(0, 1 << bits, (BLOCKS, 32), dtype=np.uint8)
    codes[:8] = np.arange(8 * 32).reshape(8, 32) % (1 << bits)
    scales, biases = wide_scales(rng, BLOCKS), rng.normal(0, 0.1, BLOCKS).astype("<f4")
    numbers = scales.reshape(-1, 1) * codes.astype("<f4") + biases.reshape(-1, 1)
    stored = codes if bits == 8 else codes[:, :16] | codes[:, 16:] << 4
    head = np.hstack([x.reshape(-1, 1).view(np.uint8) for x in (scales, biases)])
    return np.hstack([head, stored]), numbers


def main():
    here = pathlib.Path(__file__).resolve().parent.parent
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "crates/format/tests/fixtures/blocks"
    out.mkdir(parents=True, exist_ok=True)
    for ty in [Type.F32, Type.F16, Type.BF16, *HALVES]:
        rng = np.random.default_rng([20240517, int(ty)])
        blocks = quantised(rng, ty) if ty in HALVES else floats(rng, ty)
        with np.errstate(over="ignore"):
            numbers = gguf.quants.dequantize(blocks, ty).astype("<f4")
        # The largest exponents of MXFP4 overflow to infinity, which is a result like any other.
        assert not np.isnan(numbers).any(), ty.name
        (out / f"{ty.name}.blocks").write_bytes(blocks.tobytes())
        (out / f"{ty.name}.f32").write_bytes(numbers.tobytes())
        print(f"{ty.name}: {blocks.size} bytes, {numbers.size} numbers")
    others = {"F8_E4M3": float8, "AFFINE4": lambda rng: affine(rng, 4), "AFFINE8": lambda rng: affine(rng, 8)}
    for seed, (name, make) in enumerate(others.items()):
        blocks, numbers = make(np.random.default_rng([20240517, 1000 + seed]))
        assert np.isfinite(numbers).all(), name
        (out / f"{name}.blocks").write_bytes(blocks.tobytes())
        (out / f"{name}.f32").write_bytes(numbers.astype("<f4").tobytes())
        print(f"{name}: {blocks.size} bytes, {numbers.size} numbers")
    print(f"torch {torch.__version__}")
    print(f"gguf {version('gguf')}, numpy {np.__version__}")


main()
