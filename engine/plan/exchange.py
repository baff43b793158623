"""Bytes and seconds of a group's collectives, and seconds of gradients until the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...comm import regions_of
from ...kernels.quantized_blocks import quantized_bytes
from ...zero.plan import GroupPlan
from ...zero.powersgd import ThinLayout
from ...zero.whole_update import sent_numels
from ..blueprint.blueprint import Blueprint
from ..blueprint.offload import Placement
from .machine import Machine

LINKS = ("intra", "inter", "pipe")
"""Links of a rank: within its host, to other hosts, and, over either, to the neighbouring pipeline stages."""


@dataclass(frozen=True)
class CollectiveCost:
    """A collective: bytes that a rank sends over each link, and seconds."""

    intra: int = 0
    inter: int = 0
    seconds: float = 0.0

    def and_then(self, other: CollectiveCost) -> CollectiveCost:
        """Return the sum of two messages in sequence."""
        return CollectiveCost(self.intra + other.intra, self.inter + other.inter, self.seconds + other.seconds)


def sent_by_link(messages: Sequence[CollectiveCost]) -> dict[str, int]:
    """Return the bytes of messages that stay within a host, and of those that leave it."""
    return {link: sum(getattr(message, link) for message in messages) for link in ("intra", "inter")}


@dataclass(frozen=True)
class CollectiveCosts:
    """The collectives of a blueprint on a machine.

    |             | over                 | group with n elements on r ranks: each rank sends               |
    |-------------|----------------------|-----------------------------------------------------------------|
    | gather      | sharding.parameters  | (r - 1) / r n elements of the parameters' dtype                 |
    | reduce      | sharding.states      | (r - 1) / r n elements of the reduce dtype                      |
    | then        | sharding.replicas    | (r - 1) / r of its shard, and as much of the sum                |
    | refresh     | sharding.refreshed   | (r - 1) / r n elements of the parameters' dtype                 |
    | matrices    | sharding.owning_axes | parts of other ranks' matrices, and the results of its own      |

    Quantized messages have as many elements in fewer bits, with scales. A reduction in levels reduces over each level,
    with the shard of the level before. Ranks that share memory read it and send nothing.
    """

    blueprint: Blueprint
    machine: Machine

    def gather(self, group: GroupPlan) -> CollectiveCost:
        """Gather full parameters, including the read of an offloaded shard."""
        bits = None if group.sends_differences else group.weight_bits
        nbytes = _message_bytes(group.layout.padded_numel, group.dtype, bits)
        message, machine = self._spread("gather", group.sharding.parameters, nbytes), self.machine
        placement = self.blueprint.offload_plan.parameters
        if placement is Placement.MODEL:
            return message
        speed = (
            machine.link if placement is Placement.HOST else min(machine.link, machine.nvme / machine.devices_per_host)
        )
        read = group.shard_bytes / speed
        read = machine.moving("file read", group.shard_bytes, read) if placement is Placement.FILE else read
        return replace(message, seconds=message.seconds + read)

    def reduce(self, group: GroupPlan) -> CollectiveCost:
        """Reduce a gradient over the ranks that shard the states."""
        if self.blueprint.parallel_dims.size(group.sharding.states) > 1 and (thin := self._thin(group)):
            return self._sum_thin(thin, group, group.sharding.states, 0)
        total, numel = CollectiveCost(), group.layout.padded_numel
        for axes, bits in group.levels:
            total = total.and_then(self._spread("reduce", axes, _message_bytes(numel, group.reduce_dtype, bits)))
            # The next level reduces the shard that this level leaves.
            numel //= self.blueprint.parallel_dims.size(axes)
        return total

    def all_reduce(self, group: GroupPlan, rank: int = 0) -> CollectiveCost:
        """Reduce the shard of a gradient over replicas."""
        names, bits = group.replicas
        if self.blueprint.parallel_dims.size(names) == 1:
            return CollectiveCost()
        if thin := self._thin(group):
            return self._sum_thin(thin, group, names, rank)
        return self._sum(names, group.layout.shard_numel, group.reduce_dtype, group.accumulation_dtype, bits, rank)

    def _thin(self, group: GroupPlan) -> ThinLayout | None:
        """Return the matrices that PowerSGD sends; None if the gradient is sent as it is."""
        low_rank = self.blueprint.low_rank
        layout = None if low_rank is None else ThinLayout.of(group.layout, low_rank)
        return layout if layout and layout.thin else None

    def _sum_thin(self, layout: ThinLayout, group: GroupPlan, names: Sequence[str], rank: int) -> CollectiveCost:
        dtype = group.reduce_dtype
        first, second = (self._sum(names, n, dtype, dtype, None, rank) for n in (layout.num_first, layout.num_second))
        return first.and_then(second)

    def _sum(
        self, names: Sequence[str], numel: int, reduce: torch.dtype, total: torch.dtype, bits: int | None, rank: int
    ) -> CollectiveCost:
        """Sum `numel` elements, sent in the dtype `reduce`, over the ranks of axes. total: the dtype of the sum."""
        size, wide, narrow = self.blueprint.parallel_dims.size(names), total.itemsize, reduce.itemsize
        region = regions_of(numel, size)[self.blueprint.parallel_dims.place(rank, names)]
        summed = region.stop - region.start  # elements that this rank sums and sends to all
        if bits is not None:  # terms and sums are quantized
            sent = quantized_bytes(numel - summed, bits) + (size - 1) * quantized_bytes(summed, bits)
        elif self.blueprint.transport == "sockets":  # terms in the reduce dtype, sums in the accumulation dtype
            # A rank sends its terms to the ranks that sum them, n - s elements, and its s sums to r - 1 ranks.
            sent = (numel - summed) * narrow + (size - 1) * summed * wide
        else:
            # A ring: a reduce-scatter and an all-gather of (r - 1) / r n elements each.
            sent = 2 * numel * narrow * (size - 1) // size
        # The all-gather takes as long as the reduce-scatter, hence twice.
        once = self.machine.collective(_message_bytes(numel, reduce, bits), size, self._on_host(names))
        return self._message("reduce", names, sent, 2 * once)

    def refresh(self, group: GroupPlan) -> CollectiveCost:
        """Send updated parameters to the ranks that have copies."""
        # The copies are shards over `parameters`, so the ranks of `refreshed` together send this many elements.
        numel = group.layout.padded_numel // self.blueprint.parallel_dims.size(group.sharding.parameters)
        nbytes = _message_bytes(numel, group.dtype, group.weight_bits)
        return self._spread("gather", group.sharding.refreshed, nbytes)

    def matrices(self, group: GroupPlan, rank: int) -> CollectiveCost:
        """Send matrices to the ranks that update them, and the results back: see `MatrixTrip`."""
        dims = self.blueprint.parallel_dims
        is_repeated = dims.size(group.sharding.states) == 1
        names = group.sharding.owning_axes(dims.size(group.sharding.states))
        size, itemsize, total = dims.size(names), max(4, group.dtype.itemsize), CollectiveCost()
        if size == 1 or not group.params or not self.blueprint.optimizer.is_matrix(group.params[0][1]):
            return total
        for numel in sent_numels(group.layout, size, dims.place(rank, names), is_repeated):
            sent = numel * itemsize
            # `all_to_all` takes the bytes of all parts. A rank sends (r - 1) / r of these.
            seconds = self.machine.all_to_all(sent * size / (size - 1), size, self._on_host(names))
            total = total.and_then(self._message("swap", names, sent, seconds))
        return total

    def _spread(self, what: str, names: Sequence[str], nbytes: int) -> CollectiveCost:
        size = self.blueprint.parallel_dims.size(names)
        seconds = self.machine.collective(nbytes, size, self._on_host(names))
        return self._message(what, names, nbytes // size * (size - 1), seconds)

    def _message(self, what: str, names: Sequence[str], sent: int, seconds: float) -> CollectiveCost:
        """Make the message of a "gather", "reduce" or "swap". seconds: used unless the machine was measured."""
        size, transport = self.blueprint.parallel_dims.size(names), self.blueprint.transport
        if size == 1:
            return CollectiveCost()
        # Gathering is free: ranks of a host read the parameters in their shared memory.
        if transport == "shared_memory":
            read = 2 * sent / self.machine.host_memory
            return CollectiveCost(
                seconds=0.0 if what == "gather" else self.machine.moving("shared_memory reduce", sent, read)
            )
        # A swap has no curve. Like a reduction it sends a part to each rank.
        seconds = self.machine.moving(f"{transport} {'gather' if what == 'gather' else 'reduce'}", sent, seconds)
        goes_to_each = transport == "sockets" or what == "swap"
        return over_links(sent, size, self._on_host(names), goes_to_each, seconds)

    def _on_host(self, names: Sequence[str]) -> int:
        return self.machine.ranks_on_host(self.blueprint.parallel_dims, names)


def _message_bytes(numel: int, dtype: torch.dtype, bits: int | None) -> int:
    return numel * dtype.itemsize if bits is None else quantized_bytes(numel, bits)


def over_links(sent: int, size: int, on_host: int, goes_to_each: bool, seconds: float) -> CollectiveCost:
    """Divide sent bytes between the links of a rank.

    goes_to_each: each rank gets a part; otherwise the ranks form a ring that leaves each host once.
    """
    # To each rank: r - h of r - 1 receivers are on foreign hosts. A ring: a single rank of h on a host sends outside.
    outside = (size - on_host) / (size - 1) if goes_to_each else 1 / on_host
    inter = 0 if on_host >= size else round(sent * outside)
    return CollectiveCost(sent - inter, inter, seconds)


def gradient_seconds(
    blueprint: Blueprint, machine: Machine, place: int, is_first: bool, is_last: bool, is_direct: bool
) -> float:
    """Return seconds of a microbatch's gradients between backward and update: copies, sums and checks.

    is_first, is_last: of the step's microbatches. is_direct: gradients are written where they are staged.
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
    size = blueprint.parallel_dims.size
    numel, dtype = group.layout.numel, str(group.dtype).removeprefix("torch.")
    wide = group.accumulation_dtype.itemsize
    is_alone = size(group.sharding.states) == size(group.sharding.replicas) == 1
    is_staged = is_last or blueprint.policy.reduces_every_backward or group.is_added_up_flat
    seconds = 0.0
    if not is_first:  # added to the gradient of earlier microbatches
        # Bytes as `Tracker` counts them: read the new gradient, read and write the sum.
        seconds += machine.speeds.operation("add", dtype, numel * (group.dtype.itemsize + 2 * wide))
    if is_staged and not is_direct and is_first:
        seconds += machine.speeds.operation("copy", dtype, numel * (2 * group.dtype.itemsize + wide))
    if is_last and is_alone:
        seconds += machine.moving("inspect", group.layout.shard_numel * wide)
    return seconds


def host_seconds(blueprint: Blueprint, machine: Machine, num_units: int, num_microbatches: int) -> float:
    """Return host time of the engine in a step: for each unit of each microbatch, and for the step."""
    stage, transport = blueprint.config.zero_optimization.stage, blueprint.transport
    # Stage 2 was not measured: like stage 3 it sends each unit's gradients in every backward.
    measured = {0: 0, 1: 1, 2: 3, 3: 3}.get(int(stage), 0)
    unit, step = machine.host(f"{transport} unit {measured}"), machine.host(f"{transport} step {measured}")
    return num_microbatches * num_units * unit + step
