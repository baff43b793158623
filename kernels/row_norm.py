"""Norms of rows: what the RMS norm and the layer norm have in common, as one differentiable function on Triton.

    h = x + residual                            (h = x without)
    h^ = (h - mean) / sqrt(mean((h - mean)^2) + eps)        mean: of each row of h, or 0 for the RMS norm
    y = h^ * (weight + offset) + bias

`rms_norm.py` and `layer_norm.py` have the references, the derivatives and the sources.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .rows import as_rows


def row_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    subtracts_mean: bool,
) -> tuple[Tensor, Tensor | None]:
    """y and h, None without a residual; both of the shape and dtype of x.

    x, residual: (..., n) of one dtype, with elements, where Triton can run; weight, bias: (n,) or None.
    """
    return _RowNorm.apply(x, residual, weight, bias, eps, offset, subtracts_mean)  # type: ignore[no-untyped-call, no-any-return]


def check_residual(kernel: str, x: Tensor, residual: Tensor) -> None:
    """Raises ValueError unless the residual has the shape and dtype of x."""
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"{kernel}: expected residual like x, {tuple(x.shape)} {x.dtype}, found {tuple(residual.shape)} "
            f"{residual.dtype}"
        )


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        offset: float,
        subtracts_mean: bool,
    ) -> tuple[Tensor, Tensor | None]:
        from .triton import row_norm as triton_form

        residual_rows = as_rows(residual) if residual is not None else None
        y, h, mean, rstd = triton_form.forward(as_rows(x), residual_rows, weight, bias, eps, offset, subtracts_mean)
        ctx.save_for_backward(h, weight, mean, rstd)
        _, ctx.needs_residual, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        ctx.dweight_dtype = weight.dtype if weight is not None and needs_weight else None
        ctx.dbias_dtype = bias.dtype if bias is not None and needs_bias else None
        ctx.offset = offset
        ctx.set_materialize_grads(False)  # a sum that nobody uses then costs no read of zeros
        return y.view(x.shape), h.view(x.shape) if residual is not None else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        from .triton import row_norm as triton_form

        h, weight, mean, rstd = ctx.saved_tensors
        if dy is None:
            return dh, dh, None, None, None, None, None
        dh_rows = as_rows(dh) if dh is not None else None
        dx, dweight, dbias = triton_form.backward(
            as_rows(dy), dh_rows, h, weight, mean, rstd, ctx.offset, ctx.dweight_dtype, ctx.dbias_dtype
        )
        dx = dx.view(dy.shape)
        return dx, dx if ctx.needs_residual else None, dweight, dbias, None, None, None
