"""Sends tokens to the ranks of their experts, and the expert outputs back.

[Note: the way of a token]
The ranks of an expert axis have different tokens. Rank p has the experts [p n, (p + 1) n) of each layer.

    counts         gathered on all ranks: how many rows and choices each rank sends to each rank
    dispatch       a row for each token and rank with some of its experts, with these choices and their weights
    experts        the module's original forward: a row for each choice, experts numbered from 0, weight 1
    combine        weight times row, summed for each token on the rank of its experts; these rows go back
    output         the sum over the ranks, on the rank of the token

[Note: slots] has the order of rows and choices. The backward takes the same way: the gradient of combine goes to the
experts, and the gradients of rows and weights come back, with the counts of the forward.

All ranks exchange in each layer, even if they have no token or no chosen expert. A rank that receives no rows returns
an output without rows, whose gradient gives zeros to its parameters, so that its backward also exchanges. A
recomputation exchanges again, on all ranks in the same backward.
Source: the all-to-all of GShard, arXiv 2006.16668, section 3.2, without its capacity, since rows are counted first. A
token goes once to each rank: DeepSeek-V3, arXiv 2412.19437, section 3.2.2.

[Note: slots]
One layer, two ranks with experts 0 1 | 2 3, tokens a b c d of this rank with two choices each:

    choices             a0 a2   b2 b3   c0 c1   d1 d3
    rows for rank 0     c a d           tokens with the most choices there come first
      slot 0            c0 a0 d1        the first choice of each row on that rank
      slot 1            c1              the second choice, for the first rows only
    rows for rank 1     b a d
      slot 0            b2 a2 d3
      slot 1            b3

So the number of choices in each slot tells the row of each choice. Slot 0 also counts the rows. Ranks exchange only
these numbers beforehand. Weights travel with the choices, and the expert outputs of a row are summed before they go
back, so a single row returns. A row occurs once within a slot, so the order of sums is fixed.

[Note: the check of rows]
Rows of other ranks' tokens arrive without their weights, each with one choice. So the output for a row must depend on
that row and its expert alone, and be proportional to the weight. `ExpertSelfCheck` checks this with the first rows: it
runs half of the rows again with half of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Collectives
from ..kernels.dispatch import once_differentiable
from ..model.compiled import untraced
from ..model.float8 import without_float8
from ..model.patches import ModelPatches
from ..model.random_states import random_states
from ..model.recomputing import BufferValues
from ..offload import sent
from .collectives import with_backward
from .experts import ExpertLayer, ExpertPlan
from .split_self_check import MOST_NARROW, distance_of


class ExpertSelfCheck:
    """Runs an expert module on rows with a single choice each, and checks with the first rows that it can be split.

    Raises ValueError if it cannot. See [Note: the check of rows].
    """

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        self._name = name
        self._module = module
        self._forward = forward
        self._is_tried = False

    def __call__(self, rows: Tensor, experts: Tensor) -> Tensor:
        """rows: (rows, width), at least one; experts: (rows,) int64 -> (rows, width), for weight 1."""
        if self._is_tried or rows.is_meta:
            return self._made(rows, experts, 1.0)
        before = random_states(rows.device)
        made = self._made(rows, experts, 1.0)
        if all(map(torch.equal, before, random_states(rows.device))):  # else two calls differ anyway
            self._try(rows, experts)
        self._is_tried = True  # after the check: experts that were refused are checked again
        return made

    def _made(self, rows: Tensor, experts: Tensor, weight: float) -> Tensor:
        made = self._forward(rows, experts.unsqueeze(1), rows.new_full((len(rows), 1), weight))
        if not isinstance(made, Tensor) or made.shape != rows.shape:
            found = tuple(made.shape) if isinstance(made, Tensor) else f"a {type(made).__name__}"
            raise ValueError(
                f"'{self._name}': expected an output of the shape of its input, {tuple(rows.shape)}, found {found}; "
                "its experts cannot be split, set parallel.expert to 1"
            )
        return made.to(rows.dtype)

    def _try(self, rows: Tensor, experts: Tensor) -> None:
        num = (len(rows) + 1) // 2
        with BufferValues(self._module), without_float8(self._module), torch.no_grad():
            made = self._made(rows, experts, 1.0)
            found = distance_of(self._made(rows[:num], experts[:num], 0.5), made[:num] * 0.5)
        if found > MOST_NARROW:
            raise ValueError(
                f"'{self._name}': expected an output that depends on its row and expert alone and is proportional to "
                f"the weight, found it off by {found:.0%} for half of the rows with half of the weight; write the "
                "output as the sum over k of weight times expert(row), or set parallel.expert to 1"
            )


Slots = tuple[tuple[tuple[int, ...], ...], ...]
"""Slots[i][j][n]: number of choices in slot n that rank i sends to rank j."""


@dataclass(frozen=True)
class TokenWay:
    """The exchange of tokens in a forward of a layer: which rows and choices go to which rank.

    tokens: (sent rows,) int64, by rank. choices: (sent choices,) int64, indices of flat choices, by rank and slot.
    slots: of all ranks.
    """

    exchange: Collectives
    what: str
    num_tokens: int
    num_choices: int
    tokens: Tensor
    choices: Tensor
    slots: Slots

    def rows_there(self, x: Tensor, what: str) -> Tensor:
        """Send (sent rows, width) to (received rows, width)."""
        return self.exchange.swap_rows(x, self._rows, f"{what} of {self.what}")

    def rows_back(self, y: Tensor, what: str) -> Tensor:
        """Send (received rows, width) back to (sent rows, width)."""
        return self.exchange.swap_rows(y.contiguous(), _turned(self._rows), f"{what} of {self.what}")

    def choices_there(self, numbers: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Send int32 expert numbers and weights, (sent choices,) each, in one message. Returns (received choices,) of
        both.
        """
        both = torch.cat([one.unsqueeze(1).contiguous().view(torch.uint8) for one in (numbers, weights)], dim=1)
        came = self.exchange.swap_rows(both, self._choices, f"choices of {self.what}")
        parts = torch.split(came, [numbers.element_size(), weights.element_size()], dim=1)
        kinds = numbers.dtype, weights.dtype
        # Clones, which are aligned for their dtype.
        found = [
            part.clone(memory_format=torch.contiguous_format).view(kind)[:, 0]
            for part, kind in zip(parts, kinds, strict=True)
        ]
        return found[0], found[1]

    def choices_back(self, y: Tensor, what: str) -> Tensor:
        """Send (received choices,) back to (sent choices,)."""
        return self.exchange.swap_rows(y.contiguous(), _turned(self._choices), f"{what} of {self.what}")

    def summed_at_home(self, rows: Tensor) -> Tensor:
        """Sum (sent rows, width) to (tokens, width), over the ranks that a token was sent to."""
        total = rows.new_zeros(self.num_tokens, rows.shape[1], dtype=_wide(rows.dtype))
        ends = list(accumulate(self._rows[self.exchange.place]))
        for low, high in zip([0, *ends[:-1]], ends, strict=True):
            # A token occurs once in the rows of a rank. So the order of sums is fixed, also on a GPU.
            total.index_add_(0, self.tokens[low:high], rows[low:high].to(total.dtype))
        return total.to(rows.dtype)

    def repeated(self, rows: Tensor) -> Tensor:
        """(received rows, width) -> (received choices, width)."""
        return rows[self._of_row]

    def summed(self, made: Tensor) -> Tensor:
        """(received choices, width) -> (received rows, width)."""
        total = made.new_zeros(self.num_received, made.shape[1], dtype=_wide(made.dtype))
        for at in self._by_slot:
            total.index_add_(0, self._of_row[at], made[at].to(total.dtype))
        return total.to(made.dtype)

    @property
    def num_received(self) -> int:
        return sum(row[self.exchange.place] for row in self._rows)

    @cached_property
    def _rows(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(slots[0] for slots in row) for row in self.slots)

    @cached_property
    def _choices(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(map(sum, row)) for row in self.slots)

    @cached_property
    def _of_slots(self) -> list[list[tuple[int, int, int]]]:
        """For each slot: (first received choice, first row, count) of each rank that sent some."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in self.slots[0][0]]
        choice = row = 0
        for slots in (of_rank[self.exchange.place] for of_rank in self.slots):
            for slot, count in enumerate(slots):
                if count:
                    found[slot].append((choice, row, count))
                choice += count
            row += slots[0]
        return found

    @cached_property
    def _of_row(self) -> Tensor:
        """The row of each received choice."""
        by_choice = sorted(one for of_slot in self._of_slots for one in of_slot)
        return self._numbers([(row, count) for _, row, count in by_choice])

    @cached_property
    def _by_slot(self) -> list[Tensor]:
        """The received choices of each slot."""
        return [self._numbers([(choice, count) for choice, _, count in one]) for one in self._of_slots if one]

    def _numbers(self, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Concatenate ranges of (first, count) to a tensor of numbers."""
        device = self.tokens.device
        if device.type == "meta":
            return torch.empty(sum(count for _, count in ranges), dtype=torch.int64, device=device)
        parts = [torch.arange(first, first + count) for first, count in ranges]
        # From integers of the host, so the host does not wait for the device.
        return sent(torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64), device)


