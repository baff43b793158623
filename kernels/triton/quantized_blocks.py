"""Triton form of `kernels/quantized_blocks.py`, with the same bits: a program per a few blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..optimizer_states import signed_word
from ..quantized_blocks import QUANTIZED_BLOCK_NUMEL as BLOCK_NUMEL, parts_of
from ..weight_rounding import Rounding, signed_long, step_key
from .launch import launch
from .optimizer_states import nearest_bfloat16, numbered_noise

ROWS = 16  # blocks of a program that quantizes
ROWS_BACK = 32  # blocks of a program that dequantizes: 16 bytes of codes per thread


@triton.jit
def _half_of(X_ptr, LESS_ptr, at, ok):
    """Load x - less of half of each block."""
    x = tl.load(X_ptr + at, mask=ok, other=0.0).to(tl.float32)
    if LESS_ptr is not None:
        x = x - tl.load(LESS_ptr + at, mask=ok, other=0.0).to(tl.float32)
    return x


@triton.jit
def _largest_bits(x):
    """Return the bits of the largest |x| in each row. The bits have the order of |x|, with inf and NaN on top."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def _codes(x, at, inverse, is_broken, first, low_key, high_key, MOST: tl.constexpr, IS_DRAWN: tl.constexpr):
    """Round x * inverse to int32 codes; in a broken block: 1 for non-finite values, else 0."""
    is_bad = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000
    y = tl.where(is_bad, 0.0, x) * inverse[:, None]
    if IS_DRAWN:
        noise = numbered_noise(first + at, low_key, high_key)
        # 2^-24: the step of the random numbers in [0, 1)
        y = tl.floor(y + (noise >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08)
    else:
        # 1.5 * 2^23: a float32 of that size has no fraction.
        y = (y + 12582912.0) - 12582912.0  # the nearest integer, ties to even
    y = tl.minimum(tl.maximum(y, -MOST), MOST)
    return tl.where(is_broken[:, None], is_bad.to(tl.float32), y).to(tl.int32)


# These numbers differ between messages. Triton would compile again for values that are 1 or multiples of 16.
@triton.jit(do_not_specialize=["n_blocks", "first", "low_key", "high_key"])
def _quantize_kernel(
    X_ptr, LESS_ptr, CODES_ptr, SCALES_ptr, n_blocks, first, low_key, high_key,
    BITS: tl.constexpr, IS_DRAWN: tl.constexpr, BLOCK_NUMEL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Quantize blocks. A byte has a 4-bit code from each half of a block, so the halves are separate tensors."""
    MOST: tl.constexpr = 127.0 if BITS == 8 else 7.0
    HALF: tl.constexpr = BLOCK_NUMEL // 2
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = block < n_blocks
    columns = tl.arange(0, HALF)[None, :]
    at = block[:, None] * BLOCK_NUMEL + columns
    left, right = _half_of(X_ptr, LESS_ptr, at, ok[:, None]), _half_of(X_ptr, LESS_ptr, at + HALF, ok[:, None])
    top = tl.maximum(_largest_bits(left), _largest_bits(right))
    is_broken = top >= 0x7F800000
    largest = tl.where(is_broken, 0, top).to(tl.float32, bitcast=True)
    is_zero = largest < 7.888609052210118e-31  # 2^-100
    safe = tl.where(is_zero, 1.0, largest)
    inverse = tl.where(is_zero, 0.0, tl.math.div_rn(tl.full((ROWS,), MOST, tl.float32), safe))
    scale = tl.where(is_zero, 0.0, tl.math.div_rn(safe, tl.full((ROWS,), MOST, tl.float32)))
    # As bits: every NaN of a scale is the same, as in the C++ form.
    scale_bits = tl.where(is_broken, 0x7FC00000, scale.to(tl.int32, bitcast=True))
    tl.store(SCALES_ptr + block, scale_bits.to(tl.float32, bitcast=True), mask=ok)
    low = _codes(left, at, inverse, is_broken, first, low_key, high_key, MOST, IS_DRAWN)
    high = _codes(right, at + HALF, inverse, is_broken, first, low_key, high_key, MOST, IS_DRAWN)
    if BITS == 8:
        tl.store(CODES_ptr + at, low.to(tl.uint8), mask=ok[:, None])
        tl.store(CODES_ptr + at + HALF, high.to(tl.uint8), mask=ok[:, None])
    else:
        pair = (low + 8) | ((high + 8) << 4)
        tl.store(CODES_ptr + block[:, None] * HALF + columns, pair.to(tl.uint8), mask=ok[:, None])


@triton.jit
def _store_values(OUT_ptr, at, ok, code, scale, ADDS: tl.constexpr):
    values = tl.where(code == 0, 0.0, code.to(tl.float32) * scale[:, None])
    if ADDS:
        values = tl.load(OUT_ptr + at, mask=ok, other=0.0).to(tl.float32) + values
    if OUT_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(OUT_ptr + at, nearest_bfloat16(values), mask=ok)
    else:
        tl.store(OUT_ptr + at, values.to(OUT_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["n_blocks"])
def _dequantize_kernel(
    CODES_ptr, SCALES_ptr, OUT_ptr, n_blocks,
    BITS: tl.constexpr, ADDS: tl.constexpr, BLOCK_NUMEL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK_NUMEL // 2
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = block < n_blocks
    columns = tl.arange(0, HALF)[None, :]
    at = block[:, None] * BLOCK_NUMEL + columns
    scale = tl.load(SCALES_ptr + block, mask=ok, other=0.0)
    if BITS == 8:
        left = tl.load(CODES_ptr + at, mask=ok[:, None], other=0).to(tl.int8, bitcast=True).to(tl.int32)
        right = tl.load(CODES_ptr + at + HALF, mask=ok[:, None], other=0).to(tl.int8, bitcast=True).to(tl.int32)
    else:
        pair = tl.load(CODES_ptr + block[:, None] * HALF + columns, mask=ok[:, None], other=0).to(tl.int32)
        left, right = (pair & 15) - 8, (pair >> 4) - 8
    _store_values(OUT_ptr, at, ok[:, None], left, scale, ADDS)
    _store_values(OUT_ptr, at + HALF, ok[:, None], right, scale, ADDS)


def quantize(
    values: Tensor, bits: int, message: Tensor, less: Tensor | None, rounding: Rounding | None, step: int
) -> None:
    """Launch `quantize`. values: (n,), n a multiple of 128."""
    n_blocks = values.numel() // BLOCK_NUMEL
    codes, scales = parts_of(message, bits)
    low_key, high_key = (0, 0) if rounding is None else step_key(rounding.seed, step)
    launch(
        _quantize_kernel, (-(-n_blocks // ROWS),), num_warps=4, enable_fp_fusion=False,
        X_ptr=values, LESS_ptr=less, CODES_ptr=codes, SCALES_ptr=scales, n_blocks=n_blocks,
        first=0 if rounding is None else signed_long(rounding.first),
        low_key=signed_word(low_key), high_key=signed_word(high_key),
        BITS=bits, IS_DRAWN=rounding is not None, BLOCK_NUMEL=BLOCK_NUMEL, ROWS=ROWS,
    )  # fmt: skip


def dequantize(message: Tensor, bits: int, out: Tensor, adds: bool) -> None:
    """Launch `dequantize`. out: (n,)."""
    n_blocks = out.numel() // BLOCK_NUMEL
    codes, scales = parts_of(message, bits)
    launch(
        _dequantize_kernel, (-(-n_blocks // ROWS_BACK),), num_warps=4, CODES_ptr=codes, SCALES_ptr=scales, OUT_ptr=out,
        n_blocks=n_blocks, BITS=bits, ADDS=adds, BLOCK_NUMEL=BLOCK_NUMEL, ROWS=ROWS_BACK, enable_fp_fusion=False,
    )  # fmt: skip
