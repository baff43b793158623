"""Root-mean-square norm, alone and with the addition of a residual in front of it.

    h = x + residual                                    (add_rms_norm; else h = x)
    y = h / sqrt(mean(h^2) + eps) * (weight + offset)

Computed in float32 and rounded once. Backward, with x^ = h rstd and g = (weight + offset) dy:

    dx = rstd (g - x^ mean(g x^)) + dh          dweight = sum over rows of dy x^

Saved for backward: h, which the next layers keep anyway, and one float32 a row. Source: arXiv 1910.07467, section 3;
offset 1 is Gemma's form, in which weights start at 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import Backend, uses_triton
from .rows import as_rows, check_row_weight


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, backend: Backend = "auto"
) -> Tensor:
    """y, of the shape and dtype of x. x: (..., n); weight: (n,) or None for ones.

    Raises ValueError where shapes do not fit together, or the backend is not possible.
    """
    check_row_weight("rms_norm", x, "weight", weight)
    if not uses_triton(backend, "rms_norm", x, weight) or not x.numel():
        return rms_norm_reference(x, weight, eps, offset=offset)
    y, _ = _RmsNorm.apply(x, None, weight, eps, offset)  # type: ignore[no-untyped-call]
    return y  # type: ignore[no-any-return]


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
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"add_rms_norm: expected residual like x, {tuple(x.shape)} {x.dtype}, found {tuple(residual.shape)} "
            f"{residual.dtype}"
        )
    if not uses_triton(backend, "add_rms_norm", x, residual, weight) or not x.numel():
        h = x + residual
        return rms_norm_reference(h, weight, eps, offset=offset), h
    return _RmsNorm.apply(x, residual, weight, eps, offset)  # type: ignore[no-untyped-call, no-any-return]


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0) -> Tensor:
    """The formula in eager torch; float64 stays float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.to(wide.dtype) + offset)
    return y.to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
    ) -> tuple[Tensor, Tensor | None]:
        from .triton import rms_norm as triton_form

        residual_rows = as_rows(residual) if residual is not None else None
        y, h, rstd = triton_form.forward(as_rows(x), residual_rows, weight, eps, offset)
        ctx.save_for_backward(h, weight, rstd)
        ctx.offset, ctx.has_residual = offset, residual is not None
        ctx.set_materialize_grads(False)  # a sum that nobody uses then costs no read of zeros
        return y.view(x.shape), h.view(x.shape) if residual is not None else None

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        from .triton import rms_norm as triton_form

        h, weight, rstd = ctx.saved_tensors
        if dy is None:
            return dh, dh, None, None, None
        dh_rows = as_rows(dh) if dh is not None else None
        dx, dweight = triton_form.backward(as_rows(dy), dh_rows, h, weight, rstd, ctx.offset)
        dx = dx.view(dy.shape)
        return dx, dx if ctx.has_residual else None, dweight, None, None
