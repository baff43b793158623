"""Sums of float64 values that do not depend on order: fixed point in int64 limbs.

The global gradient norm adds one partial sum for each block of elements. Which rank holds which block depends on the
stage, and floating-point addition is not associative; so the partial sums are added as integers. A float64 m * 2^e is
cut into three limbs of 32 bits at multiples of 2^32; limbs are added in int64, which is exact for 2^31 values, locally
and across ranks. Idea: superaccumulator, Kulisch, "Computer Arithmetic and Validity" (2013), chapter 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LIMB_BITS = 32
_BIAS_BITS = 1152  # 36 limbs below one: the smallest float64, 2^-1074, is a whole number of units
NUM_LIMBS = 72


def to_limbs(values: Tensor) -> Tensor:
    """The exact sum of finite, non-negative float64 values, (n,), as (NUM_LIMBS,) int64."""
    return limbs_of_each([values])[0]


def limbs_of_each(parts: Sequence[Tensor]) -> Tensor:
    """As `to_limbs`, of each part in one pass, (len(parts), NUM_LIMBS)."""
    values = torch.cat(list(parts))
    limbs = torch.zeros(len(parts) * NUM_LIMBS, dtype=torch.int64, device=values.device)
    mantissa, exponent = torch.frexp(values)
    integer = (mantissa * 2.0**53).to(torch.int64)  # exact, and below 2^53
    position = exponent.to(torch.int64) - 53 + _BIAS_BITS
    position = torch.where(integer == 0, torch.zeros_like(position), position)
    index, shift = position // _LIMB_BITS, position % _LIMB_BITS
    end = 0
    for row, part in enumerate(parts):
        end += part.numel()
        if row:
            index[end - part.numel() : end] += row * NUM_LIMBS
    low_half, high_half = integer & 0xFFFFFFFF, integer >> _LIMB_BITS
    # Each half, shifted, spans two limbs: half << shift = (half << shift) mod 2^32 + carry * 2^32.
    low, high = low_half << shift, high_half << shift
    limbs.index_add_(0, index, low & 0xFFFFFFFF)
    limbs.index_add_(0, index + 1, ((low >> _LIMB_BITS) & 0xFFFFFFFF) + (high & 0xFFFFFFFF))
    limbs.index_add_(0, index + 2, high >> _LIMB_BITS)
    return limbs.view(len(parts), NUM_LIMBS)


def value_of(limbs: Tensor) -> Tensor:
    """The sum as a float64, (), where the limbs are: within some units of the last place of what `from_limbs` gives.

    inf where it is too large for one.
    """
    units = torch.arange(NUM_LIMBS, dtype=torch.float64, device=limbs.device)
    return torch.where(limbs == 0, 0.0, limbs * torch.exp2(units * _LIMB_BITS - _BIAS_BITS)).sum()


def from_limbs(limbs: Tensor) -> float:
    """The sum as a float, correctly rounded; inf where it is too large for one."""
    total = sum([limb << (_LIMB_BITS * index) for index, limb in enumerate(limbs.tolist()) if limb])
    try:
        return math.ldexp(total, -_BIAS_BITS) if total.bit_length() < 1000 else total / (1 << _BIAS_BITS)
    except OverflowError:
        return math.inf
