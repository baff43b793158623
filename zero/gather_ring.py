"""Gathers of units in one order on all ranks: see [Note: canonical order] in `sequence.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .unit import Unit

MAX_PREFETCHED = 2  # more would cost memory and hide nothing further


class GatherRing:
    """Gathers units in a fixed order, round and round; see [Note: canonical order]."""

    def __init__(self, order: Sequence[Unit], prefetch_numel: int) -> None:
        self._order = order
        self._members = frozenset(order)
        self._prefetch_numel = prefetch_numel
        self._cursor = 0
        self._issued: deque[tuple[Unit, bool]] = deque()  # (unit, was it full before)
        self._issued_numel = 0
        self._passed: set[Unit] = set()  # that the ring has come to

    def begin(self, order: Sequence[Unit], goes_ahead: bool) -> None:
        """A first round in another order. goes_ahead: what may be gathered ahead of the first unit is issued now."""
        self._order, self._members = order, frozenset(order)
        self._cursor = self._issued_numel = 0
        self._issued.clear()
        self._passed.clear()
        if goes_ahead and order and order[0].numel <= self._prefetch_numel and not order[0].is_kept:
            self._issue()
            self._prefetch()

    def reach(self, unit: Unit) -> None:
        """Gathers `unit`, and before it all that the order puts there and that was not used.

        What is issued when does not depend on which units are used, only on how far the ring has come.
        """
        if unit.groups and unit.groups[0].keeper is not None and unit.is_kept:  # the first alone costs no call
            return
        if unit not in self._members:
            self._take_up(unit)
        while not self._pass_next(unit):
            pass

    @property
    def is_at_rest(self) -> bool:
        """Whether it is between two rounds, with nothing issued."""
        return not self._cursor and not self._issued

    def leave_behind(self, unit: Unit) -> None:
        """Goes on to `unit`, if the order has it and the ring has not come to it yet."""
        if unit in self._members and unit not in self._passed:
            self.reach(unit)

    def _pass_next(self, wanted: Unit) -> bool:
        if not self._issued:
            self._issue()
        found, was_full = self._issued.popleft()
        self._issued_numel -= found.numel
        self._passed.add(found)
        if found is wanted:
            found.gather()
        elif not was_full:
            found.release()
        if self._issued:  # was loaded while the last unit was used, and is gathered while this one is
            self._issued[0][0].continue_gather()
        self._prefetch()
        return found is wanted

    def _take_up(self, unit: Unit) -> None:
        """It was full when the round began, and is no more: its place is behind all others, or here between rounds."""
        if not self._cursor:
            self._cursor = len(self._order)
        self._order = [*self._order, unit]
        self._members |= {unit}

    def end_round(self) -> None:
        """Issues what is left of the round, so that every rank ends it at the same place."""
        if self.is_at_rest or all(unit.is_kept for unit in self._order):
            return
        while self._cursor:
            self._issue()
        while self._issued:
            unit, was_full = self._issued.popleft()
            if not was_full:
                unit.release()
        self._issued_numel = 0

    def _issue(self) -> None:
        unit = self._order[self._cursor]
        self._cursor = (self._cursor + 1) % len(self._order)
        self._issued.append((unit, unit.is_full))
        self._issued_numel += unit.numel
        unit.start_gather()

    def _prefetch(self) -> None:
        """Issues the next of the round, as long as there is room for one more."""
        while self._cursor and len(self._issued) < MAX_PREFETCHED:
            if self._issued_numel + self._order[self._cursor].numel > self._prefetch_numel:
                return
            self._issue()
