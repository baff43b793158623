"""From a plan to units: takes the memory of every group."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ..comm import Mesh
from ..offload import PagedBuffer, PagePool, huge_zeros
from .codec import Codec
from .gradient import GroupGradient
from .group import ShardedGroup
from .group_memory import PagedMemory, ResizedMemory
from .host_update import HostUpdate
from .plan import ModelPlan, Role
from .shard_rest import ShardRest
from .unit import Unit

_NO_HOSTS: Mapping[str, HostUpdate] = {}


def build_units(
    plan: ModelPlan,
    mesh: Mesh,
    reduces_every_backward: bool,
    rest: ShardRest | None = None,
    shares_gradients: bool = False,
    delays_updates: bool = False,
    hosts: Mapping[str, HostUpdate] = _NO_HOSTS,
) -> list[Unit]:
    """Takes the memory of every group. Parameters still are what they were; `fill` comes next.

    rest: where shards are while nobody needs them, with room for all; None: in memory. shares_gradients: replicas that
    share memory have one sum of their gradients, and nobody changes it; but of tied ones, to which other stages add.
    delays_updates: the gradients of a step are used while the next ones come. hosts: by name of the group, what updates
    parameters that are on a device.
    """
    take_memory = _memory_for(plan, mesh, rest)
    for axes, nbytes, count in plan.rings(mesh.arrangement):
        mesh.over(axes).route.reserve_slots(nbytes, count)
    replica_axis = mesh.over(plan.domain.replicas)
    common: dict[str, Tensor] = {}  # by name of the group
    if shares_gradients and replica_axis.route.copies_are_shared:
        own = [group for group in plan.trained if not group.domain.copies]
        specs = [(group.layout.shard_numel, group.accumulation_dtype) for group in own]
        common = dict(zip((group.name for group in own), replica_axis.route.allocate(specs), strict=True))
    units = []
    for unit, group_plans in plan.units:
        groups, gradients = [], []
        for group_plan in group_plans:
            group = ShardedGroup(
                group_plan.name,
                group_plan.params,
                group_plan.dtype,
                group_plan.layout,
                mesh,
                group_plan.domain,
                group_plan.role,
            )
            take_memory(group)
            groups.append(group)
            if group_plan.role is not Role.FROZEN:
                gradients.append(
                    GroupGradient(
                        group,
                        Codec(group_plan.reduce_dtype),
                        group_plan.accumulation_dtype,
                        reduces_every_backward,
                        common.get(group.name),
                        delays_updates,
                        hosts.get(group.name),
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
