"""For how long a peer has said nothing.

[Note: silence]
A peer that has ended is noticed at once, by the end of its stream; silence tells only of a cut link, of a host that
lost its power, or of a process that is stopped. It is counted in ticks of this side's own timer and not by the clock,
because a process that was stopped itself (Ctrl-Z, a laptop's sleep) would find everyone silent when it wakes.
"""

import time

TICK_SECONDS = 0.5


class Silence:
    """limit_seconds: None: it is never over. since: when the peer was last heard."""

    def __init__(self, limit_seconds: float | None) -> None:
        self.is_over = False
        self.seconds = 0.0
        self.since = time.monotonic()
        self._limit_seconds = limit_seconds

    def heard(self) -> None:
        """The peer has said something."""
        self.since = time.monotonic()
        self.seconds = 0.0

    def tick(self) -> bool:
        """Each TICK_SECONDS. Whether it has lasted for the limit, before this tick."""
        if self._limit_seconds is None:
            return False
        if self.seconds >= self._limit_seconds:
            self.is_over = True
        else:
            self.seconds += TICK_SECONDS
        return self.is_over
