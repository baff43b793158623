"""From a model to its units: plans layouts, takes memory, fills it with the model's values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..comm import Arrangement, Mesh
from ..offload import PagedBuffer, PagePool, huge_zeros
from .codec import Codec
from .domain import Domain
from .gradient import GroupGradient
from .group import ShardedGroup
from .group_memory import PagedMemory, ResizedMemory
from .host_update import HostUpdate
from .layout import FlatLayout
from .policy import ZeroPolicy
from .sequence import Unit
from .shard_rest import ShardRest
from .units import UnitPlan


@dataclass(frozen=True)
class Dtypes:
    """What is computed, reduced and accumulated in. None: as the parameter, and at least float32 for the last two."""

    compute: torch.dtype | None
    reduce: torch.dtype | None
    accumulate: torch.dtype | None
    kept: Collection[int] = ()  # identities of parameters that are computed in their own dtype

    def of(self, param: Tensor) -> torch.dtype:
        """The dtype in which a parameter is computed."""
        if self.compute is None or not param.is_floating_point() or id(param) in self.kept:
            return param.dtype
        return self.compute

    def accumulated(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of parameters that are computed in `dtype` are added up."""
        return _at_least_float32(self.accumulate, dtype)


@dataclass(frozen=True)
class GroupPlan:
    """A group before it has memory: its parameters, dtype, layout and domain."""

    name: str
    params: tuple[tuple[str, nn.Parameter], ...]
    dtype: torch.dtype
    layout: FlatLayout
    domain: Domain

    @property
    def requires_grad(self) -> bool:
        return self.params[0][1].requires_grad


@dataclass(frozen=True)
class ModelPlan:
    """The units of a model with the layouts of their groups, on axes of given sizes: no memory taken yet."""

    units: tuple[tuple[UnitPlan, tuple[GroupPlan, ...]], ...]
    domain: Domain  # of groups of which no other stage has a copy

    @classmethod
    def of(cls, units: Sequence[UnitPlan], dtypes: Dtypes, domain: Domain, arrangement: Arrangement) -> ModelPlan:
        return cls(tuple((unit, tuple(_plan_groups(unit, dtypes, domain, arrangement))) for unit in units), domain)

    @property
    def groups(self) -> list[GroupPlan]:
        return [group for _, groups in self.units for group in groups]

    @property
    def shard_bytes(self) -> list[int]:
        """Bytes of a rank's shard of each group."""
        return [group.layout.shard_numel * group.dtype.itemsize for group in self.groups]

    def shared_bytes(self, dtypes: Dtypes, num_ranks: int, shares_gradients: bool) -> int:
        """An upper bound of what the ranks of one host take of its shared memory: one copy, and the ring of slots.

        shares_gradients: the copy is of the gradients, and not of the parameters.
        """
        kinds = [(group.layout.padded_numel, group.dtype) for group in self.groups]
        copies = sum(n * (dtypes.accumulated(dtype) if shares_gradients else dtype).itemsize for n, dtype in kinds)
        return copies + 2 * num_ranks * slot_bytes(self.groups, dtypes) + (1 << 20)


def slot_bytes(groups: Iterable[GroupPlan], dtypes: Dtypes) -> int:
    """Bytes of the largest gradient that is ever staged, with its sum where the reduce dtype cannot hold that."""
    return max((_slot_bytes_of(group, dtypes) for group in groups if group.requires_grad), default=0)


