"""Reductions of gradients that have started and not ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..comm import Pending
from .gradient import GroupGradient

OnFinal = Callable[[GroupGradient], None]
"""Called when the sum of a gradient over microbatches and ranks is complete; may use it up."""


class Reductions:
    """Takes each reduction one phase on when the next one starts: the time between the two covers its waiting."""

    def __init__(self) -> None:
        self._in_flight: list[tuple[Iterator[Pending], Pending]] = []  # oldest first

    def start(self, gradient: GroupGradient, boundary: bool, on_final: OnFinal | None = None) -> None:
        """Stages a group's gradient and starts to reduce it, after the others were taken on."""
        self._advance([True] * len(self._in_flight))
        steps = _with_end(gradient, boundary, on_final)
        pending = next(steps, None)
        if pending is not None:
            self._in_flight.append((steps, pending))

    def poll(self) -> None:
        """Takes those on that would not wait: their memory is free the sooner, here and on other ranks."""
        # Asked from the newest on: what makes a phase of one ready came later than what makes it for those before it.
        self._advance([pending.is_done for _, pending in reversed(self._in_flight)][::-1])

    def finish(self) -> None:
        """Waits for all."""
        while self._in_flight:
            self._advance([True] * len(self._in_flight))

    def abandon(self) -> None:
        """Leaves them as they are: other ranks will not answer."""
        self._in_flight.clear()

    def _advance(self, is_due: Sequence[bool]) -> None:
        """Takes some one phase on, the oldest first. An error leaves the others."""
        left, self._in_flight = self._in_flight, []
        try:
            for due in is_due:
                steps, before = left.pop(0)
                pending = next(steps, None) if due else before
                if pending is not None:
                    self._in_flight.append((steps, pending))
        finally:
            self._in_flight += left


def _with_end(gradient: GroupGradient, boundary: bool, on_final: OnFinal | None) -> Iterator[Pending]:
    yield from gradient.collect(boundary)
    if boundary and on_final is not None:
        gradient.settle()
        on_final(gradient)
