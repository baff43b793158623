"""The peak of gathered parameters, found by running the units' gather order on groups that only count bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import cast

import torch

from ...comm import Mesh, Progress
from ...pipe.schedules.schedule import Op
from ...zero.group import ShardedGroup, ShardedState
from ...zero.plan import GroupPlan
from ...zero.scheduled_units import ScheduledUnits
from ...zero.sequence import UnitSequence
from ...zero.unit import Unit
from .blueprint import Blueprint
from .pipeline_plan import PipelinePlan


def peak_gathered_bytes(blueprint: Blueprint, place: int, bytes_of: Callable[[GroupPlan], int]) -> int:
    """Return the peak in a training microbatch or a pipeline step. bytes_of: the bytes that gathering a group adds."""
    changes: list[int] = []
    units = [
        Unit(unit.name, unit.module, [_counted(changes, group, bytes_of(group)) for group in groups], [])
        for unit, groups in blueprint.places[place].units
    ]
    if blueprint.pipeline is None:
        _run_microbatch(UnitSequence(units, blueprint.prefetch_numel, Progress()))
    else:
        _run_schedule(blueprint.pipeline.at(blueprint.stage_place_of(place)), units)
    return max(accumulate(changes, initial=0))


class _CountedGroup:
    """A `ShardedGroup` that notes changes of its memory instead of taking it."""

    # Nobody keeps a group full in a planned microbatch, so `keeper` stays None.
    frees_memory = True
    keeper = None

    def __init__(self, changes: list[int], plan: GroupPlan, nbytes: int) -> None:
        self.layout = plan.layout
        self.sharded_state = ShardedState.SHARDED
        self._changes = changes
        self._nbytes = nbytes

    def start_gather(self) -> None:
        if self.sharded_state is ShardedState.SHARDED:
            self._changes.append(self._nbytes)
            self.sharded_state = ShardedState.UNSHARDING

    def gather(self) -> None:
        self.start_gather()
        self.sharded_state = ShardedState.UNSHARDED

    def release(self, holds_shard: bool = False) -> None:
        if self.sharded_state is not ShardedState.SHARDED:
            self._changes.append(-self._nbytes)
            self.sharded_state = ShardedState.SHARDED


def _counted(changes: list[int], plan: GroupPlan, nbytes: int) -> ShardedGroup:
    return cast(ShardedGroup, _CountedGroup(changes, plan, nbytes))


# A planner may run without gradients, and `begin_forward` would then expect no backward.
@torch.enable_grad()
def _run_microbatch(sequence: UnitSequence) -> None:
    """Run forward and backward of a model that uses each block once, in order."""
    sequence.begin_forward()
    uses = []
    for unit in sequence.blocks:
        uses.append(sequence.enter(unit))
        sequence.leave(unit)
    sequence.end_forward(keeps_graph=True)
    sequence.begin_backward(boundary=True, on_final=None)
    for use in reversed(uses):
        assert use is not None
        sequence.enter_backward(use)
    sequence.end_backward()


def _run_schedule(plan: PipelinePlan, units: list[Unit]) -> None:
    stages = {stage: plan.members(units, stage) for stage in plan.stages}
    scheduled = ScheduledUnits(units, stages, cast(Mesh, None))  # only sums of tied weights use the mesh
    # Forwards, backwards and messages neither gather nor release.
    for action in plan.training.actions[plan.place]:
        if action.op is Op.GATHER:
            scheduled.gather(action.stage)
        elif action.op is Op.RELEASE:
            scheduled.release(action.stage)
