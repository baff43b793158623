"""Triton form of `kernels/rms_norm.py`: one program a row forward, a strip of rows a program backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, next_power_of_2, num_processors

MAX_BLOCK_SIZE = 8192  # columns that a program holds in registers at once; wider rows are read twice


@triton.jit
def _forward_kernel(
    X_ptr, R_ptr, W_ptr, Y_ptr, H_ptr, RSTD_ptr,
    X_row_stride, R_row_stride, n_cols, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row: h = x + r;  rstd = 1 / sqrt(mean(h^2) + eps);  y = h * rstd * (w + offset)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)
    squares = tl.zeros((BLOCK_SIZE,), tl.float32)
    h = squares
    for block in range(NUM_BLOCKS):
        at = block * BLOCK_SIZE + cols
        ok = at < n_cols
        h = tl.load(X_ptr + row * X_row_stride + at, mask=ok, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            h += tl.load(R_ptr + row * R_row_stride + at, mask=ok, other=0.0).to(tl.float32)
            rounded = h.to(H_ptr.dtype.element_ty)
            tl.store(H_ptr + row * n_cols + at, rounded, mask=ok)
            h = rounded.to(tl.float32)  # what backward will read
        squares += h * h
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / n_cols + eps)
    tl.store(RSTD_ptr + row, rstd)
    for block in range(NUM_BLOCKS):
        at = block * BLOCK_SIZE + cols
        ok = at < n_cols
        if NUM_BLOCKS > 1:
            if HAS_RESIDUAL:
                h = tl.load(H_ptr + row * n_cols + at, mask=ok, other=0.0).to(tl.float32)
            else:
                h = tl.load(X_ptr + row * X_row_stride + at, mask=ok, other=0.0).to(tl.float32)
        y = h * rstd
        if HAS_WEIGHT:
            y *= tl.load(W_ptr + at, mask=ok, other=0.0).to(tl.float32) + offset
        tl.store(Y_ptr + row * n_cols + at, y.to(Y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _backward_kernel(
    DY_ptr, DH_ptr, H_ptr, W_ptr, RSTD_ptr, DX_ptr, DW_ptr,
    DY_row_stride, DH_row_stride, n_rows, n_cols, rows_per_program, offset,
    HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Rows of one strip: x^ = h rstd;  dx = rstd (w dy - x^ mean(w dy x^)) + dh;  dw of the strip = sum(dy x^)."""
    strip = tl.program_id(0)
    first = strip * rows_per_program
    last = tl.minimum(first + rows_per_program, n_rows)
    cols = tl.arange(0, BLOCK_SIZE)
    for block in range(NUM_BLOCKS):
        at = block * BLOCK_SIZE + cols
        ok = at < n_cols
        w = tl.zeros((BLOCK_SIZE,), tl.float32) + 1.0
        if HAS_WEIGHT:
            w = tl.load(W_ptr + at, mask=ok, other=0.0).to(tl.float32) + offset
        dw = tl.zeros((BLOCK_SIZE,), tl.float32)
        for row_index in range(first, last):
            row = tl.cast(row_index, tl.int64)
            rstd = tl.load(RSTD_ptr + row)
            dy = tl.load(DY_ptr + row * DY_row_stride + at, mask=ok, other=0.0).to(tl.float32)
            normed = tl.load(H_ptr + row * n_cols + at, mask=ok, other=0.0).to(tl.float32) * rstd
            if NUM_BLOCKS == 1:
                mean = tl.sum(w * dy * normed, axis=0) / n_cols
            else:
                products = tl.zeros((BLOCK_SIZE,), tl.float32)
                for other_block in range(NUM_BLOCKS):
                    other = other_block * BLOCK_SIZE + cols
                    there = other < n_cols
                    part = tl.load(DY_ptr + row * DY_row_stride + other, mask=there, other=0.0).to(tl.float32)
                    part *= tl.load(H_ptr + row * n_cols + other, mask=there, other=0.0).to(tl.float32)
                    if HAS_WEIGHT:
                        part *= tl.load(W_ptr + other, mask=there, other=0.0).to(tl.float32) + offset
                    products += part
                mean = tl.sum(products, axis=0) * rstd / n_cols
            dx = rstd * (w * dy - normed * mean)
            if HAS_DH:
                dx += tl.load(DH_ptr + row * DH_row_stride + at, mask=ok, other=0.0).to(tl.float32)
            tl.store(DX_ptr + row * n_cols + at, dx.to(DX_ptr.dtype.element_ty), mask=ok)
            dw += dy * normed
        if HAS_WEIGHT:
            tl.store(DW_ptr + tl.cast(strip, tl.int64) * n_cols + at, dw, mask=ok)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual: (n_rows, n_cols) with adjacent columns. Returns y, h = x + residual (x itself without), rstd."""
    n_rows, n_cols = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = torch.empty_like(y) if residual is not None else x
    rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    block_size = min(next_power_of_2(n_cols), MAX_BLOCK_SIZE)
    launch(
        _forward_kernel, (n_rows,), num_warps=_num_warps(block_size),
        X_ptr=x, R_ptr=residual, W_ptr=weight, Y_ptr=y, H_ptr=h, RSTD_ptr=rstd,
        X_row_stride=x.stride(0), R_row_stride=residual.stride(0) if residual is not None else 0,
        n_cols=n_cols, eps=eps, offset=offset,
        HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None,
        BLOCK_SIZE=block_size, NUM_BLOCKS=-(-n_cols // block_size),
    )  # fmt: skip
    return y, h, rstd


def backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor | None]:
    """dy, dh: (n_rows, n_cols) with adjacent columns; h: contiguous. Returns dx and dw (in the dtype of weight)."""
    n_rows, n_cols = h.shape
    dx = torch.empty_like(h)
    rows_per_program = max(1, -(-n_rows // (4 * num_processors(h.device))))
    num_strips = -(-n_rows // rows_per_program)
    strips = torch.empty((num_strips, n_cols), dtype=torch.float32, device=h.device) if weight is not None else None
    # A wide row keeps more in registers at once: what is summed over it, and what is summed over rows.
    block_size = next_power_of_2(n_cols) if n_cols <= MAX_BLOCK_SIZE else MAX_BLOCK_SIZE // 2
    launch(
        _backward_kernel, (num_strips,), num_warps=_num_warps(block_size),
        DY_ptr=dy, DH_ptr=dh, H_ptr=h, W_ptr=weight, RSTD_ptr=rstd, DX_ptr=dx, DW_ptr=strips,
        DY_row_stride=dy.stride(0), DH_row_stride=dh.stride(0) if dh is not None else 0,
        n_rows=n_rows, n_cols=n_cols, rows_per_program=rows_per_program, offset=offset,
        HAS_DH=dh is not None, HAS_WEIGHT=weight is not None,
        BLOCK_SIZE=block_size, NUM_BLOCKS=-(-n_cols // block_size),
    )  # fmt: skip
    return dx, strips.sum(0).to(weight.dtype) if strips is not None and weight is not None else None


def _num_warps(block_size: int) -> int:
    """8 elements a thread: enough loads in flight. At most 512 threads: with more, there are too few registers each."""
    return min(max(block_size // 256, 4), 16)
