"""Rotary position embedding: rotate pairs of a head's elements of q and k by the angle of their position.

    y = x * cos + rotate(x) * sin           on the first rotary_dim elements; the remaining elements do not change

    by halves:       rotate(x) = [-x_2, x_1]                        of the halves x_1, x_2
    interleaved:     rotate(x) = [-x_1, x_0, -x_3, x_2, ...]        neighbours are pairs

Halves are Hugging Face's `rotate_half` (Llama and most models), neighbours are GPT-J's. In both, column j of cos and
sin belongs to element j of a head. Computed in float32 and rounded once. Backward rotates in the opposite direction:

    dx = dy * cos - rotate(dy * sin)

For tables that are equal within a pair, this is the same kernel with -sin. Saved for backward: cos and sin.
Source: arXiv 2104.09864, section 3.4. Under torch.autocast the result has the dtype of q and k; eager torch returns
float32 if cos is float32.
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


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Rotate q and k into new tensors with the same shapes, dtype and strides.

    q: (batch, heads, seq, head_dim) with any strides; k: like q, with any number of heads; cos, sin: (batch or 1, seq,
    rotary_dim), float32 or the dtype of q, rotary_dim even and at most head_dim. cos and sin are constants.
    Raises ValueError if shapes and dtypes do not fit together, if cos or sin requires a gradient, or if the backend is
    not possible.
    """
    forms = form_of(q), form_of(k), form_of(cos), form_of(sin)
    # Backward would silently give the tables no gradient.
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        name = "cos" if cos.requires_grad else "sin"
        raise ValueError(
            f"rotary_embedding: expected {name} without requires_grad, because it gets no gradient; pass "
            f"{name}.detach(), or compute learned angles in plain torch"
        )
    launches = None
    if is_compiling():
        _check(*forms)
        if backend != "reference":
            return operators().rotary(q, k, cos, sin, interleaved, False, backend)  # type: ignore[no-any-return]
    else:
        launches = launches_of(*forms, interleaved, backend)
    if launches is not None:
        return _apply(q, k, cos, sin, launches)  # type: ignore[no-any-return]
    return tuple(rotary_reference(x, cos, sin, interleaved=interleaved) for x in (q, k))  # type: ignore[return-value]


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, transposed: bool = False) -> Tensor:
    """Rotate a tensor, (batch, heads, seq, head_dim), in eager torch; float64 stays so. transposed: of gradients."""
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    rotary_dim = cos.shape[-1]
    wide, rest = x[..., :rotary_dim].to(wide_dtype), x[..., rotary_dim:]
    cos, sin = cos.unsqueeze(1).to(wide_dtype), sin.unsqueeze(1).to(wide_dtype)
    if transposed:
        y = wide * cos - _rotate_pairs(wide * sin, interleaved)
    else:
        y = wide * cos + _rotate_pairs(wide, interleaved) * sin
    return torch.cat((y.to(x.dtype), rest), dim=-1)


def _rotate_pairs(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@lru_cache(maxsize=MOST_PREPARED)
def launches_of(q: Form, k: Form, cos: Form, sin: Form, interleaved: bool, backend: Backend) -> Any:
    """Check the tensors, and prepare the launches of `triton/rotary.py`; None if the reference is to run."""
    _check(q, k, cos, sin)
    is_empty = not all(form[0].numel() for form in (q, k, cos))
    if not form_uses_triton(backend, "rotary_embedding", q, k, cos, sin) or is_empty:
        return None
    return triton_form("rotary").Rotation(interleaved)


def _check(q: Form, k: Form, cos: Form, sin: Form) -> None:
    shape, _, dtype, _ = q
    if len(shape) != 4 or not dtype.is_floating_point:
        raise ValueError(
            f"rotary_embedding: expected a floating-point q, (batch, heads, seq, head_dim), found {tuple(shape)} "
            f"{dtype}"
        )
    batch, _, seq, head_dim = shape
    if len(k[0]) != 4 or (k[0][0], *k[0][2:]) != (batch, seq, head_dim) or k[2] != dtype:
        raise ValueError(
            f"rotary_embedding: expected k of shape ({batch}, heads, {seq}, {head_dim}) and {dtype}, as q is; found "
            f"{tuple(k[0])} {k[2]}"
        )
    for name, (table, _, table_dtype, _) in (("cos", cos), ("sin", sin)):
        if len(table) != 3 or table[0] not in (1, batch) or table[1] != seq or table != cos[0]:
            raise ValueError(
                f"rotary_embedding: expected cos and sin of the same shape, ({batch} or 1, {seq}, rotary_dim), found "
                f"{tuple(cos[0])} and {tuple(sin[0])}"
            )
        if table[-1] % 2 or table[-1] > head_dim:
            raise ValueError(
                f"rotary_embedding: expected rotary_dim, the last dimension of {name}, to be even and at most "
                f"head_dim ({head_dim}), found {table[-1]}"
            )
        if table_dtype not in (torch.float32, dtype):
            raise ValueError(
                f"rotary_embedding: expected {name} in torch.float32 or {dtype}, the dtype of q, found {table_dtype}"
            )


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, launches: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.launches = launches
        return launches.rotate(q, k, cos, sin, False)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.launches.rotate(dq, dk, *ctx.saved_tensors, True), None, None, None


_apply = direct_apply(_Rotary)
