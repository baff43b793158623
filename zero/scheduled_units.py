"""The units of a rank in a pipeline: gathered, released and reduced when the schedule says so.

All data-parallel ranks of a pipeline place run the same list of actions, so their collectives come in the same order
without a canonical one; `sequence.py` is for ranks that go through a whole model on their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch

from ..comm import Mesh
from .domain import Copies
from .gradient import GroupGradient
from .reductions import OnFinal, Reductions
from .unit import Unit

# Above those of the schedule's messages. Ranks come to the tied weights that they share in the same order, whichever
# others each of them has, so the order of messages tells them apart.
_TIED_TAG = 1 << 19

U = TypeVar("U", bound=Hashable)


class ScheduledUnits:
    """What a pipeline's executor does to parameters and gradients, stage by stage; see `executor.StageMemory`.

    stage ----gather----> full ...F, B, I, W... ----release---->
                                      |                    after each microbatch but the last: collect
                                      +--- param.grad ---> after the last: reduce

    A unit that several stages of the rank use is there as long as one of them needs it, and reduced with the last.
    """

    def __init__(
        self, units: Sequence[Unit], stages: Mapping[int, Sequence[Unit]], mesh: Mesh, adds_in_place: bool = True
    ) -> None:
        """units: all of this rank, the rest first; stages: those of each stage that lives here. adds_in_place: see
        `GroupGradient.accumulate_in_place`; the shards of all gradients are there from the first microbatch on.
        """
        self.units = units
        self.rest, self.blocks = units[0], list(units[1:])
        self.reduction_order = reduction_order(units, stages)
        self._stages = stages
        self._adds_in_place = adds_in_place
        self._mesh = mesh
        self._users: dict[int, set[int]] = {id(unit): set() for unit in units}  # stages for which it is full
        self._coming: dict[int, int] = {}  # stages that were gathered and not used yet: how often others were since
        self._unreduced: dict[int, set[int]] = {}
        self._on_final: OnFinal | None = None
        self._reductions = Reductions()

    def begin_backward(self, boundary: bool, on_final: OnFinal | None) -> None:
        """boundary: always; a schedule has all microbatches of a step. on_final: called with each final gradient."""
        assert boundary
        self._on_final = on_final
        self._reductions.abandon()
        self._unreduced = {
            id(unit): {stage for stage, members in self._stages.items() if unit in members} for unit in self.units
        }
        for unit in self.units if self._adds_in_place else ():
            for gradient in unit.gradients:
                gradient.accumulate_in_place()

    # -- what the executor calls ----------------------------------------------------------------------------------

    def gather(self, stage: int) -> None:
        """Starts to make the stage's parameters full."""
        for unit in self._stages[stage]:
            self._users[id(unit)].add(stage)
            unit.start_gather()
        self._coming[stage] = 0

    def use(self, stage: int) -> None:
        """The stage's parameters are full from now on.

        What other stages load is asked of the ranks with the second use after it was asked for: then it has had time
        to come, and all ranks are at the same place of their lists.
        """
        if self._coming.pop(stage, None) is not None:
            for unit in self._stages[stage]:
                unit.continue_gather()
            for unit in self._stages[stage]:
                unit.gather()
        for other in self._coming:
            if self._coming[other] == 1:
                for unit in self._stages[other]:
                    unit.continue_gather()
            self._coming[other] += 1

    def release(self, stage: int) -> None:
        """Frees those that no other stage here needs."""
        self._coming.pop(stage, None)
        for unit in self._stages[stage]:
            self._users[id(unit)].discard(stage)
            if not self._users[id(unit)]:
                is_updated = self._on_final is not None and not self._unreduced.get(id(unit), {stage})
                unit.release_reduced(is_updated)
                unit.release()

    def collect(self, stage: int) -> None:
        """Takes a microbatch's gradients from `param.grad`: more will come."""
        for unit in reversed(self._stages[stage]):
            self._start(unit, boundary=False)

    def collect_half(self, stage: int) -> None:
        """As `collect`, where autograd cannot add up what comes next: before the last of a microbatch's gradients."""
        for unit in reversed(self._stages[stage]):
            for gradient in unit.gradients:
                if gradient.group.plan.is_added_up_flat:
                    self._reductions.start(gradient, boundary=False)

    def reduce(self, stage: int) -> None:
        """The stage has its last gradients: reduces the units that no other stage here still adds to."""
        for unit in reversed(self._stages[stage]):
            left = self._unreduced[id(unit)]
            left.discard(stage)
            self._start(unit, boundary=not left)

    def _start(self, unit: Unit, boundary: bool) -> None:
        on_final = self._on_final if boundary else None
        for gradient in unit.gradients:
            self._reductions.start(gradient, boundary, on_final)

    # -- the ends of a schedule -----------------------------------------------------------------------------------

    def end_backward(self) -> None:
        """Completes all reductions, and sums what is tied. A collective over pipe and data-parallel ranks."""
        self._reductions.finish()
        self._on_final = None
        for unit in self.units:
            for gradient in unit.gradients:
                for copies in gradient.group.plan.domain.tied:
                    self._sum_tied(gradient, copies)

    def abort(self, error: BaseException) -> None:
        """Ends a schedule that `error` has ended."""
        self._reductions.abandon()
        self._on_final = None
        self.release_all()

    def await_others(self) -> None:
        """Does nothing: all ranks run the same schedule."""

    def release_all(self) -> None:
        self._coming.clear()
        for unit in self.units:
            self._users[id(unit)].clear()
            unit.release()

    def _sum_tied(self, gradient: GroupGradient, copies: Copies) -> None:
        """shard = sum over the places: the same bits on each. The last first, as a backward of the whole model adds."""
        assert gradient.shard is not None
        what = f"the gradient of tied {gradient.group.plan.name}"
        own = self._mesh.axes[copies.axis].rank
        parts = {place: torch.empty_like(gradient.shard) for place in copies.places if place != own}
        pending = [
            self._mesh.peers.exchange(gradient.shard, part, place, _TIED_TAG, what) for place, part in parts.items()
        ]
        for one in pending:
            one.wait()
        total = None
        for place in reversed(copies.places):
            part = gradient.shard if place == own else parts[place]
            total = part.clone() if total is None else total.add_(part)
        assert total is not None
        gradient.replace(total)


def reduction_order(units: Sequence[U], stages: Mapping[int, Sequence[U]]) -> list[U]:
    """In which stages, the last one first, have all gradients of each unit; at the end what none of them has."""
    first_stage = {unit: stage for stage in sorted(stages, reverse=True) for unit in stages[stage]}
    order = [
        unit for stage in sorted(stages, reverse=True) for unit in reversed(stages[stage]) if first_stage[unit] == stage
    ]
    return [*order, *(unit for unit in units if unit not in first_stage)]
