"""Root-mean-square norm, alone and with the addition of a residual in front of it.

    h = x + residual                                    (add_rms_norm; else h = x)
    y = h / sqrt(mean(h^2) + eps) * (weight + offset)

Computed in float32 and rounded once. Backward, with x^ = h rstd and g = (weight + offset) dy:

    dx = rstd (g - x^ mean(g x^)) + dh          dweight = sum over rows of dy x^

Saved for backward: h, which the next layers keep anyway, and one float32 a row. Source: arXiv 1910.07467, section 3;
offset 1 is Gemma's form, in which weights start at 0.
Under torch.autocast the dtype of x is kept; on a GPU torch's own rms_norm casts x to float32 first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Backend, uses_triton
from .row_norm import check_residual, row_norm
from .rows import check_row_weight


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, backend: Backend = "auto"
) -> Tensor:
    """y, of the shape and dtype of x. x: (..., n); weight: (n,) or None for ones.

    Raises ValueError where shapes do not fit together, or the backend is not possible.
    """
    check_row_weight("rms_norm", x, "weight", weight)
    if not uses_triton(backend, "rms_norm", x, weight) or not x.numel():
        return rms_norm_reference(x, weight, eps, offset=offset)
    return row_norm(x, None, weight, None, eps, offset=offset, subtracts_mean=False)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """y and h = x + residual, which is the residual of the next layer; both of the shape and dtype of x.

    x, residual: (..., n) of one dtype; weight: (n,) or None for ones. Raises ValueError as `rms_norm`.
    """
    check_row_weight("add_rms_norm", x, "weight", weight)
    check_residual("add_rms_norm", x, residual)
    if not uses_triton(backend, "add_rms_norm", x, residual, weight) or not x.numel():
        total = x + residual
        return rms_norm_reference(total, weight, eps, offset=offset), total
    y, h = row_norm(x, residual, weight, None, eps, offset=offset, subtracts_mean=False)
    assert h is not None
    return y, h


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0) -> Tensor:
    """The formula in eager torch; float64 stays float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.to(wide.dtype) + offset)
    return y.to(x.dtype)
