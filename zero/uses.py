"""Which units a forward has used, and in which order."""

from __future__ import annotations

from .unit import Unit


class Forward:
    """The uses of units in one forward. Held by the graph that it has made, so it is gone when that is."""

    def __init__(self) -> None:
        self.first_use: dict[Unit, int] = {}
        self.num_uses: dict[Unit, int] = {}


def start_of(forward: Forward) -> int:
    """The number of its first use."""
    return next(iter(forward.first_use.values()))


class Use:
    """One use of a unit. number: later ones have higher numbers, in all forwards."""

    __slots__ = ("forward", "number", "unit")

    def __init__(self, unit: Unit, forward: Forward, number: int) -> None:
        self.unit = unit
        self.forward = forward
        self.number = number
