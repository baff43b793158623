"""What the collectives of a group send, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...comm import regions_of
from ...zero.plan import GroupPlan
from ..blueprint import Blueprint
from ..offload import Home
from .machine import Machine

LINKS = ("intra", "inter", "pipe")
"""Links of a rank: to others of its host, to other hosts, and, on either, to the next and last stage of a pipeline."""


@dataclass(frozen=True)
class Message:
    """One collective: bytes that a rank sends over each link, and seconds."""

    intra: int = 0
    inter: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """Collectives of a blueprint on a machine.

    |             | over              | of a group with n elements on r ranks, each rank sends          |
    |-------------|-------------------|-----------------------------------------------------------------|
    | gather      | domain.parameters | (r - 1) / r n elements of the parameters' dtype                 |
    | reduce      | domain.states     | (r - 1) / r n elements of the reduce dtype                      |
    | then        | domain.replicas   | (r - 1) / r of its shard, and as much of the sum                |
    | refresh     | domain.refreshed  | (r - 1) / r n elements of the parameters' dtype                 |

    Where ranks share memory nothing is sent: they read it.
    """

    blueprint: Blueprint
    machine: Machine

    def gather(self, group: GroupPlan) -> Message:
        """Of full parameters, with what brings the shard from where it rests."""
        message, machine = self._spread("gather", group.domain.parameters, group.full_bytes), self.machine
        home = self.blueprint.homes.parameters
        if home is Home.MODEL:
            return message
        speed = machine.link if home is Home.HOST else min(machine.link, machine.nvme / machine.devices_per_host)
        read = group.shard_bytes / speed
        read = machine.moving("file read", group.shard_bytes, read) if home is Home.FILE else read
        return replace(message, seconds=message.seconds + read)

    def reduce(self, group: GroupPlan) -> Message:
        """Of a gradient, over the ranks among which states are divided."""
        return self._spread("reduce", group.domain.states, group.layout.padded_numel * group.reduce_dtype.itemsize)

    def all_reduce(self, group: GroupPlan, rank: int = 0) -> Message:
        """Of a shard of the gradient, over replicas."""
        names, numel = group.domain.replicas, group.layout.shard_numel
        size = self.blueprint.arrangement.size(names)
        if size == 1:
            return Message()
        wide, narrow = group.accumulation_dtype.itemsize, group.reduce_dtype.itemsize
        if self.blueprint.route == "sockets":  # a rank gets what it sums in the reduce dtype, and sends the sum
            mine = regions_of(numel, size)[self.blueprint.arrangement.place(rank, names)]
            own = mine.stop - mine.start
            sent = (numel - own) * narrow + (size - 1) * own * wide
        else:
            sent = 2 * numel * narrow * (size - 1) // size
        once = self.machine.collective(numel * narrow, size, self._on_host(names))
        return self._message("reduce", names, sent, 2 * once)

    def refresh(self, group: GroupPlan) -> Message:
        """Of updated parameters."""
        nbytes = group.full_bytes // self.blueprint.arrangement.size(group.domain.parameters)
        return self._spread("gather", group.domain.refreshed, nbytes)

    def _spread(self, what: str, names: Sequence[str], nbytes: int) -> Message:
        size = self.blueprint.arrangement.size(names)
        seconds = self.machine.collective(nbytes, size, self._on_host(names))
        return self._message(what, names, nbytes // size * (size - 1), seconds)

    def _message(self, what: str, names: Sequence[str], sent: int, seconds: float) -> Message:
        """what: "gather" or "reduce". seconds: where the machine was not measured."""
        size = self.blueprint.arrangement.size(names)
        if size == 1:
            return Message()
        if self.blueprint.route == "shared_memory":
            read = 2 * sent / self.machine.host_memory
            return Message(seconds=0.0 if what == "gather" else self.machine.moving("shared_memory reduce", sent, read))
        seconds = self.machine.moving(f"{self.blueprint.route} {what}", sent, seconds)
        on_host = self._on_host(names)
        # To each of the others its part (sockets), or to the next one of a ring that leaves each host once.
        outside = (size - on_host) / (size - 1) if self.blueprint.route == "sockets" else 1 / on_host
        inter = 0 if on_host >= size else round(sent * outside)
        return Message(sent - inter, inter, seconds)

    def _on_host(self, names: Sequence[str]) -> int:
        return self.machine.ranks_on_host(self.blueprint.arrangement, names)
