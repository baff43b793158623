"""SIGTERM as a request: it is noted, and acted upon at the end of the step."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class Preemption:
    """Notes SIGTERM while it is armed. The second one ends the process as it would without."""

    def __init__(self) -> None:
        self.is_requested = False
        self._before: signal._HANDLER = None
        self._is_armed = False

    def arm(self) -> None:
        """Raises ValueError outside of the main thread, where Python allows no signal handlers."""
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "checkpoint.on_sigterm: expected lowtide.initialize in the main thread, found "
                f"'{threading.current_thread().name}'; only there a signal can be received"
            )
        self._before = signal.signal(signal.SIGTERM, self._note)
        self._is_armed = True

    def disarm(self) -> None:
        """Gives the signal back to whoever had it, unless somebody has taken it since."""
        if self._is_armed:
            self._is_armed = False
            if signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:
            self.is_requested = True
            self.disarm()
        elif callable(self._before):  # given back to us by one who took it from us
            self._before(number, frame)
        elif self._before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
