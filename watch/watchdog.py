"""Threads that look at a hanging process from inside: `poll`, and a report of each step over the limit."""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable

from .progress import Progress

_POLLS_PER_LIMIT = 8
_MAX_POLL_SECONDS = 1.0


def poll(look: Callable[[], object], seconds: float, name: str) -> Callable[[], None]:
    """Call a bound method every `seconds` from a thread with this name.

    The thread ends if the method returns False, if its object is garbage-collected, or if the result is called. It
    works if the process hangs in Python, or in C code that has released the GIL, as waits do.
    """
    method, stop = weakref.WeakMethod(look), threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            call = method()
            if call is None or call() is False:
                return
            del call  # until the next call nothing here keeps the object, and so an engine, alive

    # A daemon, as it must not keep a process alive that ends without calling the result.
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        if thread is not threading.current_thread():  # an engine may be closed by the method itself
            thread.join()

    return end


def poll_seconds(limit_seconds: float) -> float:
    """Return the time between two looks for something that may take `limit_seconds`."""
    return min(limit_seconds / _POLLS_PER_LIMIT, _MAX_POLL_SECONDS)


class Watchdog:
    """Reads this rank's record from a thread, and reports each step over the limit once on stderr."""

    def __init__(self) -> None:
        self._end: Callable[[], None] | None = None
        self._has_reported = False  # the present step

    def start(self, progress: Progress, limit_seconds: float) -> None:
        """Start the thread. Call it once."""
        assert self._end is None
        self._progress, self._limit_seconds = progress, limit_seconds
        self._end = poll(self._look, poll_seconds(limit_seconds), "lowtide watchdog")

    def stop(self) -> None:
        """End the thread."""
        if self._end is not None:
            self._end()

    def _look(self) -> None:
        now = self._progress.snapshot()
        is_late = now.step_seconds is not None and now.step_seconds > self._limit_seconds
        if is_late and not self._has_reported:
            print(
                f"lowtide: rank {now.rank}: a step has taken longer than {self._limit_seconds:g} s "
                f"(communication.step_timeout_seconds) and goes on; {now}. The stacks of its threads:\n{_stacks()}",
                file=sys.stderr,
                flush=True,
            )
        # The next step is not late at first, which ends the silence.
        self._has_reported = is_late


def _stacks() -> str:
    """Format the Python stacks of all other threads, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
