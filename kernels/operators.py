"""The fused kernels of a block as operators of torch.library, so that a compiler sees a node and traces no launch.

    lowtide::rms_norm        lowtide::rms_norm_backward        of row_norm.py
    lowtide::gated_mlp       lowtide::gated_mlp_backward       of gated_mlp.py
    lowtide::rotary          its own backward, transposed      of rotary.py

Only compiled code comes here: in eager mode an autograd.Function costs the host less than an operator. Each operator
chooses its form when it runs, as the eager kernel does. With backend "reference" the compiler traces the formula.
An operator may return no alias of its inputs, so a tensor that a kernel does not need is an empty one.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd, register_fake
from torch.nn import functional as F

from . import gated_mlp as gated_mlp_kernel, rotary as rotary_kernel, row_norm
from .dispatch import form_of

LOWTIDE = torch.ops.lowtide
MaybeTensor = Optional[Tensor]  # noqa: UP045  # the form from which torch.library reads a schema


@torch.compiler.disable  # type: ignore[untyped-decorator]
def untraced(function: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Return function(*args, **given). A compiler ends its graph before the call.

    For kernels that are no operators, since they may write over their inputs.
    """
    return function(*args, **given)


@custom_op("lowtide::rms_norm", mutates_args=())
def rms_norm(
    x: Tensor, residual: MaybeTensor, weight: MaybeTensor, eps: float, offset: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute y, h = x + residual (empty without), and 1 / deviation of each row, (n_rows,) float32."""
    launches = row_norm.launches_of("rms_norm", form_of(x), _form_of(residual), _form_of(weight), eps, offset, backend)
    if launches is not None:
        y, h, rstd = launches.forward(x, residual, weight)
        return y, h if residual is not None else x.new_empty(0), rstd
    total = x if residual is None else (x + residual).contiguous()
    y = row_norm.rms_norm_reference(total, weight, eps, offset=offset).contiguous()
    h = total if residual is not None else x.new_empty(0)
    # No deviations: the backward of this form computes them from h.
    return y, h, x.new_zeros(x.shape[:-1].numel(), dtype=torch.float32)


def _fake_rms_norm(x: Tensor, residual: MaybeTensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = torch.empty_like(y) if residual is not None else x.new_empty(0)
    return y, h, x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


@custom_op("lowtide::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    dy: Tensor,
    dh: MaybeTensor,
    h: Tensor,
    weight: MaybeTensor,
    rstd: Tensor,
    wants_dweight: bool,
    eps: float,
    offset: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Compute dx, which is also the residual's gradient, and dweight (empty if it is not wanted)."""
    launches = row_norm.launches_of("rms_norm", form_of(h), None, _form_of(weight), eps, offset, backend)
    if launches is not None:
        dx, dweight = launches.backward(dy, dh, h, weight, rstd, wants_dweight)
        return dx, _or_empty(dweight, dy)
    wide = torch.promote_types(h.dtype, torch.float32)
    deviation = torch.rsqrt(h.to(wide).square().mean(-1, keepdim=True) + eps)
    normed, g, dweight = h.to(wide) * deviation, dy.to(wide), dy.new_empty(0)
    if weight is not None and wants_dweight:
        dweight = (g * normed).flatten(0, -2).sum(0).to(weight.dtype)
    if weight is not None:
        g = g * (weight.to(wide) + offset)
    dx = (g - normed * (g * normed).mean(-1, keepdim=True)) * deviation
    return (dx if dh is None else dx + dh).to(h.dtype).contiguous(), dweight


def _fake_rms_norm_backward(
    dy: Tensor, dh: MaybeTensor, h: Tensor, weight: MaybeTensor, rstd: Tensor, wants_dweight: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    dweight = torch.empty_like(weight) if weight is not None and wants_dweight else dy.new_empty(0)
    return torch.empty_like(h, memory_format=torch.contiguous_format), dweight


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, *ctx.options = inputs
    _, h, rstd = output
    # Without a residual h is empty, as an operator may not return its input.
    ctx.save_for_backward(x if residual is None else h, weight, rstd)
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)


def _differentiate_rms_norm(ctx: Any, dy: MaybeTensor, dh: MaybeTensor, _: None) -> tuple[Any, ...]:
    h, weight, rstd = ctx.saved_tensors
    if dy is None:
        return dh, dh if ctx.has_residual else None, None, None, None, None
    wants_dweight = weight is not None and ctx.needs_input_grad[2]
    dx, dweight = torch.ops.lowtide.rms_norm_backward(
        dy, dh if ctx.has_residual else None, h, weight, rstd, wants_dweight, *ctx.options
    )
    return dx, dx if ctx.has_residual else None, dweight if wants_dweight else None, None, None, None


@custom_op("lowtide::gated_mlp", mutates_args=())
def gated_mlp(x: Tensor, up: MaybeTensor, activation: str, backend: str) -> Tensor:
    """Compute activation(x) * up; without up, of the halves of x."""
    launches = gated_mlp_kernel.launches_of("gated_mlp", form_of(x), _form_of(up), activation, backend)
    if launches is not None:
        return launches.forward(x, up)  # type: ignore[no-any-return]
    gate, up = (x, up) if up is not None else x.chunk(2, dim=-1)
    return gated_mlp_kernel.gated_reference(gate, up, activation).contiguous()  # type: ignore[arg-type]


def _fake_gated_mlp(x: Tensor, up: MaybeTensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] if up is not None else x.shape[-1] // 2))


@custom_op("lowtide::gated_mlp_backward", mutates_args=())
def gated_mlp_backward(dy: Tensor, x: Tensor, up: MaybeTensor, activation: str, backend: str) -> tuple[Tensor, Tensor]:
    """Compute dx and dup (empty without up)."""
    launches = gated_mlp_kernel.launches_of("gated_mlp", form_of(x), _form_of(up), activation, backend)
    if launches is not None:
        dx, dup = launches.backward(dy, x, up)
        return dx, _or_empty(dup, dy)
    gate, factor = (x, up) if up is not None else x.chunk(2, dim=-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, factor, dy = gate.to(wide), factor.to(wide), dy.to(wide)
    if activation == "silu":
        activated, dgate = F.silu(gate), torch.ops.aten.silu_backward(dy * factor, gate)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        activated = F.gelu(gate, approximate=approximate)
        dgate = torch.ops.aten.gelu_backward(dy * factor, gate, approximate=approximate)
    # Autograd is off inside an operator, so the derivative is a formula and no graph of the forward.
    dgate, dup = dgate.to(x.dtype), (dy * activated).to(x.dtype)
    return (
        (dgate.contiguous(), dup.contiguous())
        if up is not None
        else (torch.cat((dgate, dup), dim=-1), dgate.new_empty(0))
    )


def _fake_gated_mlp_backward(dy: Tensor, x: Tensor, up: MaybeTensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape) if up is not None else dy.new_empty(0)


def _save_gated_mlp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, up, *ctx.options = inputs
    ctx.save_for_backward(x, up)


def _differentiate_gated_mlp(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, up = ctx.saved_tensors
    dx, dup = torch.ops.lowtide.gated_mlp_backward(dy, x, up, *ctx.options)
    return dx, dup if up is not None else None, None, None


@custom_op("lowtide::rotary", mutates_args=())
def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """Rotate q and k, with the strides of empty_like. transposed: the gradient's rotation."""
    launches = rotary_kernel.launches_of(*map(form_of, (q, k, cos, sin)), interleaved, backend)
    if launches is not None:
        found = launches.rotate(q, k, cos, sin, transposed)
        if q.stride(-1) == k.stride(-1) == 1:  # else the kernel has rotated contiguous copies
            return found  # type: ignore[no-any-return]
    else:
        reference = rotary_kernel.rotary_reference
        found = [reference(x, cos, sin, interleaved=interleaved, transposed=transposed) for x in (q, k)]
    # Compiled code relies on the strides that `_fake_rotary` gives, so the copy has the same.
    rotated_q, rotated_k = (torch.empty_like(like).copy_(x) for x, like in zip(found, (q, k), strict=True))
    return rotated_q, rotated_k


def _fake_rotary(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _save_rotary(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, cos, sin, ctx.interleaved, ctx.transposed, ctx.backend = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate_rotary(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
    options = ctx.interleaved, not ctx.transposed, ctx.backend
    return *torch.ops.lowtide.rotary(dq, dk, *ctx.saved_tensors, *options), *(None,) * 5


register_fake("lowtide::rms_norm", _fake_rms_norm)
register_fake("lowtide::rms_norm_backward", _fake_rms_norm_backward)
register_fake("lowtide::gated_mlp", _fake_gated_mlp)
register_fake("lowtide::gated_mlp_backward", _fake_gated_mlp_backward)
register_fake("lowtide::rotary", _fake_rotary)
register_autograd("lowtide::rms_norm", _differentiate_rms_norm, setup_context=_save_rms_norm)
register_autograd("lowtide::gated_mlp", _differentiate_gated_mlp, setup_context=_save_gated_mlp)
register_autograd("lowtide::rotary", _differentiate_rotary, setup_context=_save_rotary)


def _form_of(tensor: MaybeTensor) -> Any:
    return form_of(tensor) if tensor is not None else None


def _or_empty(tensor: MaybeTensor, like: Tensor) -> Tensor:
    return tensor if tensor is not None else like.new_empty(0)
