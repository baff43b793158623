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

import torch
from torch import Tensor

from .dispatch import Backend, uses_triton
from .row_norm import check_residual, row_norm
from .rows import check_row_weight


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
    return row_norm(x, None, weight, bias, eps, subtracts_mean=True)[0]


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
    check_residual("add_layer_norm", x, residual)
    if not uses_triton(backend, "add_layer_norm", x, residual, weight, bias) or not x.numel():
        total = x + residual
        return layer_norm_reference(total, weight, bias, eps), total
    y, h = row_norm(x, residual, weight, bias, eps, subtracts_mean=True)
    assert h is not None
    return y, h


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
