#!/usr/bin/env python3
"""Writes crates/cpu/tests/fixtures/round_trip: rows, and what DeepSeek's round trips make of them (little-endian f32).

NAME.in.f32 and NAME.out.f32 for the cases of CASES. Scales come from numpy's frexp, FP8 values from torch's
float8_e4m3fn, FP4 values from a search of the table of values in double precision. The seed is fixed: a second run
writes the same bytes.

usage: make-round-trip-fixtures.py [OUTPUT DIRECTORY]
"""

import pathlib
import sys

import numpy as np
import torch

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype="<f8")
# name: width of a row, group, block, numbers from, to (FP8) or None (FP4).
CASES = {
    "fp8": (160, 160, 64, (0, 128)),
    "fp8_tail": (192, 96, 32, (32, 96)),
    "fp4_64": (128, 64, 32, None),
    "fp4_128": (256, 128, 32, None),
}


def scale_of(largest, floor, top):
    """The power of two from ceil(log2(max(largest, floor) / top)), all in single precision."""
    mantissa, exponent = np.frexp(np.maximum(largest, np.float32(floor)) / np.float32(top))
    return np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).astype("<f4")


def fp8(blocks):
    scale = scale_of(np.abs(blocks).max(axis=-1, keepdims=True), 1e-4, 448)
    scaled = np.clip(blocks / scale, -448, 448)
    return torch.from_numpy(scaled).to(torch.float8_e4m3fn).to(torch.float32).numpy() * scale


def fp4(blocks):
    floor = np.float32(6) * np.float32(2.0**-126)
    scale = scale_of(np.abs(blocks).max(axis=-1, keepdims=True), floor, 6)
    size = np.abs(blocks / scale).astype("<f8")[..., None]
    distance = np.abs(size - E2M1)
    nearest = distance == distance.min(axis=-1, keepdims=True)
    # Of two that are as near, the one with the even code.
    code = np.where(nearest, np.arange(8) % 2 * 8 + np.arange(8), 99).argmin(axis=-1)
    return np.copysign(E2M1[code], blocks).astype("<f4") * scale


def hadamard(x):
    n, distance = x.shape[-1], 1
    while distance < n:
        pairs = x.reshape(*x.shape[:-1], -1, 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        distance *= 2
    return x * np.float32(1 / np.sqrt(n))


def round_trip(x, group, block, part):
    groups = x.reshape(x.shape[0], -1, group).copy()
    if part is None:
        groups = hadamard(groups)
    first, end = part or (0, group)
    blocks = groups[..., first:end].reshape(*groups.shape[:2], -1, block)
    rounded = fp8(blocks) if part else fp4(blocks)
    groups[..., first:end] = rounded.reshape(*groups.shape[:2], -1)
    return groups.reshape(x.shape).astype("<f4")


def rows(rng, width, part):
    x = rng.normal(0, 1, (24, width)).astype("<f4")
    x[1] = 0
    x[2] = -0.0
    x[3] *= np.float32(1e-7)
    x[4] = np.where(rng.random(width) < 0.5, 1e-42, -1e-40).astype("<f4")
    x[5] *= np.float32(2.0**100)
    x[6] *= np.exp(rng.normal(0, 6, width)).astype("<f4")
    if part:
        # Ties everywhere between values, under a scale of one (448 is there), and just above it.
        codes = np.arange(1, 0x7E, dtype=np.uint8)
        values = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32).numpy()
        ties = np.concatenate([[2.0**-10], (values[1:] + values[:-1]) / 2]).astype("<f4")
        for row in range(7, 15):
            x[row] = np.resize(ties, width + 13 * row)[13 * row :] * np.where(np.arange(width) % 3, 1, -1)
            x[row, ::32] = [448, np.nextafter(np.float32(448), np.float32(449))][row % 2]
    else:
        # The transform of these (its own inverse) has ties between all values; exact for groups of 4^n.
        ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -2.5, 0, 6, -5, 1, -3.5, 0.5], dtype="<f4")
        for row in range(7, 15):
            y = np.resize(ties, width + row)[row:] * np.float32(2.0 ** (row - 10))
            x[row] = hadamard(y.reshape(-1, 64)).reshape(-1)
    return x


def main():
    here = pathlib.Path(__file__).resolve().parent.parent
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "crates/cpu/tests/fixtures/round_trip"
    out.mkdir(parents=True, exist_ok=True)
    for seed, (name, (width, group, block, part)) in enumerate(CASES.items()):
        x = rows(np.random.default_rng([20240517, seed]), width, part)
        y = round_trip(x, group, block, part)
        assert np.isfinite(y).all(), name
        (out / f"{name}.in.f32").write_bytes(x.astype("<f4").tobytes())
        (out / f"{name}.out.f32").write_bytes(y.tobytes())
        print(f"{name}: {x.shape}, {(x == y).mean():.2f} unchanged")
    print(f"torch {torch.__version__}, numpy {np.__version__}")


main()
