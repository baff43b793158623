"""Triton form of `kernels/clip_factor.py`: one program."""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..exact_sum import BIAS_BITS, NUM_LIMBS
from .launch import launch, next_power_of_2


@triton.jit(do_not_specialize=["flags", "place", "expected", "rest", "limit"])
def _kernel(
    SUMS_ptr, FACTOR_ptr, SKIP_ptr, flags, place, expected, rest, limit,
    CLIPS_BELOW: tl.constexpr, EPSILON: tl.constexpr, NUM_LIMBS: tl.constexpr, BIAS_BITS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """FACTOR = rest * min(1, limit / (norm + EPSILON));  SKIP = flags. rest, limit: the bits of float64."""
    at = tl.arange(0, TILE)
    limbs = tl.load(SUMS_ptr + at, mask=at < NUM_LIMBS, other=0)
    exponent = at.to(tl.int64) * 32 - BIAS_BITS + 1023  # of what a limb counts; below all normal numbers it is nothing
    unit = tl.where(limbs == 0, 0, tl.minimum(tl.maximum(exponent, 0), 2047) << 52).to(tl.float64, bitcast=True)
    square = tl.sum(limbs.to(tl.float64) * unit, axis=0)
    rest = rest.to(tl.int64).to(tl.float64, bitcast=True)
    limit = limit.to(tl.int64).to(tl.float64, bitcast=True)
    one = tl.full((), 1.0, tl.float64)
    norm = tl.sqrt(square) * rest
    factor = tl.minimum(limit / (norm + tl.full((), EPSILON, tl.float64)), one)
    if not CLIPS_BELOW:
        factor = tl.where(norm > limit, factor, one)
    tl.store(FACTOR_ptr, factor * rest)
    differs = tl.load(SUMS_ptr + place) != expected
    tl.store(SKIP_ptr, tl.load(SUMS_ptr + flags) + tl.load(SUMS_ptr + flags + 1) + differs.to(tl.int64))


def clip_factor(
    sums: Tensor, flags: int, known: tuple[int, int], rest: float, limit: float, clips_below: bool, epsilon: float
) -> tuple[Tensor, Tensor]:
    """As `clip_factor.clip_factor`."""
    factor = torch.empty(1, dtype=torch.float64, device=sums.device)
    skip = torch.empty(1, dtype=torch.int64, device=sums.device)
    rest_bits, limit_bits = struct.unpack("=2q", struct.pack("=2d", rest, limit))  # a float would come as a float32
    launch(
        _kernel, (1,), num_warps=4, SUMS_ptr=sums, FACTOR_ptr=factor, SKIP_ptr=skip,
        flags=flags, place=known[0], expected=known[1], rest=rest_bits, limit=limit_bits,
        CLIPS_BELOW=clips_below, EPSILON=epsilon, NUM_LIMBS=NUM_LIMBS, BIAS_BITS=BIAS_BITS,
        TILE=next_power_of_2(NUM_LIMBS),
    )  # fmt: skip
    return factor, skip
