"""Seconds of gradients on their way from autograd to the update, beside what is sent, where that was measured."""

from __future__ import annotations

from ...zero.plan import GroupPlan
from ..blueprint.blueprint import Blueprint
from .machine import Machine


def gradient_seconds(
    blueprint: Blueprint, machine: Machine, place: int, is_first: bool, is_last: bool, is_direct: bool
) -> float:
    """Of one microbatch, the first or last of a step or neither, on the ranks of one place of a pipeline.

    is_direct: gradients are made where they are staged.
    """
    if machine.speeds is None:
        return 0.0
    return sum(
        _of_group(blueprint, machine, group, is_first, is_last, is_direct) for group in blueprint.places[place].trained
    )


def _of_group(
    blueprint: Blueprint, machine: Machine, group: GroupPlan, is_first: bool, is_last: bool, is_direct: bool
) -> float:
    assert machine.speeds is not None
    size = blueprint.arrangement.size
    numel, dtype = group.layout.numel, str(group.dtype).removeprefix("torch.")
    wide = group.accumulation_dtype.itemsize
    is_alone = size(group.domain.states) == size(group.domain.replicas) == 1
    is_staged = is_last or blueprint.policy.reduces_every_backward or group.is_added_up_flat
    seconds = 0.0
    if not is_first:  # it is added to what there is
        seconds += machine.speeds.operation("add", dtype, numel * (group.dtype.itemsize + 2 * wide))
    if is_staged and not is_direct and is_first:
        seconds += machine.speeds.operation("copy", dtype, numel * (2 * group.dtype.itemsize + wide))
    if is_last and is_alone:
        seconds += machine.moving("inspect", group.layout.shard_numel * wide)
    return seconds


def host_seconds(blueprint: Blueprint, machine: Machine, num_units: int, num_microbatches: int) -> float:
    """Of the engine itself in a step: for each unit of each microbatch, and once."""
    stage, route = blueprint.config.zero_optimization.stage, blueprint.route
    measured = {0: 0, 1: 1, 2: 3, 3: 3}.get(int(stage), 0)
    unit, step = (machine.host(f"{route} {what} {measured}") for what in ("unit", "step"))
    return num_microbatches * num_units * unit + step
