"""Report the activity of a rank without a launcher if its step exceeds the limit."""

from __future__ import annotations

import sys
import threading
import traceback

from .progress import Progress

_POLLS_PER_LIMIT = 8
_MAX_POLL_SECONDS = 1.0


class Watchdog:
    """A thread that reads this rank's record, and reports each step over the limit once on stderr.

    It works if the rank hangs in Python, or in C code that has released the GIL, as waits do.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, progress: Progress, limit_seconds: float) -> None:
        """Start the thread. Call it once."""
        assert self._thread is None
        self._thread = threading.Thread(
            target=self._watch, args=(progress, limit_seconds), name="lowtide watchdog", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self, progress: Progress, limit_seconds: float) -> None:
        has_told = False
        while not self._stop.wait(min(limit_seconds / _POLLS_PER_LIMIT, _MAX_POLL_SECONDS)):
            now = progress.snapshot()
            is_late = now.step_seconds is not None and now.step_seconds > limit_seconds
            if is_late and not has_told:
                print(
                    f"lowtide: rank {now.rank}: a step has taken longer than {limit_seconds:g} s "
                    f"(communication.step_timeout_seconds) and goes on; {now}. The stacks of its threads:\n{_stacks()}",
                    file=sys.stderr,
                    flush=True,
                )
            has_told = is_late


def _stacks() -> str:
    """Format the Python stacks of all other threads, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
