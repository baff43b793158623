"""Builds units from a plan: takes the memory of every group and gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from ..comm import Mesh
from ..kernels.weight_rounding import Rounding
from ..offload import PagedBuffer, PagePool, huge_zeros
from .codec import Codec, Parts, QuantizedCodec, WeightCodec
from .gradient import GroupGradient
from .group import GroupMemory, ShardedGroup
from .host_update import HostUpdate
from .placement import ShardStore
from .plan import GroupPlan, ModelPlan, rings_for
from .powersgd import PowerSGDOptions
from .unit import Unit

Hosts = Mapping[str, HostUpdate]
"""Name of a group -> the host update of its device parameters."""


class GroupMemories:
    """Takes the memory of groups and gradients, at the start and when groups are added later.

    Every method is a collective: ranks allocate shared memory together.
    """

    def __init__(
        self,
        mesh: Mesh,
        reduces_every_backward: bool,
        shard_store: ShardStore | None = None,
        shares_gradients: bool = False,
        delays_updates: bool = False,
        keeps_sums: bool = True,
        seed: int = 0,
        num_steps: Callable[[], int] = lambda: 0,
        low_rank: PowerSGDOptions | None = None,
    ) -> None:
        """shard_store: the store of shards between uses, with room for all; None: shards stay in memory.

        shares_gradients: replicas on a host share the sum of their gradients read-only, except for tied groups.
        delays_updates: gradients of a step are still in use while the next gradients arrive. keeps_sums: see
        `LocalSum`. seed: of random rounding. num_steps: see `QuantizedCodec`. low_rank: gradients are sent as thin
        matrices (PowerSGD).
        """
        self._mesh = mesh
        self._reduces_every_backward = reduces_every_backward
        self._shard_store = shard_store
        self._shares_gradients = shares_gradients
        self._delays_updates = delays_updates
        self._keeps_sums = keeps_sums
        self._seed = seed
        self._num_steps = num_steps
        self._low_rank = low_rank
        self._slot_bytes: dict[tuple[str, ...], int] = {}  # by axes

    def units(self, plan: ModelPlan, hosts: Hosts) -> list[Unit]:
        """Build the units of a plan. The parameters keep their old memory until `fill`."""
        groups = dict(zip((group.name for group in plan.groups), self.groups(plan.groups), strict=True))
        gradients = self.gradients([(group, groups[group.name]) for group in plan.trained], hosts)
        of_group = {id(gradient.group): gradient for gradient in gradients}
        units = []
        for unit, group_plans in plan.units:
            own = [groups[group.name] for group in group_plans]
            trained = [of_group[id(group)] for group in own if id(group) in of_group]
            units.append(Unit(unit.name, unit.module, own, trained, unit.is_end))
        return units

    def groups(self, plans: Sequence[GroupPlan]) -> list[ShardedGroup]:
        """Build groups with zeroed memory for their parameters."""
        groups = [ShardedGroup(plan, self._mesh, WeightCodec(plan.weight_bits)) for plan in plans]
        for _, own in _by_axes(groups, lambda group: group.plan.sharding.states):
            self._take_memory(own)
        return groups

    def gradients(self, trained: Sequence[tuple[GroupPlan, ShardedGroup]], hosts: Hosts) -> list[GroupGradient]:
        """Build the gradients of trained groups, with their codecs."""
        self._reserve_slots([plan for plan, _ in trained])
        common = self._common_sums([plan for plan, _ in trained])
        return [
            GroupGradient(
                group,
                [self._codec(plan, *level) for level in plan.levels],
                self._codec(plan, *plan.replicas),
                plan.accumulation_dtype,
                self._reduces_every_backward or self._adds_up_in_shard(plan, plan.name in {*common, *hosts}),
                common.get(plan.name),
                self._delays_updates,
                hosts.get(plan.name),
                self._keeps_sums,
                self._low_rank,
            )
            for plan, group in trained
        ]

    def _adds_up_in_shard(self, plan: GroupPlan, is_elsewhere: bool) -> bool:
        """Whether the shard can replace the flat memory of earlier microbatches: it has the same size.

        is_elsewhere: the shard is shared by replicas, or is sent to the host.
        """
        is_whole = self._mesh.over(plan.sharding.states).size == 1
        adds_up = self._keeps_sums and self._low_rank is None and not is_elsewhere
        return is_whole and adds_up and plan.is_added_up_flat

    # -- helpers --------------------------------------------------------------------------------------------------

    def _codec(self, plan: GroupPlan, axes: tuple[str, ...], bits: int | None) -> Codec:
        """Return the codec of a group's gradient over these axes."""
        axis, parallel_dims = self._mesh.over(axes), self._mesh.parallel_dims
        parts: Parts | None = None
        if axes == plan.sharding.first and len(plan.levels) > 1:
            states, last = plan.sharding.states, plan.sharding.last
            # The first level sums for all ranks that this rank meets in the second level: it needs their pieces.
            parts = [
                [parallel_dims.place(peer, states) for peer in parallel_dims.ranks(rank, last)] for rank in axis.ranks
            ]
        if bits is None or axis.size == 1:
            return Codec(axis, plan.reduce_dtype, parts)
        # Ranks with the same data and parameters, as along `tensor`, must draw alike: their copies would drift apart.
        own = (*plan.sharding.summed, *plan.sharding.partitioned)
        name = f"{plan.name} over {axis.name} from rank {parallel_dims.place(self._mesh.world.rank, own)}"
        return QuantizedCodec(axis, plan.reduce_dtype, bits, Rounding.of(self._seed, name, 0), self._num_steps, parts)

    def _reserve_slots(self, trained: Sequence[GroupPlan]) -> None:
        """Reserve larger message slots if these groups need them."""
        for axes, nbytes, count in rings_for(trained, self._mesh.parallel_dims):
            # All groups of an axis use the same slots, so the largest group counts.
            if nbytes > self._slot_bytes.get(axes, 0):
                self._slot_bytes[axes] = nbytes
                self._mesh.over(axes).transport.reserve_slots(nbytes, count)

    def _common_sums(self, trained: Sequence[GroupPlan]) -> dict[str, Tensor]:
        """Allocate the gradient sums that replicas on a host share, by name of the group."""
        # Without tied groups: `replace` changes their sums, and no rank may write to the common memory.
        found: dict[str, Tensor] = {}
        for axes, plans in _by_axes(
            [plan for plan in trained if not plan.sharding.tied], lambda plan: plan.sharding.replicas
        ):
            transport = self._mesh.over(axes).transport
            if self._shares_gradients and transport.copies_are_shared:
                specs = [(plan.layout.shard_numel, plan.accumulation_dtype) for plan in plans]
                found |= zip((plan.name for plan in plans), transport.allocate(specs), strict=True)
        return found

    @cached_property
    def _pages(self) -> PagePool:
        return PagePool()

    def _take_memory(self, groups: Sequence[ShardedGroup]) -> None:
        """Give groups the memory of their full buffers. Their states are divided over the same axes."""
        transport, device = groups[0].axes.states.transport, self._mesh.world.device
        kinds = [(group.layout.padded_numel, group.plan.dtype) for group in groups]
        if self._shard_store is None and not groups[0].frees_memory:
            is_private = device.type == "cpu" and not transport.copies_are_shared
            buffers = [huge_zeros(*kind, device) for kind in kinds] if is_private else transport.allocate(kinds)
            for group, full in zip(groups, buffers, strict=True):
                group.adopt(full)
            return
        for group, kind in zip(groups, kinds, strict=True):
            if device.type == "cpu" and PagePool.is_possible():
                memory = GroupMemory.in_pages(PagedBuffer(self._pages, *kind), group.at_rest, group.rests_beside)
            else:
                # Each full buffer is made, and its memory freed, before the next is made: the peak is a single buffer.
                (full,) = transport.allocate([kind])
                memory = GroupMemory.in_storages(full, full[group.at_rest].numel())
            group.adopt_memory(memory, self._shard_store)


T = TypeVar("T")


def _by_axes(
    members: Iterable[T], axes_of: Callable[[T], tuple[str, ...]]
) -> Collection[tuple[tuple[str, ...], list[T]]]:
    """Collect the members with the same axes, in order."""
    found: dict[tuple[str, ...], list[T]] = {}
    for member in members:
        found.setdefault(axes_of(member), []).append(member)
    return found.items()
