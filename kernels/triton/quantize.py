"""Triton form of `kernels/quantize.py`: a program takes whole blocks, a tile of (ROWS, BLOCK_NUMEL)."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantized import BROKEN_BITS, LEAST_BITS, NEAREST_BITS, NF4_FIXED, NF4_LEVELS, TOP_CODES, Quantized
from .launch import launch

TILE_NUMEL = 4096  # elements of a program: 16 a thread; random bits and code books need registers


@triton.jit
def _random_bits(first, at, seed):
    """32 random bits of the elements with numbers first + at, int64 and int32 -> uint32: see `random_bits`."""
    first_low = first.to(tl.uint32)
    low = first_low + at.to(tl.uint32)
    high = (first >> 32).to(tl.uint32) + (low < first_low).to(tl.uint32)
    x = low * 0x9E3779B1 ^ (high * 0x85EBCA77 + tl.cast(seed, tl.uint32))
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _num_below(y, t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14):
    """How many of 15 ascending thresholds are below y: a search by halves, four comparisons an element."""
    b3 = y > t7
    b2 = y > tl.where(b3, t11, t3)
    b1 = y > tl.where(b3, tl.where(b2, t13, t9), tl.where(b2, t5, t1))
    upper = tl.where(b2, tl.where(b1, t14, t12), tl.where(b1, t10, t8))
    lower = tl.where(b2, tl.where(b1, t6, t4), tl.where(b1, t2, t0))
    b0 = y > tl.where(b3, upper, lower)
    return b3.to(tl.int32) * 8 + b2.to(tl.int32) * 4 + b1.to(tl.int32) * 2 + b0.to(tl.int32)


@triton.jit
def _tile(n, BLOCK_NUMEL: tl.constexpr, ROWS: tl.constexpr):
    """The number of the tile's first element (int64), how many there are, and where they lie in the tile."""
    start = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK_NUMEL)
    rest = tl.minimum(n - start, ROWS * BLOCK_NUMEL).to(tl.int32)
    return start, rest, tl.arange(0, ROWS)[:, None] * BLOCK_NUMEL + tl.arange(0, BLOCK_NUMEL)[None, :]


