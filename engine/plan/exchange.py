"""What the collectives of a group send and how long they take, and gradients on their way to the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...comm import ParallelDims, regions_of
from ...kernels.quantized_blocks import quantized_bytes
from ...zero.plan import GroupPlan
from ..blueprint.blueprint import Blueprint
from ..blueprint.offload import Placement
from .machine import Machine
from .profile import CollectiveCall, Profile

LINKS = ("intra", "inter", "pipe")
"""Links of a rank: to others of its host, to other hosts, and, on either, to the next and last stage of a pipeline."""


@dataclass(frozen=True)
class Message:
    """One collective: bytes that a rank sends over each link, and seconds."""

    intra: int = 0
    inter: int = 0
    seconds: float = 0.0

    def and_then(self, other: Message) -> Message:
        """Both, one after the other."""
        return Message(self.intra + other.intra, self.inter + other.inter, self.seconds + other.seconds)


@dataclass(frozen=True)
class CollectiveCosts:
    """Collectives of a blueprint on a machine.

    |             | over              | of a group with n elements on r ranks, each rank sends          |
    |-------------|-------------------|-----------------------------------------------------------------|
    | gather      | domain.parameters | (r - 1) / r n elements of the parameters' dtype                 |
    | reduce      | domain.states     | (r - 1) / r n elements of the reduce dtype                      |
    | then        | domain.replicas   | (r - 1) / r of its shard, and as much of the sum                |
    | refresh     | domain.refreshed  | (r - 1) / r n elements of the parameters' dtype                 |

    Or messages of as many elements in fewer bits, with their scales; a sum in levels is a sum over each, of what the
    one before has left. Where ranks share memory nothing is sent: they read it.
    """

    blueprint: Blueprint
    machine: Machine

    def gather(self, group: GroupPlan) -> Message:
        """Of full parameters, with what brings the shard from where it rests."""
        bits = None if group.sends_differences else group.weight_bits
        nbytes = _weight_bytes(group, group.layout.padded_numel, bits)
        message, machine = self._spread("gather", group.sharding.parameters, nbytes), self.machine
        home = self.blueprint.offload_plan.parameters
        if home is Placement.MODEL:
            return message
        speed = machine.link if home is Placement.HOST else min(machine.link, machine.nvme / machine.devices_per_host)
        read = group.shard_bytes / speed
        read = machine.moving("file read", group.shard_bytes, read) if home is Placement.FILE else read
        return replace(message, seconds=message.seconds + read)

    def reduce(self, group: GroupPlan) -> Message:
        """Of a gradient, over the ranks among which states are divided."""
        total, numel = Message(), group.layout.padded_numel
        for axes, bits in group.levels:
            total = total.and_then(self._spread("reduce", axes, _gradient_bytes(group, numel, bits)))
            numel //= self.blueprint.parallel_dims.size(axes)
        return total

    def all_reduce(self, group: GroupPlan, rank: int = 0) -> Message:
        """Of a shard of the gradient, over replicas."""
        (names, bits), numel = group.replicas, group.layout.shard_numel
        size = self.blueprint.parallel_dims.size(names)
        if size == 1:
            return Message()
        wide, narrow = group.accumulation_dtype.itemsize, group.reduce_dtype.itemsize
        if bits is not None:  # a rank gets what it sums, and sends the sum, in as many bits
            mine = regions_of(numel, size)[self.blueprint.parallel_dims.place(rank, names)]
            own = mine.stop - mine.start
            sent = quantized_bytes(numel - own, bits) + (size - 1) * quantized_bytes(own, bits)
        elif self.blueprint.route == "sockets":  # a rank gets what it sums in the reduce dtype, and sends the sum
            mine = regions_of(numel, size)[self.blueprint.parallel_dims.place(rank, names)]
            own = mine.stop - mine.start
            sent = (numel - own) * narrow + (size - 1) * own * wide
        else:
            sent = 2 * numel * narrow * (size - 1) // size
        once = self.machine.collective(_gradient_bytes(group, numel, bits), size, self._on_host(names))
        return self._message("reduce", names, sent, 2 * once)

    def refresh(self, group: GroupPlan) -> Message:
        """Of updated parameters."""
        numel = group.layout.padded_numel // self.blueprint.parallel_dims.size(group.sharding.parameters)
        nbytes = _weight_bytes(group, numel, group.weight_bits)
        return self._spread("gather", group.sharding.refreshed, nbytes)

    def _spread(self, what: str, names: Sequence[str], nbytes: int) -> Message:
        size = self.blueprint.parallel_dims.size(names)
        seconds = self.machine.collective(nbytes, size, self._on_host(names))
        return self._message(what, names, nbytes // size * (size - 1), seconds)

    def _message(self, what: str, names: Sequence[str], sent: int, seconds: float) -> Message:
        """what: "gather" or "reduce". seconds: where the machine was not measured."""
        size, route = self.blueprint.parallel_dims.size(names), self.blueprint.route
        if size == 1:
            return Message()
        if route == "shared_memory":
            read = 2 * sent / self.machine.host_memory
            return Message(seconds=0.0 if what == "gather" else self.machine.moving("shared_memory reduce", sent, read))
        seconds = self.machine.moving(f"{route} {what}", sent, seconds)
        return _over_links(sent, size, self._on_host(names), goes_to_each=route == "sockets", seconds=seconds)

    def _on_host(self, names: Sequence[str]) -> int:
        return self.machine.ranks_on_host(self.blueprint.parallel_dims, names)


def _weight_bytes(group: GroupPlan, numel: int, bits: int | None) -> int:
    return numel * group.dtype.itemsize if bits is None else quantized_bytes(numel, bits)


def _gradient_bytes(group: GroupPlan, numel: int, bits: int | None) -> int:
    return numel * group.reduce_dtype.itemsize if bits is None else quantized_bytes(numel, bits)


@dataclass(frozen=True)
class Calls:
    """Seconds and bytes on links of what ranks exchange in the middle of a model: see `comm.Collectives`.

    | call     | of a whole tensor of n bytes on r ranks, each rank sends |
    |----------|----------------------------------------------------------|
    | sum      | 2 (r - 1) / r n                                          |
    | sum_part | (r - 1) / r n                                            |
    | gather   | (r - 1) / r n                                            |
    | swap     | (r - 1) / r n, to each of the others as much             |
    | trade    | what it has for other ranks: a hop of a ring, all of n   |

    Whoever calls waits for the result: nothing of it is hidden, nor, in this arithmetic, of a ring beside its products.
    """

    machine: Machine
    sizes: tuple[tuple[str, int], ...]  # as of `Profile`
    route: str

    @classmethod
    def of(cls, profile: Profile, machine: Machine, route: str) -> Calls:
        return cls(machine, profile.sizes, route)

    def seconds(self, calls: Sequence[CollectiveCall]) -> float:
        return sum(self._message(call).seconds for call in calls)

    def sent(self, calls: Sequence[CollectiveCall]) -> dict[str, int]:
        """By link."""
        found = {"intra": 0, "inter": 0}
        for message in map(self._message, calls):
            found["intra"] += message.intra
            found["inter"] += message.inter
        return found

    @cached_property
    def _axes(self) -> Mapping[str, tuple[int, int]]:
        """By axis: its ranks, and those of them that have one host."""
        parallel_dims = ParallelDims(self.sizes, data=())
        names = [name for name, _ in self.sizes]
        return {
            name: (parallel_dims.size((name,)), self.machine.ranks_on_host(parallel_dims, (name,))) for name in names
        }

    def _message(self, call: CollectiveCall) -> Message:
        size, on_host = self._axes.get(call.axis, (1, 1))
        if call.kind == "swap":
            seconds = self.machine.all_to_all(call.nbytes, size, on_host)
        elif call.kind == "trade":
            seconds = self.machine.pass_on(call.sent, is_inside=on_host >= size)
        else:
            seconds = self.machine.collective(call.nbytes, size, on_host) * (2 if call.kind == "sum" else 1)
        name = "gather" if call.kind == "gather" else "reduce"
        if self.route == "shared_memory":
            return Message(call.sent, 0, self.machine.moving("shared_memory reduce", call.sent, seconds))
        seconds = self.machine.moving(f"{self.route} {name}", call.sent, seconds)
        goes_to_each = self.route == "sockets" or call.kind == "swap"
        return _over_links(call.sent, size, on_host, goes_to_each, seconds)


def _over_links(sent: int, size: int, on_host: int, goes_to_each: bool, seconds: float) -> Message:
    """goes_to_each: of the others, its part; else to the next one of a ring that leaves each host once."""
    outside = (size - on_host) / (size - 1) if goes_to_each else 1 / on_host
    inter = 0 if on_host >= size else round(sent * outside)
    return Message(sent - inter, inter, seconds)


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
    size = blueprint.parallel_dims.size
    numel, dtype = group.layout.numel, str(group.dtype).removeprefix("torch.")
    wide = group.accumulation_dtype.itemsize
    is_alone = size(group.sharding.states) == size(group.sharding.replicas) == 1
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
