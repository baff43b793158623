"""RMS norm of rows, alone or fused with the addition of a residual.

    h = x + residual                                        (add_rms_norm; else h = x)
    h^ = h / sqrt(mean(h^2) + eps)                          mean: of each row
    y = h^ * (weight + offset)

Computed in float32 and rounded once. Backward, with rstd = 1 / sqrt(mean(h^2) + eps) and g = (weight + offset) dy:

    dx = rstd (g - h^ mean(g h^)) + dh
    dweight = sum over rows of dy h^

Saved for backward: h, which the next layers hold anyway, and a float32 per row. offset 1 is Gemma's form, in which
weights start at 0. Source: arXiv 1910.07467, section 3. torch's layer norm is a single kernel already.
Under torch.autocast the result has the dtype of x, as in torch on a CPU; on a GPU torch's norms cast x to float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .dispatch import (
    MOST_PREPARED,
    Backend,
    Form,
    direct_apply,
    form_of,
    form_uses_triton,
    once_differentiable,
    operators,
    triton_form,
)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, backend: Backend = "auto"
) -> Tensor:
    """Compute y, of the shape and dtype of x. x: (..., n); weight: (n,), or None for ones.

    Raises ValueError if shapes do not fit together, or the backend is not possible.
    """
    return _norm("rms_norm", x, None, weight, eps, offset, backend)[0]


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
    return _norm("add_rms_norm", x, residual, weight, eps, offset, backend)


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0) -> Tensor:
    """Compute the RMS norm in eager torch; float64 stays float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.to(wide.dtype) + offset)
    return y.to(x.dtype)


def _norm(
    kernel: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Compute y, and h = x + residual (x without a residual)."""
    forms = (
        form_of(x),
        form_of(residual) if residual is not None else None,
        form_of(weight) if weight is not None else None,
    )
    if is_compiling():
        _check(kernel, *forms)
        launches = None
        if backend != "reference":
            y, h, _ = operators().rms_norm(x, residual, weight, eps, offset, backend)
            return y, x if residual is None else h
    else:
        launches = launches_of(kernel, *forms, eps, offset, backend)
    if launches is not None:
        if residual is None:
            return _apply(x, None, weight, launches), x
        return _apply(x, residual, weight, launches)  # type: ignore[no-any-return]
    h = x if residual is None else x + residual
    return rms_norm_reference(h, weight, eps, offset=offset), h


@lru_cache(maxsize=MOST_PREPARED)
def launches_of(
    kernel: str,
    x: Form,
    residual: Form | None,
    weight: Form | None,
    eps: float,
    offset: float,
    backend: Backend,
) -> Any:
    """Check the tensors, and prepare the launches of `triton/row_norm.py`; None if the reference is to run."""
    _check(kernel, x, residual, weight)
    if not form_uses_triton(backend, kernel, x, residual, weight) or not x[0].numel():
        return None
    return triton_form("row_norm").RmsNorm(x, residual, weight, float(eps), float(offset))


def _check(kernel: str, x: Form, residual: Form | None, weight: Form | None) -> None:
    shape, _, dtype, _ = x
    if not shape or not dtype.is_floating_point:
        raise ValueError(
            f"{kernel}: expected a floating-point x of at least one dimension, found {tuple(shape)} {dtype}"
        )
    if weight is not None and weight[0] != shape[-1:]:
        raise ValueError(
            f"{kernel}: expected weight of shape ({shape[-1]},), the last dimension of x, {tuple(shape)}; found "
            f"{tuple(weight[0])}"
        )
    if residual is not None and (residual[0] != shape or residual[2] != dtype):
        raise ValueError(
            f"{kernel}: expected residual like x, {tuple(shape)} {dtype}, found {tuple(residual[0])} {residual[2]}"
        )


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, launches: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, h, rstd = launches.forward(x, residual, weight)
        ctx.save_for_backward(h, weight, rstd)
        ctx.launches = launches
        if residual is None:
            return y  # type: ignore[no-any-return]
        ctx.set_materialize_grads(False)  # if y or h is not used, backward reads no zeros
        return y, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dh, dh, None, None
        h, weight, rstd = ctx.saved_tensors
        _, needs_residual, needs_weight, _ = ctx.needs_input_grad
        dx, dweight = ctx.launches.backward(dy, dh, h, weight, rstd, needs_weight)
        # The two gradients share a tensor. Autograd adds in place only to a tensor without further references.
        return dx, dx if needs_residual else None, dweight, None


_apply = direct_apply(_RmsNorm)
