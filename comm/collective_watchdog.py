"""A watchdog for collectives of a device.

[Note: a lost rank on a device]
On a device `wait` orders a stream, so the host continues at once. If a rank is lost, the host blocks later in a call of
torch without a timeout, as soon as it reads a value from the device. torch's watchdog would end the process then, and
would not name the missing rank. So torch's watchdog is switched off (`leave_errors_to_us`), and a thread notes when the
host last started or awaited an operation. If that was more than the timeout ago and the device has not passed the
operation, the thread aborts the process groups. The streams then run on with undefined data, the host returns, and its
next collective raises an error that names the missing ranks. The error is also in the log, for a host that
returns to the user's code instead of the engine.

The thread queries the device only after the host has been idle for a while, so it costs a running training nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..watch.watchdog import poll, poll_seconds
from .errors import CollectiveError, no_answer

logger = logging.getLogger("lowtide")


def leave_errors_to_us() -> None:
    """Keep torch from ending the process on a NCCL error, for groups made from now on. The environment takes
    precedence.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


class _Call(NamedTuple):  # made for each operation: a dataclass takes three times as long to make
    """The operation that the host last started or awaited."""

    what: str
    others: Sequence[int]
    compare: Callable[[Sequence[int]], str]
    since: float
    stream: torch.Stream | None  # None on the CPU, where the host waits


class CollectiveWatchdog:
    """Detects operations that the device does not pass within the timeout, and aborts them. Off until `start`."""

    def __init__(self) -> None:
        self.is_on = False
        """If False, `begin`, `end` and `check` do nothing."""
        self.error: CollectiveError | None = None
        self._rank, self._timeout_seconds = 0, 0.0
        self._device = torch.device("cpu")
        self._latest: _Call | None = None
        self._asked: tuple[_Call, torch.Event] | None = None  # the event completes when the device passes the call
        self._is_inside = False  # the host has not returned from the call
        self._is_raised = False
        self._end_polling: Callable[[], None] | None = None

    def start(self, rank: int, device: torch.device, timeout_seconds: float) -> None:
        """Start the thread. Call it once, before the groups of an engine are made."""
        leave_errors_to_us()
        self._rank, self._device, self._timeout_seconds = rank, device, timeout_seconds
        self._end_polling = poll(self._look, poll_seconds(timeout_seconds), "lowtide overdue")
        self.is_on = True

    def stop(self) -> None:
        """End the thread. Raises a CollectiveError that was found and not raised yet."""
        if self._end_polling is not None:
            self._end_polling()
            self._end_polling = None
            self.is_on = False
        self._latest = self._asked = None  # releases `compare`, which refers to the engine
        if not self._is_raised:
            self.check()

    def check(self) -> None:
        """Raise CollectiveError if an operation was aborted."""
        if self.error is not None:
            self._is_raised = True
            raise self.error

    def begin(self, what: str, others: Sequence[int], compare: Callable[[Sequence[int]], str], waits: bool) -> None:
        """Record that the host starts or awaits `what`. compare: see `FlightRecorder.compare`.

        An operation that is only started blocks no stream, so the stream of the last wait stays under observation.
        """
        if self.is_on:
            self.check()
            stream = None if self._latest is None else self._latest.stream
            if self._device.type != "cpu" and (waits or stream is None):
                stream = torch.accelerator.current_stream(self._device)
            self._latest = _Call(what, others, compare, time.monotonic(), stream)
            self._is_inside = True

    def end(self) -> None:
        """Record that the host has returned from the operation."""
        self._is_inside = False

    def _look(self) -> bool:
        """Abort an operation that is overdue. Returns False if it did."""
        # No lock: the host replaces the tuple by a single store, which the thread sees before or after.
        call = self._latest
        if call is None or time.monotonic() - call.since < poll_seconds(self._timeout_seconds):
            return True
        if not self._is_inside:
            if call.stream is None:
                return True
            # Of this thread alone. Device 0, as it begins, would get a context from torch's calls with events.
            torch.accelerator.set_stream(call.stream)
            # Other devices than CUDA's may have no graphs. A capture runs nothing that could be awaited.
            if getattr(torch.get_device_module(self._device), "is_current_stream_capturing", bool)():
                return True
            # Recorded only now, which costs a running training nothing: it comes behind the operation in its stream.
            if self._asked is None or self._asked[0] is not call:
                self._asked = call, torch.Event(self._device)
                self._asked[1].record(call.stream)
            if self._asked[1].query():
                return True
        # The host may have begun another operation since this thread read `_latest`.
        if time.monotonic() - call.since <= self._timeout_seconds or self._latest is not call:
            return True
        self._abort(call)
        return False

    def _abort(self, call: _Call) -> None:
        waited = time.monotonic() - call.since
        text = no_answer(self._rank, call.what, call.others, waited, RuntimeError("timed out"))
        self.error = CollectiveError(text + call.compare(call.others))
        logger.error("%s The communicators of this rank are aborted.", self.error)
        for group in list(dist.distributed_c10d._world.pg_map):  # all: a stream may wait for any of them
            try:
                group.abort()
            except RuntimeError as error:  # the backend has no abort
                logger.warning("a process group could not be aborted: %s", error)
