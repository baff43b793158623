"""What the ranks of a pretend group say of themselves: where their hosts wait, and what their queues are at.

From this a rank that waits finds that nobody can go on, and says who waits for what; see `Board.look`.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 0.3  # seconds that a host waits before it says so
LOOK = 0.15  # seconds between two looks at the others


class Hang(BaseException):
    """The ranks wait for each other for ever."""


class Board:
    """One per process: hosts that wait, operations at the heads of queues, and the keys of the store they wait for."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self.store, self._rank, self._num_ranks = store, rank, num_ranks
        self._heads: dict[str, str] = {}  # queue -> the operation that it is at
        self._awaited: dict[str, str] = {}  # queue, or the host -> key
        self._num_looks = 0
        self._is_shown = False
        self._first: list[Any] | None = None  # what all ranks said at an earlier look
        self.found: BaseException | None = None  # an error that could not be raised where it was found

    def check(self) -> None:
        if self.found is not None:
            raise self.found

    def at(self, queue: str, operation: str | None) -> None:
        """The queue has come to this operation; None: it is empty."""
        if operation is None:
            self._heads.pop(queue, None)
        else:
            self._heads[queue] = operation

    def awaits(self, who: str, key: str | None) -> None:
        """A queue, or the host, waits for a value; None: for nothing."""
        if key is None:
            self._awaited.pop(who, None)
        else:
            self._awaited[who] = key

    @contextmanager
    def host_waits(self, what: str) -> Iterator["Looking"]:
        looking = Looking(self, what)
        try:
            yield looking
        finally:
            self._hide()

    def look(self, what: str) -> None:
        """Raises Hang where the hosts of all ranks wait, and what all queues wait for does not exist, twice."""
        self._num_looks += 1
        own = {
            "host": what,
            "heads": [f"{operation} ({queue})" for queue, operation in dict(self._heads).items()],
            "awaited": sorted(dict(self._awaited).values()),
            "looks": self._num_looks,
        }
        self.store.set(f"board/{self._rank}", json.dumps(own))
        self._is_shown = True
        keys = [f"board/{rank}" for rank in range(self._num_ranks)]
        if not self.store.check(keys):
            return
        found = [json.loads(self.store.get(key)) for key in keys]
        if self._first is None or not all(map(_is_same, self._first, found)):
            self._first = found
        elif all(now["looks"] > then["looks"] + 1 for then, now in zip(self._first, found, strict=True)):
            if any(self.store.check([key]) for one in found for key in one["awaited"]):
                return
            lines = [
                f"  rank {rank}: its host waits for {one['host']}; queues: {'; '.join(one['heads']) or 'nothing'}"
                for rank, one in enumerate(found)
            ]
            time.sleep(4 * LOOK)  # the others see it as well before this rank's end changes the picture
            raise Hang("\n".join(["all ranks wait for each other:", *lines]))

    def _hide(self) -> None:
        if self._is_shown:
            self._is_shown, self._first = False, None
            self.store.set(f"board/{self._rank}", "null")


class Looking:
    """A host that waits: `look` is called again and again meanwhile."""

    def __init__(self, board: Board, what: str) -> None:
        self._board, self._what = board, what
        self._next = time.monotonic() + PATIENCE

    def look(self) -> None:
        if time.monotonic() > self._next:
            self._next = time.monotonic() + LOOK
            self._board.look(self._what)


def _is_same(then: Any, now: Any) -> bool:
    """Whether a rank waits, in all its queues, for the same."""
    is_waiting = then and now and now["awaited"] and len(now["awaited"]) >= len(now["heads"])
    return bool(is_waiting) and {**then, "looks": 0} == {**now, "looks": 0}
