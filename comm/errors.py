"""What a collective raises when a peer is gone, late, or somewhere else; and how ranks tell each other of errors.

Others may wait in collectives for a rank that an error has taken out of a call of the engine.

[Note: who raised alone]
A rank that raises in a forward or a backward says so in the store: how often it has by now, and how many collectives of
each channel it had begun. All ranks of a channel begin the same ones in the same order. So where a rank waits that has
raised less often, and has begun more than the other had, it has come past the place of the error without one: nobody
will come to what it waits for. Where all raise the same error, none of them has come past, and the next step goes on.

A call that is not a pass, and a context such as `engine.gathered()`, begin and end together on all ranks. An error in
one is told with its name and number, even before a collective: a rank that waits inside of the same call, past the
collectives that the other had begun, waits in vain. An error before the first collective of a call is withdrawn when
the rank makes the call again.

A collective that has failed leaves a channel whose ranks are not at the same one. So a rank that gives up says that
too, and whoever waits for it gives up as well.
"""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

_ALONE = (
    " It waits for parameters: a forward counts as a call of the engine. One rank alone may run it inside of "
    "`with engine.gathered():` (zero.GatheredParameters in lowtide.deepspeed), which all ranks enter."
)
UNEVEN = (
    "All ranks must make the same number of steps: where their data do not end together, put the loop into "
    "`with engine.join():`, let a DistributedSampler pad them, or end all ranks at the smallest number of batches."
)

_POLL_SECONDS = 0.5
_MOST_LETTERS = 300
_GAVE_UP = " gave up: "
_NO_FURTHER = (
    ", and goes no further in this call of the engine, whose collectives are of all ranks; let the error end the job, "
    "or raise it on all of them"
)
BODY = "the body of "
"""Before the name of a context, where the error is of what the caller does in it."""


class CollectiveError(RuntimeError):
    """A collective could not complete. Says which rank waited for which rank, in what, and for how long."""


def no_answer(
    rank: int, what: str, peers: Sequence[int], waited_seconds: float, error: RuntimeError, what_to_do: str = UNEVEN
) -> str:
    """For a backend that does not say whether the others died, left, or are late."""
    named = ", ".join(map(str, peers))
    cause = re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0]).split(". ")[0]  # without gloo's file and jokes
    return (
        f"rank {rank} in {what}: no answer from rank {named} after {waited_seconds:.1f} s ({cause}). "
        "A rank died, has left, or the ranks make different calls of the engine; a slow rank needs a larger "
        f"communication.timeout_seconds. {what_to_do}" + (_ALONE if what.startswith("gather of") else "")
    )


@dataclass(eq=False)
class Begun:
    """How many collectives of a channel this rank has begun. number: the channel's, the same on all of its `ranks`."""

    number: int
    ranks: Sequence[int]
    count: int = 0


