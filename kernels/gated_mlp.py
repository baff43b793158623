"""SwiGLU and GeGLU, the activation of a gated MLP, on two tensors or on the halves of a packed tensor.

    y = activation(gate) * up

    swiglu:                 silu(x) = x sigmoid(x)
    geglu, "none":          gelu(x) = x (1 + erf(x / sqrt(2))) / 2
    geglu, "tanh":          x (1 + tanh(z)) / 2 = x sigmoid(2 z)        z = sqrt(2 / pi) (x + 0.044715 x^3)

Computed in float32 and rounded once (eager torch also rounds the activation). Backward:

    dgate = dy up activation'(gate)         dup = dy activation(gate)

Saved for backward: gate and up; the activation is recomputed. Source: arXiv 2002.05202, equation 6; arXiv 1606.08415.
Under torch.autocast the result has the dtype of the inputs, as with torch's operations.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

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

Activation = Literal["silu", "gelu", "gelu_tanh"]


def swiglu(gate: Tensor, up: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Compute silu(gate) * up. gate, up: (..., n) with the same shape and dtype, which the result has too.

    Rows need not be adjacent, as in the halves of a packed tensor. Raises ValueError if gate and up do not fit
    together, or the backend is not possible.
    """
    return _gated("swiglu", gate, up, "silu", backend)


def swiglu_packed(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Compute silu(gate) * up, (..., n), of x = [gate, up], (..., 2 n). The gradient is a single tensor like x.

    Raises ValueError for an odd number of columns, or if the backend is not possible.
    """
    return _gated("swiglu_packed", x, None, "silu", backend)


def geglu(
    gate: Tensor, up: Tensor, *, approximate: Literal["tanh", "none"] = "tanh", backend: Backend = "auto"
) -> Tensor:
    """Compute gelu(gate) * up. approximate: as in torch's gelu. Everything else is as in `swiglu`."""
    return _gated("geglu", gate, up, _gelu("geglu", approximate), backend)


def geglu_packed(x: Tensor, *, approximate: Literal["tanh", "none"] = "tanh", backend: Backend = "auto") -> Tensor:
    """Compute gelu(gate) * up of x = [gate, up]. Everything else is as in `swiglu_packed`."""
    return _gated("geglu_packed", x, None, _gelu("geglu_packed", approximate), backend)


def gated_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Compute the formula in eager torch; float64 stays float64."""
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    if activation == "silu":
        activated = F.silu(wide)
    else:
        activated = F.gelu(wide, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (activated * up.to(wide.dtype)).to(gate.dtype)


def _gated(kernel: str, x: Tensor, up: Tensor | None, activation: Activation, backend: Backend) -> Tensor:
    """Compute y of gate x and up, or of the halves of x if up is None."""
    of_x, of_up = form_of(x), form_of(up) if up is not None else None
    launches = None
    if is_compiling():
        _check(kernel, of_x, of_up)
        if backend != "reference":
            return operators().gated_mlp(x, up, activation, backend)  # type: ignore[no-any-return]
    else:
        launches = launches_of(kernel, of_x, of_up, activation, backend)
    if launches is not None:
        return _apply(x, up, launches)  # type: ignore[no-any-return]
    gate, up = (x, up) if up is not None else x.chunk(2, dim=-1)
    return gated_reference(gate, up, activation)


@lru_cache(maxsize=MOST_PREPARED)
def launches_of(kernel: str, x: Form, up: Form | None, activation: Activation, backend: Backend) -> Any:
    """Check the tensors, and prepare the launches of `triton/gated_mlp.py`; None if the reference is to run."""
    _check(kernel, x, up)
    if not form_uses_triton(backend, kernel, x, up) or not x[0].numel():
        return None
    return triton_form("gated_mlp").GatedMlp(x, up, activation)


def _check(kernel: str, x: Form, up: Form | None) -> None:
    shape, _, dtype, _ = x
    if not shape or not dtype.is_floating_point:
        raise ValueError(
            f"{kernel}: expected a floating-point {'x' if up is None else 'gate'} of at least one dimension, found "
            f"{tuple(shape)} {dtype}"
        )
    if up is None and shape[-1] % 2:
        raise ValueError(
            f"{kernel}: expected an even last dimension of x, gate and up side by side; found {tuple(shape)}"
        )
    if up is not None and (up[0] != shape or up[2] != dtype):
        raise ValueError(f"{kernel}: expected up like gate, {tuple(shape)} {dtype}, found {tuple(up[0])} {up[2]}")


def _gelu(kernel: str, approximate: str) -> Activation:
    if approximate not in ("tanh", "none"):
        raise ValueError(f'{kernel}: expected approximate to be "tanh" or "none", found "{approximate}"')
    return "gelu_tanh" if approximate == "tanh" else "gelu"


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor | None, launches: Any) -> Tensor:
        ctx.save_for_backward(x, up)
        ctx.launches = launches
        return launches.forward(x, up)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.launches.backward(dy, *ctx.saved_tensors), None


_apply = direct_apply(_GatedMlp)
