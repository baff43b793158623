"""How far each rank of an axis has come, in memory that all of them map, and how they wait for each other.

[Note: ordering of stores]
A counter is stored after the data that it announces. Between the two lies at least one release and acquire of a lock
(torch gives up the interpreter's lock around a copy), which orders them on every processor.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import psutil
from torch import Tensor

from .errors import CollectiveError
from .trail import AxisTrail

COUNTERS_NUMEL = 64  # one rank's counters fill lines of the cache that no other rank writes
POSTED, REDUCED, CONSUMED, MAILED, FENCED, _LEFT = range(6)
_LIVENESS_SECONDS = 0.2
_IN_PEACE, _AFTER_ERROR = 1, 2  # values of _LEFT


class SharedCounters:
    """A row of counters for each rank, which it alone writes: they only grow. See [Note: ordering of stores]."""

    def __init__(
        self,
        memory: Tensor,
        rank: int,
        ranks: Sequence[int],
        pids: Sequence[int],
        timeout_seconds: float,
        channel: AxisTrail,
    ) -> None:
        """memory: (size * COUNTERS_NUMEL,) int64, zero. rank, ranks: as of `Axis`. pids: of the ranks."""
        self._values = memory.numpy().reshape(len(ranks), COUNTERS_NUMEL)
        self._rank = rank
        self._ranks = ranks
        self._processes = [psutil.Process(pid) for pid in pids]
        self._timeout_seconds = timeout_seconds
        self._channel = channel
        # Called by `close`, and at the end of a script that has not closed its engine.
        self._say_goodbye = weakref.finalize(self, _say_goodbye, self._values[rank], os.getpid())

    def store(self, counter: int, value: int) -> None:
        """This rank has come so far."""
        self._values[self._rank, counter] = value

    def has_come(self, counter: int, target: int) -> bool:
        """Whether the counter of every rank has reached target."""
        return bool(self._values[:, counter].min() >= target)

    def wait_for(self, counter: int, target: int, what: str, sequence: int) -> None:
        """Returns when the counter of every rank has reached target. sequence: of the collective, for the record."""
        self._channel.note(what)
        column = self._values[:, counter]
        for _ in range(200):
            if column.min() >= target:
                return
            os.sched_yield()
        self._channel.wait(what, sequence)
        started = checked = time.monotonic()
        pause_seconds = 2e-5
        try:
            while column.min() < target:
                time.sleep(pause_seconds)
                pause_seconds = min(pause_seconds * 1.5, 1e-3)
                now = time.monotonic()
                if now - checked > _LIVENESS_SECONDS:
                    checked = now
                    self._check_peers(column, target, now - started, what)
        finally:
            self._channel.go_on()

    def close(self) -> None:
        """This rank stores nothing more, and says so."""
        self._say_goodbye()

    def _check_peers(self, column: np.ndarray[Any, Any], target: int, waited_seconds: float, what: str) -> None:
        fates = {rank: self._fate(rank) for rank in np.flatnonzero(column < target).tolist()}
        # Looked at again: a rank may have come here, and gone, since.
        late = {self._ranks[rank]: fate for rank, fate in fates.items() if column[rank] < target}
        here = f"rank {self._ranks[self._rank]} in {what}"
        for fate in _Fate:
            gone = ", ".join(str(rank) for rank, found in late.items() if found is fate)
            if gone:
                advice = f" {self._channel.raised.what_to_do}" if fate is _Fate.LEFT else ""
                raise CollectiveError(f"{here}: rank {gone} {fate.value}{advice}")
        if late and (found := self._channel.alone(list(late))):
            raise CollectiveError(f"{here}: {found}")
        if late and waited_seconds > self._timeout_seconds:
            raise CollectiveError(
                f"{here}: waited {waited_seconds:.0f} s for rank {', '.join(map(str, late))}, which is alive but "
                "elsewhere. Do all ranks run the same calls of the engine in the same order? "
                f"A slow rank needs a larger communication.timeout_seconds. {self._channel.raised.what_to_do}"
                + self._channel.compare(list(late))
            )

    def _fate(self, rank: int) -> _Fate | None:
        """Why nothing more can come from a rank of the axis; None: it is alive, and has not left."""
        if goodbye := self._values[rank, _LEFT]:
            return _Fate.FAILED if goodbye == _AFTER_ERROR else _Fate.LEFT
        return None if _is_alive(self._processes[rank]) else _Fate.DIED


class _Fate(Enum):
    """What has become of a rank that others wait for; the value is how users read it. The likely cause stands first."""

    DIED = "died. Its own output says why."
    FAILED = "left after an error. Its own output says which."
    LEFT = "has left: it closed its engine, or its script came to an end."


def _say_goodbye(counters: np.ndarray[Any, Any], pid: int) -> None:
    """counters: this rank's row. Does nothing in a process that was forked from the rank's own."""
    if os.getpid() == pid:
        counters[_LEFT] = _AFTER_ERROR if _is_failing() else _IN_PEACE


def _is_failing() -> bool:
    """Whether an exception ends this program, or the block in which the engine is closed."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    is_end = isinstance(error, StopIteration) or (isinstance(error, SystemExit) and not error.code)
    return error is not None and not is_end


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