class ErrorBroadcast:
    """Tells the other ranks of this one's errors, and reads theirs. One of each world."""

    def __init__(self) -> None:
        self._rank = 0
        self._store: Any = None  # until `start`
        self._prefix = ""
        self._channels: list[Begun] = []
        self._mark: list[int] = []
        self._num_told = 0
        self._text, self._begun, self._gave_up = "", dict[int, int](), False
        self._entered = Counter[str]()  # how often each call was entered, ...
        self._left = Counter[str]()  # ... and left with an error
        self._inside: list[str] = []
        self._num_between = 0
        self._calls: dict[str, tuple[int, int, dict[int, int], str]] = {}  # the last error of each
        self._may_repeat: set[str] = set()
        self._is_told = False  # the error that ends the innermost call
        self._waits: tuple[Begun, float, Callable[[], None]] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.found = ""
        """Why a wait was ended: see `wait`."""

    def start(self, rank: int, store: Any, engine_number: int) -> None:
        """From now on errors are told. store: that all ranks share."""
        self._rank, self._store, self._prefix = rank, store, f"lowtide/raised/{engine_number}"

    def channel(self, number: int, ranks: Sequence[int]) -> Begun:
        """To be counted from now on."""
        made = Begun(number, ranks)
        self._channels.append(made)
        return made

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Around a forward, or all that there are in a step: an error that ends it is told."""
        self._mark = self._counts()
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise

    def tell(self, error: BaseException) -> None:
        """`error` ends a pass. One without a collective is not told of: it may be repeated with another batch."""
        self._is_told = True
        begun = self._counts()
        if begun == self._mark and not isinstance(error, CollectiveError):
            return
        self._mark = begun
        self._num_told += 1
        self._text, self._begun = _text_of(error), self._by_number()
        self._gave_up = isinstance(error, CollectiveError)
        self._say()

    @contextmanager
    def call(self, what: str, is_context: bool = False) -> Iterator[None]:
        """Around a call that all ranks make, or a context that all of them enter. what: "engine.state_dict()"."""
        before = self.enter(what)
        try:
            yield
        except BaseException as error:
            self.fail(what, error, before, is_context)
            raise
        finally:
            self._inside.pop()

    def enter(self, what: str) -> list[int]:
        """As `call`, until `leave`; gives what `fail` asks for."""
        if what in self._may_repeat:
            self._may_repeat.remove(what)
            del self._calls[what]
            self._left[what] -= 1
            self._say()
        self._entered[what] += 1
        self._inside.append(what)
        self._is_told = False
        return self._counts()

    def leave(self) -> None:
        self._inside.pop()

    def fail(self, what: str, error: BaseException, before: list[int], is_context: bool = False) -> None:
        """`error` ends the call."""
        if isinstance(error, CollectiveError) and not self._gave_up:
            self.tell(error)
        if self._is_told and not is_context:  # as one of a pass
            return
        self._left[what] += 1
        self._calls[what] = self._entered[what], self._left[what], self._by_number(), _text_of(error)
        if self._counts() == before and not is_context:
            self._may_repeat.add(what)
            self._entered[what] -= 1
        self._say()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Around what is no part of a step."""
        self._num_between += 1
        try:
            yield
        finally:
            self._num_between -= 1

    @property
    def what_to_do(self) -> str:
        """For the error of a wait in vain: which call all ranks must make."""
        if not self._num_between or not self._inside:
            return UNEVEN
        return f"Every rank must call {self._inside[-1].removeprefix(BODY)}, not one alone."

    def _counts(self) -> list[int]:
        return [channel.count for channel in self._channels]

    def _by_number(self) -> dict[int, int]:
        return {channel.number: channel.count for channel in self._channels}

    def _say(self) -> None:
        if self._store is not None:
            told = json.dumps([self._num_told, self._begun, self._text, self._gave_up, self._calls])
            with suppress(RuntimeError):  # the rank that keeps the store is gone
                self._store.set(self._key(self._rank), told)

    @property
    def last(self) -> tuple[int, str]:
        """How many errors of passes this rank has told of, and the last one."""
        return self._num_told, self._text

    def check_same(self, told: Sequence[tuple[int, str]], what: str) -> None:
        """Raises CollectiveError where ranks come to `what` of which some have had an error. told: `last` by rank."""
        rank = max(range(len(told)), key=lambda rank: told[rank][0])
        count, text = told[rank]
        if count == self._num_told and all(other == count for other, _ in told):
            return
        others = ", ".join(str(other) for other, (number, _) in enumerate(told) if number < count)
        raised = (
            f"rank {rank} raised {text}"
            if count > self._num_told
            else f"this rank raised {text}, rank {others} did not"
        )
        raise CollectiveError(f"rank {self._rank} in {what}: {raised}{_NO_FURTHER}")

    def alone(self, channel: Begun, ranks: Sequence[int]) -> str:
        """Why this rank waits in vain in a collective of the channel for one of these; "" where that is not known."""
        if self._store is None:
            return ""
        try:
            for rank in ranks:
                if rank == self._rank or not self._store.check([self._key(rank)]):
                    continue
                count, begun, text, gave_up, calls = json.loads(self._store.get(self._key(rank)))
                if gave_up:
                    return f"rank {rank}{_GAVE_UP}{text}"
                if count > self._num_told and begun.get(str(channel.number), 0) < channel.count:
                    return f"rank {rank} raised {text}{_NO_FURTHER}"
                for what in self._inside:
                    number, times, begun, text = calls.get(what, (0, 0, {}, ""))
                    is_past = begun.get(str(channel.number), 0) < channel.count
                    if is_past and number >= self._entered[what] and times > self._left[what]:
                        return (
                            f"rank {rank} raised {text}, in {what}, which all ranks must go through together; let the "
                            "error end the job, or raise it on all of them"
                        )
        except RuntimeError:
            pass  # as above
        return ""

    # -- waits that do not look for themselves --------------------------------------------------------------------

    def wait(self, channel: Begun, end: Callable[[], None]) -> None:
        """This rank begins to wait, until `go_on`. end: called by a thread, lets the wait raise RuntimeError."""
        self._waits = channel, time.monotonic(), end
        if self._thread is None and self._store is not None:
            arguments = weakref.ref(self), self._stop
            self._thread = threading.Thread(target=_look, args=arguments, name="lowtide raised", daemon=True)
            self._thread.start()

    def go_on(self) -> None:
        self._waits = None

    def close(self) -> None:
        """Ends the thread."""
        self._store = None
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


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0].rpartition(_GAVE_UP)[2][:_MOST_LETTERS]


def _look(raised: weakref.ref[ErrorBroadcast], stop: threading.Event) -> None:
    """Until it is closed, or gone with an engine that nobody has closed."""
    while not stop.wait(_POLL_SECONDS):
        there = raised()
        if there is None:
            return
        there.look()
        del there
