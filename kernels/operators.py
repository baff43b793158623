"""The fused kernels of a block as operators of torch.library, so that a compiler sees a node and traces no launch.

    lowtide::row_norm        lowtide::row_norm_backward        of row_norm.py
    lowtide::gated_mlp       lowtide::gated_mlp_backward       of gated_mlp.py
    lowtide::rotary          its own backward, transposed      of rotary.py

Only compiled code comes here: in eager mode an autograd.Function costs the host less than an operator. Each operator
chooses its form when it runs, as the eager kernel does. With backend "reference" the compiler traces the formula.
An operator may return no alias of its inputs, so a tensor that a kernel does not need is an empty one.
"""

from typing import Any, Optional

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd, register_fake
from torch.nn import functional as F

from .dispatch import as_rows, triton_form, uses_triton
from .gated_mlp import gate_and_up, gated_reference
from .rotary import rotary_reference
from .row_norm import layer_norm_reference, rms_norm_reference

MaybeTensor = Optional[Tensor]  # noqa: UP045  # the form from which torch.library reads a schema


@custom_op("lowtide::row_norm", mutates_args=())
def row_norm(
    x: Tensor,
    residual: MaybeTensor,
    weight: MaybeTensor,
    bias: MaybeTensor,
    eps: float,
    offset: float,
    subtracts_mean: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute y, h = x + residual (empty without), and each row's mean and 1 / deviation, (n_rows,) float32."""
    if _runs_on_triton(backend, "row_norm", x, residual, weight, bias):
        residual_rows = as_rows(residual) if residual is not None else None
        form = triton_form("row_norm")
        y, h, mean, rstd = form.forward(as_rows(x), residual_rows, weight, bias, eps, offset, subtracts_mean)
        mean = torch.zeros_like(rstd) if mean is None else mean
        return y.view(x.shape), h.view(x.shape) if residual is not None else x.new_empty(0), mean, rstd
    total = x if residual is None else (x + residual).contiguous()
    y = _row_norm_formula(total, weight, bias, eps, offset, subtracts_mean).contiguous()
    rows = as_rows(x).shape[0]
    mean, rstd = (torch.zeros(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    return y, total if residual is not None else x.new_empty(0), mean, rstd


def _fake_row_norm(x: Tensor, residual: MaybeTensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = torch.empty_like(y) if residual is not None else x.new_empty(0)
    rows = x.shape[:-1].numel()
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    return y, h, mean, rstd


@custom_op("lowtide::row_norm_backward", mutates_args=())
def row_norm_backward(
    dy: Tensor,
    dh: MaybeTensor,
    h: Tensor,
    weight: MaybeTensor,
    bias: MaybeTensor,
    mean: Tensor,
    rstd: Tensor,
    wants_dweight: bool,
    wants_dbias: bool,
    eps: float,
    offset: float,
    subtracts_mean: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dx, which is also the residual's gradient, and dweight and dbias (empty if they are not wanted)."""
    vectors = weight if wants_dweight else None, bias if wants_dbias else None
    if _runs_on_triton(backend, "row_norm", dy, h, weight, bias):
        dtypes = [vector.dtype if vector is not None else None for vector in vectors]
        dh_rows = as_rows(dh) if dh is not None else None
        of_rows = as_rows(dy), dh_rows, as_rows(h), weight, mean if subtracts_mean else None, rstd, offset, *dtypes
        dx, dweight, dbias = triton_form("row_norm").backward(*of_rows)
        return dx.view(h.shape), _or_empty(dweight, dy), _or_empty(dbias, dy)
    wide = torch.promote_types(h.dtype, torch.float32)
    centered, g = h.to(wide), dy.to(wide)
    if subtracts_mean:
        centered = centered - centered.mean(-1, keepdim=True)
    deviation = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    normed = centered * deviation
    dweight, dbias = (g * normed).flatten(0, -2).sum(0), g.flatten(0, -2).sum(0)
    if weight is not None:
        g = g * (weight.to(wide) + offset)
    dx = g - normed * (g * normed).mean(-1, keepdim=True)
    if subtracts_mean:
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * deviation if dh is None else dx * deviation + dh
    dweight, dbias = (
        total.to(vector.dtype) if vector is not None else dy.new_empty(0)
        for total, vector in zip((dweight, dbias), vectors, strict=True)
    )
    return dx.to(h.dtype).contiguous(), dweight, dbias


def _fake_row_norm_backward(
    dy: Tensor,
    dh: MaybeTensor,
    h: Tensor,
    weight: MaybeTensor,
    bias: MaybeTensor,
    mean: Tensor,
    rstd: Tensor,
    wants_dweight: bool,
    wants_dbias: bool,
    *_: Any,
) -> tuple[Tensor, ...]:
    vectors = weight if wants_dweight else None, bias if wants_dbias else None
    empty = [torch.empty_like(vector) if vector is not None else dy.new_empty(0) for vector in vectors]
    return torch.empty_like(h, memory_format=torch.contiguous_format), *empty


def _save_row_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, *ctx.options = inputs
    _, h, mean, rstd = output
    ctx.save_for_backward(x if residual is None else h, weight, bias, mean, rstd)
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)


def _differentiate_row_norm(ctx: Any, dy: MaybeTensor, dh: MaybeTensor, *_: None) -> tuple[Any, ...]:
    h, weight, bias, mean, rstd = ctx.saved_tensors
    nothing = (None,) * 4
    dh = dh if ctx.has_residual else None  # without a residual h is an empty tensor
    if dy is None:
        return dh, dh, None, None, *nothing
    _, _, wants_dweight, wants_dbias, *_ = ctx.needs_input_grad  # a frozen norm computes no gradient of its own
    wants = wants_dweight and weight is not None, wants_dbias and bias is not None
    dx, *found = torch.ops.lowtide.row_norm_backward(dy, dh, h, weight, bias, mean, rstd, *wants, *ctx.options)
    dweight, dbias = (vector if is_wanted else None for vector, is_wanted in zip(found, wants, strict=True))
    return dx, dx if ctx.has_residual else None, dweight, dbias, *nothing


def _row_norm_formula(
    h: Tensor, weight: MaybeTensor, bias: MaybeTensor, eps: float, offset: float, subtracts_mean: bool
) -> Tensor:
    if subtracts_mean:
        return layer_norm_reference(h, weight, bias, eps)
    return rms_norm_reference(h, weight, eps, offset=offset)


@custom_op("lowtide::gated_mlp", mutates_args=())
def gated_mlp(x: Tensor, up: MaybeTensor, activation: str, backend: str) -> Tensor:
    """Compute activation(x) * up; without up, of the halves of x."""
    if _runs_on_triton(backend, "gated_mlp", x, up):
        y: Tensor = triton_form("gated_mlp").forward(*gate_and_up(x, up), activation)
        return y.view(*x.shape[:-1], y.shape[-1])
    return _gated_formula(x, up, activation).contiguous()


def _fake_gated_mlp(x: Tensor, up: MaybeTensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] if up is not None else x.shape[-1] // 2))


@custom_op("lowtide::gated_mlp_backward", mutates_args=())
def gated_mlp_backward(dy: Tensor, x: Tensor, up: MaybeTensor, activation: str, backend: str) -> tuple[Tensor, Tensor]:
    """Compute dx and dup (empty without up)."""
    if _runs_on_triton(backend, "gated_mlp", dy, x, up):
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dup = torch.empty_like(dx) if up is not None else None
        triton_form("gated_mlp").backward(as_rows(dy), *gate_and_up(x, up), *gate_and_up(dx, dup), activation)
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


def _gated_formula(x: Tensor, up: MaybeTensor, activation: Any) -> Tensor:
    gate, up = (x, up) if up is not None else x.chunk(2, dim=-1)
    return gated_reference(gate, up, activation)


@custom_op("lowtide::rotary", mutates_args=())
def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """Rotate q and k, with the strides of empty_like. transposed: the gradient's rotation."""
    if cos.numel() and k.numel() and _runs_on_triton(backend, "rotary_embedding", q, k, cos, sin):
        found = triton_form("rotary").rotate(q, k, cos, sin, interleaved=interleaved, transposed=transposed)
    else:
        found = [rotary_reference(x, cos, sin, interleaved=interleaved, transposed=transposed) for x in (q, k)]
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


register_fake("lowtide::row_norm", _fake_row_norm)
register_fake("lowtide::row_norm_backward", _fake_row_norm_backward)
register_fake("lowtide::gated_mlp", _fake_gated_mlp)
register_fake("lowtide::gated_mlp_backward", _fake_gated_mlp_backward)
register_fake("lowtide::rotary", _fake_rotary)
register_autograd("lowtide::row_norm", _differentiate_row_norm, setup_context=_save_row_norm)
register_autograd("lowtide::gated_mlp", _differentiate_gated_mlp, setup_context=_save_gated_mlp)
register_autograd("lowtide::rotary", _differentiate_rotary, setup_context=_save_rotary)


def _runs_on_triton(backend: Any, kernel: str, *tensors: MaybeTensor) -> bool:
    return bool(tensors[0].numel()) and uses_triton(backend, kernel, *tensors)  # type: ignore[union-attr]


def _or_empty(tensor: MaybeTensor, like: Tensor) -> Tensor:
    return tensor if tensor is not None else like.new_empty(0)