def _turned(counts: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(zip(*counts, strict=True))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def order_of(choices: Tensor, own: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order of rows and choices in [Note: slots], without a value read by the host.

    choices: (tokens, k), expert numbers, of which each rank has `own`. Returns (ranks, tokens), the order of tokens for
    each rank, of which a prefix is sent; (tokens * k,), the order of flat choices, of which a prefix is sent; (ranks,
    k) int64, the choices in each slot.
    """
    tokens, k = choices.shape
    # floor: a negative number, which is no expert, must not become 0.
    rank_of = choices.long().div(own, rounding_mode="floor")
    rank_of = rank_of.where((rank_of >= 0) & (rank_of < size), size)  # size: a choice of no expert
    is_there = rank_of.unsqueeze(0) == torch.arange(size, device=choices.device).view(-1, 1, 1)  # (ranks, tokens, k)
    numbers = is_there.sum(2)
    # Stable, so that rows, and with them sums, have the same order in each run.
    order = torch.argsort(numbers, dim=1, descending=True, stable=True)
    # Slot n of a rank has a choice of each token with more than n choices there.
    slots = (numbers.unsqueeze(2) > torch.arange(k, device=choices.device)).sum(1)
    places = torch.empty_like(order).scatter_(1, order, torch.arange(tokens, device=order.device).expand_as(order))
    # For each choice: how many choices of its token precede it on its rank, and the row of its token there.
    slot = ((is_there.cumsum(2) - 1) * is_there).sum(0)
    place = (places.unsqueeze(2) * is_there).sum(0)
    # By rank, then slot, then row: a single sort, without a value read by the host.
    # Choices of no expert have the rank `size`, so they come behind the prefix that is sent.
    key = (rank_of * k + slot) * max(tokens, 1) + place
    return order, torch.argsort(key.reshape(-1), stable=True), slots


class Dispatched(torch.autograd.Function):
    """Send (tokens, width), (tokens, k) weights and (sent choices,) expert numbers to the ranks of the experts.

    Returns (received rows, width), (received choices,) weights and numbers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, numbers: Tensor, way: TokenWay) -> tuple[Tensor, Tensor, Tensor]:
        ctx.way, ctx.k = way, weights.shape[1]
        found, given = way.choices_there(numbers, weights.reshape(-1)[way.choices])
        ctx.mark_non_differentiable(found)
        return way.rows_there(x[way.tokens], "tokens"), given, found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dy: Tensor) -> Any:
        way: TokenWay = ctx.way
        dx = way.summed_at_home(way.rows_back(dy[0], "the gradient of tokens"))
        back = way.choices_back(dy[1], "the gradient of weights")
        # Choices of no expert were not sent: their weights get zeros.
        dweights = back.new_zeros(way.num_choices).index_copy_(0, way.choices, back)
        return dx, dweights.view(way.num_tokens, ctx.k), None, None


