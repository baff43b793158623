"""Triton form of `kernels/gated_mlp.py`: a program per tile of rows and columns."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import Form, contiguous_strides, form_of, row_strides
from .launch import PreparedLaunch, next_power_of_2

TILE_NUMEL = 1024  # 8 elements per thread: a 16-byte load of each input in two-byte dtypes
NUM_WARPS = 4


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """Compute activation(x) = x s(x) and its slope, s(x) + x s'(x)."""
    if ACTIVATION == "gelu":
        # 0.7071 is 1 / sqrt(2), and 0.3989 below is 1 / sqrt(2 pi).
        s = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = s + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))  # the density of the normal distribution
    else:
        u = x
        if ACTIVATION == "gelu_tanh":
            # 1.5958 is 2 sqrt(2 / pi), since (1 + tanh(z)) / 2 = sigmoid(2 z). Below, 0.134145 = 3 * 0.044715.
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
    G_row_stride, U_row_stride, U_offset, n_rows, n_cols, num_blocks,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """y = activation(g) * u. U_offset: of u in its tensor, which is the tensor of g if both are halves of it."""
    program = tl.program_id(0)
    rows = (program // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = program % num_blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    ok = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    g = tl.load(G_ptr + (rows * G_row_stride)[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    u = tl.load(U_ptr + U_offset + (rows * U_row_stride)[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    activated, _ = _activated(g, ACTIVATION)
    y = (activated * u).to(Y_ptr.dtype.element_ty)
    tl.store(Y_ptr + (rows * n_cols)[:, None] + cols[None, :], y, mask=ok)


@triton.jit
def _backward_kernel(
    DY_ptr, G_ptr, U_ptr, DG_ptr, DU_ptr,
    DY_row_stride, G_row_stride, U_row_stride, U_offset, D_row_stride, n_rows, n_cols, num_blocks,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """dg = dy * u * activation'(g);  du = dy * activation(g). U_offset: of u, and of du."""
    program = tl.program_id(0)
    rows = (program // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = program % num_blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    ok = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    dy = tl.load(DY_ptr + (rows * DY_row_stride)[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    g = tl.load(G_ptr + (rows * G_row_stride)[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    u = tl.load(U_ptr + U_offset + (rows * U_row_stride)[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    activated, slope = _activated(g, ACTIVATION)
    dg = (dy * u * slope).to(DG_ptr.dtype.element_ty)
    du = (dy * activated).to(DU_ptr.dtype.element_ty)
    tl.store(DG_ptr + (rows * D_row_stride)[:, None] + cols[None, :], dg, mask=ok)
    tl.store(DU_ptr + U_offset + (rows * D_row_stride)[:, None] + cols[None, :], du, mask=ok)


class GatedMlp:
    """The launches for tensors of certain forms, and for whatever gradients they get."""

    def __init__(self, x: Form, up: Form | None, activation: str) -> None:
        """x, up: (..., n_cols); without up, gate and up are the halves of x, (..., 2 n_cols)."""
        shape = x[0]
        n_cols = shape[-1] // 2 if up is None else shape[-1]
        self._row_numel, self._shape, self._activation = shape[-1], (*shape[:-1], n_cols), activation
        self._strides = contiguous_strides(self._shape)
        self._grid, self._tile = _tiles(shape.numel() // shape[-1], n_cols)
        self._tile["U_offset"] = n_cols if up is None else 0
        self._is_apart, strides = row_strides(x, x if up is None else up)
        self._start = PreparedLaunch(
            _forward_kernel, self._grid, num_warps=NUM_WARPS, ACTIVATION=activation,
            G_row_stride=strides[0], U_row_stride=strides[1], **self._tile,
        )  # fmt: skip
        self._backwards: dict[Any, tuple[bool, PreparedLaunch]] = {}

    def forward(self, x: Tensor, up: Tensor | None) -> Tensor:
        """Return y, (..., n_cols), contiguous."""
        up = x if up is None else up
        if self._is_apart:
            x, up = x.contiguous(), up.contiguous()
        y = x.new_empty_strided(self._shape, self._strides)  # new_empty costs the host more
        self._start(x, up, y)
        return y

    def backward(self, dy: Tensor, x: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return dx and dup, contiguous; None without up. dy: (..., n_cols).

        The tensors may have other strides than in forward, as hooks return them.
        """
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dup = torch.empty_like(dx) if up is not None else None
        up = x if up is None else up
        given = dy.stride(), dy.dtype, x.stride(), up.stride()
        prepared = self._backwards.get(given)
        if prepared is None:
            prepared = self._backwards[given] = self._prepare_backward(dy, x, up)
        is_apart, start = prepared
        if is_apart:
            dy, x, up = dy.contiguous(), x.contiguous(), up.contiguous()
        start(dy, x, up, dx, dx if dup is None else dup)
        return dx, dup

    def _prepare_backward(self, dy: Tensor, x: Tensor, up: Tensor) -> tuple[bool, PreparedLaunch]:
        """Return whether a tensor is copied, and the launch."""
        is_apart, strides = row_strides(form_of(dy), form_of(x), form_of(up))
        return is_apart, PreparedLaunch(
            _backward_kernel, self._grid, num_warps=NUM_WARPS, ACTIVATION=self._activation,
            DY_row_stride=strides[0], G_row_stride=strides[1], U_row_stride=strides[2], D_row_stride=self._row_numel,
            **self._tile,
        )  # fmt: skip


def _tiles(n_rows: int, n_cols: int) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid over (n_rows, n_cols) and the kernel's sizes. The grid uses the GPU's only large dimension."""
    block_size = min(next_power_of_2(n_cols), TILE_NUMEL)
    rows, num_blocks = TILE_NUMEL // block_size, -(-n_cols // block_size)
    sizes = {"n_rows": n_rows, "n_cols": n_cols, "num_blocks": num_blocks, "ROWS": rows, "BLOCK_SIZE": block_size}
    return (-(-n_rows // rows) * num_blocks,), sizes
