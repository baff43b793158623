"""Triton form of `kernels/gated_mlp.py`: a program per tile of rows and columns."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, next_power_of_2

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
    grid, tile = _tiles(gate)
    launch(
        _forward_kernel, grid, num_warps=NUM_WARPS,
        G_ptr=gate, U_ptr=up, Y_ptr=y, G_row_stride=gate.stride(0), U_row_stride=up.stride(0),
        ACTIVATION=activation, **tile,
    )  # fmt: skip
    return y


def backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, activation: str) -> None:
    """Compute dgate and dup in place. All tensors: (n_rows, n_cols) with adjacent columns."""
    grid, tile = _tiles(gate)
    launch(
        _backward_kernel, grid, num_warps=NUM_WARPS,
        DY_ptr=dy, G_ptr=gate, U_ptr=up, DG_ptr=dgate, DU_ptr=dup,
        DY_row_stride=dy.stride(0), G_row_stride=gate.stride(0), U_row_stride=up.stride(0),
        DG_row_stride=dgate.stride(0), DU_row_stride=dup.stride(0), ACTIVATION=activation, **tile,
    )  # fmt: skip


def _tiles(x: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid over (n_rows, n_cols) and the kernel's sizes. The grid uses the GPU's only large dimension."""
    n_rows, n_cols = x.shape
    block_size = min(next_power_of_2(n_cols), TILE_NUMEL)
    rows, num_blocks = TILE_NUMEL // block_size, -(-n_cols // block_size)
    sizes = {"n_rows": n_rows, "n_cols": n_cols, "num_blocks": num_blocks, "ROWS": rows, "BLOCK_SIZE": block_size}
    return (-(-n_rows // rows) * num_blocks,), sizes
