"""Triton form of `kernels/gated_mlp.py`: a program per tile of rows and columns."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import MOST_PREPARED, PreparedLaunch, next_power_of_2

TILE_NUMEL = 1024  # 8 elements per thread: a 16-byte load of each input in two-byte dtypes
NUM_WARPS = 4


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """Compute activation(x) = x s(x) and its slope, s(x) + x s'(x)."""
    if ACTIVATION == "gelu":
        s = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = s + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))  # the density of the normal distribution
    else:
        u = x
        if ACTIVATION == "gelu_tanh":
            u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = tl.sigmoid(u)
        rest = x * s * (1.0 - s)
        if ACTIVATION == "gelu_tanh":
            rest *= 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        slope = s + rest
    return x * s, slope


@triton.jit
def _forward_kernel(
    G_ptr, U_ptr, Y_ptr,
    G_row_stride, U_row_stride, n_rows, n_cols, num_blocks,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """y = activation(g) * u."""
    program = tl.program_id(0)
    rows = (program // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = program % num_blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    ok = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    g = tl.load(G_ptr + (rows * G_row_stride)[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    u = tl.load(U_ptr + (rows * U_row_stride)[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    activated, _ = _activated(g, ACTIVATION)
    y = (activated * u).to(Y_ptr.dtype.element_ty)
    tl.store(Y_ptr + (rows * n_cols)[:, None] + cols[None, :], y, mask=ok)


@triton.jit
def _backward_kernel(
    DY_ptr, G_ptr, U_ptr, DG_ptr, DU_ptr,
    DY_row_stride, G_row_stride, U_row_stride, DG_row_stride, DU_row_stride, n_rows, n_cols, num_blocks,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """dg = dy * u * activation'(g);  du = dy * activation(g)."""
    program = tl.program_id(0)
    rows = (program // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = program % num_blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    ok = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    dy = tl.load(DY_ptr + (rows * DY_row_stride)[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    g = tl.load(G_ptr + (rows * G_row_stride)[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    u = tl.load(U_ptr + (rows * U_row_stride)[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    activated, slope = _activated(g, ACTIVATION)
    dg = (dy * u * slope).to(DG_ptr.dtype.element_ty)
    du = (dy * activated).to(DU_ptr.dtype.element_ty)
    tl.store(DG_ptr + (rows * DG_row_stride)[:, None] + cols[None, :], dg, mask=ok)
    tl.store(DU_ptr + (rows * DU_row_stride)[:, None] + cols[None, :], du, mask=ok)


def forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Compute y, contiguous. gate, up: (n_rows, n_cols) with adjacent columns."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _forward_launch(*gate.shape, gate.dtype, gate.stride(0), up.stride(0), activation)(gate, up, y)
    return y


@lru_cache(maxsize=MOST_PREPARED)
def _forward_launch(
    n_rows: int, n_cols: int, dtype: torch.dtype, gate_stride: int, up_stride: int, activation: str
) -> PreparedLaunch:
    grid, tile = _tiles(n_rows, n_cols)
    strides = {"G_row_stride": gate_stride, "U_row_stride": up_stride}
    return PreparedLaunch(_forward_kernel, grid, num_warps=NUM_WARPS, **strides, ACTIVATION=activation, **tile)


def backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, activation: str) -> None:
    """Compute dgate and dup in place. All tensors: (n_rows, n_cols) with adjacent columns."""
    strides = dy.stride(0), gate.stride(0), up.stride(0), dgate.stride(0), dup.stride(0)
    _backward_launch(*gate.shape, gate.dtype, dy.dtype, strides, activation)(dy, gate, up, dgate, dup)


@lru_cache(maxsize=MOST_PREPARED)
def _backward_launch(
    n_rows: int, n_cols: int, dtype: torch.dtype, dy_dtype: torch.dtype, strides: tuple[int, ...], activation: str
) -> PreparedLaunch:
    """strides: the row strides of dy, gate, up, dgate and dup."""
    grid, tile = _tiles(n_rows, n_cols)
    named = {f"{name}_row_stride": stride for name, stride in zip(("DY", "G", "U", "DG", "DU"), strides, strict=True)}
    return PreparedLaunch(_backward_kernel, grid, num_warps=NUM_WARPS, **named, ACTIVATION=activation, **tile)


def _tiles(n_rows: int, n_cols: int) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid over (n_rows, n_cols) and the kernel's sizes. The grid uses the GPU's only large dimension."""
    block_size = min(next_power_of_2(n_cols), TILE_NUMEL)
    rows, num_blocks = TILE_NUMEL // block_size, -(-n_cols // block_size)
    sizes = {"n_rows": n_rows, "n_cols": n_cols, "num_blocks": num_blocks, "ROWS": rows, "BLOCK_SIZE": block_size}
    return (-(-n_rows // rows) * num_blocks,), sizes
