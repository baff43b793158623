"""The units of a model with the layouts of their groups: what is built, before it takes memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor, nn

from ..comm import Arrangement
from ..offload import Portion
from .domain import Copies, Domain
from .layout import FlatLayout
from .units import UnitPlan
from .wire import PLAIN, Wire


@dataclass(frozen=True)
class Dtypes:
    """What is computed, reduced and accumulated in. None: as the parameter, and at least float32 for the last two."""

    compute: torch.dtype | None
    reduce: torch.dtype | None
    accumulate: torch.dtype | None
    kept: Collection[int] = ()  # identities of parameters that are computed in their own dtype
    wire: Wire = PLAIN  # what messages have in fewer bits

    def of(self, param: Tensor) -> torch.dtype:
        """The dtype in which a parameter is computed."""
        if self.compute is None or not param.is_floating_point() or id(param) in self.kept:
            return param.dtype
        return self.compute


class Role(Enum):
    """What becomes of a parameter in training, and which memory is taken for it beside its own."""

    FROZEN = "frozen"  # nothing: it has no gradient, now or later
    LEFT_OUT = "left out"  # a gradient, and no states: no group of the optimizer has it
    UPDATED = "updated"  # a gradient, and states


Roles = Callable[[nn.Parameter], Role]


@dataclass(frozen=True)
class Share:
    """What a rank has of a parameter before that is sharded, and which others have the same of it."""

    portion: Portion
    copies: tuple[Copies, ...] = ()
    portioned: tuple[str, ...] = ()  # as of `Domain`

    @classmethod
    def all_of(cls, param: Tensor) -> Share:
        return cls(Portion.all_of(tuple(param.shape)))


Shares = Callable[[nn.Parameter], Share]
Level = tuple[tuple[str, ...], int | None]
"""Axes over which a gradient is summed, and the bits of what is sent of it; None: those of the reduce dtype."""


@dataclass(frozen=True)
class GroupPlan:
    """A group before it has memory: its parameters, dtypes, layout and domain."""

    name: str
    params: tuple[tuple[str, nn.Parameter], ...]
    dtype: torch.dtype  # of the parameters, as they are computed
    reduce_dtype: torch.dtype  # of gradients between ranks
    accumulation_dtype: torch.dtype  # of their sums over ranks and microbatches
    layout: FlatLayout
    domain: Domain
    role: Role
    levels: tuple[Level, ...]  # of the sum of gradients over `domain.states`
    replicas: Level  # of that over `domain.replicas`
    weight_bits: int | None  # of weights that go to other ranks; None: they go as they are
    sends_differences: bool  # what goes there is what an update has changed of their copies, and nothing else

    @property
    def full_bytes(self) -> int:
        """Of all parameters, with padding."""
        return self.layout.padded_numel * self.dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """Of a rank's part of the parameters."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def is_added_up_flat(self) -> bool:
        """Whether autograd cannot add up the gradients of a step's microbatches: their sum has another dtype."""
        return self.accumulation_dtype != self.dtype

    @property
    def slot_bytes(self) -> int:
        """Of the gradient where it is staged, with its sum where the reduce dtype cannot hold that."""
        holds_sum = torch.promote_types(self.reduce_dtype, self.accumulation_dtype) == self.reduce_dtype
        sum_itemsize = 0 if holds_sum else self.accumulation_dtype.itemsize
        return self.layout.padded_numel * (self.reduce_dtype.itemsize + sum_itemsize)


@dataclass(frozen=True)
class ModelPlan:
    """What one rank has of a model, on axes of given sizes. Ranks of one pipeline place have the same."""

    units: tuple[tuple[UnitPlan, tuple[GroupPlan, ...]], ...]

    @classmethod
    def of(
        cls,
        units: Sequence[UnitPlan],
        dtypes: Dtypes,
        domain: Domain,
        arrangement: Arrangement,
        role_of: Roles,
        share_of: Shares = Share.all_of,
        is_matrix: Callable[[nn.Parameter], bool] = lambda param: False,
    ) -> ModelPlan:
        """is_matrix: whether a parameter has other states than the rest, as its update is of whole matrices."""
        groups = (
            (unit, tuple(_plan_groups(unit, dtypes, domain, arrangement, role_of, share_of, is_matrix)))
            for unit in units
        )
        return cls(tuple(groups))

    @property
    def groups(self) -> list[GroupPlan]:
        return [group for _, groups in self.units for group in groups]

    @property
    def trained(self) -> list[GroupPlan]:
        """Those that have gradients."""
        return [group for group in self.groups if group.role is not Role.FROZEN]

    @property
    def updated(self) -> list[GroupPlan]:
        """Those that have gradients and states."""
        return [group for group in self.groups if group.role is Role.UPDATED]

    def rings(self, arrangement: Arrangement) -> list[Ring]:
        """Through which gradients are reduced, for each rank."""
        return rings_for(self.trained, arrangement)


