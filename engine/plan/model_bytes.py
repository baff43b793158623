"""Bytes of a model of which nothing is divided: what bounds are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from ...zero.plan import GroupPlan
from ..blueprint.blueprint import Blueprint
from ..blueprint.footprint import Footprint, Moment


@dataclass(frozen=True)
class ModelBytes:
    """Without padding. Of one rank that has all layers."""

    parameters: int
    gathered_again: int  # in the backward: all but the rest and the last unit
    reduced: int  # gradients, as messages have them
    summed: int  # gradients, as they are added up
    refreshed: int  # parameters that an update changes
    passing: int  # what an update reads and writes at least: gradients, and those parameters
    states: float  # of the optimizer
    least_slot: int  # the largest message of a block, of the block where that is least
    adds_up_apart: bool
    """Each block adds some gradients up flat. Then a pipeline's backward keeps its gradients: see `PlaceMemory`."""
    share_of_blocks: float  # of all parameters, if each block had as few as any

    @classmethod
    def of(cls, first: Blueprint, blocks: Set[str]) -> ModelBytes:
        """first: nothing is divided over its data-parallel ranks. blocks: names."""
        plan = first.places[0]
        in_blocks = [groups for unit, groups in plan.units if unit.name in blocks]
        padded, numel = sum(one.layout.shard_numel for one in plan.updated), _bytes(plan.updated, lambda one: 1)
        states = Footprint(first, 0).at(Moment.BETWEEN_STEPS, gathers=False).optimizer
        slots = [max(_bytes([one], lambda one: one.reduce_dtype.itemsize) for one in groups) for groups in in_blocks]
        least = min((_bytes(groups, lambda one: 1) for groups in in_blocks), default=0)
        refreshed = _bytes(plan.updated, lambda one: one.dtype.itemsize)
        return cls(
            parameters=_bytes(plan.groups, lambda one: one.dtype.itemsize),
            gathered_again=sum(_bytes(groups, lambda one: one.dtype.itemsize) for _, groups in plan.units[1:-1]),
            reduced=_bytes(plan.trained, lambda one: one.reduce_dtype.itemsize),
            summed=_bytes(plan.trained, lambda one: one.accumulation_dtype.itemsize),
            refreshed=refreshed,
            passing=refreshed + _bytes(plan.updated, lambda one: one.accumulation_dtype.itemsize),
            states=states * numel / max(1, padded),
            least_slot=min(slots, default=0),
            adds_up_apart=all(any(one.is_added_up_flat for one in groups) for groups in in_blocks),
            share_of_blocks=least * len(blocks) / _bytes(plan.groups, lambda one: 1),
        )


def _bytes(groups: Iterable[GroupPlan], itemsize: Callable[[GroupPlan], int]) -> int:
    return sum(one.layout.numel * itemsize(one) for one in groups)
