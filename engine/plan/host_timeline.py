"""The timeline of an update on the host: how long the device waits for gradients, updates and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...zero.host_update import MAX_LEAVING


class UnitWork(NamedTuple):
    """Seconds of a unit: on the device, on the link in each direction, and on the host."""

    name: str
    forward: float = 0.0  # in the first microbatch of a step
    backward: float = 0.0  # in the last
    leaving: float = 0.0  # of its gradient
    update: float = 0.0
    returning: float = 0.0  # of its parameters


class TimedEvent(NamedTuple):
    """The end of a part. Seconds count from the begin of the last backward."""

    seconds: float
    what: str  # backward, leaves, norm, update, returns, forward
    name: str = ""  # of a unit


@dataclass(frozen=True)
class HostTimeline:
    """From the last backward of a step to the end of the first forward of the next step.

        device   backward n ... backward 0 | norm |         forward 0 | forward 1 | ...
        to host             gradient n ... gradient 0
        host                                      update 0 | update 1 | update 2 | ...
        to device                                          parameters 0 | parameters 1 | ...

    As `zero/host_update.py` and `zero/versions.py` do it: at most two gradients are on their way, the host updates the
    units in the order of the forward, and each unit waits for its own parameters. speculative: it updates them in the
    order of the backward, when the gradient has arrived. by_unit: else the step ends when all parameters are back.
    """

    events: tuple[TimedEvent, ...]
    exposed: float
    """Seconds in which the device waits."""

    @classmethod
    def of(cls, units: Sequence[UnitWork], speculative: bool = False, by_unit: bool = True) -> HostTimeline:
        """units: in the order of the forward."""
        events: list[TimedEvent] = []
        now, link = 0.0, 0.0
        arrived: dict[str, float] = {}
        for unit in reversed(units):
            now += unit.backward
            events.append(TimedEvent(now, "backward", unit.name))
            link = arrived[unit.name] = max(link, now) + unit.leaving
            events.append(TimedEvent(link, "leaves", unit.name))
            if len(arrived) > MAX_LEAVING:
                now = max(now, list(arrived.values())[-1 - MAX_LEAVING])
        norm = now
        events.append(TimedEvent(norm, "norm"))
        host, link = 0.0 if speculative else norm, 0.0
        back: dict[str, float] = {}
        for unit in reversed(units) if speculative else units:
            host = max(host, arrived[unit.name]) + unit.update
            events.append(TimedEvent(host, "update", unit.name))
            before = link  # the buffer of the unit before is free again
            link = back[unit.name] = max(link, host) + unit.returning
            events.append(TimedEvent(link, "returns", unit.name))
            host = max(host, before)
        for unit in units:
            now = max(now, back[unit.name] if by_unit else max(back.values())) + unit.forward
            events.append(TimedEvent(now, "forward", unit.name))
        computed = sum(unit.forward + unit.backward for unit in units)
        return cls(tuple(sorted(events, key=lambda event: event.seconds)), now - computed)
