"""The units of a pipeline rank: the schedule says when they are gathered, released and reduced.

All data-parallel ranks of a pipeline stage run the same list of actions, so their collectives have the same order.
`sequence.py` is for ranks that run a whole model.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch

from ..comm import Mesh
from .gradient import GroupGradient
from .reductions import OnFinal, Reductions
from .sharding_spec import Replicas
from .unit import Unit

# Above the tags of the schedule's messages. Ranks reach the tied weights that they share in the same order, even
# if each has more, so the order of messages tells them apart.
_TIED_TAG = 1 << 19

U = TypeVar("U", bound=Hashable)


class ScheduledUnits:
    """Gathers, releases and reduces units for the pipeline executor, stage by stage; see `executor.StageMemory`.

        stage ----gather----> full ...F, B, I, W... ----release---->
                                          |                    after each microbatch but the last: collect
                                          +--- param.grad ---> after the last: reduce

    If several stages of the rank use a unit, it stays full while any of them needs it, and is reduced with the last.
    """

    def __init__(
        self, units: Sequence[Unit], stages: Mapping[int, Sequence[Unit]], mesh: Mesh, adds_in_place: bool = True
    ) -> None:
        """units: all units of this rank, the root unit first. stages: the units of each stage on this rank.

        adds_in_place: see `GroupGradient.accumulate_in_place`; all gradient shards then exist from the first microbatch
        on.
        """
        self.units = units
        self.root, self.blocks = units[0], list(units[1:])
        self.reduction_order = reduction_order(units, stages)
        self._stages = stages
        self._adds_in_place = adds_in_place
        self._mesh = mesh
        self._users: dict[int, set[int]] = {id(unit): set() for unit in units}  # stages that need the unit
        self._coming: dict[int, int] = {}  # gathered stages -> uses of other stages since then
        self._unreduced: dict[int, set[int]] = {}
        self._on_final: OnFinal | None = None
        self._reductions = Reductions()

    def begin_backward(self, boundary: bool, on_final: OnFinal | None) -> None:
        """Begin a schedule. boundary: True, as a schedule is a whole step. on_final: called with each final sum."""
        assert boundary
        self._on_final = on_final
        # Reductions of a schedule that an error has ended.
        self._reductions.abandon()
        self._unreduced = {
            id(unit): {stage for stage, members in self._stages.items() if unit in members} for unit in self.units
        }
        for unit in self.units if self._adds_in_place else ():
            for gradient in unit.gradients:
                gradient.accumulate_in_place()

    # -- what the executor calls ----------------------------------------------------------------------------------

    def gather(self, stage: int) -> None:
        """Start to gather a stage's parameters."""
        for unit in self._stages[stage]:
            self._users[id(unit)].add(stage)
            unit.start_gather()
        self._coming[stage] = 0

    def use(self, stage: int) -> None:
        """Wait until the stage's parameters are full.

        The collective of an offloaded stage starts at the second use after its load began: the load has had time, and
        all ranks are at the same position of their lists.
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
        """Free the parameters that no other stage of this rank needs."""
        self._coming.pop(stage, None)
        for unit in self._stages[stage]:
            self._users[id(unit)].discard(stage)
            if not self._users[id(unit)]:
                is_updated = self._on_final is not None and not self._unreduced[id(unit)]
                # Trained groups first: an offloaded shard stays in memory if its update follows.
                unit.release_reduced(is_updated)
                unit.release()

    def collect(self, stage: int) -> None:
        """Take a microbatch's gradients from `param.grad`. More microbatches follow."""
        for unit in reversed(self._stages[stage]):
            self._start(unit, boundary=False)

    def collect_half(self, stage: int) -> None:
        """As `collect`, for groups whose gradients autograd cannot add up, before the microbatch's last gradients."""
        for unit in reversed(self._stages[stage]):
            for gradient in unit.gradients:
                if gradient.group.plan.is_added_up_flat:
                    self._reductions.start(gradient, boundary=False)

    def reduce(self, stage: int) -> None:
        """Take a stage's last gradients, and reduce the units that no other stage of this rank still adds to."""
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
        """Complete all reductions, and sum tied gradients. A collective over pipe and data-parallel ranks."""
        self._reductions.finish()
        self._on_final = None
        for unit in self.units:
            for gradient in unit.gradients:
                for copies in gradient.group.plan.sharding.tied:
                    self._sum_tied(gradient, copies)

    def abort(self, error: BaseException, completes: bool) -> None:
        """End a schedule that `error` has ended. Nothing of it can be completed."""
        self._reductions.abandon()
        self._on_final = None
        self.release_all()

    def await_others(self) -> None:
        """Do nothing: all ranks run the same schedule."""

    def release_all(self) -> None:
        self._coming.clear()
        for unit in self.units:
            self._users[id(unit)].clear()
            unit.release()

    def _sum_tied(self, gradient: GroupGradient, copies: Replicas) -> None:
        """shard = sum over the copies, with the same bits on each. The last stage first, the order of a backward."""
        assert gradient.shard is not None
        what = f"the gradient of tied {gradient.group.plan.name}"
        own = self._mesh.axes[copies.axis].rank
        parts = {place: torch.empty_like(gradient.shard) for place in copies.places if place != own}
        pending = [
            self._mesh.peers.exchange(gradient.shard, part, place, _TIED_TAG, what) for place, part in parts.items()
        ]
        for message in pending:
            message.wait()
        total = None
        # Every copy adds in this order, so all get the same bits.
        for place in reversed(copies.places):
            part = gradient.shard if place == own else parts[place]
            total = part.clone() if total is None else total.add_(part)
        assert total is not None
        gradient.replace(total)


def reduction_order(units: Sequence[U], stages: Mapping[int, Sequence[U]]) -> list[U]:
    """Return the order in which the units get their last gradients, the last stage first; unused units at the end."""
    first_stage = {unit: stage for stage in sorted(stages, reverse=True) for unit in stages[stage]}
    order = [
        unit for stage in sorted(stages, reverse=True) for unit in reversed(stages[stage]) if first_stage[unit] == stage
    ]
    return [*order, *(unit for unit in units if unit not in first_stage)]
