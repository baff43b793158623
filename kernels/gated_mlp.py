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

from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from .dispatch import Backend, as_rows, operators, triton_form, uses_triton

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
    return _gated_packed("swiglu_packed", x, "silu", backend)


def geglu(
    gate: Tensor, up: Tensor, *, approximate: Literal["tanh", "none"] = "tanh", backend: Backend = "auto"
) -> Tensor:
    """Compute gelu(gate) * up. approximate: as in torch's gelu. Everything else is as in `swiglu`."""
    return _gated("geglu", gate, up, _gelu("geglu", approximate), backend)


def geglu_packed(x: Tensor, *, approximate: Literal["tanh", "none"] = "tanh", backend: Backend = "auto") -> Tensor:
    """Compute gelu(gate) * up of x = [gate, up]. Everything else is as in `swiglu_packed`."""
    return _gated_packed("geglu_packed", x, _gelu("geglu_packed", approximate), backend)


def gated_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Compute the formula in eager torch; float64 stays float64."""
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    if activation == "silu":
        activated = F.silu(wide)
    else:
        activated = F.gelu(wide, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (activated * up.to(wide.dtype)).to(gate.dtype)


def _gated(kernel: str, gate: Tensor, up: Tensor, activation: Activation, backend: Backend) -> Tensor:
    _check_floating(kernel, "gate", gate)
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise ValueError(
            f"{kernel}: expected up like gate, {tuple(gate.shape)} {gate.dtype}, found {tuple(up.shape)} {up.dtype}"
        )
    if is_compiling() and backend != "reference":
        return operators().gated_mlp(gate, up, activation, backend)  # type: ignore[no-any-return]
    if not uses_triton(backend, kernel, gate, up) or not gate.numel():
        return gated_reference(gate, up, activation)
    return _GatedMlp.apply(gate, up, activation)  # type: ignore[no-untyped-call, no-any-return]


def _gated_packed(kernel: str, x: Tensor, activation: Activation, backend: Backend) -> Tensor:
    _check_floating(kernel, "x", x)
    if x.shape[-1] % 2:
        raise ValueError(
            f"{kernel}: expected an even last dimension of x, gate and up side by side; found {tuple(x.shape)}"
        )
    if is_compiling() and backend != "reference":
        return operators().gated_mlp(x, None, activation, backend)  # type: ignore[no-any-return]
    if not uses_triton(backend, kernel, x) or not x.numel():
        gate, up = x.chunk(2, dim=-1)
        return gated_reference(gate, up, activation)
    return _GatedMlp.apply(x, None, activation)  # type: ignore[no-untyped-call, no-any-return]


def _check_floating(kernel: str, name: str, x: Tensor) -> None:
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(
            f"{kernel}: expected a floating-point {name} of at least one dimension, found {tuple(x.shape)} {x.dtype}"
        )


def _gelu(kernel: str, approximate: str) -> Activation:
    if approximate not in ("tanh", "none"):
        raise ValueError(f'{kernel}: expected approximate to be "tanh" or "none", found "{approximate}"')
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def gate_and_up(x: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gate and up as rows, views if strides allow it: x and up, or the halves of x if up is None."""
    rows = as_rows(x)
    if up is not None:
        return rows, as_rows(up)
    n_cols = rows.shape[-1] // 2
    return rows[:, :n_cols], rows[:, n_cols:]


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(x, up)
        ctx.activation = activation
        y: Tensor = triton_form("gated_mlp").forward(*gate_and_up(x, up), activation)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, up = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dup = torch.empty_like(dx) if up is not None else None
        triton_form("gated_mlp").backward(as_rows(dy), *gate_and_up(x, up), *gate_and_up(dx, dup), ctx.activation)
        return dx, dup, None
