"""Splits experts in an `nn.ModuleList`, which the code of the surrounding module calls on their tokens.

[Note: two runs]
Only that code knows the rows of each call, and ranks call different experts a different number of times. So the forward
of the block around the list runs twice, with stand-ins in the list:

    first run     a stand-in records its rows and returns zeros
    exchange      the rows of all calls go to the ranks of their experts, and the outputs come back
    second run    the same calls in the same order: each returns the output of its expert

Gradients of the outputs go through the exchange to the recorded rows, and from them to the block's input. Routing
weights and other computations in the block get their gradients from the second run. Results behind the experts in the
first run are dropped. So a block must call its experts with the same rows in both runs: random generators are set back,
and rows that depend on the output of another expert are an error in the first forward. Each row goes to the rank of its
expert and comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..comm import Collectives
from ..model.compiled import untraced
from ..model.patches import ModelPatches
from ..model.random_states import random_states, set_random_states
from .collectives import with_backward
from .expert_dispatch import ExpertSelfCheck, NoRows
from .experts import ExpertList

_Run = Callable[[int, tuple[Any, ...], dict[str, Any]], Tensor]


class ListedExperts:
    """Runs a list of experts on a rank that holds some of them. The parameters of the remaining experts are empty."""

    def __init__(self, layer: ExpertList, exchange: Collectives, patches: ModelPatches) -> None:
        self._layer, self._exchange = layer, exchange
        num_own = layer.num_experts // exchange.size
        self._first = exchange.place * num_own
        self._own = layer.experts[self._first : self._first + num_own]
        self._tried = ExpertSelfCheck(layer.name, layer.block, self._computed)
        self._inner = layer.block.forward
        self._is_compared = False
        for expert in layer.experts:
            # The parameters of this expert are empty here. The list itself holds stand-ins while the block runs.
            if all(expert is not own for own in self._own):
                patches.override(expert, "forward", partial(_refuse, layer.name))
        patches.override(layer.block, "forward", partial(_called, untraced(self._forward)))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        name = self._layer.name
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.is_floating_point()]
        if not inputs:
            raise ValueError(f"'{name}': expected tokens as an input of its block, found no floating-point tensor")
        x = inputs[0]
        states, versions = random_states(x.device), self._versions()
        calls: list[tuple[int, Tensor]] = []
        self._run(partial(_ask, name, x, calls), args, kwargs)
        self._check_buffers(versions)
        # The second run must draw the same numbers, or dropout and noisy routers would choose other rows.
        set_random_states(x.device, states)
        made = self._exchanged(x, calls)
        ends = list(accumulate(one.numel() // x.shape[-1] for _, one in calls))
        number = iter(range(len(calls)))

        def answer(expert: int, given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
            rows, at = _rows(name, x, given, named), next(number, None)
            if at is None or calls[at][0] != expert or calls[at][1].shape != rows.shape:
                raise ValueError(_CHANGED.format(name=name))
            # In the first forward alone: `torch.equal` makes the host wait.
            if not self._is_compared and not torch.equal(calls[at][1], rows):
                raise ValueError(_CHANGED.format(name=name))
            own = made[ends[at] - rows.numel() // x.shape[-1] : ends[at]]
            return own.clone().view(rows.shape)  # a clone, since the block may change it in place

        out = self._run(answer, args, kwargs)
        if next(number, None) is not None:
            raise ValueError(_CHANGED.format(name=name))
        self._is_compared = True
        return _tied(out, made)

    def _run(self, call: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block's forward with stand-ins in the list."""
        modules = self._layer.block._modules
        real = modules[self._layer.key]
        modules[self._layer.key] = nn.ModuleList(
            _Placeholder(self._layer.name, partial(call, number)) for number in range(self._layer.num_experts)
        )
        try:
            return self._inner(*args, **kwargs)
        finally:
            modules[self._layer.key] = real

    def _exchanged(self, x: Tensor, calls: Sequence[tuple[int, Tensor]]) -> Tensor:
        """Return (rows, width), the outputs of experts of all ranks for the rows of these calls, in order."""
        width = x.shape[-1]
        # The empty first part gives dtype, device and graph if this rank calls no expert.
        rows = torch.cat([x.reshape(-1, width)[:0], *(one.reshape(-1, width) for _, one in calls)])
        numels = torch.tensor([one.numel() // width for _, one in calls], dtype=torch.int64, device=x.device)
        numbers = torch.tensor([number for number, _ in calls], dtype=torch.int64, device=x.device)
        # With `output_size` the host does not wait to learn the size.
        choices = torch.repeat_interleave(numbers, numels, output_size=len(rows))
        counts, experts, without_rows = self._routes(choices, numbers)
        order, name = torch.sort(choices, stable=True).indices, self._layer.name  # rows are sent by expert
        counts_back = tuple(zip(*counts, strict=True))

        def there(x: Tensor, what: str) -> Tensor:
            """Send (sent, width) to (received, width)."""
            return self._exchange.swap_rows(x[order], counts, f"{what} of {name}")

        def back(y: Tensor, what: str) -> Tensor:
            """Send (received, width) back to (sent, width)."""
            got = self._exchange.swap_rows(y.contiguous(), counts_back, f"{what} of {name}")
            out = torch.empty_like(got)
            out[order] = got
            return out

        received = with_backward(rows, lambda x: there(x, "tokens"), lambda dy: back(dy, "the gradient of tokens"))
        made = self._made(received, experts, without_rows)
        return with_backward(made, lambda made: back(made, "outputs"), lambda dy: there(dy, "the gradient of outputs"))

    def _routes(self, choices: Tensor, called: Tensor) -> tuple[tuple[tuple[int, ...], ...], Tensor, list[int]]:
        """Count the rows that ranks exchange. choices: (rows,); called: (calls,).

        Returns the rows that rank i sends to rank j, as counts[i][j]; the expert of each received row among this rank's
        experts; and those of them that are called with no rows only. These get a gradient of zeros; an expert that no
        rank calls gets none. The host waits for the device here.
        """
        exchange, num_experts = self._exchange, self._layer.num_experts
        size, own = exchange.size, num_experts // exchange.size
        counts = torch.bincount(choices, minlength=num_experts) * 2
        # The lowest bit says that the expert is called, perhaps with no rows. It is added once for several calls: an
        # assignment by indices does not accumulate.
        counts[called] += 1
        what = f"the counts of {self._layer.name}"
        every = exchange.gather(counts, 0, what).view(size, size, own).tolist()
        by_rank = tuple(tuple(sum(one // 2 for one in there) for there in row) for row in every)
        mine = [row[exchange.place] for row in every]
        received = torch.tensor([one // 2 for row in mine for one in row], dtype=torch.int64, device=choices.device)
        experts = torch.arange(own, device=choices.device).repeat(size)
        num_received = sum(row[exchange.place] for row in by_rank)
        of_rows = torch.repeat_interleave(experts, received, output_size=num_received)
        return by_rank, of_rows, [number for number in range(own) if max(row[number] for row in mine) == 1]

    def _made(self, rows: Tensor, experts: Tensor, without_rows: list[int]) -> Tensor:
        if len(rows):
            made = self._tried(rows, experts)
        else:
            params = [param for expert in self._own for param in expert.parameters() if param.requires_grad]
            # No zeros: each expert in a list has separate parameters, and without a call they get no gradient.
            made = NoRows.apply(rows, False, *params)  # type: ignore[no-untyped-call]  # as torch has it
        for number in without_rows:
            # The gradient is then zeros and not None, as without a split: weight decay and momentum go on.
            made = torch.cat([made, self._own[number](rows[:0])])
        return made

    def _computed(self, rows: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """Run the experts as the forward of a module with all experts: rows (rows, width), choices and weights (rows,
        1).
        """
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
                f"'{self._layer.name}': expected a block that changes no buffer in its forward, since experts in a "
                "list run their block twice, found a changed buffer; use a single module with parameters of shape "
                "(experts, ..., ...), or set parallel.expert to 1"
            )


_CHANGED = (
    "'{name}': expected a block that calls the same experts with the same rows in each run, since experts in a list "
    "run their block twice, found different calls in the second run; set parallel.expert to 1"
)


class _Placeholder(nn.Module):
    """Replaces an expert while its block runs."""

    def __init__(self, name: str, call: Callable[[tuple[Any, ...], dict[str, Any]], Tensor]) -> None:
        super().__init__()
        self._name, self._call = name, call

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._call(args, kwargs)

    def __getattr__(self, key: str) -> Any:
        raise AttributeError(
            f"'{self._name}': expected that experts are only called, found a use of their '{key}', whose values are on "
            "different ranks; set parallel.expert to 1"
        )


def _called(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that torch.compile must not trace, as `_called` in `expert_dispatch.py`."""
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
    """Return the only tensor that an expert is called with. Raises ValueError if there are more inputs."""
    given = [*args, *kwargs.values()]
    if len(given) == 1 and isinstance(given[0], Tensor) and given[0].dim():
        rows: Tensor = given[0]
        if rows.shape[-1] == x.shape[-1] and rows.dtype == x.dtype:
            return rows
    found = ", ".join(f"{one.dtype} {tuple(one.shape)}" if isinstance(one, Tensor) else repr(one) for one in given)
    raise ValueError(
        f"'{name}': expected experts that take only tokens, {x.dtype} (..., {x.shape[-1]}) like the block's input, "
        f"found a call with {found}; set parallel.expert to 1"
    )


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"'{name}': expected that its block calls experts through the list, found a direct call of an expert that is "
        "on a different rank; set parallel.expert to 1"
    )


def _tied(out: Any, made: Tensor) -> Any:
    """Let the gradient of the block's output reach the exchange on each rank, even on a rank that called no expert."""
    leaves, tree = tree_flatten(out)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            # The loss is taken to depend on the first output on each rank, so that each rank's backward exchanges.
            leaves[number] = _Tied.apply(leaf, made)  # type: ignore[no-untyped-call]  # as torch has it
            break
    return tree_unflatten(leaves, tree)


class _Tied(torch.autograd.Function):
    """Returns the first of two tensors, with a gradient of zeros for the second.

    The saved tensor is not used. It makes a recomputation run past the exchange on each rank, since a recomputation
    stops behind the last saved tensor (`test_experts_in_lists_beside_what_else_there_is`).
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
