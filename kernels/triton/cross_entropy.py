"""Triton form of `kernels/cross_entropy.py`: a program per row in forward, per block of a row in backward.

[Note: one tensor of statistics] A launch of torch's operators to count labels, to sum and to divide costs the host more
than these operations cost the device. `_reduce_kernel`, one program, does all three in a fixed order. Backward reads
the count from the device's memory. The lse of all rows, their losses and the count are in one tensor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import MOST_PREPARED, Form, contiguous_strides, form_of, row_strides
from .launch import PreparedLaunch, next_power_of_2

if TYPE_CHECKING:
    from ..loss_terms import LossTerms

MAX_FORWARD_BLOCK_SIZE = 2048  # columns of a block; a program loads the next block while it computes on this block
MAX_BACKWARD_BLOCK_SIZE = 4096  # columns of a program
SCALE_BLOCK_SIZE = 4096
REDUCE_BLOCK_SIZE = 2048  # rows


@triton.jit
def _capped(x, at, n_cols, soft_cap, HAS_CAP: tl.constexpr):
    """Compute u and u / soft_cap of a block of a row. x and u are -inf from column n_cols on."""
    u = x.to(tl.float32)
    share = u
    if HAS_CAP:
        share = 2.0 * tl.sigmoid(2.0 / soft_cap * u) - 1.0  # tanh
        u = tl.where(at < n_cols, soft_cap * share, float("-inf"))
    return u, share


@triton.jit
def _scaled_gradient(u, share, at, y, lse, scale, n_cols, label_smoothing, z_loss, HAS_CAP: tl.constexpr):
    """Compute scale (exp(u - lse) (1 + 2 z lse) - s / n - (1 - s) [i = y]) (1 - share^2)."""
    dx = tl.exp(u - lse) * (1.0 + 2.0 * z_loss * lse) - label_smoothing / n_cols
    dx -= tl.where(at == y, 1.0 - label_smoothing, 0.0)
    if HAS_CAP:
        dx *= 1.0 - share * share
    return dx * scale


@triton.jit
def _losses_kernel(
    X_ptr, Y_ptr, LOSS_ptr, LSE_ptr, SCALE_ptr,
    X_row_stride, LOSS_offset, n_cols, n_stored, ignore_index, label_smoothing, z_loss, soft_cap,
    HAS_GRADIENT: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Row: lse = max + log(sum(exp(u - max)));  loss = (1-s) (lse - u_y) + s (lse - mean(u)) + z lse^2;  x = dx.

    LOSS_offset: of the losses in their tensor. [Note: one tensor of statistics]
    """
    row = tl.program_id(0).to(tl.int64)
    X_row_ptr = X_ptr + row * X_row_stride
    cols = tl.arange(0, BLOCK_SIZE)
    y = tl.load(Y_ptr + row)
    if y == ignore_index:
        tl.store(LOSS_ptr + LOSS_offset + row, 0.0)
        tl.store(LSE_ptr + row, 0.0)
        if HAS_GRADIENT:
            for block in range(NUM_BLOCKS):
                at = block * BLOCK_SIZE + cols
                zeros = tl.zeros((BLOCK_SIZE,), X_ptr.dtype.element_ty)
                tl.store(X_row_ptr + at, zeros, mask=at < n_stored)
    else:
        is_known = (y >= 0) & (y < n_cols)
        # This read comes before the barrier of the maximum, and the gradient is written after it.
        u_y = tl.load(X_row_ptr + y, mask=is_known, other=float("nan")).to(tl.float32)
        if HAS_CAP:
            u_y = soft_cap * (2.0 * tl.sigmoid(2.0 / soft_cap * u_y) - 1.0)
        largest = tl.full((), float("-inf"), tl.float32)
        base = tl.full((), 0.0, tl.float32)
        sums = tl.zeros((BLOCK_SIZE,), tl.float32)  # by column: summed over threads once, at the end
        totals = tl.zeros((BLOCK_SIZE,), tl.float32)
        x = tl.load(X_row_ptr + cols, mask=cols < n_stored, other=float("-inf"))
        for block in range(NUM_BLOCKS):
            at = block * BLOCK_SIZE + cols
            u, _ = _capped(x, at, n_cols, soft_cap, HAS_CAP)
            if NUM_BLOCKS > 1:  # load the next block while this block is computed
                x = tl.load(X_row_ptr + at + BLOCK_SIZE, mask=at + BLOCK_SIZE < n_stored, other=float("-inf"))
            previous = largest
            largest = tl.maximum(largest, tl.max(u, axis=0))
            base = tl.where(largest == float("-inf"), 0.0, largest)  # -inf - -inf would be NaN
            sums = sums * tl.exp(previous - base) + tl.exp(u - base)
            if HAS_SMOOTHING:
                totals += tl.where(at < n_cols, u, 0.0)
        lse = base + tl.log(tl.sum(sums, axis=0))
        # NaN in place of an error: [Note: labels out of range] in kernels/cross_entropy.py
        lse = tl.where(is_known, lse, float("nan"))
        loss = lse - u_y
        if HAS_SMOOTHING:
            loss = (1.0 - label_smoothing) * loss + label_smoothing * (lse - tl.sum(totals, axis=0) / n_cols)
        tl.store(LOSS_ptr + LOSS_offset + row, loss + z_loss * lse * lse)
        tl.store(LSE_ptr + row, lse)
        if HAS_GRADIENT:
            scale = tl.load(SCALE_ptr)
            for block in range(NUM_BLOCKS):
                at = block * BLOCK_SIZE + cols
                if NUM_BLOCKS > 1:
                    x = tl.load(X_row_ptr + at, mask=at < n_stored, other=float("-inf"))
                u, share = _capped(x, at, n_cols, soft_cap, HAS_CAP)
                dx = _scaled_gradient(
                    u, share, at, y.to(tl.int32), lse, scale, n_cols, label_smoothing, z_loss, HAS_CAP
                )
                tl.store(X_row_ptr + at, dx.to(X_ptr.dtype.element_ty), mask=at < n_stored)