_Forward = Callable[..., Tensor]
_Read = Callable[[Tensor, int], Slots]


def _counted(slots: Tensor, num_tokens: int) -> Slots:
    return tuple(tuple(tuple(one) for one in row) for row in slots.tolist())


def split_experts(plan: ExpertPlan, exchange: Collectives, patches: ModelPatches, read: _Read = _counted) -> None:
    """Install the exchange on all layers of the plan. Their modules have this rank's experts alone.

    read: turns the (ranks, ranks, k) int64 counts and this rank's number of tokens into `Slots`; the planner replaces
    it for tensors without values.
    """
    for layer in plan.layers:
        experts = ExpertSelfCheck(layer.name, layer.module, layer.module.forward)
        forward = partial(_forward, layer, exchange, experts, read)
        # Experts are numbered from 0 on each rank, so a forward must see the number of experts of this rank.
        for key in layer.counts:
            patches.override(layer.module, key, layer.num_experts // plan.degree)
        patches.override(layer.module, "forward", partial(_called, layer, untraced(forward)))


def _called(layer: ExpertLayer, forward: _Forward, *args: Any, **kwargs: Any) -> Tensor:
    """Call a function that torch.compile must not trace. Put on a module directly, it would be traced."""
    return forward(*args, *(kwargs[name] for name in layer.inputs[len(args) :]))


def _forward(
    layer: ExpertLayer,
    exchange: Collectives,
    experts: ExpertSelfCheck,
    read: _Read,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Return the layer's output for all experts, with any leading dimensions."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    k = top_k_index.shape[-1]
    way, numbers = _way_of(layer, exchange, top_k_index.reshape(-1, k), read)
    weights = top_k_weights.reshape(-1, k)
    rows, weights, numbers = Dispatched.apply(x, weights, numbers, way)  # type: ignore[no-untyped-call]  # as torch
    repeated = with_backward(rows, way.repeated, way.summed)  # (received choices, width)
    made = _made(layer, experts, repeated, numbers.long()) * weights.unsqueeze(1)
    # Routing weights in float32 make it float32. Rows travel in the dtype of tokens, so their gradient is cast back.
    dtype = made.dtype

    def combine(made: Tensor) -> Tensor:
        """(received choices, width), weighted -> (tokens, width), summed over the experts of all ranks."""
        return way.summed_at_home(way.rows_back(way.summed(made).to(hidden_states.dtype), "outputs"))

    def combine_backward(dy: Tensor) -> Tensor:
        return way.repeated(way.rows_there(dy.contiguous()[way.tokens], "the gradient of outputs")).to(dtype)

    return with_backward(made, combine, combine_backward).view(hidden_states.shape)


def _way_of(layer: ExpertLayer, exchange: Collectives, choices: Tensor, read: _Read) -> tuple[TokenWay, Tensor]:
    """Return the exchange for (tokens, k) choices, and the int32 numbers of sent choices among their rank's experts.

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


def _made(layer: ExpertLayer, experts: ExpertSelfCheck, rows: Tensor, numbers: Tensor) -> Tensor:
    """Run this rank's experts on the received rows."""
    if not len(rows):
        params = [param for param in layer.module.parameters() if param.requires_grad]
        # Zeros, since the experts of a layer are one parameter: without a split it gets a gradient if any expert has a
        # token.
        nothing: Tensor = NoRows.apply(rows, True, *params)  # type: ignore[no-untyped-call]  # as torch has it
        return nothing
    return experts(rows, numbers)


class NoRows(torch.autograd.Function):
    """An output without rows that depends on parameters, so that its backward exchanges like the backward of other
    ranks.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gives_zeros: bool, *params: Tensor) -> Tensor:
        """gives_zeros: parameters get a gradient of zeros, else none."""
        ctx.like = [(param.shape, param.dtype, param.device) if gives_zeros else None for param in params]
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        zeros = (like and torch.zeros(like[0], dtype=like[1], device=like[2]) for like in ctx.like)
        return dy[0], None, *zeros
