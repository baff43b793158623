"""RMS norm and layer norm of rows, alone or fused with the addition of a residual.

    h = x + residual                                        (add_rms_norm, add_layer_norm; else h = x)
    h^ = (h - mean) / sqrt(mean((h - mean)^2) + eps)        mean: of each row of h, or 0 for the RMS norm
    y = h^ * (weight + offset) + bias                       the RMS norm has no bias, the layer norm no offset

Computed in float32 and rounded once. Backward, with h^ = (h - mean) rstd and g = (weight + offset) dy:

    dx = rstd (g - mean(g) - h^ mean(g h^)) + dh            without mean(g) for the RMS norm
    dweight = sum over rows of dy h^                        dbias = sum over rows of dy

Saved for backward: h, which the next layers hold anyway, and a float32 per row, two for a layer norm. offset 1 is
Gemma's form, in which weights start at 0. Sources: arXiv 1910.07467, section 3; arXiv 1607.06450, section 3.
Under torch.autocast the result has the dtype of x, as in torch on a CPU; on a GPU torch's norms cast x to float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .dispatch import Backend, as_rows, check_row_weight, operators, triton_form, uses_triton


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, backend: Backend = "auto"
) -> Tensor:
    """Compute y, of the shape and dtype of x. x: (..., n); weight: (n,), or None for ones.

    Raises ValueError if shapes do not fit together, or the backend is not possible.
    """
    return _norm("rms_norm", x, None, weight, None, eps, offset, backend, subtracts_mean=False)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute y, and h = x + residual, the residual of the next layer, both of the shape and dtype of x.

    x, residual: (..., n) of the same dtype; weight: (n,), or None for ones. Raises ValueError as `rms_norm` does.
    """
    return _norm("add_rms_norm", x, residual, weight, None, eps, offset, backend, subtracts_mean=False)


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0) -> Tensor:
    """Compute the RMS norm in eager torch; float64 stays float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.to(wide.dtype) + offset)
    return y.to(x.dtype)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5, *, backend: Backend = "auto"
) -> Tensor:
    """Compute y, of the shape and dtype of x. x: (..., n); weight: (n,), or None for ones; bias: (n,), or None.

    Raises ValueError if shapes do not fit together, or the backend is not possible.
    """
    return _norm("layer_norm", x, None, weight, bias, eps, 0.0, backend, subtracts_mean=True)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute y, and h = x + residual, the residual of the next layer, both of the shape and dtype of x.

    x, residual: (..., n) of the same dtype; weight, bias: (n,) or None. Raises ValueError as `layer_norm` does.
    """
    return _norm("add_layer_norm", x, residual, weight, bias, eps, 0.0, backend, subtracts_mean=True)


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute the layer norm in eager torch; float64 stays float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = wide - wide.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    return y.to(x.dtype)


def _norm(
    kernel: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    backend: Backend,
    *,
    subtracts_mean: bool,
) -> tuple[Tensor, Tensor]:
    """Check the inputs, and compute y, and h = x + residual (x without a residual)."""
    check_row_weight(kernel, x, "weight", weight)
    if bias is not None:
        check_row_weight(kernel, x, "bias", bias)
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"{kernel}: expected residual like x, {tuple(x.shape)} {x.dtype}, found {tuple(residual.shape)} "
            f"{residual.dtype}"
        )
    if is_compiling() and backend != "reference":
        y, h, *_ = operators().row_norm(x, residual, weight, bias, eps, offset, subtracts_mean, backend)
        return y, x if residual is None else h
    if uses_triton(backend, kernel, x, residual, weight, bias) and x.numel():
        y, h = _RowNorm.apply(x, residual, weight, bias, (eps, offset, subtracts_mean))  # type: ignore[no-untyped-call]
        return y, x if h is None else h
    h = x if residual is None else x + residual
    if subtracts_mean:
        return layer_norm_reference(h, weight, bias, eps), h
    return rms_norm_reference(h, weight, eps, offset=offset), h


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        options: tuple[float, float, bool],  # eps, offset, subtracts_mean: autograd inspects every argument
    ) -> tuple[Tensor, Tensor | None]:
        residual_rows = as_rows(residual) if residual is not None else None
        y, h, mean, rstd = triton_form("row_norm").forward(as_rows(x), residual_rows, weight, bias, *options)
        ctx.save_for_backward(h, weight, mean, rstd)
        _, ctx.needs_residual, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        ctx.dweight_dtype = weight.dtype if weight is not None and needs_weight else None
        ctx.dbias_dtype = bias.dtype if bias is not None and needs_bias else None
        ctx.offset = options[1]
        ctx.set_materialize_grads(False)  # if h is not used, backward reads no zeros
        return y.view(x.shape), h.view(x.shape) if residual is not None else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        h, weight, mean, rstd = ctx.saved_tensors
        if dy is None:
            return dh, dh, None, None, None
        dh_rows = as_rows(dh) if dh is not None else None
        dx, dweight, dbias = triton_form("row_norm").backward(
            as_rows(dy), dh_rows, h, weight, mean, rstd, ctx.offset, ctx.dweight_dtype, ctx.dbias_dtype
        )
        dx = dx.view(dy.shape)
        return dx, dx if ctx.needs_residual else None, dweight, dbias, None
