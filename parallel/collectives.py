"""Collectives inside a model that autograd differentiates.

| function    | forward                 | backward                | use                                                |
|-------------|-------------------------|-------------------------|----------------------------------------------------|
| `copied`    | x                       | sum over the ranks      | before columns: all ranks have x                   |
| `summed`    | sum over the ranks      | dy                      | behind rows: all ranks get y                       |
| `gathered`  | all parts               | local part of the sum   | before columns: each rank has a part of the tokens |
| `scattered` | local part of the sum   | all parts               | behind rows: each rank gets a part of the tokens   |
| `joined`    | all parts               | local part              | from parts to ranks that compute the same          |
| `parted`    | local part              | all parts               | from a tensor that all ranks have to parts         |

The gradient of a tensor that all ranks have is the whole gradient on each rank, on both sides of each function.
`gathered_and_joined` returns both results in the same memory, from a single collective.

Source: Megatron-LM, arXiv 1909.08053, section 3 (f, g), and arXiv 2205.05198, section 4.2 (g and its conjugate).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..comm import Collectives
from ..kernels.dispatch import once_differentiable
from ..pipe.split.absent import is_missing, resolved
from .splits import ranges_of

_Change = Callable[[Tensor], Tensor]


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: _Change, backward: _Change) -> Tensor:
        ctx.changes = forward, backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        forward, backward = ctx.changes
        # With create_graph the gradient is differentiated again. The transpose of `backward` is `forward`.
        dx = with_backward(dy[0], backward, forward) if torch.is_grad_enabled() else backward(dy[0])
        return dx, None, None


def with_backward(x: Tensor, forward: _Change, backward: _Change) -> Tensor:
    """Return forward(x) with backward(dy) as its gradient: two linear functions, each the transpose of the other.

    forward must not keep x.
    """
    y: Tensor = _WithBackward.apply(x, forward, backward)  # type: ignore[no-untyped-call]  # as torch has it
    return y


class _GatheredAndJoined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Collectives, dim: int, length: int, what: str) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.dim, ctx.what = exchange, dim, what
        ctx.added = x.shape[dim] * exchange.size - length
        # Else a result that nothing used would get zeros as its gradient, and the backward would send them.
        ctx.set_materialize_grads(False)
        gathered = exchange.gather(x, dim, f"the input of {what}").narrow(dim, 0, length).contiguous()
        # A second tensor of the same memory, so that autograd keeps the gradients of the two uses apart.
        return gathered, gathered.new_empty(0).set_(gathered)  # type: ignore[call-overload]  # as torch has it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        of_parts, of_all = (None if dy is None else _lengthened(dy, ctx.dim, ctx.added) for dy in dys)
        dx = None
        if of_parts is not None:
            dx = ctx.exchange.sum_part(of_parts, ctx.dim, f"the gradient of the input of {ctx.what}")
        if of_all is not None:
            # Each rank has the whole gradient of the joined result, so its part needs no collective.
            own = ctx.exchange.part(of_all, ctx.dim)
            dx = own.contiguous() if dx is None else dx + own
        return dx, None, None, None, None


def copied(x: Tensor, exchange: Collectives, what: str) -> Tensor:
    """Return x, and sum its gradient over the ranks, since each rank uses x differently.

    what: the layer in error messages, here and below.
    """
    # An absent tensor of a pipeline stage. All ranks of the axis run the same stage, so all skip the collective.
    if is_missing(x):
        return x
    return _applied(x, lambda x: x.view_as(x), lambda dy: exchange.sum(dy, f"the gradient of the input of {what}"))


def summed(x: Tensor, exchange: Collectives, what: str) -> Tensor:
    """Return the sum of x over the ranks, on all ranks."""
    return x if is_missing(x) else _applied(x, lambda x: exchange.sum(x, f"the output of {what}"), lambda dy: dy)


def gathered(x: Tensor, exchange: Collectives, dim: int, what: str) -> Tensor:
    """Gather the parts x of all ranks, and sum the gradient, since each rank uses the result differently."""
    return _applied(
        x,
        lambda x: exchange.gather(x, dim, f"the input of {what}"),
        lambda dy: exchange.sum_part(dy, dim, f"the gradient of the input of {what}"),
    )


def gathered_and_joined(x: Tensor, exchange: Collectives, dim: int, length: int, what: str) -> tuple[Tensor, Tensor]:
    """Gather the first `length` tokens of all parts once, and return them as `gathered` and as `joined` do."""
    with torch._C.DisableTorchFunction():
        found: tuple[Tensor, Tensor] = _GatheredAndJoined.apply(x, exchange, dim, length, what)  # type: ignore[no-untyped-call]
    return found


def scattered(x: Tensor, exchange: Collectives, dim: int, what: str) -> Tensor:
    """Sum x over the ranks and return this rank's part. The gradient is gathered."""
    return _applied(
        x,
        # `sum_part` returns a transposed view. Model code behind the layer may call view().
        lambda x: exchange.sum_part(x, dim, f"the output of {what}").contiguous(),
        lambda dy: exchange.gather(dy, dim, f"the gradient of the output of {what}"),
    )


def joined(x: Tensor, exchange: Collectives, dim: int, what: str) -> Tensor:
    """Gather the parts x of all ranks. All ranks use the result alike, so each keeps its part of the gradient."""
    return _applied(
        x,
        lambda x: exchange.gather(x, dim, f"the output of {what}").contiguous(),
        lambda dy: exchange.part(dy, dim).contiguous(),
    )


def joined_columns(x: Tensor, exchange: Collectives, numel: int, what: str) -> Tensor:
    """Join the last dimension, `numel` wide, from parts by `ranges_of`. Uneven parts are padded for the collective."""
    bounds = ranges_of(numel, exchange.size)
    most = -(-numel // exchange.size)
    dim = x.dim() - 1
    if numel % exchange.size == 0:
        return joined(x, exchange, dim, what)
    parts = torch.split(joined(functional.pad(x, (0, most - x.shape[dim])), exchange, dim, what), most, dim)
    return torch.cat([part[..., : high - low] for part, (low, high) in zip(parts, bounds, strict=True)], dim)


def parted_columns(x: Tensor, exchange: Collectives, what: str) -> Tensor:
    """Return this rank's columns, by `ranges_of`, of an x that all ranks have."""
    numel = x.shape[-1]
    low, high = ranges_of(numel, exchange.size)[exchange.place]
    return _applied(x, lambda x: x[..., low:high].contiguous(), lambda dy: joined_columns(dy, exchange, numel, what))


def parted(x: Tensor, exchange: Collectives, dim: int, what: str) -> Tensor:
    """Return this rank's part of an x that all ranks have."""
    return _applied(
        x,
        lambda x: exchange.part(x, dim).contiguous(),
        lambda dy: exchange.gather(dy, dim, f"the gradient of the input of {what}"),
    )


def lengthened(x: Tensor, dim: int, size: int) -> Tensor:
    """Pad x with zeros at the end of `dim` to `size`."""
    return _lengthened(x, dim, size - x.shape[dim])


def _lengthened(x: Tensor, dim: int, more: int) -> Tensor:
    # torch counts the pairs of `pad` from the last dimension.
    return x if not more else functional.pad(x, (*(0, 0) * (x.dim() - 1 - dim % x.dim()), 0, more))


def _applied(x: Tensor, forward: _Change, backward: _Change) -> Tensor:
    """Apply hidden from modes that trace torch functions, for example the trace of a pipeline stage."""
    with torch._C.DisableTorchFunction():
        return with_backward(resolved(x), forward, backward)