@triton.jit
def _gradient_kernel(
    X_ptr, Y_ptr, LSE_ptr, SCALE_ptr, DX_ptr,
    X_row_stride, DX_row_stride, SCALE_stride, N_offset,
    n_cols, n_stored, ignore_index, label_smoothing, z_loss, soft_cap,
    HAS_CAP: tl.constexpr, IS_MEAN: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """A block of a row: dx from x and lse; zeros if the label is ignored.

    IS_MEAN: the scale is still to be divided by the number of labels, at N_offset in the tensor of lse.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    DX_row_ptr = DX_ptr + row * DX_row_stride
    y = tl.load(Y_ptr + row)
    if y == ignore_index:
        tl.store(DX_row_ptr + at, tl.zeros((BLOCK_SIZE,), DX_ptr.dtype.element_ty), mask=at < n_stored)
    else:
        lse = tl.load(LSE_ptr + row)
        scale = tl.load(SCALE_ptr + row * SCALE_stride)
        if IS_MEAN:
            # div_rn rounds as torch's division does. Triton's `/` is approximate.
            scale = tl.div_rn(scale, tl.load(LSE_ptr + N_offset))
        x = tl.load(X_ptr + row * X_row_stride + at, mask=at < n_stored, other=float("-inf"))
        u, share = _capped(x, at, n_cols, soft_cap, HAS_CAP)
        dx = _scaled_gradient(u, share, at, y.to(tl.int32), lse, scale, n_cols, label_smoothing, z_loss, HAS_CAP)
        tl.store(DX_row_ptr + at, dx.to(DX_ptr.dtype.element_ty), mask=at < n_stored)


@triton.jit
def _reduce_kernel(
    STATS_ptr, Y_ptr, RESULT_ptr, n_rows, ignore_index, IS_MEAN: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """result = sum of the losses of all rows;  IS_MEAN: n = the labels that are not ignored, result /= n."""
    total = tl.zeros((BLOCK_SIZE,), tl.float32)
    counts = tl.zeros((BLOCK_SIZE,), tl.int32)
    # A single program, so the order of the sum is fixed.
    for first in range(0, n_rows, BLOCK_SIZE):
        at = first + tl.arange(0, BLOCK_SIZE)
        ok = at < n_rows
        total += tl.load(STATS_ptr + n_rows + at, mask=ok, other=0.0)
        if IS_MEAN:
            y = tl.load(Y_ptr + at, mask=ok, other=0)
            counts += (ok & (y != ignore_index)).to(tl.int32)
    result = tl.sum(total, axis=0)
    if IS_MEAN:
        n = tl.sum(counts, axis=0).to(tl.float32)
        tl.store(STATS_ptr + n_rows + n_rows, n)
        # The mean over no labels is NaN, as in torch; the maximum keeps the division valid.
        result = tl.where(n > 0.0, tl.div_rn(result, tl.maximum(n, 1.0)), float("nan"))
    tl.store(RESULT_ptr, result)


@triton.jit
def _scale_kernel(X_ptr, SCALE_ptr, numel, BLOCK_SIZE: tl.constexpr):
    """x *= scale. x is not read if scale is 1."""
    scale = tl.load(SCALE_ptr)
    if scale != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        ok = at < numel
        x = tl.load(X_ptr + at, mask=ok, other=0.0).to(tl.float32) * scale
        tl.store(X_ptr + at, x.to(X_ptr.dtype.element_ty), mask=ok)


class CrossEntropy:
    """The launches for logits and labels of certain forms, and for whatever gradients they get.

    [Note: one tensor of statistics]
    """

    def __init__(self, logits: Form, labels: Form, terms: LossTerms) -> None:
        """logits: (..., n_cols); labels: (...), at least one."""
        shape, _, self._dtype, _ = logits
        self._terms, self._labels_dtype = terms, labels[2]
        self._n_rows, self._n_cols = labels[0].numel(), shape[-1]
        self._is_apart, (row_stride,) = row_strides(logits)
        is_reduced = terms.reduction != "none"
        self._stats_numel = 2 * self._n_rows + 1 if is_reduced else self._n_rows
        self._result_shape = torch.Size() if is_reduced else labels[0]
        self._result_strides = contiguous_strides(self._result_shape)
        block_size = min(next_power_of_2(self._n_cols), MAX_FORWARD_BLOCK_SIZE)
        dtypes = self._dtype, self._labels_dtype, None
        rows = self._n_rows, self._n_cols
        loss_offset = self._n_rows if is_reduced else 0
        self._start = _losses_launch(rows, row_stride, self._n_cols, dtypes, terms, block_size, loss_offset)
        self._reduce: PreparedLaunch | None = None
        if is_reduced:
            block_size = min(next_power_of_2(self._n_rows), REDUCE_BLOCK_SIZE)
            self._reduce = PreparedLaunch(
                _reduce_kernel, (1,), num_warps=_num_warps(block_size), n_rows=self._n_rows,
                ignore_index=terms.ignore_index, IS_MEAN=terms.reduction == "mean", BLOCK_SIZE=block_size,
            )  # fmt: skip
        self._backwards: dict[Any, tuple[bool, bool, PreparedLaunch]] = {}

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result, float32, and the statistics for `backward`, which begin with lse of all rows.

        labels: contiguous.
        """
        if self._is_apart:
            logits = logits.contiguous()
        # new_empty costs the host more than new_empty_strided.
        stats = logits.new_empty_strided((self._stats_numel,), (1,), dtype=torch.float32)
        result = stats.new_empty_strided(self._result_shape, self._result_strides)
        if self._reduce is None:
            self._start(logits, labels, result, stats, None)
        else:
            self._start(logits, labels, stats, stats, None)
            self._reduce(stats, labels, result)
        return result, stats

    def backward(self, dloss: Tensor, logits: Tensor, labels: Tensor, stats: Tensor, overwrites: bool) -> Tensor:
        """Return the gradient of logits; in their memory if `overwrites` is true and each row has memory of its own.

        dloss: of the shape of the result. Logits may have other strides than in forward, as hooks return them.
        """
        if dloss.dim() > 1:
            dloss = dloss.reshape(-1)
        given = logits.stride(), dloss.stride(), overwrites
        prepared = self._backwards.get(given)
        if prepared is None:
            prepared = self._backwards[given] = self._prepare_backward(logits, dloss, overwrites)
        is_apart, is_in_place, start = prepared
        if is_apart:
            logits = dlogits = logits.contiguous()
        elif is_in_place:
            dlogits = logits.detach()
            torch.autograd.graph.increment_version(logits)  # a graph that saved these logits must raise an error
        else:
            dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        start(logits, labels, stats, dloss, dlogits)
        return dlogits

    def _prepare_backward(self, logits: Tensor, dloss: Tensor, overwrites: bool) -> tuple[bool, bool, PreparedLaunch]:
        """Return whether logits are copied, whether the gradient takes their place, and the launch."""
        is_apart, (row_stride,) = row_strides(form_of(logits))
        # Rows of an expanded tensor share memory and cannot hold a gradient each.
        is_in_place = overwrites and (self._n_rows == 1 or row_stride >= self._n_cols)
        strides = row_stride, row_stride if is_in_place else self._n_cols, dloss.stride(0) if dloss.dim() else 0
        dtypes = self._dtype, self._labels_dtype, dloss.dtype, self._dtype
        block_size = min(next_power_of_2(self._n_cols), MAX_BACKWARD_BLOCK_SIZE)
        n_offset = 2 * self._n_rows if self._terms.reduction == "mean" else None
        rows = self._n_rows, self._n_cols
        start = _gradient_launch(rows, strides, self._n_cols, dtypes, self._terms, block_size, n_offset)
        return is_apart, is_in_place, start


def losses(
    logits: Tensor, n_cols: int, labels: Tensor, terms: LossTerms, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launch `losses_of_rows`. logits: (n_rows, n_cols or more) with adjacent columns; labels: (n_rows,), contiguous.

    Columns from n_cols on are read and written: a mask with an odd end would make memory accesses narrow.
    """
    n_rows = logits.shape[0]
    loss, lse = (torch.empty(n_rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if n_rows:
        dtypes = logits.dtype, labels.dtype, scale.dtype if scale is not None else None
        block_size = min(next_power_of_2(logits.shape[1]), MAX_FORWARD_BLOCK_SIZE)
        start = _losses_launch(logits.shape, logits.stride(0), n_cols, dtypes, terms, block_size, 0)
        start(logits, labels, loss, lse, scale)
    return loss, lse


@lru_cache(maxsize=MOST_PREPARED)
def _losses_launch(
    shape: tuple[int, int],
    row_stride: int,
    n_cols: int,
    dtypes: tuple[torch.dtype | None, ...],
    terms: LossTerms,
    block_size: int,
    loss_offset: int,
) -> PreparedLaunch:
    """shape: of the logits. dtypes: of logits, labels and scale (None: there is none)."""
    n_rows, n_stored = shape
    return PreparedLaunch(
        _losses_kernel, (n_rows,), num_warps=_num_warps(block_size),
        X_row_stride=row_stride, LOSS_offset=loss_offset, n_cols=n_cols, n_stored=n_stored, **_terms(terms),
        HAS_GRADIENT=dtypes[2] is not None, HAS_SMOOTHING=terms.label_smoothing != 0.0,
        HAS_CAP=terms.soft_cap is not None, BLOCK_SIZE=block_size, NUM_BLOCKS=-(-n_stored // block_size),
    )  # fmt: skip


def gradient(
    logits: Tensor, n_cols: int, labels: Tensor, lse: Tensor, scale: Tensor, terms: LossTerms, out: Tensor
) -> None:
    """Launch `gradient_of_rows`. out: of the shape of logits, with adjacent columns; scale: () or (n_rows,)."""
    if logits.shape[0]:
        strides = logits.stride(0), out.stride(0), scale.stride(0) if scale.dim() else 0
        dtypes = logits.dtype, labels.dtype, scale.dtype, out.dtype
        block_size = min(next_power_of_2(logits.shape[1]), MAX_BACKWARD_BLOCK_SIZE)
        start = _gradient_launch(logits.shape, strides, n_cols, dtypes, terms, block_size, None)
        start(logits, labels, lse, scale, out)


@lru_cache(maxsize=MOST_PREPARED)
def _gradient_launch(
    shape: tuple[int, int],
    strides: tuple[int, int, int],
    n_cols: int,
    dtypes: tuple[torch.dtype, ...],
    terms: LossTerms,
    block_size: int,
    n_offset: int | None,
) -> PreparedLaunch:
    """shape: of the logits. strides: of the rows of logits, out and scale. dtypes: of logits, labels, scale and out.

    n_offset: of the number of labels, by which the kernel divides the scale; None: it does not.
    """
    n_rows, n_stored = shape
    return PreparedLaunch(
        _gradient_kernel, (n_rows, -(-n_stored // block_size)), num_warps=_num_warps(block_size),
        X_row_stride=strides[0], DX_row_stride=strides[1], SCALE_stride=strides[2], N_offset=n_offset or 0,
        n_cols=n_cols, n_stored=n_stored, **_terms(terms),
        HAS_CAP=terms.soft_cap is not None, IS_MEAN=n_offset is not None, BLOCK_SIZE=block_size,
    )  # fmt: skip


def _terms(terms: LossTerms) -> dict[str, Any]:
    names = ("ignore_index", "label_smoothing", "z_loss", "soft_cap")
    return {name: getattr(terms, name) for name in names}


def scale_(x: Tensor, scale: Tensor) -> None:
    """Compute x *= scale, (), in place without a host wait. If scale is 1, x is not read. x: contiguous."""
    if x.numel():
        _scale_launch(x.numel(), x.dtype, scale.dtype, SCALE_BLOCK_SIZE)(x, scale)


@lru_cache(maxsize=MOST_PREPARED)
def _scale_launch(numel: int, dtype: torch.dtype, scale_dtype: torch.dtype, block_size: int) -> PreparedLaunch:
    return PreparedLaunch(_scale_kernel, (-(-numel // block_size),), num_warps=8, numel=numel, BLOCK_SIZE=block_size)


def _num_warps(block_size: int) -> int:
    """Choose 8 elements per thread and load, and at most 512 threads: more would have too few registers each."""
    return min(max(block_size // 256, 4), 16)
