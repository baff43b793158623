"""Triton form of `kernels/exact_sum.py`: a program adds up its values limb by limb, and each limb by one atomic sum."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

TILE_NUMEL = 1024


@triton.jit(do_not_specialize=["n", "row", "flag"])
def _kernel(X_ptr, SUMS_ptr, n, row, flag, TILE: tl.constexpr):
    """SUMS[row:] += the finite x, in units of 2^-1152, 32 bits a limb;  SUMS[flag] = 1 where an x is inf or nan."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    bits = tl.load(X_ptr + at, mask=at < n, other=0.0).to(tl.int64, bitcast=True)
    exponent = (bits >> 52) & 0x7FF
    is_finite = exponent < 0x7FF
    integer = (bits & 0xFFFFFFFFFFFFF) | tl.where(
        exponent > 0, 0x10000000000000, 0
    )  # x = integer * 2^(exponent - 1075)
    integer = tl.where(is_finite, tl.where(bits < 0, -integer, integer), 0)
    position = tl.maximum(exponent, 1) + 77  # 1152 - 1075
    index, shift = position >> 5, position & 31
    low, high = (integer & 0xFFFFFFFF) << shift, (integer >> 32) << shift
    middle = ((low >> 32) & 0xFFFFFFFF) + (high & 0xFFFFFFFF)
    first = tl.min(tl.where(integer != 0, index, 72), axis=0)
    last = tl.max(tl.where(integer != 0, index, 0), axis=0)
    for limb in range(first, last + 3):
        part = tl.where(index == limb, low & 0xFFFFFFFF, 0)
        part += tl.where(index + 1 == limb, middle, 0)
        part += tl.where(index + 2 == limb, high >> 32, 0)
        tl.atomic_add(SUMS_ptr + row + limb, tl.sum(part, axis=0))
    if tl.min(is_finite.to(tl.int32), axis=0) == 0:
        tl.store(SUMS_ptr + flag, 1)


def add_limbs(sums: Tensor, values: Tensor, row: int, flag: int) -> None:
    """As `exact_sum.add_limbs`."""
    launch(
        _kernel, (-(-values.numel() // TILE_NUMEL),), num_warps=4, X_ptr=values, SUMS_ptr=sums,
        n=values.numel(), row=row, flag=flag, TILE=TILE_NUMEL,
    )  # fmt: skip
