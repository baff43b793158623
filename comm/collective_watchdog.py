"""Ends what a device waits for in vain.

[Note: a lost rank on a device]
Where `wait` orders a stream, the host goes on at once. If a rank is lost then, the host comes to stand later, wherever
it needs a value of the device, in a call of torch's that knows no timeout. torch's own watchdog would end the process
there, without a word of who waits for whom. So that watchdog is told to leave the process alone
(`leave_errors_to_us`), and a thread looks when the host has last started something or waited. Where that was the
timeout ago, and the device has not come past it, the groups are aborted: the streams go on, the host comes back, with
what no rank has sent, and what it does next of collectives is an error that says who did not come. A host that comes
back to its own code and not to the engine has read it in the log.

The device is only asked when the host has been quiet for a while, so a training that goes on pays nothing for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from .errors import CollectiveError, no_answer

logger = logging.getLogger("lowtide")

_POLLS_PER_TIMEOUT = 8
_MAX_POLL_SECONDS = 1.0


def leave_errors_to_us() -> None:
    """Of groups that are made from now on, unless the environment says otherwise: they do not end the process."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


class _Call(NamedTuple):  # one for each time: a dataclass takes thrice as long to make
    """What the host has last started, or waited for."""

    what: str
    others: Sequence[int]
    compare: Callable[[Sequence[int]], str]
    since: float
    stream: torch.Stream | None  # that it is on; None on the CPU, where the host itself waits


class CollectiveWatchdog:
    """Looks whether the device comes past what the host has started, and aborts what is late. Off until `start`."""

    def __init__(self) -> None:
        self.is_on = False
        """Else `begin`, `end` and `check` have nothing to do."""
        self.error: CollectiveError | None = None
        self._rank, self._timeout_seconds = 0, 0.0
        self._device = torch.device("cpu")
        self._latest: _Call | None = None
        self._asked: tuple[_Call, torch.Event] | None = None  # what the device has not come past yet
        self._is_inside = False  # the host has not come back from it
        self._is_told = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, rank: int, device: torch.device, timeout_seconds: float) -> None:
        """To be called once, before the groups of an engine are made."""
        leave_errors_to_us()
        self._rank, self._device, self._timeout_seconds = rank, device, timeout_seconds
        poll = min(timeout_seconds / _POLLS_PER_TIMEOUT, _MAX_POLL_SECONDS)
        arguments = weakref.ref(self), self._stop, poll
        self._thread = threading.Thread(target=_watch, args=arguments, name="lowtide overdue", daemon=True)
        self._thread.start()
        self.is_on = True

    def stop(self) -> None:
        """Ends the thread. Raises what it has found and nobody was told."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self.is_on = False
        self._latest = self._asked = None  # with what it compares
        if not self._is_told:
            self.check()

    def check(self) -> None:
        """Raises CollectiveError where something was aborted."""
        if self.error is not None:
            self._is_told = True
            raise self.error

    def begin(self, what: str, others: Sequence[int], compare: Callable[[Sequence[int]], str], waits: bool) -> None:
        """The host begins to start `what`, or to wait for it. compare: as `FlightRecorder.compare`.

        A stream waits for nothing that is started alone: until the next wait, that of the last one is looked at.
        """
        if self.is_on:
            self.check()
            stream = None if self._latest is None else self._latest.stream
            if self._device.type != "cpu" and (waits or stream is None):
                stream = torch.accelerator.current_stream(self._device)
            self._latest = _Call(what, others, compare, time.monotonic(), stream)
            self._is_inside = True

    def end(self) -> None:
        """It comes back."""
        self._is_inside = False

    def look(self, poll_seconds: float) -> bool:
        """Whether nothing is late. What is late is aborted."""
        call = self._latest
        if call is None or time.monotonic() - call.since < poll_seconds:
            return True
        if not self._is_inside:
            if call.stream is None:
                return True
            if self._asked is None or self._asked[0] is not call:
                self._asked = call, torch.Event(self._device)
                self._asked[1].record(call.stream)
            if self._asked[1].query():
                return True
        if time.monotonic() - call.since <= self._timeout_seconds or self._latest is not call:
            return True
        self._abort(call)
        return False

    def _abort(self, call: _Call) -> None:
        waited = time.monotonic() - call.since
        text = no_answer(self._rank, call.what, call.others, waited, RuntimeError("timed out"))
        self.error = CollectiveError(text + call.compare(call.others))
        logger.error("%s The communicators of this rank are aborted.", self.error)
        for group in list(dist.distributed_c10d._world.pg_map):
            try:
                group.abort()
            except RuntimeError as error:  # of a backend that cannot
                logger.warning("a process group could not be aborted: %s", error)


def _watch(overdue: weakref.ref[CollectiveWatchdog], stop: threading.Event, poll_seconds: float) -> None:
    """Until it is stopped, or gone with an engine that nobody has closed."""
    while not stop.wait(poll_seconds):
        there = overdue()
        if there is None or not there.look(poll_seconds):
            return
        del there
