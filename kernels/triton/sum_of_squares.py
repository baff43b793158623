"""Triton forms of `kernels/sum_of_squares.py` and `kernels/exact_sum.py`.

A program sums the squares of a few blocks. For the exact sum, a program adds up its values limb by limb (32 bits of
a long integer, see exact_sum.py), with an atomic addition per limb. A single program computes the clipping factor.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..exact_sum import BIAS_BITS, NUM_LIMBS
from .launch import launch, next_power_of_2

TILE_NUMEL = 4096  # elements of a program: 32 per thread
LIMBS_TILE_NUMEL = 1024  # values of a program of the exact sum


@triton.jit
def _squares_of_rows(x):
    """Sum the squares of each row of x, (ROWS, COLS) float32 -> (ROWS,) float64; inf or nan if the row has one.

    With 2^e near the largest |x| of the row: sum((x / 2^e)^2) * 2^2e.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # ordered as |x| with nan on top; tl.max of x would drop a nan
    exponent = tl.minimum(tl.maximum(tl.max(bits, axis=1) >> 23, 1), 252)  # keeps both powers below normal
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    power = (exponent << 23).to(tl.float32, bitcast=True).to(tl.float64)
    y = x * inverse[:, None]
    return tl.sum(y * y, axis=1).to(tl.float64) * (power * power)


