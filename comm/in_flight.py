"""Operations of a backend, started and waited for, and the last ones of every rank.

With the config's timeout, and in our words where they fail: the error says where ranks went different ways.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from ..watch.progress import Progress
from ..watch.record import NUM_CHANNELS
from .errors import CollectiveError, ErrorBroadcast, no_answer
from .world import World

NUM_RECORDED = NUM_CHANNELS - 1  # channels at a time in the record of the progress; the last one is the world's
_LENGTH = 4
_WAIT_SECONDS = 0.5


class InFlight:
    """What routes and messages do with a backend's work.

    | backend                  | `wait` returns                     | a rank that does not come is found by |
    |--------------------------|------------------------------------|---------------------------------------|
    | gloo, MPI                | when the result is there           | `wait` itself, after the timeout      |
    | NCCL, and other devices' | at once: the current stream waits  | `CollectiveWatchdog`, after the timeout          |

    NCCL's `wait` with a timeout would block the host.
    """

    def __init__(self, world: World, compare: Callable[[Sequence[int]], str]) -> None:
        """compare: as `FlightRecorder.compare`."""
        self._world = world
        self._overdue = world.overdue
        self._compare = compare
        self._timeout = (timedelta(seconds=world.timeout_seconds),) if world.waits_on_host else ()

    def start(self, make: Callable[[], dist.Work | None], what: str, others: Sequence[int]) -> dist.Work:
        """make: starts it. others: the ranks that take part.

        It may wait for them, where their connection is made by its first use. Raises CollectiveError.
        """
        started = time.monotonic()
        if self._overdue.is_on:
            self._overdue.begin(what, others, self._compare, waits=False)
        try:
            work = make()
        except RuntimeError as error:  # the other end of a connection is gone
            raise self._error(what, others, started, error) from error
        finally:
            if self._overdue.is_on:
                self._overdue.end()
        assert work is not None
        return work

    def wait(self, work: dist.Work, what: str, others: Sequence[int]) -> None:
        """Returns when the result may be used on the current stream. Raises CollectiveError."""
        started = time.monotonic()
        if self._overdue.is_on:
            self._overdue.begin(what, others, self._compare, waits=True)
        try:
            work.wait(*self._timeout)
        except RuntimeError as error:
            raise self._error(what, others, started, error) from error
        finally:
            if self._overdue.is_on:
                self._overdue.end()
        if self._overdue.is_on:
            self._overdue.check()

    def _error(self, what: str, others: Sequence[int], started: float, error: RuntimeError) -> CollectiveError:
        if self._overdue.error is not None:
            return self._overdue.error
        text = no_answer(self._world.rank, what, others, time.monotonic() - started, error)
        return CollectiveError(text + self._compare(others))


class FlightRecorder:
    """What this rank has done last. Ranks that wait in vain at the same time read each other's through the store."""

    def __init__(self, world: World, engine_number: int) -> None:
        self._world = world
        self._prefix = f"lowtide/trail/{engine_number}"
        self._recent: deque[str] = deque(maxlen=_LENGTH)

    def note(self, what: str) -> None:
        """A collective begins, or this rank comes back to one that has begun."""
        if not self._recent or self._recent[-1] != what:
            self._recent.append(what)

    def compare(self, ranks: Sequence[int]) -> str:
        """A sentence with the last collectives of this rank and of those `ranks` that wait as well."""
        trails = {self._world.rank: " > ".join(self._recent)}
        try:
            self._world.store.set(f"{self._prefix}/{self._world.rank}", trails[self._world.rank])
            for rank in ranks:
                key = f"{self._prefix}/{rank}"
                if rank != self._world.rank:
                    self._world.store.wait([key], timedelta(seconds=_WAIT_SECONDS))
                    trails[rank] = self._world.store.get(key).decode()
        except RuntimeError:
            pass  # that rank does not wait, or the rank that keeps the store is gone
        listed = "; ".join(f"rank {rank}: {trail}" for rank, trail in sorted(trails.items()))
        return f" The last collectives: {listed}."


class AxisRecorder:
    """The collectives of one axis: in the trail and, numbered, in the record of this rank's progress."""

    def __init__(
        self, trail: FlightRecorder, raised: ErrorBroadcast, progress: Progress, number: int, ranks: Sequence[int]
    ) -> None:
        """number: of the channel, the same on all `ranks`, which lie at equal distances of each other."""
        self.trail = trail
        self.raised = raised
        self.progress = progress
        self.begun = raised.channel(number, ranks)
        self._number = number % NUM_RECORDED
        self._ranks = (ranks[0], ranks[1] - ranks[0] if len(ranks) > 1 else 1, len(ranks))

    def begin(self, what: str) -> int:
        """A collective begins: gives its number, which is the same on every rank."""
        self.trail.note(what)
        self.begun.count += 1
        return self.progress.begin(self._number, what) if self.progress.is_on else 0

    def wait(self, what: str, sequence: int) -> None:
        """This rank waits for others in collective `sequence`, until `progress.go_on`."""
        self.progress.wait(what, self._number, sequence, *self._ranks)

    def alone(self, ranks: Sequence[int]) -> str:
        """As `ErrorBroadcast.alone`."""
        return self.raised.alone(self.begun, ranks)
