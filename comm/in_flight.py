"""Start and await a backend's operations, and record the last collectives of each rank.

Operations run under the config's timeout. The error of a failed operation says where the ranks diverged.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from ..watch.progress import Progress
from ..watch.record import NUM_CHANNELS
from .errors import CollectiveError, ErrorBroadcast, no_answer
from .world import World

T = TypeVar("T")

NUM_RECORDED = NUM_CHANNELS - 1  # the progress record keeps its last channel for the world
_LENGTH = 4
# Ranks that wait for the same lost rank time out at about the same time.
_WAIT_SECONDS = 0.5


class InFlight:
    """Starts and awaits the backend operations of transports and messages.

    | backend                | `wait` returns                     | finds a missing rank after the timeout |
    |------------------------|------------------------------------|----------------------------------------|
    | gloo, MPI              | when the result is ready           | `wait`                                 |
    | NCCL and other devices | at once: the current stream waits  | `CollectiveWatchdog`                   |
    """

    def __init__(self, world: World, compare: Callable[[Sequence[int]], str]) -> None:
        """compare: see `FlightRecorder.compare`."""
        self._world = world
        self._collective_watchdog = world.collective_watchdog
        self._compare = compare
        # Without a timeout on devices: NCCL's `wait` with a timeout would block the host.
        self._timeout = (timedelta(seconds=world.timeout_seconds),) if world.waits_on_host else ()

    def start(self, make: Callable[[], dist.Work | None], what: str, others: Sequence[int]) -> dist.Work:
        """Start an operation by `make`. others: the ranks that take part. Raises CollectiveError.

        The first operation between two ranks may block until the other rank connects.
        """
        work = self._guarded(make, what, others, waits=False)
        assert work is not None
        return work

    def wait(self, work: dist.Work, what: str, others: Sequence[int]) -> None:
        """Wait until the current stream may use the result. Raises CollectiveError."""
        self._guarded(partial(work.wait, *self._timeout), what, others, waits=True)
        if self._collective_watchdog.is_on:
            self._collective_watchdog.check()

    def _guarded(self, act: Callable[[], T], what: str, others: Sequence[int], waits: bool) -> T:
        """Call torch under the watchdog, and explain its errors."""
        started, watchdog = time.monotonic(), self._collective_watchdog
        if watchdog.is_on:
            watchdog.begin(what, others, self._compare, waits)
        try:
            return act()
        except RuntimeError as error:  # also if the peer closed the connection before the operation began
            raise self._error(what, others, started, error) from error
        finally:
            if watchdog.is_on:
                watchdog.end()

    def _error(self, what: str, others: Sequence[int], started: float, error: RuntimeError) -> CollectiveError:
        if self._collective_watchdog.error is not None:
            return self._collective_watchdog.error
        text = no_answer(self._world.rank, what, others, time.monotonic() - started, error)
        return CollectiveError(text + self._compare(others))


class FlightRecorder:
    """Keeps the last collectives of this rank. Ranks that time out together exchange their lists through the store."""

    def __init__(self, world: World, engine_number: int) -> None:
        self._world = world
        self._prefix = f"lowtide/recent/{engine_number}"
        self._recent: deque[str] = deque(maxlen=_LENGTH)

    def note(self, what: str) -> None:
        """Append a collective that begins or resumes."""
        if not self._recent or self._recent[-1] != what:
            self._recent.append(what)

    def compare(self, ranks: Sequence[int]) -> str:
        """Write a sentence with the last collectives of this rank and of the `ranks` that have also timed out."""
        # The first rank without a list ends the loop, so at most a single wait below times out.
        recent_by_rank = {self._world.rank: " > ".join(self._recent)}
        try:
            self._world.store.set(f"{self._prefix}/{self._world.rank}", recent_by_rank[self._world.rank])
            for rank in ranks:
                key = f"{self._prefix}/{rank}"
                if rank != self._world.rank:
                    self._world.store.wait([key], timedelta(seconds=_WAIT_SECONDS))
                    recent_by_rank[rank] = self._world.store.get(key).decode()
        except RuntimeError:
            pass  # that rank has not timed out, or the rank that hosts the store is gone
        listed = "; ".join(f"rank {rank}: {recent}" for rank, recent in sorted(recent_by_rank.items()))
        return f" The last collectives: {listed}."


class AxisRecorder:
    """Records the collectives of an axis in the flight recorder and, numbered, in this rank's progress record."""

    def __init__(
        self,
        recorder: FlightRecorder,
        error_broadcast: ErrorBroadcast,
        progress: Progress,
        number: int,
        ranks: Sequence[int],
    ) -> None:
        """number: of the channel, equal on all `ranks`. The distance between consecutive `ranks` is constant."""
        self.recorder = recorder
        self.error_broadcast = error_broadcast
        self.progress = progress
        self.begun = error_broadcast.channel(number, ranks)
        self._number = number % NUM_RECORDED
        self._ranks = (ranks[0], ranks[1] - ranks[0] if len(ranks) > 1 else 1, len(ranks))

    def begin(self, what: str) -> int:
        """Record that a collective begins. Returns its sequence number, which is equal on every rank."""
        self.recorder.note(what)
        self.begun.count += 1
        return self.progress.begin(self._number, what) if self.progress.is_on else 0

    def wait(self, what: str, sequence: int) -> None:
        """Record that this rank waits in collective `sequence`, until `progress.end_wait`."""
        self.progress.wait(what, self._number, sequence, *self._ranks)

    def alone(self, ranks: Sequence[int]) -> str:
        """See `ErrorBroadcast.alone`."""
        return self.error_broadcast.alone(self.begun, ranks)
