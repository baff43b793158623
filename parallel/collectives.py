"""Collectives in the middle of a model, which autograd goes through.

| function    | forward              | backward             | where                                                |
|-------------|----------------------|----------------------|------------------------------------------------------|
| `copied`    | x                    | sum over the ranks   | before columns: all ranks have x                     |
| `summed`    | sum over the ranks   | dy                   | behind rows: all ranks get y                         |
| `gathered`  | all parts            | own part of the sum  | before columns: each rank has a part of the sequence |
| `scattered` | own part of the sum  | all parts            | behind rows: each rank gets a part of the sequence   |
| `joined`    | all parts            | own part             | each rank has a part, and then all compute the same  |
| `parted`    | own part             | all parts            | all ranks have x, and each goes on with a part       |

Source: Megatron-LM, arXiv 1909.08053, section 3 (f, g), and arXiv 2205.05198, section 4.2 (g and its conjugate). A
gradient of what all ranks have is the whole gradient on each of them, on both sides of each function.

`gathered_and_joined` gives what both give, in the same memory, of one collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..comm import Collectives
from ..pipe.split.absent import is_missing, resolved
from .splits import ranges_of

_Change = Callable[[Tensor], Tensor]


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: _Change, backward: _Change) -> Tensor:
        ctx.change = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return ctx.change(dy[0]), None, None


def with_backward(x: Tensor, forward: _Change, backward: _Change) -> Tensor:
    """forward(x), whose gradient is backward(dy). forward must not keep x."""
    y: Tensor = _WithBackward.apply(x, forward, backward)  # type: ignore[no-untyped-call]  # as torch has it
    return y


class _GatheredAndJoined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Collectives, dim: int, length: int, what: str) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.dim, ctx.what = exchange, dim, what
        ctx.added = x.shape[dim] * exchange.size - length
        ctx.set_materialize_grads(False)
        gathered = exchange.gather(x, dim, f"the input of {what}").narrow(dim, 0, length).contiguous()
        return gathered, gathered.new_empty(0).set_(gathered)  # type: ignore[call-overload]  # as torch has it

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        of_parts, of_all = (None if dy is None else _lengthened(dy, ctx.dim, ctx.added) for dy in dys)
        dx = None
        if of_parts is not None:
            dx = ctx.exchange.sum_part(of_parts, ctx.dim, f"the gradient of the input of {ctx.what}")
        if of_all is not None:
            own = ctx.exchange.part(of_all, ctx.dim)
            dx = own.contiguous() if dx is None else dx + own
        return dx, None, None, None, None


def copied(x: Tensor, exchange: Collectives, what: str) -> Tensor:
    """x, of which the ranks use different things. what: the layer, in error messages; also of the others."""
    if is_missing(x):
        return x
    return _applied(x, lambda x: x.view_as(x), lambda dy: exchange.sum(dy, f"the gradient of the input of {what}"))


def summed(x: Tensor, exchange: Collectives, what: str) -> Tensor:
    """The sum of the ranks' x, on all of them."""
    return x if is_missing(x) else _applied(x, lambda x: exchange.sum(x, f"the output of {what}"), lambda dy: dy)


def gathered(x: Tensor, exchange: Collectives, dim: int, what: str) -> Tensor:
    """The parts x of all ranks, which then use different things of it."""
    return _applied(
        x,
        lambda x: exchange.gather(x, dim, f"the input of {what}"),
        lambda dy: exchange.sum_part(dy, dim, f"the gradient of the input of {what}"),
    )


def gathered_and_joined(x: Tensor, exchange: Collectives, dim: int, length: int, what: str) -> tuple[Tensor, Tensor]:
    """The first `length` of the parts x of all ranks: for what is different on each rank, and for what is the same."""
    with torch._C.DisableTorchFunction():
        found: tuple[Tensor, Tensor] = _GatheredAndJoined.apply(x, exchange, dim, length, what)  # type: ignore[no-untyped-call]
    return found


def scattered(x: Tensor, exchange: Collectives, dim: int, what: str) -> Tensor:
    """This rank's part of the sum of the ranks' x."""
    return _applied(
        x,
        lambda x: exchange.sum_part(x, dim, f"the output of {what}").contiguous(),  # as a layer gives it
        lambda dy: exchange.gather(dy, dim, f"the gradient of the output of {what}"),
    )


def joined(x: Tensor, exchange: Collectives, dim: int, what: str) -> Tensor:
    """The parts x of all ranks, which then compute the same of it."""
    return _applied(
        x,
        lambda x: exchange.gather(x, dim, f"the output of {what}").contiguous(),
        lambda dy: exchange.part(dy, dim).contiguous(),
    )


def joined_columns(x: Tensor, exchange: Collectives, numel: int, what: str) -> Tensor:
    """All `numel` of the last dimension, of which each rank has its part by `ranges_of`: filled up on the way."""
    bounds = ranges_of(numel, exchange.size)
    most = -(-numel // exchange.size)
    dim = x.dim() - 1
    if numel % exchange.size == 0:
        return joined(x, exchange, dim, what)
    parts = torch.split(joined(functional.pad(x, (0, most - x.shape[dim])), exchange, dim, what), most, dim)
    return torch.cat([part[..., : high - low] for part, (low, high) in zip(parts, bounds, strict=True)], dim)


def parted_columns(x: Tensor, exchange: Collectives, what: str) -> Tensor:
    """This rank's columns, by `ranges_of`, of an x that all have."""
    numel = x.shape[-1]
    low, high = ranges_of(numel, exchange.size)[exchange.place]
    return _applied(x, lambda x: x[..., low:high].contiguous(), lambda dy: joined_columns(dy, exchange, numel, what))


def parted(x: Tensor, exchange: Collectives, dim: int, what: str) -> Tensor:
    """This rank's part of an x that all have."""
    return _applied(
        x,
        lambda x: exchange.part(x, dim).contiguous(),
        lambda dy: exchange.gather(dy, dim, f"the gradient of the input of {what}"),
    )


def lengthened(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros behind it along `dim`, so that there are `size`."""
    return _lengthened(x, dim, size - x.shape[dim])


def _lengthened(x: Tensor, dim: int, more: int) -> Tensor:
    return x if not more else functional.pad(x, (*(0, 0) * (x.dim() - 1 - dim % x.dim()), 0, more))


def _applied(x: Tensor, forward: _Change, backward: _Change) -> Tensor:
    """What it moves is seen by nobody who watches the functions of a forward: as a stage of a pipeline, for names."""
    with torch._C.DisableTorchFunction():
        return with_backward(resolved(x), forward, backward)
