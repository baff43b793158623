"""Tokens go where their experts are, and what these make of them comes back.

[Note: the way of a token]
Ranks of an expert axis have other tokens, and rank p has the experts [p n, (p + 1) n) of each layer. One layer, two
ranks, tokens a b c with two choices each, experts 0 1 | 2 3:

    choices        a0 a2 b2 b3 c0 c1        order of the choices, by expert: a0 c0 c1 | a2 b2 b3
    counts         2 1 | 2 1                to all ranks: each knows then who gives how many rows to whom
    dispatch       rows of a c c to rank 0, of a b b to rank 1; a rank has its rows in the order of the ranks
    experts        the module's own forward, of rows with one choice each, numbered from 0, of weight 1
    combine        the rows go back, into the places of their choices: (tokens, k, width)
    output         the sum over k of weight times row, where the token is

The weights stay with their token, so that the gradient of the router is made there. Backward is the same way: the
gradient of combine goes to the experts, that of dispatch comes back, by the counts of the forward.

All ranks exchange in each layer, whatever they have: no token, no choice of an expert here. A rank to which nobody
comes has an output of no rows, whose gradient gives zeros to its parameters, so that its backward exchanges as others'
do. A recomputation exchanges again, on all ranks in the same backward.
Source: the all-to-all of GShard, arXiv 2006.16668, section 3.2; without its capacity, since rows are counted first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm import Exchange
from ..model.compiled import untraced
from ..model.ledger import Ledger
from .expert_trial import TriedExperts
from .experts import ExpertLayer, ExpertPlan

_Forward = Callable[..., Tensor]
_Read = Callable[[Tensor, int], list[list[int]]]


def _counted(counts: Tensor, num_choices: int) -> list[list[int]]:
    return counts.tolist()


def split_experts(plan: ExpertPlan, exchange: Exchange, ledger: Ledger, read: _Read = _counted) -> None:
    """Puts the exchange on all layers of the plan, whose modules have this rank's experts alone.

    read: (ranks, ranks) int64 of rows that each has for each, and how many choices this rank has -> the numbers; given
    where tensors have no values.
    """
    for layer in plan.layers:
        experts = TriedExperts(layer.name, layer.module, layer.module.forward)
        forward = partial(_forward, layer, exchange, experts, read)
        for key in layer.counts:
            ledger.override(layer.module, key, layer.num_experts // plan.degree)
        ledger.override(layer.module, "forward", partial(_called, layer, untraced(forward)))


def _called(layer: ExpertLayer, forward: _Forward, *args: Any, **kwargs: Any) -> Tensor:
    """torch.compile of a function that is not to be traced would trace it; of one that calls it, it does not."""
    return forward(*args, *(kwargs[name] for name in layer.inputs[len(args) :]))


@dataclass(frozen=True)
class _Way:
    """Where the rows of one forward go. A choice is a token's k-th; order has the choices that are sent, by expert."""

    exchange: Exchange
    what: str
    num_tokens: int
    k: int
    order: Tensor  # (sent,) int64, of the flat choices
    counts: tuple[tuple[int, ...], ...]  # counts[i][j]: rows that the i-th rank has for the j-th
    experts: Tensor  # (received,) int64: of this rank, from 0

    def there(self, x: Tensor, what: str) -> Tensor:
        """x: (sent, width) in the order of the choices -> (received, width)."""
        return self.exchange.swap_rows(x, self.counts, f"{what} of {self.what}")

    def back(self, y: Tensor, what: str) -> Tensor:
        """The opposite of `there`."""
        counts = tuple(zip(*self.counts, strict=True))
        return self.exchange.swap_rows(y.contiguous(), counts, f"{what} of {self.what}")

    def placed(self, rows: Tensor) -> Tensor:
        """rows: (sent, width) -> (tokens, k, width), zero where nothing was sent."""
        num_choices = self.num_tokens * self.k
        has_all = len(self.order) == num_choices
        out = rows.new_empty(num_choices, rows.shape[1]) if has_all else rows.new_zeros(num_choices, rows.shape[1])
        out[self.order] = rows
        return out.view(self.num_tokens, self.k, rows.shape[1])


def _forward(
    layer: ExpertLayer,
    exchange: Exchange,
    experts: TriedExperts,
    read: _Read,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """What the layer computes with all experts, of any leading dimensions."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    way = _way_of(layer, exchange, top_k_index.reshape(-1, top_k_index.shape[-1]), read)
    rows: Tensor = _Dispatched.apply(x, way)  # type: ignore[no-untyped-call]  # as torch has it
    made = _made(layer, experts, rows, way)
    placed: Tensor = _Combined.apply(made, way)  # type: ignore[no-untyped-call]  # as torch has it
    weights = top_k_weights.reshape(-1, way.k, 1)
    return (placed * weights).sum(1).to(hidden_states.dtype).view(hidden_states.shape)


def _way_of(layer: ExpertLayer, exchange: Exchange, choices: Tensor, read: _Read) -> _Way:
    """choices: (tokens, k). The host waits for the device here, and nowhere else in the layer."""
    size, own = exchange.size, layer.num_experts // exchange.size
    flat = choices.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    counts = flat.new_zeros(layer.num_experts + 1, dtype=torch.int64)  # the last one: of no expert
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
    every = exchange.gather(counts[:-1], 0, f"the counts of {layer.name}").view(size, size, own)
    by_rank = read(every.sum(2), flat.numel())
    received = every[:, exchange.place].reshape(-1)
    experts = torch.arange(own, device=flat.device).repeat(size)
    num_received = sum(row[exchange.place] for row in by_rank)
    return _Way(
        exchange,
        layer.name,
        len(choices),
        choices.shape[1],
        order[: sum(by_rank[exchange.place])],
        tuple(map(tuple, by_rank)),
        torch.repeat_interleave(experts, received, output_size=num_received),
    )


def _made(layer: ExpertLayer, experts: TriedExperts, rows: Tensor, way: _Way) -> Tensor:
    """What this rank's experts make of the rows that have come."""
    if not len(rows):
        params = [param for param in layer.module.parameters() if param.requires_grad]
        nothing: Tensor = _Nobody.apply(rows, *params)  # type: ignore[no-untyped-call]  # as torch has it
        return nothing
    return experts(rows, way.experts)


class _Dispatched(torch.autograd.Function):
    """(tokens, width) -> (received, width): the rows of tokens for this rank's experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return way.there(x[way.order // way.k], "tokens")

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        way: _Way = ctx.way
        return way.placed(way.back(dy[0], "the gradient of tokens")).sum(1), None


class _Combined(torch.autograd.Function):
    """(received, width) -> (tokens, k, width): what the experts of all ranks have made of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return way.placed(way.back(made, "outputs"))

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        way: _Way = ctx.way
        return way.there(dy[0].reshape(-1, dy[0].shape[-1])[way.order], "the gradient of outputs"), None


class _Nobody(torch.autograd.Function):
    """No rows, made by parameters that get a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *params: Tensor) -> Tensor:
        ctx.like = [(param.shape, param.dtype, param.device) for param in params]
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return dy[0], *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
