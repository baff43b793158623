"""Ranks that an error has taken out of a call of the engine in whose collectives others wait for them.

[Note: who raised alone]
A rank that raises in a forward or a backward says so in the store: how often it has by now, and how many collectives of
each channel it had begun. All ranks of a channel begin the same ones in the same order. So where a rank waits that has
raised less often, and has begun more than the other had, it has come past the place of the error without one: nobody
will come to what it waits for. Where all raise the same error, none of them has come past, and the next step goes on.

A collective that has failed leaves a channel whose ranks are not at the same one. So a rank that gives up says that
too, and whoever waits for it gives up as well.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from .errors import CollectiveError
from .world import World

_POLL_SECONDS = 0.5
_MOST_LETTERS = 300
_GAVE_UP = " gave up: "


@dataclass(eq=False)
class Begun:
    """How many collectives of a channel this rank has begun. number: the channel's, the same on all of its `ranks`."""

    number: int
    ranks: Sequence[int]
    count: int = 0


class Raised:
    """Tells the other ranks of this one's errors, and reads theirs. One of each mesh."""

    def __init__(self, world: World, engine_number: int) -> None:
        self._world = world
        self._prefix = f"lowtide/raised/{engine_number}"
        self._channels: list[Begun] = []
        self._mark: list[int] = []
        self._num_told = 0
        self._waits: tuple[Begun, float, Callable[[], None]] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.found = ""
        """Why a wait was ended: see `watch`."""

    def channel(self, number: int, ranks: Sequence[int]) -> Begun:
        """To be counted from now on."""
        made = Begun(number, ranks)
        self._channels.append(made)
        return made

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a forward, or all that there are in a step: an error that ends it is told."""
        self._mark = [channel.count for channel in self._channels]
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise

    def tell(self, error: BaseException) -> None:
        """`error` ends the call, or a backward of it. One without a collective is not told of: it may be repeated."""
        begun = [channel.count for channel in self._channels]
        if begun == self._mark:
            return
        self._mark = begun
        self._num_told += 1
        text = f"{type(error).__name__}: {error}".split("\n")[0].rpartition(_GAVE_UP)[2][:_MOST_LETTERS]
        by_number = {channel.number: channel.count for channel in self._channels}
        told = json.dumps([self._num_told, by_number, text, isinstance(error, CollectiveError)])
        with suppress(RuntimeError):  # the rank that keeps the store is gone
            self._world.store.set(self._key(self._world.rank), told)

    def alone(self, channel: Begun, ranks: Sequence[int]) -> str:
        """Why this rank waits in vain in a collective of the channel for one of these; "" where that is not known."""
        try:
            for rank in ranks:
                if rank == self._world.rank or not self._world.store.check([self._key(rank)]):
                    continue
                count, begun, text, gave_up = json.loads(self._world.store.get(self._key(rank)))
                if gave_up:
                    return f"rank {rank}{_GAVE_UP}{text}"
                if count > self._num_told and begun.get(str(channel.number), 0) < channel.count:
                    return (
                        f"rank {rank} raised {text}, and goes no further in this call of the engine, whose collectives "
                        "are of all ranks; let the error end the job, or raise it on all of them"
                    )
        except RuntimeError:
            pass  # as above
        return ""

    # -- waits that do not look for themselves --------------------------------------------------------------------

    def watch(self) -> None:
        """From now on a thread looks while this rank waits."""
        if self._thread is None:
            arguments = weakref.ref(self), self._stop
            self._thread = threading.Thread(target=_look, args=arguments, name="lowtide raised", daemon=True)
            self._thread.start()

    def wait(self, channel: Begun, end: Callable[[], None]) -> None:
        """This rank begins to wait, until `go_on`. end: called by the thread, lets the wait raise RuntimeError."""
        self._waits = channel, time.monotonic(), end

    def go_on(self) -> None:
        self._waits = None

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def look(self) -> None:
        """Ends a wait that is in vain."""
        waits = self._waits
        if waits is None or time.monotonic() - waits[1] < _POLL_SECONDS:
            return
        channel, _, end = waits
        found = self.alone(channel, channel.ranks)
        if found and self._waits is waits:
            self.found = found
            end()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def _look(raised: weakref.ref[Raised], stop: threading.Event) -> None:
    """Until it is closed, or gone with an engine that nobody has closed."""
    while not stop.wait(_POLL_SECONDS):
        there = raised()
        if there is None:
            return
        there.look()
        del there
