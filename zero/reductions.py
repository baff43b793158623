"""Reductions of gradients that have started and not ended.

[Note: early phases]
`start` takes every reduction one phase on, the oldest first, and waits for other ranks where it must. `poll` does what
would not wait, so ranks come to differ in how far they are. That is harmless as long as

- each route sees the same order everywhere: a reduction is not taken into a phase before the older ones have left it;
- `poll` waits for nothing: what it waited for might come from this very rank, from an older reduction that is not due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..comm import Pending
from .gradient import GroupGradient

OnFinal = Callable[[GroupGradient], None]
"""Called when the sum of a gradient over microbatches and ranks is complete; may use it up.

Of one that goes to the host `settle` has to be called first."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A reduction on its way."""

    steps: Iterator[Pending]
    pending: Pending
    num_phases: int = 0  # that it has behind it

    def advance(self) -> bool:
        """Takes it one phase on; says whether it is still on its way."""
        pending = next(self.steps, None)
        if pending is None:
            return False
        self.pending = pending
        self.num_phases += 1
        return True


class Reductions:
    """Takes each reduction one phase on when the next one starts: the time between the two covers its waiting."""

    def __init__(self) -> None:
        self._in_flight: list[_Flight] = []  # oldest first

    def start(self, gradient: GroupGradient, boundary: bool, on_final: OnFinal | None = None) -> None:
        """Stages a group's gradient and starts to reduce it, after the others were taken on."""
        self._advance_all()
        steps = gradient.collect(boundary) if on_final is None else _with_end(gradient, boundary, on_final)
        pending = next(steps, None)
        if pending is not None:
            self._in_flight.append(_Flight(steps, pending))

    def poll(self) -> None:
        """Takes those on that would not wait: their memory is free the sooner, here and on other ranks.

        See [Note: early phases].
        """
        if not self._in_flight:
            return
        older = None
        for flight in list(self._in_flight):
            is_behind = older is None or older.num_phases > flight.num_phases
            if is_behind and flight.pending.is_done and not flight.advance():
                self._in_flight.remove(flight)
            else:
                older = flight

    def finish(self) -> None:
        """Waits for all."""
        while self._in_flight:
            self._advance_all()

    def abandon(self) -> None:
        """Leaves them as they are: other ranks will not answer."""
        self._in_flight.clear()

    def _advance_all(self) -> None:
        for flight in list(self._in_flight):
            if not flight.advance():
                self._in_flight.remove(flight)


def _with_end(gradient: GroupGradient, boundary: bool, on_final: OnFinal) -> Iterator[Pending]:
    yield from gradient.collect(boundary)
    if boundary:
        on_final(gradient)