# Else Triton would compile again for values that are 1 or multiples of 16.
@triton.jit(do_not_specialize=["n_blocks"])
def _squares_kernel(
    X_ptr, S_ptr, FLAG_ptr, n_blocks,
    BLOCK_NUMEL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum whole blocks of a buffer, and set the flag if a sum is not finite.

    The mask is constant along a row, so loads are wide for any n_blocks.
    """
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = block < n_blocks
    at = block[:, None] * BLOCK_NUMEL + tl.arange(0, BLOCK_NUMEL)[None, :]
    x = tl.load(X_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)
    squares = _squares_of_rows(x)
    tl.store(S_ptr + block, squares, mask=ok)
    if FLAG_ptr is not None:
        # NaN compares as false, so this finds NaN and inf. Rows behind the last block are 0.
        are_finite = tl.min((squares < float("inf")).to(tl.int32), axis=0)
        if are_finite == 0:
            tl.store(FLAG_ptr, 1)


def squares_by_block(values: Tensor, block_numel: int, non_finite: Tensor | None) -> Tensor:
    """Launch the sums of a tensor of any shape and strides -> (ceil(n / block_numel),) float64."""
    flat = _aligned(values)
    num_whole, rest = divmod(flat.numel(), block_numel)
    squares = torch.empty(num_whole + bool(rest), dtype=torch.float64, device=flat.device)
    _sum_whole_blocks(flat, squares, num_whole, block_numel, non_finite)
    if rest:  # zeros add nothing
        last = torch.nn.functional.pad(flat[num_whole * block_numel :], (0, block_numel - rest))
        _sum_whole_blocks(last, squares[num_whole:], 1, block_numel, non_finite)
    return squares


def _aligned(tensor: Tensor) -> Tensor:
    """Return tensor as (n,), contiguous, at an address that is a multiple of 16 bytes; itself if it is so already."""
    flat = tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1).contiguous()
    # A view may begin at any element. At other addresses Triton would compile a second kernel, with narrow loads.
    return flat if flat.data_ptr() % 16 == 0 else flat.clone()


def _sum_whole_blocks(
    flat: Tensor, squares: Tensor, n_blocks: int, block_numel: int, non_finite: Tensor | None
) -> None:
    rows = TILE_NUMEL // block_numel
    launch(
        _squares_kernel, (-(-n_blocks // rows),), num_warps=4, X_ptr=flat, S_ptr=squares, FLAG_ptr=non_finite,
        n_blocks=n_blocks, BLOCK_NUMEL=block_numel, ROWS=rows,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "row", "flag"])
def _limbs_kernel(X_ptr, SUMS_ptr, n, row, flag, TILE: tl.constexpr):
    """SUMS[row:] += finite x, in units of 2^-1152, with 32 bits per limb;  SUMS[flag] = 1 if an x is inf or nan."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    bits = tl.load(X_ptr + at, mask=at < n, other=0.0).to(tl.int64, bitcast=True)
    exponent = (bits >> 52) & 0x7FF
    is_finite = exponent < 0x7FF
    # x = integer * 2^(exponent - 1075)
    integer = (bits & 0xFFFFFFFFFFFFF) | tl.where(exponent > 0, 0x10000000000000, 0)
    integer = tl.where(is_finite, tl.where(bits < 0, -integer, integer), 0)
    position = tl.maximum(exponent, 1) + 77  # 1152 - 1075
    index, shift = position >> 5, position & 31
    low, high = (integer & 0xFFFFFFFF) << shift, (integer >> 32) << shift
    middle = ((low >> 32) & 0xFFFFFFFF) + (high & 0xFFFFFFFF)
    # The values of a program are of similar size and touch few limbs. All zeros: first is 72, the loop is empty.
    first = tl.min(tl.where(integer != 0, index, 72), axis=0)
    last = tl.max(tl.where(integer != 0, index, 0), axis=0)
    for limb in range(first, last + 3):
        part = tl.where(index == limb, low & 0xFFFFFFFF, 0)
        part += tl.where(index + 1 == limb, middle, 0)
        part += tl.where(index + 2 == limb, high >> 32, 0)
        # Integers: the order of the atomic additions does not change the sum.
        tl.atomic_add(SUMS_ptr + row + limb, tl.sum(part, axis=0))
    if tl.min(is_finite.to(tl.int32), axis=0) == 0:
        tl.store(SUMS_ptr + flag, 1)


def add_limbs(sums: Tensor, values: Tensor, row: int, flag: int) -> None:
    """Launch `exact_sum.add_limbs`."""
    launch(
        _limbs_kernel, (-(-values.numel() // LIMBS_TILE_NUMEL),), num_warps=4, X_ptr=values, SUMS_ptr=sums,
        n=values.numel(), row=row, flag=flag, TILE=LIMBS_TILE_NUMEL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["flags", "place", "expected", "grad_scale", "limit"])
def _clip_kernel(
    SUMS_ptr, FACTOR_ptr, SKIP_ptr, flags, place, expected, grad_scale, limit,
    CLIPS_BELOW: tl.constexpr, EPSILON: tl.constexpr, NUM_LIMBS: tl.constexpr, BIAS_BITS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """FACTOR = grad_scale * min(1, limit / (norm + EPSILON));  SKIP = flags. grad_scale, limit: bits of float64."""
    at = tl.arange(0, TILE)
    limbs = tl.load(SUMS_ptr + at, mask=at < NUM_LIMBS, other=0)
    exponent = at.to(tl.int64) * 32 - BIAS_BITS + 1023  # of a limb's unit; a unit below all normal numbers counts 0
    unit = tl.where(limbs == 0, 0, tl.minimum(tl.maximum(exponent, 0), 2047) << 52).to(tl.float64, bitcast=True)
    square = tl.sum(limbs.to(tl.float64) * unit, axis=0)
    grad_scale = grad_scale.to(tl.int64).to(tl.float64, bitcast=True)
    limit = limit.to(tl.int64).to(tl.float64, bitcast=True)
    one = tl.full((), 1.0, tl.float64)
    norm = tl.sqrt(square) * grad_scale
    factor = tl.minimum(limit / (norm + tl.full((), EPSILON, tl.float64)), one)
    if not CLIPS_BELOW:
        factor = tl.where(norm > limit, factor, one)
    tl.store(FACTOR_ptr, factor * grad_scale)
    differs = tl.load(SUMS_ptr + place) != expected
    tl.store(SKIP_ptr, tl.load(SUMS_ptr + flags) + tl.load(SUMS_ptr + flags + 1) + differs.to(tl.int64))


def clip_factor(
    sums: Tensor, flags: int, known: tuple[int, int], grad_scale: float, limit: float, clips_below: bool, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Launch `sum_of_squares.clip_factor`."""
    factor = torch.empty(1, dtype=torch.float64, device=sums.device)
    skip = torch.empty(1, dtype=torch.int64, device=sums.device)
    # Triton passes a float as float32: give it the bits of the float64.
    grad_scale_bits, limit_bits = struct.unpack("=2q", struct.pack("=2d", grad_scale, limit))
    launch(
        _clip_kernel, (1,), num_warps=4, SUMS_ptr=sums, FACTOR_ptr=factor, SKIP_ptr=skip,
        flags=flags, place=known[0], expected=known[1], grad_scale=grad_scale_bits, limit=limit_bits,
        CLIPS_BELOW=clips_below, EPSILON=epsilon, NUM_LIMBS=NUM_LIMBS, BIAS_BITS=BIAS_BITS,
        TILE=next_power_of_2(NUM_LIMBS),
    )  # fmt: skip
    return factor, skip
