"""Tensors as rows: what kernels over the last dimension take and check."""

from __future__ import annotations

from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """x, (..., n), as (rows, n) with adjacent columns; a view of x where its strides allow it."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((_num_rows(x), x.shape[-1]))
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()


def check_row_weight(kernel: str, x: Tensor, name: str, weight: Tensor | None) -> None:
    """Raises ValueError unless x is a floating-point (..., n) and weight (n,), or None."""
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(
            f"{kernel}: expected a floating-point x of at least one dimension, found {tuple(x.shape)} {x.dtype}"
        )
    if weight is not None and tuple(weight.shape) != (x.shape[-1],):
        raise ValueError(
            f"{kernel}: expected {name} of shape ({x.shape[-1]},), the last dimension of x, {tuple(x.shape)}; found "
            f"{tuple(weight.shape)}"
        )


def _num_rows(x: Tensor) -> int:
    count = 1
    for size in x.shape[:-1]:
        count *= size
    return count
