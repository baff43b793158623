"""Layer norm, alone and with the addition of a residual in front of it.

    h = x + residual                                    (add_layer_norm; else h = x)
    y = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps) * weight + bias

Computed in float32 and rounded once. Backward, with h^ = (h - mean) rstd and g = weight dy:

    dx = rstd (g - mean(g) - h^ mean(g h^)) + dh
    dweight = sum over rows of dy h^                    dbias = sum over rows of dy

Saved for backward: h, which the next layers keep anyway, and two float32 a row. Source: arXiv 1607.06450, section 3.
Under torch.autocast the dtype of x is kept, as torch does on a CPU; on a GPU torch casts x to float32 first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import Backend, uses_triton
from .rows import as_rows, check_row_weight


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5, *, backend: Backend = "auto"
) -> Tensor:
    """y, of the shape and dtype of x. x: (..., n); weight: (n,) or None for ones; bias: (n,) or None for zeros.

    Raises ValueError where shapes do not fit together, or the backend is not possible.
    """
    check_row_weight("layer_norm", x, "weight", weight)
    check_row_weight("layer_norm", x, "bias", bias)
    if not uses_triton(backend, "layer_norm", x, weight, bias) or not x.numel():
        return layer_norm_reference(x, weight, bias, eps)
    y, _ = _LayerNorm.apply(x, None, weight, bias, eps)  # type: ignore[no-untyped-call]
    return y  # type: ignore[no-any-return]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """y and h = x + residual, which is the residual of the next layer; both of the shape and dtype of x.

    x, residual: (..., n) of one dtype; weight, bias: (n,) or None. Raises ValueError as `layer_norm`.
    """
    check_row_weight("add_layer_norm", x, "weight", weight)
    check_row_weight("add_layer_norm", x, "bias", bias)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"add_layer_norm: expected residual like x, {tuple(x.shape)} {x.dtype}, found {tuple(residual.shape)} "
            f"{residual.dtype}"
        )
    if not uses_triton(backend, "add_layer_norm", x, residual, weight, bias) or not x.numel():
        h = x + residual
        return layer_norm_reference(h, weight, bias, eps), h
    return _LayerNorm.apply(x, residual, weight, bias, eps)  # type: ignore[no-untyped-call, no-any-return]


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The formula in eager torch; float64 stays float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = wide - wide.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    return y.to(x.dtype)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        from .triton import layer_norm as triton_form

        residual_rows = as_rows(residual) if residual is not None else None
        y, h, mean, rstd = triton_form.forward(as_rows(x), residual_rows, weight, bias, eps)
        ctx.save_for_backward(h, weight, mean, rstd)
        ctx.bias_dtype = bias.dtype if bias is not None else None
        ctx.has_residual = residual is not None
        ctx.set_materialize_grads(False)  # a sum that nobody uses then costs no read of zeros
        return y.view(x.shape), h.view(x.shape) if residual is not None else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        from .triton import layer_norm as triton_form

        h, weight, mean, rstd = ctx.saved_tensors
        if dy is None:
            return dh, dh, None, None, None
        dh_rows = as_rows(dh) if dh is not None else None
        dx, dweight, dbias = triton_form.backward(as_rows(dy), dh_rows, h, weight, ctx.bias_dtype, mean, rstd)
        dx = dx.view(dy.shape)
        return dx, dx if ctx.has_residual else None, dweight, dbias, None
