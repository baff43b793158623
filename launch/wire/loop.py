"""An event loop in a single thread: descriptors, timers, signals, and calls from all threads.

[Note: one thread]
The kernel binds a child's parent-death signal to the thread that started it, and a fork while more threads hold locks
can hang. So launcher and agent start processes from a main thread that never blocks, and that does all their work.
"""

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable

Call = Callable[[], None]


class Timer:
    """A call in the future."""

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call

    def cancel(self) -> None:
        """Cancel the call."""
        self.call = None


class Loop:
    """Makes the calls that are due, in the main thread, during `run`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()  # order of timers with the same time
        self._posted: deque[Call] = deque()
        self._handlers: dict[int, Call] = {}
        self._before: dict[int, object] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        # Python's signal handler must not block: if the pipe is full, the loop wakes in any case.
        os.set_blocking(self._wake_write, False)
        # The C handler of Python writes the signal's number there, so `select` returns and `_wake` knows the signal.
        self._fd_before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self.on_readable(self._wake_read, self._wake)

    def close(self) -> None:
        """Restore the signal handlers from before."""
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def on_readable(self, fd: int, call: Call) -> None:
        """Call whenever `fd` can be read, or has ended."""
        self._selector.register(fd, selectors.EVENT_READ, call)

    def on_writable(self, fd: int, call: Call) -> None:
        """Call whenever `fd` takes bytes."""
        self._selector.register(fd, selectors.EVENT_WRITE, call)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`. Call it before closing `fd`."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def on_signal(self, number: signal.Signals, call: Call) -> None:
        """Call when this process receives the signal. An exec'ed child has the default action again."""
        self._handlers[number] = call
        before = signal.signal(number, lambda number, frame: None)  # the wakeup descriptor tells `_wake`
        self._before.setdefault(number, before)

    def after(self, seconds: float, call: Call) -> Timer:
        """Call once, in `seconds`."""
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), timer))
        return timer

    def post(self, call: Call) -> None:
        """Call soon. May be used from any thread."""
        self._posted.append(call)
        with contextlib.suppress(OSError):  # full: the loop wakes anyway; closed: nobody waits
            os.write(self._wake_write, b"\0")

    def run(self, until: Callable[[], bool], timeout: float | None = None) -> bool:
        """Make calls until the condition holds or the time is over. Returns whether it holds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not until():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            for key, _ in self._selector.select(self._seconds_to_wait(left)):
                if self._selector.get_map().get(key.fd) is key:  # an earlier call may have removed it
                    key.data()
            self._call_timers()
        return True

    def _seconds_to_wait(self, left: float | None) -> float | None:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if self._timers:
            due = max(0.0, self._timers[0][0] - time.monotonic())
            return due if left is None else min(due, left)
        return left

    def _call_timers(self) -> None:
        # Read once: a timer that sets the next timer cannot keep the loop from its descriptors.
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                timer.call()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            # Before the queue is emptied: a call that is posted after that writes another byte and wakes the loop.
            numbers = os.read(self._wake_read, 4096)
            # Equal signals count once. A posted call wrote 0, and no signal has the number 0.
            for number in dict.fromkeys(numbers):
                if number in self._handlers:
                    self._handlers[number]()
        while self._posted:
            self._posted.popleft()()
