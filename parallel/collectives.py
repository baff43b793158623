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

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..comm import Exchange
from ..pipe.split.absent import is_missing, resolved
from .splits import ranges_of


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, what: str) -> Tensor:
        ctx.exchange, ctx.what = exchange, what
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return ctx.exchange.sum(dy[0], f"the gradient of the input of {ctx.what}"), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, what: str) -> Tensor:
        return exchange.sum(x, f"the output of {what}")

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return dy[0], None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, dim: int, what: str) -> Tensor:
        ctx.exchange, ctx.dim, ctx.what = exchange, dim, what
        return exchange.gather(x, dim, f"the input of {what}")

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        dx = ctx.exchange.sum_part(dy[0], ctx.dim, f"the gradient of the input of {ctx.what}")
        return dx, None, None, None


class _GatheredAndJoined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, dim: int, length: int, what: str) -> tuple[Tensor, Tensor]:
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


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, dim: int, what: str) -> Tensor:
        ctx.exchange, ctx.dim, ctx.what = exchange, dim, what
        return exchange.sum_part(x, dim, f"the output of {what}").contiguous()  # as a layer gives it

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        dx = ctx.exchange.gather(dy[0], ctx.dim, f"the gradient of the output of {ctx.what}")
        return dx, None, None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, dim: int, what: str) -> Tensor:
        ctx.exchange, ctx.dim = exchange, dim
        return exchange.gather(x, dim, f"the output of {what}").contiguous()

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return ctx.exchange.part(dy[0], ctx.dim).contiguous(), None, None, None


class _Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, dim: int, what: str) -> Tensor:
        ctx.exchange, ctx.dim, ctx.what = exchange, dim, what
        return exchange.part(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        dx = ctx.exchange.gather(dy[0], ctx.dim, f"the gradient of the input of {ctx.what}")
        return dx, None, None, None


class _PartedColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, what: str) -> Tensor:
        ctx.exchange, ctx.what, ctx.numel = exchange, what, x.shape[-1]
        low, high = ranges_of(ctx.numel, exchange.size)[exchange.place]
        return x[..., low:high].contiguous()

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return joined_columns(dy[0], ctx.exchange, ctx.numel, ctx.what), None, None


def copied(x: Tensor, exchange: Exchange, what: str) -> Tensor:
    """x, of which the ranks use different things. what: the layer, in error messages; also of the others."""
    return x if is_missing(x) else _applied(_Copied, x, exchange, what)


def summed(x: Tensor, exchange: Exchange, what: str) -> Tensor:
    """The sum of the ranks' x, on all of them."""
    return x if is_missing(x) else _applied(_Summed, x, exchange, what)


def gathered(x: Tensor, exchange: Exchange, dim: int, what: str) -> Tensor:
    """The parts x of all ranks, which then use different things of it."""
    return _applied(_Gathered, x, exchange, dim, what)


def gathered_and_joined(x: Tensor, exchange: Exchange, dim: int, length: int, what: str) -> tuple[Tensor, Tensor]:
    """The first `length` of the parts x of all ranks: for what is different on each rank, and for what is the same."""
    with torch._C.DisableTorchFunction():
        found: tuple[Tensor, Tensor] = _GatheredAndJoined.apply(x, exchange, dim, length, what)  # type: ignore[no-untyped-call]
    return found


def scattered(x: Tensor, exchange: Exchange, dim: int, what: str) -> Tensor:
    """This rank's part of the sum of the ranks' x."""
    return _applied(_Scattered, x, exchange, dim, what)


def joined(x: Tensor, exchange: Exchange, dim: int, what: str) -> Tensor:
    """The parts x of all ranks, which then compute the same of it."""
    return _applied(_Joined, x, exchange, dim, what)


def joined_columns(x: Tensor, exchange: Exchange, numel: int, what: str) -> Tensor:
    """All `numel` of the last dimension, of which each rank has its part by `ranges_of`: filled up on the way."""
    bounds = ranges_of(numel, exchange.size)
    most = -(-numel // exchange.size)
    dim = x.dim() - 1
    if numel % exchange.size == 0:
        return joined(x, exchange, dim, what)
    parts = torch.split(joined(functional.pad(x, (0, most - x.shape[dim])), exchange, dim, what), most, dim)
    return torch.cat([part[..., : high - low] for part, (low, high) in zip(parts, bounds, strict=True)], dim)


def parted_columns(x: Tensor, exchange: Exchange, what: str) -> Tensor:
    """This rank's columns, by `ranges_of`, of an x that all have."""
    return _applied(_PartedColumns, x, exchange, what)


def parted(x: Tensor, exchange: Exchange, dim: int, what: str) -> Tensor:
    """This rank's part of an x that all have."""
    return _applied(_Parted, x, exchange, dim, what)


def lengthened(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros behind it along `dim`, so that there are `size`."""
    return _lengthened(x, dim, size - x.shape[dim])


def _lengthened(x: Tensor, dim: int, more: int) -> Tensor:
    return x if not more else functional.pad(x, (*(0, 0) * (x.dim() - 1 - dim % x.dim()), 0, more))


def _applied(function: type[torch.autograd.Function], x: Tensor, *args: Any) -> Tensor:
    """What it moves is seen by nobody who watches the functions of a forward: as a stage of a pipeline, for names."""
    with torch._C.DisableTorchFunction():
        y: Tensor = function.apply(resolved(x), *args)  # type: ignore[no-untyped-call]  # as torch has it
    return y
