"""What the ranks of several islands decide together: all of them the same, and nobody waits for the dead.

[Note: one verdict]
A rank that dies in the middle of an exchange may have sent its part to some and not to others. So nobody uses what it
has received before there is a verdict, and a verdict is a key of the job's store that is set once, by whoever is first:

    "done"      set by the last of all ranks of all members that has everything
    "again"     set by any rank whose exchange has failed, that sees a member gone, or that has waited too long

Whoever comes later reads it. After "again" there is a roll call: each rank says that it is there, and whoever first
sees that all members are there or gone (or has waited too long) sets who the members are from now on. They repeat the
exchange, with the values that they had.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TypeVar

from .errors import CollectiveError
from .islands import Islands

DONE, AGAIN = b"done", b"again"
T = TypeVar("T")
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


class Votes:
    """Verdicts and roll calls of one attempt to exchange something, by its name.

    Raises CollectiveError where the store is gone.
    """

    def __init__(self, islands: Islands, name: str, members: tuple[int, ...], timeout_seconds: float) -> None:
        self._islands = islands
        self._store = islands.store
        self._verdict = f"{name}/verdict"
        self._members_key = f"{name}/members"
        self._moves = f"{name}/moves"
        self._name = name
        self._members = members
        self._timeout_seconds = timeout_seconds

    def tell_moved(self) -> None:
        """This rank still sends or receives: who waits for its vote goes on waiting."""
        self._asked(lambda: self._store.add(self._moves, 1))

    def is_over(self) -> bool:
        """Whether there is a verdict already, or a member is known to be gone."""
        return self._asked(lambda: self._store.check([self._verdict]) or bool(self._islands.gone(self._members)))

    def cast(self, has_all: bool) -> bool:
        """This rank has everything, or not: says whether all ranks have. Waits for the verdict."""
        return self._asked(lambda: self._cast(has_all))

    def call_roll(self) -> tuple[int, ...]:
        """Who of the members is there, the same on all that ask."""
        return self._asked(self._call_roll)

    def _cast(self, has_all: bool) -> bool:
        everyone = len(self._members) * self._islands.num_ranks
        if not has_all:
            self._store.compare_set(self._verdict, "", AGAIN.decode())
        elif self._store.add(f"{self._name}/done", 1) == everyone:
            self._store.compare_set(self._verdict, "", DONE.decode())

        moves = [0]

        def has_moved() -> bool:
            if self._islands.gone(self._members):
                self._store.compare_set(self._verdict, "", AGAIN.decode())
            before, moves[0] = moves[0], self._store.add(self._moves, 0)
            return moves[0] != before

        if not self._wait_for(self._verdict, has_moved):
            self._store.compare_set(self._verdict, "", AGAIN.decode())
        return bool(self._store.get(self._verdict) == DONE)

    def _call_roll(self) -> tuple[int, ...]:
        self._store.add(self._there(self._islands.island), 1)

        def settle(is_late: bool = False) -> bool:
            num_ranks = self._islands.num_ranks
            there = [one for one in self._members if self._store.add(self._there(one), 0) == num_ranks]
            gone = self._islands.gone(self._members)
            if is_late or all(one in there or one in gone for one in self._members):
                left = json.dumps([one for one in there if one not in gone])
                self._store.compare_set(self._members_key, "", left)
            return False

        if not self._wait_for(self._members_key, settle):
            settle(is_late=True)
        return tuple(json.loads(self._store.get(self._members_key)))

    def _there(self, island: int) -> str:
        return f"{self._name}/there/{island}"

    def _wait_for(self, key: str, look: Callable[[], bool]) -> bool:
        """Until the key is there; False when that takes too long. look: whether the time counts anew."""
        deadline, pause = time.monotonic() + self._timeout_seconds, _SHORTEST_PAUSE
        while not self._store.check([key]):
            if look():
                deadline = time.monotonic() + self._timeout_seconds
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _asked(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as error:
            raise CollectiveError(
                f"outer exchange {self._name}: expected the store of the job, found it gone "
                f"({str(error).splitlines()[0]}). Rank 0's process has it, unless the job was started by `lowtide "
                "launch --islands`, which keeps it while any island is left; go on from a checkpoint"
            ) from error
