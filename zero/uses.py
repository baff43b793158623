"""Which units forwards have used, and in which order."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from .unit import Unit

BEFORE_ALL_USES = 1  # a number of a use, to which autograd has come when it is done; 0 says nothing


class Forward:
    """The uses of units in one forward. Held by the graph that it has made, so it is gone when that is."""

    def __init__(self) -> None:
        self.first_use: dict[Unit, int] = {}
        self.num_uses: dict[Unit, int] = {}
        self.order: list[Unit] = []  # of the uses; uses of a unit that follow each other stand once
        self.is_done = False
        """Whether a backward has been through it. Another one may come where its graph is retained."""


def start_of(forward: Forward) -> int:
    """The number of its first use."""
    return next(iter(forward.first_use.values()))


class OpenForwards:
    """Those of which a backward may come."""

    def __init__(self) -> None:
        self.num_uses = BEFORE_ALL_USES  # of all
        self.last = Forward()  # or what is used between two
        self.expects_backward = False
        """Whether one may come of the last that has begun."""
        self.known: list[weakref.ref[Forward]] = []
        self.of_backward = set[Forward]()  # those that the backward has come to

    def begin(self, expects_backward: bool) -> None:
        """Uses from now on are of a new one."""
        self.last = Forward()
        self.expects_backward = expects_backward

    @property
    def has_uses(self) -> bool:
        """Whether the last one has any."""
        return bool(self.last.num_uses)

    def come_to(self, forward: Forward, units: Sequence[Unit]) -> None:
        """A backward has. Uses of units are counted anew where its graph was kept after an earlier one."""
        self.of_backward.add(forward)
        if forward.is_done or weakref.ref(forward) not in self.known:
            self.count(units)

    def expected(self) -> list[Forward]:
        """Those that the next backward may be of: all that had none, or else all whose graphs are there."""
        alive = sorted((forward for one in self.known if (forward := one()) is not None), key=start_of)
        return [one for one in alive if not one.is_done or one in self.of_backward] or alive

    def count(self, units: Sequence[Unit]) -> None:
        """Tells each unit of its uses in the forwards that are expected."""
        for unit in units:
            unit.first_use, unit.num_uses = None, 0
        for forward in self.expected():
            for unit, first in forward.first_use.items():
                unit.first_use = first if unit.first_use is None else unit.first_use
                unit.num_uses += forward.num_uses[unit]

    def end_backward(self) -> None:
        """Those that it has come to are not expected to have another."""
        for forward in self.of_backward:
            forward.is_done = True
        self.known = [one for one in self.known if one() is not None]
        self.of_backward.clear()
        self.last = Forward()

    def end_lending(self) -> None:
        """Another backward of those that autograd has come to may follow."""
        self.of_backward.clear()


class Use:
    """The next use of a unit, in the last forward. number: later ones have higher numbers, in all forwards."""

    __slots__ = ("forward", "number", "unit")

    def __init__(self, unit: Unit, forwards: OpenForwards) -> None:
        forwards.num_uses += 1
        self.unit, self.forward, self.number = unit, forwards.last, forwards.num_uses
        of_units = self.forward.num_uses
        if not of_units and (forwards.expects_backward or torch.is_grad_enabled()):
            forwards.known.append(weakref.ref(self.forward))
        self.forward.first_use.setdefault(unit, self.number)
        of_units[unit] = of_units.get(unit, 0) + 1
        order = self.forward.order
        if not order or order[-1] is not unit:
            order.append(unit)
        else:
            unit.repeats = True
