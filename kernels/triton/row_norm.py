"""Triton form of `kernels/row_norm.py`: tiles of whole rows in forward, strips of rows in backward.

[Note: tiles of rows] Narrow rows (norms of single heads) share a program, so that each thread has enough to load. Rows
of more than MAX_BLOCK_SIZE columns are cut into blocks: forward reads them twice, and backward first runs
`_row_means_kernel` for the means over each row.

[Note: one wave] Backward starts as many programs as run at the same time, each with a strip of rows: with 128 registers
per thread, a multiprocessor holds 16 warps. So few programs hide the latency of loads only if they load the next rows
early, which they do if the shared memory of a small GPU can hold them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import MOST_PREPARED, PreparedLaunch, next_power_of_2, num_processors

MAX_BLOCK_SIZE = 8192  # columns that a program holds in registers
FORWARD_THREAD_NUMEL = 8  # elements
BACKWARD_THREAD_NUMEL = 16
RESIDENT_WARPS = 16
EARLY_LOAD_BYTES = 48 * 1024


@triton.jit
def _forward_kernel(
    X_ptr, R_ptr, W_ptr, B_ptr, Y_ptr, H_ptr, MEAN_ptr, RSTD_ptr,
    X_row_stride, R_row_stride, n_rows, n_cols, eps, offset,
    SUBTRACTS_MEAN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """A tile of rows: h = x + r;  rstd = 1 / sqrt(mean((h - mean)^2) + eps);  y = (h - mean) * rstd * (w + offset) + b.

    mean is mean(h), or 0 unless SUBTRACTS_MEAN.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_SIZE)
    total = tl.zeros((ROWS,), tl.float32)
    squares = total  # of the distances from the mean
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
        if SUBTRACTS_MEAN:
            seen = block * BLOCK_SIZE
            count = tl.minimum(n_cols - seen, BLOCK_SIZE)
            block_total = tl.sum(h, axis=1)
            block_mean = block_total / count
            centered = tl.where(ok, h - block_mean[:, None], 0.0)
            squares += tl.sum(centered * centered, axis=1)
            if NUM_BLOCKS > 1:  # join blocks with different means: Chan, Golub, LeVeque 1983, equation 1.5
                distance = block_mean - total / tl.maximum(seen, 1)
                squares += distance * distance * (seen * (count / (seen + count)))
            total += block_total
        else:
            squares += tl.sum(h * h, axis=1)
    mean = total / n_cols
    rstd = tl.rsqrt(squares / n_cols + eps)
    if SUBTRACTS_MEAN:
        tl.store(MEAN_ptr + rows, mean, mask=rows < n_rows)
    tl.store(RSTD_ptr + rows, rstd, mask=rows < n_rows)
    for block in range(NUM_BLOCKS):
        at = block * BLOCK_SIZE + cols
        ok = (rows < n_rows)[:, None] & (at < n_cols)[None, :]
        if NUM_BLOCKS > 1:
            if HAS_RESIDUAL:  # a different thread may have stored it: the sums above are barriers
                h = tl.load(H_ptr + (rows * n_cols)[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
            else:
                h = tl.load(X_ptr + (rows * X_row_stride)[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
        if SUBTRACTS_MEAN:
            h -= mean[:, None]
        y = h * rstd[:, None]
        if HAS_WEIGHT:
            y *= (tl.load(W_ptr + at, mask=at < n_cols, other=0.0).to(tl.float32) + offset)[None, :]
        if HAS_BIAS:
            y += tl.load(B_ptr + at, mask=at < n_cols, other=0.0).to(tl.float32)[None, :]
        tl.store(Y_ptr + (rows * n_cols)[:, None] + at[None, :], y.to(Y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _row_means_kernel(
    DY_ptr, H_ptr, W_ptr, MEAN_ptr, RSTD_ptr, MEAN_G_ptr, MEAN_GH_ptr,
    DY_row_stride, H_row_stride, n_cols, offset,
    SUBTRACTS_MEAN: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """A wide row: with g = (w + offset) dy and h^ = (h - mean) rstd, mean(g h^), and mean(g) if SUBTRACTS_MEAN."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)
    g_total = tl.zeros((BLOCK_SIZE,), tl.float32)
    gh_total = g_total
    for block in range(NUM_BLOCKS):
        at = block * BLOCK_SIZE + cols
        ok = at < n_cols
        g = tl.load(DY_ptr + row * DY_row_stride + at, mask=ok, other=0.0).to(tl.float32)
        h = tl.load(H_ptr + row * H_row_stride + at, mask=ok, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(W_ptr + at, mask=ok, other=0.0).to(tl.float32) + offset
        if SUBTRACTS_MEAN:
            h -= tl.load(MEAN_ptr + row)
            g_total += g
        gh_total += g * h
    if SUBTRACTS_MEAN:
        tl.store(MEAN_G_ptr + row, tl.sum(g_total, axis=0) / n_cols)
    tl.store(MEAN_GH_ptr + row, tl.sum(gh_total, axis=0) * tl.load(RSTD_ptr + row) / n_cols)


@triton.jit
def _backward_kernel(
    DY_ptr, DH_ptr, H_ptr, W_ptr, MEAN_ptr, RSTD_ptr, MEAN_G_ptr, MEAN_GH_ptr, DX_ptr, DW_ptr, DB_ptr,
    DY_row_stride, DH_row_stride, H_row_stride, n_rows, n_cols, tiles_per_strip, offset,
    SUBTRACTS_MEAN: tl.constexpr, HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    WANTS_DW: tl.constexpr, WANTS_DB: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A block of columns of a strip of rows: dx, and the strip's dw = sum(dy h^) and db = sum(dy).

    g = (w + offset) dy;  h^ = (h - mean) rstd;  dx = rstd (g - mean(g) - h^ mean(g h^)) + dh, with mean(g) only if
    SUBTRACTS_MEAN. The means come from `_row_means_kernel` if a row has several blocks.
    """
    strip = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    at = tl.program_id(0) % NUM_BLOCKS * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    first = strip * tiles_per_strip * ROWS
    w = tl.zeros((1, BLOCK_SIZE), tl.float32)
    if HAS_WEIGHT:
        w = (tl.load(W_ptr + at, mask=at < n_cols, other=0.0).to(tl.float32) + offset)[None, :]
    dw = tl.zeros((ROWS, BLOCK_SIZE), tl.float32)
    db = dw
    for row in tl.range(first, tl.minimum(first + tiles_per_strip * ROWS, n_rows), ROWS, num_stages=NUM_STAGES):
        rows = row + tl.arange(0, ROWS)
        there = rows < n_rows
        ok = there[:, None] & (at < n_cols)[None, :]
        dy = tl.load(DY_ptr + (rows * DY_row_stride)[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
        h = tl.load(H_ptr + (rows * H_row_stride)[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD_ptr + rows, mask=there, other=0.0)
        if SUBTRACTS_MEAN:
            h -= tl.load(MEAN_ptr + rows, mask=there, other=0.0)[:, None]
        normed = h * rstd[:, None]
        g = dy
        if HAS_WEIGHT:
            g = dy * w
        if NUM_BLOCKS > 1:
            mean_gh = tl.load(MEAN_GH_ptr + rows, mask=there, other=0.0)
        else:
            mean_gh = tl.sum(g * normed, axis=1) / n_cols
        if SUBTRACTS_MEAN:
            if NUM_BLOCKS > 1:
                g -= tl.load(MEAN_G_ptr + rows, mask=there, other=0.0)[:, None]
            else:
                g -= (tl.sum(g, axis=1) / n_cols)[:, None]
        dx = rstd[:, None] * (g - normed * mean_gh[:, None])
        if HAS_DH:
            dx += tl.load(DH_ptr + (rows * DH_row_stride)[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
        tl.store(DX_ptr + (rows * n_cols)[:, None] + at[None, :], dx.to(DX_ptr.dtype.element_ty), mask=ok)
        if WANTS_DW:
            dw += dy * normed
        if WANTS_DB:
            db += dy
    if WANTS_DW:
        tl.store(DW_ptr + strip * n_cols + at, tl.sum(dw, axis=0), mask=at < n_cols)
    if WANTS_DB:
        tl.store(DB_ptr + strip * n_cols + at, tl.sum(db, axis=0), mask=at < n_cols)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    subtracts_mean: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Launch the forward. x, residual: (n_rows, n_cols) with adjacent columns; weight, bias: (n_cols,).

    Returns y, h = x + residual (x without a residual), the mean of each row of h (None unless subtracts_mean), rstd.
    """
    n_rows, n_cols = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = torch.empty_like(y) if residual is not None else x
    rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if subtracts_mean else None
    start = _forward_launch(
        n_rows, n_cols, x.dtype, x.stride(0), residual.stride(0) if residual is not None else None,
        weight.dtype if weight is not None else None, bias.dtype if bias is not None else None,
        eps, offset, subtracts_mean,
    )  # fmt: skip
    start(x, residual, _adjacent(weight), _adjacent(bias), y, h, mean, rstd)
    return y, h, mean, rstd


@lru_cache(maxsize=MOST_PREPARED)
def _forward_launch(
    n_rows: int,
    n_cols: int,
    dtype: torch.dtype,
    x_stride: int,
    residual_stride: int | None,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    eps: float,
    offset: float,
    subtracts_mean: bool,
) -> PreparedLaunch:
    """The forward of rows of this shape. Strides and dtypes are None for tensors that are not given."""
    block_size = min(next_power_of_2(n_cols), MAX_BLOCK_SIZE)
    rows, num_warps = _tile(block_size, FORWARD_THREAD_NUMEL)
    return PreparedLaunch(
        _forward_kernel, (-(-n_rows // rows),), num_warps=num_warps,
        X_row_stride=x_stride, R_row_stride=residual_stride or 0,
        n_rows=n_rows, n_cols=n_cols, eps=eps, offset=offset, SUBTRACTS_MEAN=subtracts_mean,
        HAS_RESIDUAL=residual_stride is not None, HAS_WEIGHT=weight_dtype is not None, HAS_BIAS=bias_dtype is not None,
        ROWS=rows, BLOCK_SIZE=block_size, NUM_BLOCKS=-(-n_cols // block_size),
    )  # fmt: skip


def backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    offset: float,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the backward. Returns dx, contiguous in the dtype of h, and dweight and dbias, None if not wanted.

    dy, dh, h: (n_rows, n_cols) with adjacent columns; rstd: (n_rows,) float32; mean: like rstd, None if not subtracted.
    """
    n_rows, n_cols = h.shape
    weight = _adjacent(weight)
    dx = torch.empty((n_rows, n_cols), dtype=h.dtype, device=h.device)
    mean_g = mean_gh = None
    if n_cols > MAX_BLOCK_SIZE:
        mean_g, mean_gh = _row_means(dy, h, weight, mean, rstd, offset)
    start, num_strips = _backward_launch(
        n_rows, n_cols, h.device, h.dtype, dy.dtype, weight.dtype if weight is not None else None,
        dy.stride(0), dh.stride(0) if dh is not None else None, h.stride(0), offset, mean is not None,
        dweight_dtype is not None, dbias_dtype is not None,
    )  # fmt: skip
    strips_of_dw = strips_of_db = None
    if dweight_dtype is not None:
        strips_of_dw = torch.empty((num_strips, n_cols), dtype=torch.float32, device=h.device)
    if dbias_dtype is not None:
        strips_of_db = torch.empty((num_strips, n_cols), dtype=torch.float32, device=h.device)
    start(dy, dh, h, weight, mean, rstd, mean_g, mean_gh, dx, strips_of_dw, strips_of_db)
    return dx, _sum_of_strips(strips_of_dw, dweight_dtype), _sum_of_strips(strips_of_db, dbias_dtype)


def _sum_of_strips(strips: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return strips.sum(0).to(dtype) if strips is not None else None


@lru_cache(maxsize=MOST_PREPARED)
def _backward_launch(
    n_rows: int,
    n_cols: int,
    device: torch.device,
    dtype: torch.dtype,
    dy_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    dy_stride: int,
    dh_stride: int | None,
    h_stride: int,
    offset: float,
    subtracts_mean: bool,
    wants_dw: bool,
    wants_db: bool,
) -> tuple[PreparedLaunch, int]:
    """The backward of rows of this shape, and its number of strips. None stands for tensors that are not given."""
    block_size = min(next_power_of_2(n_cols), MAX_BLOCK_SIZE)
    num_blocks = -(-n_cols // block_size)
    rows, num_warps = _tile(block_size, BACKWARD_THREAD_NUMEL)
    num_programs = RESIDENT_WARPS // num_warps * num_processors(device)
    tiles_per_strip = -(-n_rows * num_blocks // (rows * num_programs))
    num_strips = -(-n_rows // (rows * tiles_per_strip))
    loaded_bytes = rows * block_size * dtype.itemsize * (3 if dh_stride is not None else 2)
    start = PreparedLaunch(
        _backward_kernel, (num_strips * num_blocks,), num_warps=num_warps,
        DY_row_stride=dy_stride, DH_row_stride=dh_stride or 0, H_row_stride=h_stride,
        n_rows=n_rows, n_cols=n_cols, tiles_per_strip=tiles_per_strip, offset=offset,
        SUBTRACTS_MEAN=subtracts_mean, HAS_DH=dh_stride is not None, HAS_WEIGHT=weight_dtype is not None,
        WANTS_DW=wants_dw, WANTS_DB=wants_db, ROWS=rows, BLOCK_SIZE=block_size, NUM_BLOCKS=num_blocks,
        NUM_STAGES=2 if loaded_bytes <= EARLY_LOAD_BYTES else 1,
    )  # fmt: skip
    return start, num_strips


def _row_means(
    dy: Tensor, h: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor, offset: float
) -> tuple[Tensor | None, Tensor]:
    """Launch the means of wide rows. Returns mean(g), None if not needed, and mean(g h^), each (n_rows,) float32."""
    n_rows, n_cols = h.shape
    mean_g, mean_gh = torch.empty_like(rstd) if mean is not None else None, torch.empty_like(rstd)
    start = PreparedLaunch(
        _row_means_kernel, (n_rows,), num_warps=_tile(MAX_BLOCK_SIZE, FORWARD_THREAD_NUMEL)[1],
        DY_row_stride=dy.stride(0), H_row_stride=h.stride(0), n_cols=n_cols, offset=offset,
        SUBTRACTS_MEAN=mean is not None, HAS_WEIGHT=weight is not None,
        BLOCK_SIZE=MAX_BLOCK_SIZE, NUM_BLOCKS=-(-n_cols // MAX_BLOCK_SIZE),
    )  # fmt: skip
    start(dy, h, weight, mean, rstd, mean_g, mean_gh)
    return mean_g, mean_gh


def _adjacent(vector: Tensor | None) -> Tensor | None:
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


def _tile(block_size: int, thread_numel: int) -> tuple[int, int]:
    """Choose rows and warps (4 to 16) of a tile with that many columns. More warps would have too few registers."""
    return max(1, 4 * 32 * thread_numel // block_size), min(max(block_size // (32 * thread_numel), 4), 16)
