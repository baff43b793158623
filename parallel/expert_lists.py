"""Experts in an `nn.ModuleList`, each called on its tokens by the code of the module that has the list.

[Note: asked, then answered]
Which expert is called with which rows only that code knows, and ranks call other experts, in other numbers. So the
forward of the block that has the list is run twice, with stand-ins in the list:

    asked       a stand-in keeps the rows that it is given, and gives zeros
    exchange    the rows of all calls go where their experts are, and come back
    answered    the same calls, in the same order: each gives what its expert has made of its rows

Gradients of the answers go through the exchange to the rows that were asked for, and from these into the block's input;
weights of choices, and what else is computed in the block, have theirs from the second run. What is behind experts in
the first run is thrown away. So a block must give its experts the same rows in both runs: random numbers are set back,
and rows that depend on what another expert has made are an error in the first forward. Each row goes to the rank that
has its expert, and comes back (`Way`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..comm import Collectives
from ..model.compiled import untraced
from ..model.patches import ModelPatches
from .collectives import with_backward
from .expert_dispatch import ExpertSelfCheck, NoRows
from .experts import ExpertList
from .split_self_check import random_states


@dataclass(frozen=True)
class Way:
    """Where the rows of one forward go. order: these by expert."""

    exchange: Collectives
    what: str
    order: Tensor  # (sent,) int64
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
        """rows: (sent, width), in that order -> as they were."""
        out = torch.empty_like(rows)
        out[self.order] = rows
        return out


_Run = Callable[[int, tuple[Any, ...], dict[str, Any]], Tensor]


class ListedExperts:
    """One list on one rank, which has the values of some of its experts; the others are empty here."""

    def __init__(self, layer: ExpertList, exchange: Collectives, ledger: ModelPatches) -> None:
        self._layer, self._exchange = layer, exchange
        num_own = layer.num_experts // exchange.size
        self._first = exchange.place * num_own
        self._own = layer.experts[self._first : self._first + num_own]
        self._tried = ExpertSelfCheck(layer.name, layer.block, self._computed)
        self._inner = layer.block.forward
        self._is_compared = False
        for expert in layer.experts:
            if all(expert is not own for own in self._own):
                ledger.override(expert, "forward", partial(_refuse, layer.name))
        ledger.override(layer.block, "forward", partial(_called, untraced(self._forward)))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        name = self._layer.name
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.is_floating_point()]
        if not inputs:
            raise ValueError(f"'{name}': expected tokens among what its block is given, found no tensor of numbers")
        x = inputs[0]
        states, versions = random_states(self._layer.block), self._versions()
        calls: list[tuple[int, Tensor]] = []
        self._run(partial(_ask, name, x, calls), args, kwargs)
        self._check_buffers(versions)
        _set_random(self._layer.block, states)
        made = self._exchanged(x, calls)
        ends = list(accumulate(one.numel() // x.shape[-1] for _, one in calls))
        number = iter(range(len(calls)))

        def answer(expert: int, given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
            rows, at = _rows(name, x, given, named), next(number, None)
            if at is None or calls[at][0] != expert or calls[at][1].shape != rows.shape:
                raise ValueError(_CHANGED.format(name=name))
            if not self._is_compared and not torch.equal(calls[at][1], rows):
                raise ValueError(_CHANGED.format(name=name))
            own = made[ends[at] - rows.numel() // x.shape[-1] : ends[at]]
            return own.clone().view(rows.shape)  # which the block may change in place

        out = self._run(answer, args, kwargs)
        if next(number, None) is not None:
            raise ValueError(_CHANGED.format(name=name))
        self._is_compared = True
        return _tied(out, made)

    def _run(self, call: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's forward, with stand-ins in the list."""
        modules = self._layer.block._modules
        real = modules[self._layer.key]
        modules[self._layer.key] = nn.ModuleList(
            _StandIn(self._layer.name, partial(call, number)) for number in range(self._layer.num_experts)
        )
        try:
            return self._inner(*args, **kwargs)
        finally:
            modules[self._layer.key] = real

    def _exchanged(self, x: Tensor, calls: Sequence[tuple[int, Tensor]]) -> Tensor:
        """(rows, width): what experts of all ranks make of the rows of these calls, in their order."""
        width = x.shape[-1]
        rows = torch.cat([x.reshape(-1, width)[:0], *(one.reshape(-1, width) for _, one in calls)])
        numels = torch.tensor([one.numel() // width for _, one in calls], dtype=torch.int64, device=x.device)
        numbers = torch.tensor([number for number, _ in calls], dtype=torch.int64, device=x.device)
        way, is_called = self._way(torch.repeat_interleave(numbers, numels, output_size=len(rows)), numbers)
        received = with_backward(
            rows,
            lambda x: way.there(x[way.order], "tokens"),
            lambda dy: way.placed(way.back(dy, "the gradient of tokens")),
        )
        made = self._made(received, way, is_called)
        return with_backward(
            made,
            lambda made: way.placed(way.back(made, "outputs")),
            lambda dy: way.there(dy[way.order], "the gradient of outputs"),
        )

    def _way(self, choices: Tensor, called: Tensor) -> tuple[Way, list[bool]]:
        """choices: (rows,), called: (calls,) -> where rows go, and which of the own experts any rank has called.

        An expert that is called with no rows has a gradient of zeros, one that nobody calls has none. The host waits
        for the device here.
        """
        exchange, num_experts = self._exchange, self._layer.num_experts
        size, own = exchange.size, num_experts // exchange.size
        counts = torch.bincount(choices, minlength=num_experts) * 2
        counts[called] += 1
        what = f"the counts of {self._layer.name}"
        every = exchange.gather(counts, 0, what).view(size, size, own).tolist()
        by_rank = tuple(tuple(sum(one // 2 for one in there) for there in row) for row in every)
        mine = [row[exchange.place] for row in every]
        received = torch.tensor([one // 2 for row in mine for one in row], dtype=torch.int64, device=choices.device)
        experts = torch.arange(own, device=choices.device).repeat(size)
        num_received = sum(row[exchange.place] for row in by_rank)
        way = Way(
            exchange,
            self._layer.name,
            torch.sort(choices, stable=True).indices,
            by_rank,
            torch.repeat_interleave(experts, received, output_size=num_received),
        )
        return way, [any(row[number] % 2 for row in mine) for number in range(own)]

    def _made(self, rows: Tensor, way: Way, is_called: list[bool]) -> Tensor:
        if len(rows):
            made = self._tried(rows, way.experts)
        else:
            params = [param for expert in self._own for param in expert.parameters() if param.requires_grad]
            made = NoRows.apply(rows, False, *params)  # type: ignore[no-untyped-call]  # as torch has it
        present = set(way.experts.tolist())
        for number, expert in enumerate(self._own):
            if is_called[number] and number not in present:
                made = torch.cat([made, expert(rows[:0])])
        return made

    def _computed(self, rows: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """As the forward of a module with all experts: rows (rows, width), choices and weights (rows, 1)."""
        order = torch.sort(choices[:, 0], stable=True).indices
        counts = torch.bincount(choices[:, 0], minlength=len(self._own)).tolist()
        parts = zip(self._own, torch.split(rows[order], counts), strict=True)
        made = torch.cat([expert(part) for expert, part in parts if len(part)])
        return torch.empty_like(made).index_copy(0, order, made) * weights

    def _versions(self) -> list[int]:
        return [buffer._version for buffer in self._layer.block.buffers()]

    def _check_buffers(self, before: list[int]) -> None:
        if self._versions() != before:
            raise ValueError(
                f"'{self._layer.name}': expected a block whose forward changes no buffer, found one that does: experts "
                "in a list are split by running it twice; make the experts one module with parameters of shape "
                "(experts, ..., ...), or set parallel.expert to 1"
            )


_CHANGED = (
    "'{name}': expected a block that calls the same experts with the same rows each time, found other ones when it was "
    "run with what they had made: experts in a list are split by running it twice; set parallel.expert to 1"
)


class _StandIn(nn.Module):
    """In the place of an expert, while its block runs."""

    def __init__(self, name: str, call: Callable[[tuple[Any, ...], dict[str, Any]], Tensor]) -> None:
        super().__init__()
        self._name, self._call = name, call

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._call(args, kwargs)

    def __getattr__(self, key: str) -> Any:
        raise AttributeError(
            f"'{self._name}': expected experts that are only called, found a use of their '{key}': the values of most "
            "are on other ranks; set parallel.expert to 1"
        )


def _called(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As of `expert_dispatch.py`: torch.compile would trace the function itself."""
    return forward(*args, **kwargs)


def _ask(
    name: str,
    x: Tensor,
    calls: list[tuple[int, Tensor]],
    expert: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor:
    rows = _rows(name, x, args, kwargs)
    calls.append((expert, rows))
    return torch.zeros_like(rows)


def _rows(name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The one tensor that an expert is called with."""
    given = [*args, *kwargs.values()]
    if len(given) == 1 and isinstance(given[0], Tensor) and given[0].dim():
        rows: Tensor = given[0]
        if rows.shape[-1] == x.shape[-1] and rows.dtype == x.dtype:
            return rows
    found = ", ".join(f"{one.dtype} {tuple(one.shape)}" if isinstance(one, Tensor) else repr(one) for one in given)
    raise ValueError(
        f"'{name}': expected experts that are called with their tokens alone, {x.dtype} (..., {x.shape[-1]}) as the "
        f"block's input, found a call with {found}; set parallel.expert to 1"
    )


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"'{name}': expected its experts to be called through the list, by the block that has it, found a call of one "
        "whose values are on another rank; set parallel.expert to 1"
    )


def _set_random(module: nn.Module, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        device = next(module.parameters()).device
        torch.get_device_module(device).set_rng_state(states[1], device)


def _tied(out: Any, made: Tensor) -> Any:
    """What the block gives, whose gradient reaches the exchange on each rank: on one that has called nobody too."""
    leaves, tree = tree_flatten(out)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaves[number] = _Tied.apply(leaf, made)  # type: ignore[no-untyped-call]  # as torch has it
            break
    return tree_unflatten(leaves, tree)


class _Tied(torch.autograd.Function):
    """The first of two, with a gradient of zeros for the second.

    What is saved is not used: recomputation ends behind the last tensor that was saved, which on each rank is to be
    behind the exchange (`test_experts_in_lists_beside_what_else_there_is`).
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, made: Tensor) -> Tensor:
        ctx.save_for_backward(made)
        ctx.like = (made.shape, made.dtype, made.device)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        shape, dtype, device = ctx.like
        return dy[0], torch.zeros((), dtype=dtype, device=device).expand(shape)
