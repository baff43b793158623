"""The update by an optimizer whose ranks tell each other signs of their momenta, and not gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..optimizers.onebit import direction
from ..optimizers.optimizer import Options
from .fused_update import FusedUpdate, ScalarStates, UpdateTerms
from .layout import Piece
from .low_rank import LOW_RANK_ERROR
from .shard_state import ShardState, StatePart
from .sign_mean import SignLayout, SignMean

WORKER_ERROR, SERVER_ERROR = "worker_error", "server_error"
"""Among the states of a checkpoint, the first with the number of the rank that has it."""
AXIS = ("replica",)
Parameters = list[tuple[int, slice, Options]]
"""(index in its group, where in the shard, options) of parameters."""


@dataclass(frozen=True)
class SignUpdate(FusedUpdate):
    """States are whole on each rank, which all have the same of them; the errors of `SignMean` are of each rank.

    | a step         | gradient    | momentum                           | second moment |
    |----------------|-------------|------------------------------------|---------------|
    | of the warm-up | of all      | updated with it                    | updated       |
    | after it       | of the rank | updated with it, mean of the signs | stays         |

    All of it is in the update, when all ranks know that a step counts: what a signs' error remembers is of no gradient
    that was thrown away.
    """

    waits_for_norm = True

    def takes(self, options: Options) -> bool:
        return super().takes(options) and set(self.options) <= set(options)

    def sums_gradients(self, step: int) -> bool:
        return step <= int(self.options["freeze_step"])

    def update(
        self, shard: ShardState, parts: Callable[[], Iterable[StatePart]], gradient: Tensor, terms: UpdateTerms
    ) -> None:
        self.make_states(shard, {}, {})
        weight = shard.master
        used = [
            (
                piece.index,
                slice(piece.offset_in_shard, piece.offset_in_shard + piece.numel),
                terms.options[shard.runs.options_index(piece.index)],
            )
            for piece in shard.group.pieces
            if terms.step_of(id(shard.group.params[piece.index]))
        ]
        gradient = gradient.to(weight.dtype).mul_(terms.gradient_scale)
        if self.sums_gradients(terms.step):
            for _, where, options in used:
                own = [state[where] for state in shard.memory.states.values()]
                self.optimizer.apply(weight[where], gradient[where], own, torch.tensor(terms.step), options)
        else:
            self._step_with_signs(shard, gradient, used)
        if shard.form.is_mixed:
            shard.group.shard.copy_(weight)

    def _step_with_signs(self, shard: ShardState, gradient: Tensor, used: Parameters) -> None:
        """gradient: (padded_numel,), this rank's own part of the mean over ranks."""
        mean, (momentum, squares) = self._means[id(shard)], shard.memory.states.values()
        gradient.mul_(mean.exchange.size)
        new = momentum.clone()
        for _, where, options in used:
            new[where].lerp_(gradient[where], 1 - options["betas"][0])
        new = mean.mean(new, frozenset(range(len(shard.group.params))).difference(index for index, _, _ in used))
        for _, where, options in used:
            momentum[where] = new[where]
            step = direction(shard.master[where], new[where], squares[where], options)
            shard.master[where].add_(step, alpha=-float(options["lr"]))

    def update_together(
        self, due: Iterable[tuple[ShardState, Tensor]], terms: UpdateTerms, on_updated: Callable[[ShardState], None]
    ) -> None:
        for shard, gradient in due:
            self.update(shard, shard.as_parts, gradient, terms)
            on_updated(shard)

    # -- what is kept ---------------------------------------------------------------------------------------------

    @cached_property
    def _means(self) -> dict[int, SignMean]:
        """By identity of the shard."""
        return {}

    def make_states(
        self, shard: ShardState, dtypes: Mapping[str, Mapping[str, torch.dtype]], scalars: ScalarStates
    ) -> None:
        shard.memory.make()
        if id(shard) not in self._means:
            group = shard.group
            exchange = group.axes.exchange_along(AXIS)
            layout = SignLayout.of(group.layout, exchange.size, shard.form.master_dtype)
            self._means[id(shard)] = SignMean(layout, exchange, group.plan.name).to(group.shard.device)

    def forget_states(self, shard: ShardState) -> None:
        shard.memory.forget()
        self._means.pop(id(shard), None)

    def held(self, shard: ShardState) -> Iterator[Tensor]:
        yield from super().held(shard)
        if id(shard) in self._means:
            mean = self._means[id(shard)]
            yield from (mean.worker_error, mean.server_error)

    def rank_states(self, shard: ShardState) -> Iterator[tuple[Piece, str, Tensor]]:
        """(piece, name, values) of what this rank alone has: the errors."""
        mean = self._means.get(id(shard))
        if mean is None or not mean.worker_error.numel():
            return
        place = mean.exchange.place
        region = mean.layout.regions[place]
        for piece in shard.group.pieces:
            low, high = piece.offset_in_shard, piece.offset_in_shard + piece.numel
            yield piece, f"{WORKER_ERROR}_{place}", mean.worker_error[low:high]
        for index, low, high in mean.layout.stretches[place]:
            offset = region.start + low - shard.group.layout.slots[index].offset_in_flat
            yield Piece(index, offset, region.start + low, high - low), SERVER_ERROR, mean.server_error[low:high]

    def rank_state_names(self, shard: ShardState) -> list[str]:
        """Of all ranks."""
        size = shard.group.axes.replicas.size
        return [*(f"{WORKER_ERROR}_{place}" for place in range(size)), SERVER_ERROR] if size > 1 else []


def is_rank_state(name: str) -> bool:
    """Whether a state of that name is of one rank, and of no use to another number of them."""
    return name == SERVER_ERROR or name.startswith((f"{WORKER_ERROR}_", f"{LOW_RANK_ERROR}_"))
