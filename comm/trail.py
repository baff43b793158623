"""The last collectives of every rank, for the error that says where they went different ways; the one it waits in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from ..watch.progress import Progress
from ..watch.record import NUM_CHANNELS
from .raised import Raised
from .world import World

NUM_RECORDED = NUM_CHANNELS - 1  # channels at a time in the record of the progress; the last one is the world's
_LENGTH = 4
_WAIT_SECONDS = 0.5


class Trail:
    """What this rank has done last. Ranks that wait in vain at the same time read each other's through the store."""

    def __init__(self, world: World, engine_number: int) -> None:
        self._world = world
        self._prefix = f"lowtide/trail/{engine_number}"
        self._recent: deque[str] = deque(maxlen=_LENGTH)

    def note(self, what: str) -> None:
        """A collective begins."""
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


class AxisTrail:
    """The collectives of one axis: in the trail and, numbered, in the record of this rank's progress."""

    def __init__(self, trail: Trail, raised: Raised, progress: Progress, number: int, ranks: Sequence[int]) -> None:
        """number: of the channel, the same on all `ranks`, which lie at equal distances of each other."""
        self._trail = trail
        self.raised = raised
        self.progress = progress
        self.begun = raised.channel(number, ranks)
        self._number = number % NUM_RECORDED
        self._ranks = (ranks[0], ranks[1] - ranks[0] if len(ranks) > 1 else 1, len(ranks))

    def begin(self, what: str) -> int:
        """A collective begins: gives its number, which is the same on every rank."""
        self._trail.note(what)
        self.begun.count += 1
        return self.progress.begin(self._number, what) if self.progress.is_on else 0

    def note(self, what: str) -> None:
        """This rank comes back to one that has begun."""
        self._trail.note(what)

    def wait(self, what: str, sequence: int) -> None:
        """This rank waits for others in collective `sequence`, until `go_on`."""
        self.progress.wait(what, self._number, sequence, *self._ranks)

    def go_on(self) -> None:
        self.progress.go_on()

    def alone(self, ranks: Sequence[int]) -> str:
        """As `Raised.alone`."""
        return self.raised.alone(self.begun, ranks)

    def compare(self, ranks: Sequence[int]) -> str:
        """As `Trail.compare`."""
        return self._trail.compare(ranks)
