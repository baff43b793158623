"""The timeline of an update on the host: how long the device waits for gradients, updates and parameters."""

from __future__ import annotations

from collections.abc import Sequence
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


TimedEvent = tuple[float, str, str]
"""The end of a part: seconds from the begin of the last backward; backward, leaves, norm, update, returns or forward;
and the unit, "" for the norm."""


def host_timeline(
    units: Sequence[UnitWork], speculative: bool = False, by_unit: bool = True
) -> tuple[list[TimedEvent], float]:
    """Return the events from the last backward of a step to the end of the first forward of the next, and the seconds
    in which the device waits. units: in the order of the forward.

        device   backward n ... backward 0 | norm |         forward 0 | forward 1 | ...
        to host             gradient n ... gradient 0
        host                                      update 0 | update 1 | update 2 | ...
        to device                                          parameters 0 | parameters 1 | ...

    As `zero/host_update.py` and `zero/versions.py` do it: at most two gradients are on their way, the host updates the
    units in the order of the forward, and each unit waits for its own parameters. speculative: it updates them in the
    order of the backward, when the gradient has arrived. by_unit: else the step ends when all parameters are back.
    """
    events: list[TimedEvent] = []
    now, link = 0.0, 0.0
    arrived: dict[str, float] = {}
    for unit in reversed(units):
        now += unit.backward
        events.append((now, "backward", unit.name))
        link = arrived[unit.name] = max(link, now) + unit.leaving
        events.append((link, "leaves", unit.name))
        # At most two gradients are on their way: the next backward waits for the gradient before the last two.
        if len(arrived) > MAX_LEAVING:
            now = max(now, list(arrived.values())[-1 - MAX_LEAVING])
    norm = now
    events.append((norm, "norm", ""))
    # An update waits for the norm of all gradients. A speculative update starts before, and keeps the old versions.
    host, link = 0.0 if speculative else norm, 0.0
    back: dict[str, float] = {}
    for unit in reversed(units) if speculative else units:
        host = max(host, arrived[unit.name]) + unit.update
        events.append((host, "update", unit.name))
        before = link  # the buffer of the unit before is free again
        link = back[unit.name] = max(link, host) + unit.returning
        events.append((link, "returns", unit.name))
        host = max(host, before)
    for unit in units:
        now = max(now, back[unit.name] if by_unit else max(back.values())) + unit.forward
        events.append((now, "forward", unit.name))
    computed = sum(unit.forward + unit.backward for unit in units)
    return sorted(events, key=lambda event: event[0]), now - computed
