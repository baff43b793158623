"""The error of a failed collective, and the exchange of errors between ranks.

If an error takes a rank out of a call of the engine, other ranks may wait for it in collectives.

[Note: who raised alone]
A rank that raises in a forward or a backward writes to the store: its number of errors so far, and how many collectives
of each channel it has begun. All ranks of a channel begin the same collectives in the same order. Suppose that rank A
waits, has raised less often than rank B, and has begun more collectives than B had at its error. Then A has passed the
place of the error without raising it, and B will not come to the collective. If all ranks raise an error in a forward,
the next pass ends its collectives; a rank that raises in a backward completes those of the backward. So all ranks are
at the same place, and the next step can run.

A call outside a pass, and a context such as `engine.gathered()`, begin and end together on all ranks. An error in such
a call is announced with the name and number of the call, even if it precedes the call's first collective. A rank inside
of the same call that has begun more collectives waits in vain. An error before the first collective of a call is
withdrawn if the rank makes the call again.

After a failed collective the ranks of a channel are at different collectives. So a rank that gives up announces that
too, and the ranks that wait for it give up as well.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ..watch.watchdog import poll

_ALONE = (
    " The rank waits for parameters: a forward is a call of the engine. To run a forward on a single rank, let all "
    "ranks enter `with engine.gathered():` (zero.GatheredParameters in lowtide.deepspeed) around it."
)
UNEVEN = (
    "All ranks must make the same number of steps. If their data have different lengths, put the loop into "
    "`with engine.join():`, pad with a DistributedSampler, or end all ranks at the smallest number of batches."
)

_COUNT = attrgetter("count")  # of the collectives of a channel
# An error reaches waiting ranks within two seconds: a wait is looked at after 0.5 to 1 s, then every 0.5 s.
_POLL_SECONDS = 0.5
_MAX_CHARACTERS = 300
_GAVE_UP = " gave up: "
_NO_FURTHER = (
    " and left this call of the engine, which needs all ranks. Let the error end the job, or raise it on all ranks."
)
BODY = "the body of "
"""Prefix of a context's name if the error comes from the caller's code in the context."""


class CollectiveError(RuntimeError):
    """A collective could not complete. The text names the waiting rank, the missing ranks and the operation."""


def no_answer(
    rank: int, what: str, peers: Sequence[int], waited_seconds: float, error: RuntimeError, what_to_do: str = UNEVEN
) -> str:
    """Write the error for a backend that does not say if its peers died, left, or are late."""
    named = ", ".join(map(str, peers))
    cause = re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0]).split(". ")[0]  # drops gloo's file name and its jokes
    return (
        f"rank {rank} in {what}: no answer from rank {named} after {waited_seconds:.1f} s ({cause}). "
        "A rank died, has left, or the ranks make different calls of the engine. A slow rank needs a larger "
        f"communication.timeout_seconds. {what_to_do}" + (_ALONE if what.startswith("gather of") else "")
    )


@dataclass(eq=False)
class Begun:
    """Counts the collectives of a channel that this rank has begun. `number` is equal on all `ranks`."""

    number: int
    ranks: Sequence[int]
    count: int = 0


class ErrorBroadcast:
    """Announces this rank's errors to the other ranks and reads theirs. A world has one instance.

    See [Note: who raised alone].
    """

    def __init__(self) -> None:
        self._rank = 0
        self._store: Any = None  # until `start`
        self._prefix = ""
        self._channels: list[Begun] = []
        self._mark: list[int] = []
        self._num_announced = 0
        self._text, self._begun, self._gave_up = "", dict[int, int](), False
        self._entered = Counter[str]()  # how often each call was entered
        self._left = Counter[str]()  # how often each call ended with an error
        self._inside: list[str] = []
        self._num_between = 0
        self._calls: dict[str, tuple[int, int, dict[int, int], str]] = {}  # the last error of each call
        self._may_repeat: set[str] = set()
        self._is_announced = False  # the error of the innermost call is announced
        self._waits: tuple[Begun, float, Callable[[], None]] | None = None
        self._end_polling: Callable[[], None] | None = None
        self.found = ""
        """The reason why the thread ended a wait: see `wait`."""

    def start(self, rank: int, store: Any, engine_number: int) -> None:
        """Announce errors from now on. store: shared by all ranks."""
        self._rank, self._store, self._prefix = rank, store, f"lowtide/raised/{engine_number}"

    def channel(self, number: int, ranks: Sequence[int]) -> Begun:
        """Count the collectives of a channel from now on."""
        made = Begun(number, ranks)
        self._channels.append(made)
        return made

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Wrap a forward, or all passes of a step. An error that leaves the context is announced."""
        self._mark = self._counts()
        try:
            yield
        # An interrupt and sys.exit take the rank out of the pass too.
        except BaseException as error:
            self.broadcast(error)
            raise

    def broadcast(self, error: BaseException, may_repeat: bool = True) -> bool:
        """Announce an error that ends a pass. Returns whether it was announced.

        may_repeat: an error before the first collective is not announced, since the pass may be repeated with another
        batch.
        """
        self._is_announced = True
        begun = self._counts()
        if may_repeat and begun == self._mark and not isinstance(error, CollectiveError):
            return False
        self._mark = begun
        self._num_announced += 1
        self._text, self._begun = _text_of(error), self._by_number()
        self._gave_up = isinstance(error, CollectiveError)
        self._say()
        return True

    @contextmanager
    def call(self, what: str, is_context: bool = False) -> Iterator[None]:
        """Wrap a call that all ranks make, or a context that all ranks enter. what: such as "engine.state_dict()"."""
        before = self.enter(what)
        try:
            yield
        except BaseException as error:
            self.fail(what, error, before, is_context)
            raise
        finally:
            self._inside.pop()

    def enter(self, what: str) -> list[int]:
        """Enter a call, until `leave`. Returns an argument of `fail`. Faster than `call`."""
        if what in self._may_repeat:
            # The call is made again, so the ranks that wait in it do not wait in vain: withdraw its error.
            self._may_repeat.remove(what)
            del self._calls[what]
            self._left[what] -= 1
            self._say()
        self._entered[what] += 1
        self._inside.append(what)
        self._is_announced = False
        return self._counts()

    def leave(self) -> None:
        self._inside.pop()

    def fail(self, what: str, error: BaseException, before: list[int], is_context: bool = False) -> None:
        """Announce an error that ends the call."""
        if isinstance(error, CollectiveError) and not self._gave_up:
            self.broadcast(error)
        if self._is_announced and not is_context:  # a pass in this call has announced it
            return
        self._left[what] += 1
        self._calls[what] = self._entered[what], self._left[what], self._by_number(), _text_of(error)
        if self._counts() == before and not is_context:
            self._may_repeat.add(what)
            self._entered[what] -= 1  # the repeated call has the number that it has on the other ranks
        self._say()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Wrap code that is not part of a step."""
        self._num_between += 1
        try:
            yield
        finally:
            self._num_between -= 1

    @property
    def what_to_do(self) -> str:
        """Advice for the error of a wait in vain: the call that all ranks must make."""
        if not self._num_between or not self._inside:
            return UNEVEN
        return f"All ranks must call {self._inside[-1].removeprefix(BODY)}."

    def _counts(self) -> list[int]:
        return [*map(_COUNT, self._channels)]

    def _by_number(self) -> dict[int, int]:
        return {channel.number: channel.count for channel in self._channels}

    def _say(self) -> None:
        if self._store is not None:
            report = json.dumps([self._num_announced, self._begun, self._text, self._gave_up, self._calls])
            with suppress(RuntimeError):  # the rank that hosts the store is gone
                self._store.set(self._key(self._rank), report)

    @property
    def last(self) -> tuple[int, str]:
        """This rank's number of announced errors of passes, and the last of them."""
        return self._num_announced, self._text

    def check_same(self, reports: Sequence[tuple[int, str]], what: str) -> None:
        """Raise CollectiveError if ranks with different numbers of errors meet at `what`. reports: `last` by rank."""
        rank = max(range(len(reports)), key=lambda rank: reports[rank][0])
        count, text = reports[rank]
        if count == self._num_announced and all(other == count for other, _ in reports):
            return
        others = ", ".join(str(other) for other, (number, _) in enumerate(reports) if number < count)
        if count > self._num_announced:
            found = f"rank {rank} raised {text}"
        else:
            found = f"this rank raised {text}, rank {others} did not"
        raise CollectiveError(f"rank {self._rank} in {what}: {found}{_NO_FURTHER}")

    def alone(self, channel: Begun, ranks: Sequence[int]) -> str:
        """Explain why this rank waits in vain for one of `ranks` in a collective. Returns "" if unknown."""
        if self._store is None:
            return ""
        try:
            for rank in ranks:
                # `get` of a key that no rank has set would block.
                if rank == self._rank or not self._store.check([self._key(rank)]):
                    continue
                count, begun, text, gave_up, calls = json.loads(self._store.get(self._key(rank)))
                if gave_up:
                    return f"rank {rank}{_GAVE_UP}{text}"
                # JSON has made strings of the channel numbers.
                if count > self._num_announced and begun.get(str(channel.number), 0) < channel.count:
                    return f"rank {rank} raised {text}{_NO_FURTHER}"
                for what in self._inside:
                    number, times, begun, text = calls.get(what, (0, 0, {}, ""))
                    is_past = begun.get(str(channel.number), 0) < channel.count
                    if is_past and number >= self._entered[what] and times > self._left[what]:
                        return (
                            f"rank {rank} raised {text}, in {what}, which all ranks must complete together. Let the "
                            "error end the job, or raise it on all ranks."
                        )
        except RuntimeError:
            pass  # the rank that hosts the store is gone
        return ""

    # -- blocking waits, observed by a thread ---------------------------------------------------------------------

    def wait(self, channel: Begun, end: Callable[[], None]) -> None:
        """Record that this rank waits, until `end_wait`. end: called by the thread, lets the wait raise
        RuntimeError."""
        self._waits = channel, time.monotonic(), end
        # The thread starts with the first wait inside torch. Waits on shared memory ask by themselves.
        if self._end_polling is None and self._store is not None:
            self._end_polling = poll(self._look, _POLL_SECONDS, "lowtide raised")

    def end_wait(self) -> None:
        self._waits = None

    def close(self) -> None:
        """End the thread."""
        if self._end_polling is not None:
            self._end_polling()
            self._end_polling = None
        self._store = None  # last: the thread may just ask it

    def _look(self) -> None:
        """End the wait if it is in vain."""
        waits = self._waits
        if waits is None or time.monotonic() - waits[1] < _POLL_SECONDS:
            return
        channel, _, end = waits
        found = self.alone(channel, channel.ranks)
        # The host may have begun a new wait while this thread asked the store.
        if found and self._waits is waits:
            self.found = found
            end()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def _text_of(error: BaseException) -> str:
    # If rank 2 gives up because rank 1 gave up, its text keeps the root cause alone.
    return f"{type(error).__name__}: {error}".split("\n")[0].rpartition(_GAVE_UP)[2][:_MAX_CHARACTERS]
