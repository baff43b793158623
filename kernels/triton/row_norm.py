"""Triton form of `kernels/row_norm.py`: tiles of whole rows in forward, strips of rows in backward.

[Note: tiles of rows] Narrow rows (norms of single heads) share a program, so that each thread has enough to load. Rows
of more than MAX_BLOCK_SIZE columns are cut into blocks: forward reads them twice, and backward first runs
`_row_means_kernel` for the means over each row.

[Note: one wave] Backward starts as many programs as run at the same time, each with a strip of rows: with 128 registers
per thread, a multiprocessor holds 16 warps. So few programs hide the latency of loads only if they load the next rows
early, which they do if the shared memory of a small GPU can hold them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import Form, form_of, row_strides, together
from .launch import PreparedLaunch, next_power_of_2, num_processors

MAX_BLOCK_SIZE = 8192  # columns that a program holds in registers
FORWARD_THREAD_NUMEL = 8  # elements
BACKWARD_THREAD_NUMEL = 16
RESIDENT_WARPS = 16
EARLY_LOAD_BYTES = 48 * 1024


@triton.jit
def _forward_kernel(
    X_ptr, R_ptr, W_ptr, Y_ptr, H_ptr, RSTD_ptr,
    X_row_stride, R_row_stride, n_rows, n_cols, eps, offset, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """A tile of rows: h = x + r;  rstd = 1 / sqrt(mean(h^2) + eps);  y = h * rstd * (w + offset)."""
    # int64: a row's offset exceeds 2^31 in tensors of more than 2G elements.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_SIZE)
    squares = tl.zeros((ROWS,), tl.float32)
    h = tl.zeros((ROWS, BLOCK_SIZE), tl.float32)
    for block in range(NUM_BLOCKS):
        at = block * BLOCK_SIZE + cols
        ok = (rows < n_rows)[:, None] & (at < n_cols)[None, :]
        h = tl.load(X_ptr + (rows * X_row_stride)[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            h += tl.load(R_ptr + (rows * R_row_stride)[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
            rounded = h.to(H_ptr.dtype.element_ty)
            tl.store(H_ptr + (rows * n_cols)[:, None] + at[None, :], rounded, mask=ok)
            h = rounded.to(tl.float32)  # the value that backward will read
        # Masked columns were loaded as 0, and add nothing.
        squares += tl.sum(h * h, axis=1)
    rstd = tl.rsqrt(squares / n_cols + eps)
    tl.store(RSTD_ptr + rows, rstd, mask=rows < n_rows)
    for block in range(NUM_BLOCKS):
        at = block * BLOCK_SIZE + cols
        ok = (rows < n_rows)[:, None] & (at < n_cols)[None, :]
        if NUM_BLOCKS > 1:
            if HAS_RESIDUAL:  # a different thread may have stored it: the sums above are barriers
                h = tl.load(H_ptr + (rows * n_cols)[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
            else:
                h = tl.load(X_ptr + (rows * X_row_stride)[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
        y = h * rstd[:, None]
        if HAS_WEIGHT:
            y *= (tl.load(W_ptr + at, mask=at < n_cols, other=0.0).to(tl.float32) + offset)[None, :]
        tl.store(Y_ptr + (rows * n_cols)[:, None] + at[None, :], y.to(Y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _row_means_kernel(
    DY_ptr, H_ptr, W_ptr, RSTD_ptr, MEAN_ptr,
    DY_row_stride, H_row_stride, n_cols, offset,
    HAS_WEIGHT: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """A wide row: mean(g h^), with g = (w + offset) dy and h^ = h rstd."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)
    total = tl.zeros((BLOCK_SIZE,), tl.float32)
    for block in range(NUM_BLOCKS):
        at = block * BLOCK_SIZE + cols
        ok = at < n_cols
        g = tl.load(DY_ptr + row * DY_row_stride + at, mask=ok, other=0.0).to(tl.float32)
        h = tl.load(H_ptr + row * H_row_stride + at, mask=ok, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(W_ptr + at, mask=ok, other=0.0).to(tl.float32) + offset
        total += g * h
    tl.store(MEAN_ptr + row, tl.sum(total, axis=0) * tl.load(RSTD_ptr + row) / n_cols)


@triton.jit
def _backward_kernel(
    DY_ptr, DH_ptr, H_ptr, W_ptr, RSTD_ptr, MEAN_ptr, DX_ptr, DW_ptr,
    DY_row_stride, DH_row_stride, H_row_stride, n_rows, n_cols, tiles_per_strip, offset,
    HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr, WANTS_DW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A block of columns of a strip of rows: dx, and the strip's dw = sum(dy h^).

    g = (w + offset) dy;  h^ = h rstd;  dx = rstd (g - h^ mean(g h^)) + dh. The mean comes from `_row_means_kernel` if a
    row has several blocks.
    """
    strip = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    at = tl.program_id(0) % NUM_BLOCKS * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    first = strip * tiles_per_strip * ROWS
    w = tl.zeros((1, BLOCK_SIZE), tl.float32)
    if HAS_WEIGHT:
        w = (tl.load(W_ptr + at, mask=at < n_cols, other=0.0).to(tl.float32) + offset)[None, :]
    dw = tl.zeros((ROWS, BLOCK_SIZE), tl.float32)
    for row in tl.range(first, tl.minimum(first + tiles_per_strip * ROWS, n_rows), ROWS, num_stages=NUM_STAGES):
        rows = row + tl.arange(0, ROWS)
        there = rows < n_rows
        ok = there[:, None] & (at < n_cols)[None, :]
        dy = tl.load(DY_ptr + (rows * DY_row_stride)[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
        h = tl.load(H_ptr + (rows * H_row_stride)[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD_ptr + rows, mask=there, other=0.0)
        normed = h * rstd[:, None]
        g = dy
        if HAS_WEIGHT:
            g = dy * w
        if NUM_BLOCKS > 1:
            mean = tl.load(MEAN_ptr + rows, mask=there, other=0.0)
        else:
            mean = tl.sum(g * normed, axis=1) / n_cols
        dx = rstd[:, None] * (g - normed * mean[:, None])
        if HAS_DH:
            dx += tl.load(DH_ptr + (rows * DH_row_stride)[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
        tl.store(DX_ptr + (rows * n_cols)[:, None] + at[None, :], dx.to(DX_ptr.dtype.element_ty), mask=ok)
        # Last: if it came before dx, the kernel would take 135 registers a thread on sm_90, above the budget of 128.
        if WANTS_DW:
            dw += dy * normed
    if WANTS_DW:
        # A row of partial sums per strip: with atomic additions the bits would change from run to run.
        tl.store(DW_ptr + strip * n_cols + at, tl.sum(dw, axis=0), mask=at < n_cols)


class RmsNorm:
    """The launches for tensors of certain forms, and for whatever gradients they get."""

    def __init__(self, x: Form, residual: Form | None, weight: Form | None, eps: float, offset: float) -> None:
        """x, residual: (..., n_cols); weight: (n_cols,). None: there is none."""
        shape, _, self._dtype, self._device = x
        self._n_cols = n_cols = shape[-1]
        self._n_rows = shape.numel() // n_cols
        self._offset, self._has_weight = offset, weight is not None
        self._block_size = min(next_power_of_2(n_cols), MAX_BLOCK_SIZE)
        self._num_blocks = -(-n_cols // self._block_size)
        self._is_apart, (x_stride, residual_stride, _) = row_strides(x, residual, weight)
        rows, num_warps = _tile(self._block_size, FORWARD_THREAD_NUMEL)
        self._start = PreparedLaunch(
            _forward_kernel, (-(-self._n_rows // rows),), num_warps=num_warps,
            X_row_stride=x_stride, R_row_stride=residual_stride,
            n_rows=self._n_rows, n_cols=n_cols, eps=eps, offset=offset,
            HAS_RESIDUAL=residual is not None, HAS_WEIGHT=self._has_weight,
            ROWS=rows, BLOCK_SIZE=self._block_size, NUM_BLOCKS=self._num_blocks,
        )  # fmt: skip
        self._backwards: dict[Any, tuple[bool, PreparedLaunch | None, PreparedLaunch, int]] = {}

    def forward(self, x: Tensor, residual: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, h = x + residual (x without a residual), and rstd, (n_rows,) float32."""
        if self._is_apart:
            x, residual, weight = map(together, (x, residual, weight))
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        h = torch.empty_like(y) if residual is not None else x
        rstd = x.new_empty(self._n_rows, dtype=torch.float32)
        self._start(x, residual, weight, y, h, rstd)
        return y, h, rstd

    def backward(
        self, dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, rstd: Tensor, wants_dweight: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return dx, contiguous in the dtype of h, and dweight in the dtype of weight, None if it is not wanted.

        dy, dh, h: (..., n_cols). They may have other strides than the tensors of forward had, as hooks return them.
        """
        given = (
            dy.stride(), dy.dtype, dh.stride() if dh is not None else None, h.stride(),
            weight.stride() if weight is not None else None, rstd.stride(), wants_dweight,
        )  # fmt: skip
        prepared = self._backwards.get(given)
        if prepared is None:
            prepared = self._backwards[given] = self._prepare_backward(dy, dh, h, weight, rstd, wants_dweight)
        is_apart, start_means, start, num_strips = prepared
        if is_apart:
            dy, dh, h, weight, rstd = map(together, (dy, dh, h, weight, rstd))
        dx = torch.empty_like(h, memory_format=torch.contiguous_format)
        strips, mean = None, None
        if wants_dweight:
            strips = rstd.new_empty((num_strips, self._n_cols))
        if start_means is not None:
            mean = torch.empty_like(rstd)
            start_means(dy, h, weight, rstd, mean)
        start(dy, dh, h, weight, rstd, mean, dx, strips)
        if strips is None or weight is None:
            return dx, None
        dweight = strips.sum(0)
        return dx, dweight if dweight.dtype == weight.dtype else dweight.to(weight.dtype)

    def _prepare_backward(
        self, dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, rstd: Tensor, wants_dweight: bool
    ) -> tuple[bool, PreparedLaunch | None, PreparedLaunch, int]:
        """Return whether a tensor is copied, the launch of the means of wide rows, the launch, and its strips."""
        rows, num_warps = _tile(self._block_size, BACKWARD_THREAD_NUMEL)
        # [Note: one wave]
        num_programs = RESIDENT_WARPS // num_warps * num_processors(self._device)
        tiles_per_strip = -(-self._n_rows * self._num_blocks // (rows * num_programs))
        num_strips = -(-self._n_rows // (rows * tiles_per_strip))
        # dy and h of a tile, and dh with a residual: a second stage holds them in shared memory.
        loaded_bytes = rows * self._block_size * self._dtype.itemsize * (3 if dh is not None else 2)
        forms = (None if tensor is None else form_of(tensor) for tensor in (dy, dh, h, weight, rstd))
        is_apart, (dy_stride, dh_stride, h_stride, *_) = row_strides(*forms)
        shared: dict[str, Any] = {
            "DY_row_stride": dy_stride, "H_row_stride": h_stride, "n_cols": self._n_cols,
            "offset": self._offset, "HAS_WEIGHT": self._has_weight,
            "BLOCK_SIZE": self._block_size, "NUM_BLOCKS": self._num_blocks,
        }  # fmt: skip
        start_means = None
        if self._num_blocks > 1:
            warps = _tile(self._block_size, FORWARD_THREAD_NUMEL)[1]
            start_means = PreparedLaunch(_row_means_kernel, (self._n_rows,), num_warps=warps, **shared)
        start = PreparedLaunch(
            _backward_kernel, (num_strips * self._num_blocks,), num_warps=num_warps, **shared,
            DH_row_stride=dh_stride, n_rows=self._n_rows, tiles_per_strip=tiles_per_strip,
            HAS_DH=dh is not None, WANTS_DW=wants_dweight, ROWS=rows,
            NUM_STAGES=2 if loaded_bytes <= EARLY_LOAD_BYTES else 1,
        )  # fmt: skip
        return is_apart, start_means, start, num_strips


def _tile(block_size: int, thread_numel: int) -> tuple[int, int]:
    """Choose rows and warps (4 to 16) of a tile with that many columns. More warps would have too few registers."""
    return max(1, 4 * 32 * thread_numel // block_size), min(max(block_size // (32 * thread_numel), 4), 16)