def build_units(
    plan: ModelPlan,
    mesh: Mesh,
    policy: ZeroPolicy,
    dtypes: Dtypes,
    rest: ShardRest | None = None,
    shares_gradients: bool = False,
    delays_updates: bool = False,
    host: HostUpdate | None = None,
) -> list[Unit]:
    """Takes the memory of every group. Parameters still are what they were; `fill` comes next.

    rest: where shards are while nobody needs them, with room for `plan.shard_bytes`; None: in memory.
    shares_gradients: replicas that share memory have one sum of their gradients, and nobody changes it. delays_updates:
    the gradients of a step are used while the next ones come. host: what updates parameters that are on a device.
    """
    plans = plan.groups
    trained = [group for group in plans if group.requires_grad]
    take_memory = _memory_for(plan, mesh, rest)
    staged = slot_bytes(plans, dtypes)
    state_axis, replica_axis = mesh.over(plan.domain.states), mesh.over(plan.domain.replicas)
    # A unit is staged when the one before it was summed; an all-reduce takes one more phase. One more is no faster:
    # ranks that are apart by less than a unit do not wait.
    for axis, nbytes, count in ((state_axis, staged, 1), (replica_axis, staged // state_axis.size, 2)):
        if axis.size > 1 and staged:
            axis.route.reserve_slots(nbytes, count)
    common: dict[str, Tensor] = {}  # by name of the group
    if shares_gradients and replica_axis.route.copies_are_shared:
        own = [group for group in trained if not group.domain.copies]
        specs = [(group.layout.shard_numel, dtypes.accumulated(group.dtype)) for group in own]
        common = dict(zip((group.name for group in own), replica_axis.route.allocate(specs), strict=True))
    units = []
    for unit, group_plans in plan.units:
        groups, gradients = [], []
        for group_plan in group_plans:
            group = ShardedGroup(
                group_plan.name, group_plan.params, group_plan.dtype, group_plan.layout, mesh, group_plan.domain
            )
            take_memory(group)
            groups.append(group)
            if group.requires_grad:
                gradients.append(
                    GroupGradient(
                        group,
                        Codec(_at_least_float32(dtypes.reduce, group.dtype)),
                        dtypes.accumulated(group.dtype),
                        policy.reduces_every_backward,
                        common.get(group.name),
                        delays_updates,
                        host if host is not None and host.updates(group.layout.shard_numel) else None,
                    )
                )
        units.append(Unit(unit.name, unit.module, groups, gradients))
    return units


def _memory_for(plan: ModelPlan, mesh: Mesh, rest: ShardRest | None) -> Callable[[ShardedGroup], None]:
    """What gives each group, in order, the memory that its full buffer lives in."""
    route = mesh.over(plan.domain.states).route
    specs = [(group.layout.padded_numel, group.dtype) for group in plan.groups]
    frees_memory = rest is not None or (mesh.over(plan.domain.parameters).size > 1 and not route.copies_are_shared)
    device = mesh.world.device
    if not frees_memory and device.type == "cpu" and not route.copies_are_shared:
        return lambda group: group.adopt(huge_zeros(group.layout.padded_numel, group.dtype, device))
    if not frees_memory:
        buffers = iter(route.allocate(specs))
        return lambda group: group.adopt(next(buffers))
    if mesh.world.device.type == "cpu" and PagePool.is_possible():
        pool = PagePool()

        def adopt_pages(group: ShardedGroup) -> None:
            pages = PagedBuffer(pool, group.layout.padded_numel, group.dtype)
            group.adopt_memory(PagedMemory(pages, group.at_rest), rest)

        return adopt_pages

    def adopt_storage(group: ShardedGroup) -> None:  # one by one: each is made, and its memory freed, before the next
        (full,) = route.allocate([(group.layout.padded_numel, group.dtype)])
        group.adopt_memory(ResizedMemory(full, full[group.at_rest].numel()), rest)

    return adopt_storage


def _plan_groups(unit: UnitPlan, dtypes: Dtypes, domain: Domain, arrangement: Arrangement) -> Iterable[GroupPlan]:
    domain, shard_count = replace(domain, copies=unit.copies), arrangement.size(domain.states)
    members: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, param in unit.params:
        members.setdefault((dtypes.of(param), param.requires_grad), []).append((name, param))
    for (dtype, requires_grad), params in members.items():
        layout = FlatLayout.of([(name, tuple(param.shape)) for name, param in params], shard_count)
        kind = f"{str(dtype).removeprefix('torch.')}{'' if requires_grad else ', frozen'}"
        yield GroupPlan(f"unit {unit.name} ({kind})", tuple(params), dtype, layout, domain)


def _slot_bytes_of(group: GroupPlan, dtypes: Dtypes) -> int:
    reduce = _at_least_float32(dtypes.reduce, group.dtype)
    accumulate = dtypes.accumulated(group.dtype)
    sum_itemsize = 0 if torch.promote_types(reduce, accumulate) == reduce else accumulate.itemsize
    return group.layout.padded_numel * (reduce.itemsize + sum_itemsize)


def _at_least_float32(wanted: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype that was asked for, else float32; float64 parameters keep float64."""
    if dtype == torch.float64:
        return dtype
    return wanted if wanted is not None else torch.float32