Ring = tuple[tuple[str, ...], int, int]
"""(axes, bytes of a slot, number of slots)"""


def rings_for(trained: Sequence[GroupPlan], arrangement: Arrangement) -> list[Ring]:
    """Through which the gradients of these groups are reduced, for each rank."""
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    for group in trained:
        states, replicas = arrangement.wide(group.domain.states), arrangement.wide(group.domain.replicas)
        # A unit is staged when the one before it was summed; an all-reduce takes one more phase. One more is no faster:
        # ranks that are apart by less than a unit do not wait.
        rings = ((states, group.slot_bytes, 1), (replicas, group.slot_bytes // arrangement.size(states), 2))
        for axes, nbytes, count in rings:
            most, slots = found.get(axes, (0, 0))
            found[axes] = max(most, nbytes), max(slots, count)
    return [(axes, nbytes, count) for axes, (nbytes, count) in found.items() if axes and nbytes]


def _plan_groups(
    unit: UnitPlan,
    dtypes: Dtypes,
    domain: Domain,
    arrangement: Arrangement,
    role_of: Roles,
    share_of: Shares,
    is_matrix: Callable[[nn.Parameter], bool],
) -> Iterable[GroupPlan]:
    Key = tuple[torch.dtype, Role, tuple[Copies, ...], tuple[str, ...], bool]
    members: dict[Key, list[tuple[str, nn.Parameter]]] = {}
    for name, param in unit.params:
        share = share_of(param)
        key = dtypes.of(param), role_of(param), share.copies, share.portioned, is_matrix(param)
        members.setdefault(key, []).append((name, param))
    for (dtype, role, copies, portioned, has_matrices), params in members.items():
        kind = f"{str(dtype).removeprefix('torch.')}{'' if role is Role.UPDATED else f', {role.value}'}"
        kind += "".join(f", on {one.axis} {', '.join(map(str, one.places))}" for one in copies)
        kind += "".join(f", split over {axis}" for axis in portioned)
        kind += ", matrices" if has_matrices else ""
        own = replace(domain.within(portioned), copies=(*unit.copies, *copies))
        yield plan_group(f"unit {unit.name} ({kind})", params, dtype, role, dtypes, own, arrangement, share_of)


def plan_group(
    name: str,
    params: Sequence[tuple[str, nn.Parameter]],
    dtype: torch.dtype,
    role: Role,
    dtypes: Dtypes,
    domain: Domain,
    arrangement: Arrangement,
    share_of: Shares = Share.all_of,
) -> GroupPlan:
    """A group of its own of these parameters, which are computed in `dtype`."""
    reduce, wire = _at_least_float32(dtypes.reduce, dtype), dtypes.wire

    def level(axes: tuple[str, ...]) -> Level:
        return axes, wire.gradient_bits(arrangement, axes, reduce)

    weight_bits = wire.weight_bits(arrangement, domain, dtype, role is Role.FROZEN)
    in_two = arrangement.size(domain.first) > 1 and arrangement.size(domain.last) > 1
    return GroupPlan(
        name=name,
        params=tuple(params),
        dtype=dtype,
        reduce_dtype=reduce,
        accumulation_dtype=_at_least_float32(dtypes.accumulate, dtype),
        layout=FlatLayout.of_portions(
            [(name, share_of(param).portion) for name, param in params], arrangement.size(domain.states)
        ),
        domain=domain,
        role=role,
        levels=tuple(map(level, (domain.first, domain.last) if in_two else (domain.states,))),
        replicas=level(domain.replicas),
        weight_bits=weight_bits,
        sends_differences=weight_bits is not None and arrangement.size(domain.refreshed) > 1,
    )


def _at_least_float32(wanted: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype that was asked for, else float32; float64 parameters keep float64."""
    if dtype == torch.float64:
        return dtype
    return wanted if wanted is not None else torch.float32
