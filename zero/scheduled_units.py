"""The units of a rank in a pipeline: gathered, released and reduced when the schedule says so.

All data-parallel ranks of a pipeline place run the same list of actions, so their collectives come in the same order
without a canonical one; `sequence.py` is for ranks that go through a whole model on their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..comm import Mesh
from .domain import Copies
from .gradient import GroupGradient
from .reductions import OnFinal, Reductions
from .unit import Unit

# Above those of the schedule's messages. Ranks come to the tied weights that they share in the same order, whichever
# others each of them has, so the order of messages tells them apart.
_TIED_TAG = 1 << 19


class ScheduledUnits:
    """What a pipeline's executor does to parameters and gradients, stage by stage; see `executor.StageMemory`.

    stage ----gather----> full ...F, B, I, W... ----release---->
                                      |                    after each microbatch but the last: collect
                                      +--- param.grad ---> after the last: reduce

    A unit that several stages of the rank use is there as long as one of them needs it, and reduced with the last.
    """

    def __init__(self, units: Sequence[Unit], stages: Mapping[int, Sequence[Unit]], mesh: Mesh) -> None:
        """units: all of this rank, the rest first; stages: those of each stage that lives here."""
        self.units = units
        self.rest, self.blocks = units[0], list(units[1:])
        self.reduction_order = [*reversed(self.blocks), self.rest]
        self._stages = stages
        self._mesh = mesh
        self._users: dict[int, set[int]] = {id(unit): set() for unit in units}  # stages for which it is full
        self._unreduced: dict[int, set[int]] = {}
        self._reductions = Reductions()

    def begin_backward(self, boundary: bool, on_final: OnFinal | None) -> None:
        """boundary: always; a schedule has all microbatches of a step. on_final: None; so says the config."""
        assert boundary and on_final is None
        self._reductions.abandon()
        self._unreduced = {
            id(unit): {stage for stage, members in self._stages.items() if unit in members} for unit in self.units
        }
        for unit in self.units:
            for gradient in unit.gradients:
                gradient.accumulate_in_place()

    # -- what the executor calls ----------------------------------------------------------------------------------

    def gather(self, stage: int) -> None:
        """Makes the stage's parameters full."""
        for unit in self._stages[stage]:
            self._users[id(unit)].add(stage)
            unit.start_gather()
        for unit in self._stages[stage]:
            unit.continue_gather()
        for unit in self._stages[stage]:
            unit.gather()

    def release(self, stage: int) -> None:
        """Frees those that no other stage here needs."""
        for unit in self._stages[stage]:
            self._users[id(unit)].discard(stage)
            if not self._users[id(unit)]:
                unit.release()

    def collect(self, stage: int) -> None:
        """Takes a microbatch's gradients from `param.grad`: more will come."""
        for unit in reversed(self._stages[stage]):
            self._start(unit, boundary=False)

    def reduce(self, stage: int) -> None:
        """The stage has its last gradients: reduces the units that no other stage here still adds to."""
        for unit in reversed(self._stages[stage]):
            left = self._unreduced[id(unit)]
            left.discard(stage)
            self._start(unit, boundary=not left)

    def _start(self, unit: Unit, boundary: bool) -> None:
        for gradient in unit.gradients:
            self._reductions.start(gradient, boundary)

    # -- the ends of a schedule -----------------------------------------------------------------------------------

    def end_backward(self) -> None:
        """Completes all reductions, and sums what is tied. A collective over pipe and data-parallel ranks."""
        self._reductions.finish()
        for unit in self.units:
            for gradient in unit.gradients:
                for copies in gradient.group.domain.tied:
                    self._sum_tied(gradient, copies)

    def abort(self, error: BaseException) -> None:
        """Ends a schedule that `error` has ended."""
        self._reductions.abandon()
        self.release_all()

    def release_all(self) -> None:
        for unit in self.units:
            self._users[id(unit)].clear()
            unit.release()

    def _sum_tied(self, gradient: GroupGradient, copies: Copies) -> None:
        """shard = sum over the places: the same bits on each. The last first, as a backward of the whole model adds."""
        assert gradient.shard is not None
        what = f"the gradient of tied {gradient.group.name}"
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
