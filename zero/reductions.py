"""Reductions of gradients that have started and not ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..comm import Reduction
from .gradient import GroupGradient


class Reductions:
    """Takes each reduction one phase on when the next one starts: the time between the two covers its waiting."""

    def __init__(self) -> None:
        self._in_flight: list[tuple[Iterator[Reduction], Reduction]] = []  # oldest first

    def start(self, gradient: GroupGradient, boundary: bool) -> None:
        """Stages a group's gradient and starts to reduce it, after the others were taken on."""
        self._advance([True] * len(self._in_flight))
        steps = gradient.collect(boundary)
        reduction = next(steps, None)
        if reduction is not None:
            self._in_flight.append((steps, reduction))

    def poll(self) -> None:
        """Takes those on that would not wait: their memory is free the sooner, here and on other ranks."""
        # Asked from the newest on: what makes a phase of one ready came later than what makes it for those before it.
        self._advance([reduction.is_ready for _, reduction in reversed(self._in_flight)][::-1])

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
                reduction = next(steps, None) if due else before
                if reduction is not None:
                    self._in_flight.append((steps, reduction))
        finally:
            self._in_flight += left
