"""Sum float64 values exactly, independent of the order: fixed point in int64 limbs.

The global gradient norm adds a partial sum for each block of elements. The rank of a block depends on the ZeRO stage,
and floating-point addition is not associative, so the partial sums are added as integers. A float64 m * 2^e is cut into
three limbs of 32 bits at multiples of 2^32. Limbs are added in int64, which is exact for 2^30 values, locally and
across ranks. Results stay on the device, and the host does not wait.
Source: superaccumulator, Kulisch, "Computer Arithmetic and Validity" (2013), chapter 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import compress

import torch
from torch import Tensor

from .dispatch import Backend, triton_form, uses_triton

_LIMB_BITS = 32
_MASK = (1 << _LIMB_BITS) - 1
BIAS_BITS = 1152  # 36 limbs below one: the smallest float64, 2^-1074, is a whole number of units
# A finite float64 touches limbs up to 68. Limbs keep their carries, as they have 64 bits.
NUM_LIMBS = 72


def add_limbs(sums: Tensor, values: Tensor, row: int, flag: int, *, backend: Backend = "auto") -> None:
    """Add the finite values exactly to the limbs sums[row : row + NUM_LIMBS]. Set sums[flag] = 1 for inf or nan.

    sums: (m,) int64; values: (n,) float64, on the same device.
    """
    if uses_triton(backend, "exact_sum", sums):
        triton_form("sum_of_squares").add_limbs(sums, values, row, flag)
        return
    is_finite = values.isfinite()
    # A non-finite value adds 0, so all limbs stay valid. The flag tells of it.
    mantissa, exponent = torch.frexp(torch.where(is_finite, values, 0.0))
    integer = (mantissa * 2.0**53).to(torch.int64)  # exact, and below 2^53
    position = exponent.to(torch.int64) + (BIAS_BITS - 53)
    index, shift = position >> 5, position & (_LIMB_BITS - 1)
    # Each half, shifted, spans two limbs: half << shift = (half << shift) mod 2^32 + carry * 2^32. Of a negative value
    # only the high half is negative (two's complement). The middle limb gets less than 1.5 * 2^32 from a value.
    low, high = (integer & _MASK) << shift, (integer >> _LIMB_BITS) << shift
    limbs = sums[row : row + NUM_LIMBS]
    limbs.index_add_(0, index, low & _MASK)
    limbs[1:].index_add_(0, index, ((low >> _LIMB_BITS) & _MASK) + (high & _MASK))
    limbs[2:].index_add_(0, index, high >> _LIMB_BITS)
    sums[flag : flag + 1].bitwise_or_(is_finite.all().logical_not())


def value_of(limbs: Tensor) -> Tensor:
    """Convert limbs to float64, (), on their device, within a few units in the last place; inf if too large."""
    # The units of the highest limbs are inf in float64, and 0 * inf would be NaN.
    return torch.where(limbs == 0, 0.0, limbs * _units(limbs.device)).sum()


@lru_cache(maxsize=4)
def _units(device: torch.device) -> Tensor:
    """Return the unit of each limb, (NUM_LIMBS,) float64."""
    return torch.exp2(torch.arange(NUM_LIMBS, dtype=torch.float64, device=device) * _LIMB_BITS - BIAS_BITS)


def from_limbs(limbs: Sequence[int]) -> float:
    """Convert limbs to a float, correctly rounded; inf if too large."""
    total = 0
    for index in compress(range(NUM_LIMBS), limbs):  # most are 0
        total += limbs[index] << (_LIMB_BITS * index)
    try:
        # ldexp converts the integer to a float first, so it must be below 2^1024. A division has no limit.
        return math.ldexp(total, -BIAS_BITS) if total.bit_length() < 1000 else total / (1 << BIAS_BITS)
    except OverflowError:
        return math.inf