@triton.jit
def _scaled_tile(
    X_ptr, S_ptr, n,
    TOP: tl.constexpr, LEAST: tl.constexpr, BROKEN: tl.constexpr, BLOCK_NUMEL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stores the scales m / TOP of a tile's blocks; gives x * (TOP / m), (ROWS, BLOCK_NUMEL) float32."""
    start, rest, at = _tile(n, BLOCK_NUMEL, ROWS)
    x = tl.load(X_ptr + start + at, mask=at < rest, other=0.0).to(tl.float32)
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # in the order of |x|, nan above all
    is_broken = bits >= BROKEN
    largest = tl.maximum(tl.where(is_broken, 0, bits), LEAST).to(tl.float32, bitcast=True)
    top = tl.full((ROWS,), TOP, tl.float32)
    scale = tl.where(is_broken, float("nan"), tl.div_rn(largest, top))
    rows = tl.arange(0, ROWS)
    tl.store(S_ptr + start // BLOCK_NUMEL + rows, scale, mask=rows * BLOCK_NUMEL < rest)
    return tl.where(is_broken[:, None], 0.0, x) * tl.div_rn(top, largest)[:, None]


@triton.jit
def _store_codes(code, Q_ptr, n, IS_8_BIT: tl.constexpr, BLOCK_NUMEL: tl.constexpr, ROWS: tl.constexpr):
    """code: (ROWS, BLOCK_NUMEL) int32; two of 4 bits make a byte, the first one is its lower half."""
    start, rest, at = _tile(n, BLOCK_NUMEL, ROWS)
    if IS_8_BIT:
        tl.store(Q_ptr + start + at, code.to(tl.int8), mask=at < rest)
    else:
        low, high = tl.split(tl.reshape(code, (ROWS, BLOCK_NUMEL // 2, 2)))
        pair = tl.arange(0, ROWS)[:, None] * (BLOCK_NUMEL // 2) + tl.arange(0, BLOCK_NUMEL // 2)[None, :]
        tl.store(Q_ptr + start // 2 + pair, (low | (high << 4)).to(tl.uint8), mask=pair < (rest + 1) // 2)


@triton.jit
def _linear_kernel(
    X_ptr, Q_ptr, S_ptr, n, seed, offset,
    TOP: tl.constexpr, NEAREST: tl.constexpr, IS_RANDOM: tl.constexpr, LEAST: tl.constexpr, BROKEN: tl.constexpr,
    BLOCK_NUMEL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """|c| = floor(|y| + u), with u = 1/2 or random in [0, 1), in units of 2^-16;  y = x TOP / m."""
    y = _scaled_tile(X_ptr, S_ptr, n, TOP, LEAST, BROKEN, BLOCK_NUMEL, ROWS)
    fixed = (tl.abs(y) * 65536.0).to(tl.int32)
    if IS_RANDOM:
        start, _, at = _tile(n, BLOCK_NUMEL, ROWS)
        fixed += (_random_bits(start + offset, at, seed) >> 16).to(tl.int32)
    else:
        fixed += NEAREST >> 16
    code = tl.minimum(fixed >> 16, TOP)
    code = tl.where(y < 0, -code, code)
    if TOP < 8:
        code += 8
    _store_codes(code, Q_ptr, n, TOP > 8, BLOCK_NUMEL, ROWS)


@triton.jit
def _nf4_kernel(
    X_ptr, Q_ptr, S_ptr, FIXED_ptr, n, seed, offset,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr, T4: tl.constexpr, T5: tl.constexpr,
    T6: tl.constexpr, T7: tl.constexpr, T8: tl.constexpr, T9: tl.constexpr, T10: tl.constexpr, T11: tl.constexpr,
    T12: tl.constexpr, T13: tl.constexpr, T14: tl.constexpr, IS_RANDOM: tl.constexpr,
    LEAST: tl.constexpr, BROKEN: tl.constexpr, BLOCK_NUMEL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The level next to y = x / m, in units of 2^-23. T: the middles of levels; at random, the 15 lower levels."""
    y = _scaled_tile(X_ptr, S_ptr, n, 1, LEAST, BROKEN, BLOCK_NUMEL, ROWS)
    fixed = (y * 8388608.0).to(tl.int32)
    code = _num_below(fixed, T0, T1, T2, T3, T4, T5, T6, T7, T8, T9, T10, T11, T12, T13, T14)
    if IS_RANDOM:
        start, _, at = _tile(n, BLOCK_NUMEL, ROWS)
        code = tl.maximum(code - 1, 0)
        low = tl.load(FIXED_ptr + code)
        gap = (tl.load(FIXED_ptr + code + 1) - low).to(tl.uint32)
        code += (fixed > low + tl.umulhi(_random_bits(start + offset, at, seed), gap).to(tl.int32)).to(tl.int32)
    _store_codes(code, Q_ptr, n, False, BLOCK_NUMEL, ROWS)


@triton.jit
def _dequantize_kernel(
    Q_ptr, S_ptr, LEVELS_ptr, Y_ptr, n,
    IS_8_BIT: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_NUMEL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y = s * level of the code (+ y)"""
    start, rest, at = _tile(n, BLOCK_NUMEL, ROWS)
    rows = tl.arange(0, ROWS)
    scale = tl.load(S_ptr + start // BLOCK_NUMEL + rows, mask=rows * BLOCK_NUMEL < rest, other=0.0)
    if IS_8_BIT:
        y = tl.load(Q_ptr + start + at, mask=at < rest, other=0).to(tl.float32)
    else:
        pair = rows[:, None] * (BLOCK_NUMEL // 2) + tl.arange(0, BLOCK_NUMEL // 2)[None, :]
        byte = tl.load(Q_ptr + start // 2 + pair, mask=pair < (rest + 1) // 2, other=0).to(tl.int32)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (ROWS, BLOCK_NUMEL))
        y = tl.load(LEVELS_ptr + code) if LEVELS_ptr is not None else (code - 8).to(tl.float32)
    y *= scale[:, None]
    if ACCUMULATE:
        y += tl.load(Y_ptr + start + at, mask=at < rest, other=0.0).to(tl.float32)
    tl.store(Y_ptr + start + at, y.to(Y_ptr.dtype.element_ty), mask=at < rest)


def quantize(values: Tensor, out: Quantized, seed: int | None, offset: int) -> None:
    """values: (n,), contiguous."""
    rows = TILE_NUMEL // out.block_numel
    word = (seed or 0) & 0xFFFFFFFF
    common: dict[str, Any] = {
        "X_ptr": values, "Q_ptr": out.payload, "S_ptr": out.scale, "n": values.numel(),
        "seed": word - (1 << 32) if word >= 1 << 31 else word, "offset": offset, "IS_RANDOM": seed is not None,
        "LEAST": LEAST_BITS, "BROKEN": BROKEN_BITS, "BLOCK_NUMEL": out.block_numel, "ROWS": rows,
    }  # fmt: skip
    grid = (-(-out.scale.numel() // rows),)
    if out.format != "nf4":
        launch(_linear_kernel, grid, num_warps=8, TOP=TOP_CODES[out.format], NEAREST=NEAREST_BITS, **common)
        return
    thresholds: dict[str, Any] = {
        f"T{index}": low + (0 if seed is not None else NEAREST_BITS * (high - low) >> 32)
        for index, (low, high) in enumerate(pairwise(NF4_FIXED))
    }
    fixed = _constants(NF4_FIXED, torch.int32, values.device) if seed is not None else None
    launch(_nf4_kernel, grid, num_warps=8, FIXED_ptr=fixed, **thresholds, **common)


def dequantize(quantized: Quantized, out: Tensor, accumulate: bool) -> None:
    """out: (n,), contiguous."""
    rows = TILE_NUMEL // quantized.block_numel
    is_nf4 = quantized.format == "nf4"
    launch(
        _dequantize_kernel, (-(-quantized.scale.numel() // rows),), num_warps=8,
        Q_ptr=quantized.payload, S_ptr=quantized.scale,
        LEVELS_ptr=_constants(NF4_LEVELS, torch.float32, out.device) if is_nf4 else None,
        Y_ptr=out, n=out.numel(), IS_8_BIT=quantized.format == "int8", ACCUMULATE=accumulate,
        BLOCK_NUMEL=quantized.block_numel, ROWS=rows,
    )  # fmt: skip


@cache
def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)
