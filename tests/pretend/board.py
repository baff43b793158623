"""What the ranks of a pretend group say of themselves: where their hosts wait, and what their queues are at.

From this a rank that waits finds that nobody can go on, and says who waits for what; see `Board.look`.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 0.6  # seconds that a host waits before it says so
LOOK = 0.3  # seconds between two looks at the others


class Hang(BaseException):
    """The ranks wait for each other for ever."""


class Board:
    """One per process: hosts that wait, operations at the heads of queues, and how many were ever completed."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._lock = threading.Lock()
        self._heads: dict[str, str] = {}  # queue -> the operation that it is at
        self._progress = 0
        self._is_shown = False
        self._seen: tuple[list[Any], float] | None = None

    def at(self, queue: str, operation: str | None) -> None:
        """The queue has come to this operation; None: it is empty."""
        with self._lock:
            self._progress += 1
            if operation is None:
                self._heads.pop(queue, None)
            else:
                self._heads[queue] = operation

    @contextmanager
    def host_waits(self, what: str) -> Iterator["Looking"]:
        looking = Looking(self, what)
        try:
            yield looking
        finally:
            looking.end()

    def look(self, what: str) -> None:
        """Raises Hang where the hosts of all ranks wait, and nothing was completed between two looks."""
        with self._lock:
            heads = [f"{operation} ({queue})" for queue, operation in self._heads.items()]
            own = {"host": what, "heads": heads, "progress": self._progress}
        self._store.set(f"board/{self._rank}", json.dumps(own))
        self._is_shown = True
        keys = [f"board/{rank}" for rank in range(self._num_ranks)]
        if not self._store.check(keys):
            return
        found = [json.loads(self._store.get(key)) for key in keys]
        now = time.monotonic()
        if self._seen is None or self._seen[0] != found or not all(found):
            self._seen = found, now
        elif now - self._seen[1] > 2 * LOOK:
            lines = [
                f"  rank {rank}: its host waits for {one['host']}; queues: {'; '.join(one['heads']) or 'nothing'}"
                for rank, one in enumerate(found)
            ]
            time.sleep(2 * LOOK)  # the others see it as well before this rank's end changes the picture
            raise Hang("\n".join(["all ranks wait for each other:", *lines]))

    def hide(self) -> None:
        if self._is_shown:
            self._is_shown, self._seen = False, None
            self._store.set(f"board/{self._rank}", "null")


class Looking:
    """A host that waits: `look` is called again and again meanwhile."""

    def __init__(self, board: Board, what: str) -> None:
        self._board, self._what = board, what
        self._next = time.monotonic() + PATIENCE

    def look(self) -> None:
        if time.monotonic() > self._next:
            self._next = time.monotonic() + LOOK
            self._board.look(self._what)

    def end(self) -> None:
        self._board.hide()
