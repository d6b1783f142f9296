"""The round trips of DeepSeek's own graph, put into transformers' DeepSeek V4.

Its rows pass through a small float format after their rotation: rows that are keys and values through FP8 in blocks of 64
(the numbers that are not rotated), queries and keys of the indexer through a Hadamard transform and FP4 in blocks of 32.
Every such row comes out of `apply_rotary_pos_emb`, which is where `install` puts the round trips.

In:  a configuration whose `head_dim`, `index_head_dim` and head counts tell the rows apart by their shape.
Out: for each kind the smallest distance that a number had from a tie between two values of its format, in the number's own
     unit; arithmetic that differs by more than that may round otherwise.
"""
import math

import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)


def scales(blocks, floor, top):
    """2^ceil(log2(max(amax, floor) / top)) of each block, in single precision."""
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=floor)
    mantissa, exponent = torch.frexp(largest / top)
    return torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).int())


def nearest(blocks, values, floor, margin):
    """Blocks rounded to `values` (of both signs) under their scales; ties go to the even code."""
    scale = scales(blocks, floor, float(values[-1]))
    size = (blocks / scale).abs().double()
    upper = torch.searchsorted(values, size.contiguous()).clamp(1, len(values) - 1)
    low, high = values[upper - 1], values[upper]
    middle = (low + high) / 2
    code = torch.where((size > middle) | ((size == middle) & (upper % 2 == 0)), upper, upper - 1)
    margin.append(float(((size - middle).abs() * scale).min()))
    return torch.copysign(values[code].float() * scale, blocks)


def hadamard(x):
    """Sylvester's order, orthonormal."""
    n, distance = x.shape[-1], 1
    while distance < n:
        a, b = x.reshape(*x.shape[:-1], -1, 2, distance).unbind(-2)
        x = torch.stack([a + b, a - b], -2).reshape(x.shape)
        distance *= 2
    return x * (1 / math.sqrt(n))


def round_trip(x, values, block, floor, margin):
    if x.numel() == 0:
        return x
    return nearest(x.reshape(*x.shape[:-1], -1, block), values, floor, margin).reshape(x.shape)


def install(config):
    """From here on rows are rounded. Returns the margins, which fill as rows pass."""
    rotate, margins = modeling.apply_rotary_pos_emb, {"fp8": [], "fp4": []}
    assert config.head_dim != config.index_head_dim and config.num_attention_heads > 1
    plain = config.head_dim - config.qk_rope_head_dim

    def rotate_and_round(x, cos, sin, *args, **kwargs):
        x = rotate(x, cos, sin, *args, **kwargs)
        if x.shape[-1] == config.index_head_dim:
            return round_trip(hadamard(x), E2M1, 32, 6 * 2.0**-126, margins["fp4"])
        if x.shape[1] == 1:
            rounded = round_trip(x[..., :plain], E4M3, 64, 1e-4, margins["fp8"])
            return torch.cat([rounded, x[..., plain:]], -1)
        return x

    modeling.apply_rotary_pos_emb = rotate_and_round
    return margins
