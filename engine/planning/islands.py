"""What ranks exchange with other islands (`outer`), for a plan: a part of it falls to each step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch

from ..blueprint import Blueprint
from ..config.outer import OuterConfig
from ..island_bits import message_bytes
from .estimate import Estimate
from .machine import Machine

_BYTES = {"fp32": 4, "bf16": 2}
_BITS = {"int8": 8, "int4": 4}


def divided(machine: Machine, outer: OuterConfig) -> Machine:
    """One of the islands on a machine, which are hosts where the config says nothing. Raises ValueError."""
    if not outer.has_islands or machine.num_islands > 1:
        return machine
    return machine.island(outer.ranks or machine.devices_per_host)


@dataclass(frozen=True)
class Meeting:
    """An exchange of all parameters with other islands, of the rank that sends most. nbytes: sent; seconds: of it."""

    outer: OuterConfig
    nbytes: int
    seconds: float

    @classmethod
    def of(cls, blueprint: Blueprint, machine: Machine) -> Meeting | None:
        """None where there is one island, or nothing is trained. See `Ring` for what is sent."""
        outer, count = blueprint.config.outer, machine.num_islands
        if count == 1 or not outer.has_islands:
            return None
        sent = max(_bytes_sent(blueprint, outer, place, count) for place in range(len(blueprint.places)))
        seconds = 2 * (machine.inter_latency + sent / 2 / machine.inter)
        return cls(outer, sent, outer.fragments * machine.moving("sockets message", sent / outer.fragments, seconds))

    def beside(self, steps: Estimate) -> Estimate:
        """With a part of it in each step: what is not hidden beside the steps that are made meanwhile is waited for."""
        outer = self.outer
        assert outer.every is not None
        meanwhile = outer.fragments * outer.overlap * steps.step_seconds
        waiting = max(0.0, self.seconds - meanwhile) / outer.every
        return replace(
            steps,
            sent={**steps.sent, "outer": round(self.nbytes / outer.every)},
            step_seconds=steps.step_seconds + waiting,
            seconds={**steps.seconds, "outer exposed": waiting},
            hidden={**steps.hidden, "outer": self.seconds / outer.every - waiting},
        )


def _bytes_sent(blueprint: Blueprint, outer: OuterConfig, place: int, count: int) -> int:
    """What a rank sends to the other islands of its shards, or of a part of them where all have everything."""
    numel_of: Counter[int] = Counter()  # by bytes of an element
    groups, arrangement = blueprint.places[place].updated, blueprint.arrangement
    have_all = all(arrangement.size(group.domain.replicas) == arrangement.num_ranks for group in groups)
    for group in groups:
        numel = group.layout.shard_numel
        width = torch.promote_types(group.dtype, torch.float32).itemsize
        numel_of[width] += -(-numel // arrangement.num_ranks) if have_all else numel
    if outer.dtype in _BITS:
        part = -(-numel_of.total() // (count * outer.fragments))
        return 2 * (count - 1) * outer.fragments * message_bytes(part, _BITS[outer.dtype])
    nbytes = sum(numel * _BYTES.get(outer.dtype or "", width) for width, numel in numel_of.items())
    return 2 * nbytes * (count - 1) // count
