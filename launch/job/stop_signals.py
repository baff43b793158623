"""The signals with which a user, a terminal or a resource manager stops a job."""

import signal
import time
from collections.abc import Callable

from ..wire.loop import Loop

_SAME_SIGNAL_SECONDS = 0.2  # a terminal, a resource manager and `timeout` may all send the same one
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Those that have come to this process, or to an agent. first: is told of the first one.

    number: of the last one that counts, None before any. time: when the first came. A second one kills.
    """

    def __init__(self, loop: Loop, first: Callable[[int], None]) -> None:
        self._first = first
        self.number: int | None = None
        self.time = 0.0
        self.count = 0
        self.is_killed = False
        for number in _PASSED_ON:
            loop.on_signal(number, lambda number=number: self.take(number))  # type: ignore[misc]

    def take(self, number: int) -> None:
        now = time.monotonic()
        self.count += 1
        if self.number is None:
            self.number, self.time = number, now
            self._first(number)
        elif number != self.number or now - self.time > _SAME_SIGNAL_SECONDS:
            self.number = number
            self.is_killed = True

    @property
    def has_come(self) -> bool:
        return self.number is not None

    @property
    def name(self) -> str:
        return "" if self.number is None else signal.Signals(self.number).name
