"""Tokens go where their experts are, and what these make of them comes back.

[Note: the way of a token]
Ranks of an expert axis have other tokens, and rank p has the experts [p n, (p + 1) n) of each layer.

    counts         to all ranks: each knows then who gives how many rows, with how many choices, to whom
    dispatch       a row for each token and rank that has some of its experts, with these choices and their weights
    experts        the module's own forward, of a row for each choice, numbered from 0, of weight 1
    combine        weight times row, summed for each token where its experts are; these rows go back
    output         the sum over the ranks, where the token is

Rows and choices are in the order of [Note: slots] in `expert_tokens.py`. Backward is the same way: the gradient of
combine goes to the experts, those of rows and weights come back, by the counts of the forward.

All ranks exchange in each layer, whatever they have: no token, no choice of an expert here. A rank to which nobody
comes has an output of no rows, whose gradient gives zeros to its parameters, so that its backward exchanges as others'
do. A recomputation exchanges again, on all ranks in the same backward.
Source: the all-to-all of GShard, arXiv 2006.16668, section 3.2; without its capacity, since rows are counted first. A
token once for each rank: DeepSeek-V3, arXiv 2412.19437, section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm import Exchange
from ..model.compiled import untraced
from ..model.ledger import Ledger
from .expert_tokens import Combined, Dispatched, Repeated, Slots, TokenWay, order_of
from .expert_trial import TriedExperts
from .experts import ExpertLayer, ExpertPlan

_Forward = Callable[..., Tensor]
_Read = Callable[[Tensor, int], Slots]


def _counted(slots: Tensor, num_tokens: int) -> Slots:
    return tuple(tuple(tuple(one) for one in row) for row in slots.tolist())


def split_experts(plan: ExpertPlan, exchange: Exchange, ledger: Ledger, read: _Read = _counted) -> None:
    """Puts the exchange on all layers of the plan, whose modules have this rank's experts alone.

    read: (ranks, ranks, k) int64 of choices in each slot that each has for each, and how many tokens this rank has ->
    the numbers; given where tensors have no values.
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
    k = top_k_index.shape[-1]
    way, numbers = _way_of(layer, exchange, top_k_index.reshape(-1, k), read)
    weights = top_k_weights.reshape(-1, k)
    rows, weights, numbers = Dispatched.apply(x, weights, numbers, way)  # type: ignore[no-untyped-call]  # as torch
    repeated: Tensor = Repeated.apply(rows, way)  # type: ignore[no-untyped-call]  # as torch has it
    made = _made(layer, experts, repeated, numbers.long()) * weights.unsqueeze(1)
    out: Tensor = Combined.apply(made, hidden_states.dtype, way)  # type: ignore[no-untyped-call]  # as torch has it
    return out.view(hidden_states.shape)


def _way_of(layer: ExpertLayer, exchange: Exchange, choices: Tensor, read: _Read) -> tuple[TokenWay, Tensor]:
    """choices: (tokens, k) -> with (sent choices,) int32 experts of their rank, from 0.

    The host waits for the device here, and nowhere else in the layer.
    """
    size, own = exchange.size, layer.num_experts // exchange.size
    order, flat, counts = order_of(choices, own, size)
    every = exchange.gather(counts, 0, f"the counts of {layer.name}").view(size, size, choices.shape[1])
    slots = read(every, len(choices))
    sent = slots[exchange.place]
    tokens = torch.cat([row[: counts[0]] for row, counts in zip(order, sent, strict=True)])
    flat = flat[: sum(map(sum, sent))]
    way = TokenWay(exchange, layer.name, len(choices), choices.numel(), tokens, flat, slots)
    return way, (choices.reshape(-1)[flat] % own).to(torch.int32)


def _made(layer: ExpertLayer, experts: TriedExperts, rows: Tensor, numbers: Tensor) -> Tensor:
    """What this rank's experts make of the rows that have come."""
    if not len(rows):
        params = [param for param in layer.module.parameters() if param.requires_grad]
        nothing: Tensor = _Nobody.apply(rows, *params)  # type: ignore[no-untyped-call]  # as torch has it
        return nothing
    return experts(rows, numbers)


class _Nobody(torch.autograd.Function):
    """No rows, made by parameters that get a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *params: Tensor) -> Tensor:
        ctx.like = [(param.shape, param.dtype, param.device) for param in params]
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return dy[0], *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
