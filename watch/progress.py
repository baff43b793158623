"""The activity of a rank, in a small file that the rank maps and the agent of its host reads.

[Note: the step clock]
The clock measures the current step from the end of the step before, so it includes data loading. Before the first step
it starts with the call of `train_step`. An evaluation, a checkpoint and an export are not part of a step: each restarts
the clock when it begins and when it ends. `engine.close()` stops the clock.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from . import stacks
from .record import (
    CLOCK,
    FIRST_CHANNEL,
    LIMIT_MS,
    MAGIC,
    NBYTES,
    NUM_CHANNELS,
    PID,
    RANK,
    STEP,
    WAITING,
    WORLD_SIZE,
    mapped,
    pairs,
)


class Activity(Enum):
    """The activity of a rank. The value is the text for users."""

    STARTING = "starting"  # `lowtide` is imported
    INITIALIZING = "in lowtide.initialize"
    BEFORE_FIRST_STEP = "before the first step"
    BETWEEN_STEPS = "between steps (data loading or the script's own code)"
    DATA_LOADING = "data loading"  # the iterator given to train_step
    FORWARD = "forward"
    BACKWARD = "backward"
    PIPELINE = "pipeline action"
    UPDATE = "update"
    EVALUATION = "evaluation"
    SAVING = "saving a checkpoint"
    LOADING = "loading a checkpoint"
    WEIGHTS = "reading or writing full weights"
    CLOSED = "after engine.close()"


# A record holds the position in this tuple, so rank and agent must be of the same version.
_ACTIVITIES = tuple(Activity)
_CODES = {activity: code for code, activity in enumerate(_ACTIVITIES)}
# The activities between these two run the step clock: the order in `Activity` matters.
_FIRST_OF_STEP, _LAST_OF_STEP = _CODES[Activity.DATA_LOADING], _CODES[Activity.UPDATE]
_OBSERVED = ("enter", "begin", "wait", "end_wait")
T = TypeVar("T")


@dataclass(frozen=True)
class Wait:
    """A collective or a message that a rank waits for.

    channel: identifies the ranks that number their collectives together, such as a shard axis of an engine. sequence:
    the number of the collective, from 1; 0 if it has none. first, distance, count: the ranks that take part (for a
    message, the peer).
    """

    what: str
    channel: int
    sequence: int
    first: int
    distance: int
    count: int
    seconds: float

    @property
    def ranks(self) -> range:
        """The ranks that take part."""
        return range(self.first, self.first + self.distance * self.count, self.distance)

    def __str__(self) -> str:
        return f"{self.what} (seq {self.sequence})" if self.sequence else self.what


@dataclass(frozen=True)
class RankProgress:
    """The activity of a rank when its record was read. Durations are in seconds until then.

    step: optimizer steps done. activity: text of `Activity`, since `activity_seconds`. unit: such as "layers.7", or a
    pipeline action such as "2F0". step_seconds: of the step clock, None while it stands; see [Note: the step clock].
    step_limit_seconds: `communication.step_timeout_seconds` of the rank's config. begun: (channel, number of begun
    collectives).
    """

    rank: int
    world_size: int
    pid: int
    step: int
    activity: str
    activity_seconds: float
    unit: str = ""
    microbatch: int | None = None
    step_seconds: float | None = None
    step_limit_seconds: float | None = None
    wait: Wait | None = None
    begun: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        """`after step 12, forward of layers.7, microbatch 1: waiting in gather of layers.7 (seq 120) for 31 s`."""
        doing = f"after step {self.step}, {self.activity}" if self.has_joined else self.activity
        if self.unit:
            doing += f" {self.unit}" if self.activity == Activity.PIPELINE.value else f" of {self.unit}"
        if self.microbatch is not None:
            doing += f", microbatch {self.microbatch}"
        if self.wait is None:
            return f"{doing} for {self.activity_seconds:.0f} s"
        return f"{doing}: waiting in {self.wait} for {self.wait.seconds:.0f} s"

    @property
    def has_joined(self) -> bool:
        """True if the rank has called `lowtide.initialize`, so it has a record."""
        return self.activity != Activity.STARTING.value


def read_progress(path: str, rank: int) -> RankProgress | None:
    """Read the record of `rank`, for the agent. None if the rank has not imported lowtide yet.

    path: LOWTIDE_PROGRESS_FILE of the rank; `stacks` makes the file. Put it into memory, such as /dev/shm: on a disk
    the kernel would write it back every few seconds.
    """
    found = None
    with suppress(FileNotFoundError), open(path, "rb") as file:
        found = _decoded(file.read(NBYTES))
    pid = stacks.owner(path) if found is None else None
    if pid is None:
        return found
    return RankProgress(rank, 0, pid, 0, Activity.STARTING.value, stacks.age_seconds(pid))


def _decoded(data: bytes) -> RankProgress | None:
    """Decode a record, (NBYTES,). None if the rank has not filled it yet."""
    if len(data) != NBYTES:
        return None
    words = memoryview(data).cast("q")
    activities, waits = pairs(data)
    doing, waiting = activities.read(), waits.read()
    # A file of zeros, or of another version of the layout.
    if words[0] != MAGIC or doing is None:
        return None
    now = time.monotonic_ns()
    wait = None
    # `end_wait` clears the word alone, so the slots may describe a wait that is over.
    if waiting is not None and waiting[0] == words[WAITING]:
        since, channel, sequence, first, distance, count, what = waiting
        wait = Wait(_text(what), channel, sequence, first, distance, count, (now - since) / 1e9)
    since, code, microbatch, unit = doing
    return RankProgress(
        rank=words[RANK],
        world_size=words[WORLD_SIZE],
        pid=words[PID],
        step=words[STEP],
        activity=_ACTIVITIES[code].value,
        activity_seconds=(now - since) / 1e9,
        unit=_text(unit),
        microbatch=microbatch if microbatch >= 0 else None,
        step_seconds=(now - words[CLOCK]) / 1e9 if words[CLOCK] else None,
        step_limit_seconds=words[LIMIT_MS] / 1000 if words[LIMIT_MS] else None,
        wait=wait,
        begun=tuple(
            (channel, words[FIRST_CHANNEL + channel])
            for channel in range(NUM_CHANNELS)
            if words[FIRST_CHANNEL + channel]
        ),
    )


def _text(field: bytes) -> str:
    # A slot keeps the first bytes of a long name, and may cut it inside of a character.
    return field.rstrip(b"\0").decode(errors="ignore")


class Progress:
    """Writes the record of this rank. Off by default: then it has no memory, and every call returns at once.

    Thread-safe: concurrent calls do not mix their values.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._memory: mmap.mmap | None = None
        self._doing: tuple[Activity, int, str] = (Activity.INITIALIZING, -1, "")

    @classmethod
    def of_this_process(cls) -> Progress:
        """Make a record that is on if the environment names a file that no other process has claimed."""
        progress = cls()
        path = os.environ.get(stacks.VARIABLE)
        try:
            if path and stacks.claim(path):
                progress._store_in(mapped(path))
        # A record helps to look at a training: its lack must not end the training.
        except OSError as error:
            warnings.warn(f"{stacks.VARIABLE}={path}: no record of this rank's progress ({error})", stacklevel=2)
        return progress

    def turn_on(self) -> None:
        """Start the record. Without a file in the environment, it is private to this process."""
        if not self.is_on:
            self._store_in(mmap.mmap(-1, NBYTES))

    def snapshot(self) -> RankProgress:
        """Return the same as `read_progress`. Only if this is on."""
        assert self._memory is not None
        found = _decoded(self._memory[:])
        assert found is not None
        return found

    @property
    def doing(self) -> tuple[Activity, int, str]:
        """(activity, microbatch or -1, unit or ""). Only if this is on."""
        return self._doing

    def identify(self, rank: int, world_size: int) -> None:
        """Store rank and world size."""
        if self.is_on:
            self._words[RANK], self._words[WORLD_SIZE] = rank, world_size

    def set_limit(self, seconds: float | None) -> None:
        """Store the limit of a step. None: no limit."""
        if self.is_on:
            # 0 means no limit, so a limit below a millisecond becomes 1.
            self._words[LIMIT_MS] = 0 if seconds is None else max(1, round(1000 * seconds))

    def listen(
        self,
        on_enter: Callable[[Activity, str], None],
        on_begin: Callable[[str], None],
        on_wait: Callable[[str], None],
        on_end_wait: Callable[[], None],
    ) -> Callable[[], None]:
        """Call back on each activity with its unit, each collective, each wait and its end, until the result is called.

        Call the results in reverse order.
        """
        # The methods are replaced, so that the path without listeners has no check.
        enter, begin, wait, end_wait = self.enter, self.begin, self.wait, self.end_wait
        before = {name: vars(self)[name] for name in _OBSERVED if name in vars(self)}

        def seen_enter(activity: Activity, microbatch: int = -1, unit: str = "") -> None:
            enter(activity, microbatch, unit)
            on_enter(activity, unit)

        def seen_begin(channel: int, what: str = "") -> int:
            on_begin(what)
            return begin(channel, what)

        def seen_wait(what: str, channel: int, sequence: int, first: int, distance: int, count: int) -> None:
            on_wait(what)
            wait(what, channel, sequence, first, distance, count)

        def seen_end_wait() -> None:
            end_wait()
            on_end_wait()

        def stop() -> None:
            for name in _OBSERVED:
                vars(self).pop(name, None)
            # Not a deletion alone: an earlier listener may have replaced the methods. Hence the reverse order.
            vars(self).update(before)

        vars(self).update(zip(_OBSERVED, (seen_enter, seen_begin, seen_wait, seen_end_wait), strict=True))
        return stop

    # -- activity -------------------------------------------------------------------------------------------------

    def enter(self, activity: Activity, microbatch: int = -1, unit: str = "") -> None:
        """Begin another activity. An activity of a step starts the step clock."""
        if self.is_on:
            self._doing = (activity, microbatch, unit)
            now, code = time.monotonic_ns(), _CODES[activity]
            self._words[WAITING] = 0
            self._activities.write(now, code, microbatch, unit.encode())
            # After the first step `end_step` has started the clock, so that it includes data loading.
            if _FIRST_OF_STEP <= code <= _LAST_OF_STEP and not self._words[CLOCK]:
                self._words[CLOCK] = now

    def at_unit(self, unit: str) -> None:
        """Continue the activity in another unit."""
        if self.is_on:
            self.enter(self._doing[0], self._doing[1], unit)

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Wrap an activity outside a step, with a restarted step clock."""
        if not self.is_on:
            yield
            return
        before, clock = self._doing, self._words[CLOCK]
        self.enter(activity)
        self._words[CLOCK] = time.monotonic_ns()
        try:
            yield
        finally:
            # `engine.close()` inside of the block has stopped the clock for good.
            if self._doing[0] is not Activity.CLOSED:
                self.enter(*before)
                self._words[CLOCK] = time.monotonic_ns() if clock else 0

    def forward(self, microbatch: int, is_training: bool) -> AbstractContextManager[None]:
        """Begin a forward that the script calls. Without a backward, it is an evaluation outside a step."""
        if not is_training:
            return self.during(Activity.EVALUATION)
        self.enter(Activity.FORWARD, microbatch)
        return nullcontext()

    def drawn(self, microbatches: Iterator[T]) -> Iterator[T]:
        """Yield the microbatches. Waiting for a microbatch counts as data loading, the caller's work as forward."""
        for index in itertools.count():
            self.enter(Activity.DATA_LOADING, index)
            try:
                microbatch = next(microbatches)
            except StopIteration:
                return
            self.enter(Activity.FORWARD, index)
            yield microbatch

    def end_step(self, step: int) -> None:
        """End an optimizer step. step: number of steps done."""
        if self.is_on:
            self._words[STEP] = step
            self._words[CLOCK] = time.monotonic_ns()
            self.enter(Activity.BETWEEN_STEPS)

    def stop_clock(self, activity: Activity) -> None:
        """Stop the step clock until a step begins."""
        if self.is_on:
            self._words[CLOCK] = 0
            self.enter(activity)

    # -- collectives ----------------------------------------------------------------------------------------------

    def begin(self, channel: int, what: str = "") -> int:
        """Begin a collective. Returns its number in the channel, from 1; 0 if this is off."""
        if not self.is_on:
            return 0
        number: int = self._words[FIRST_CHANNEL + channel] + 1
        self._words[FIRST_CHANNEL + channel] = number
        return number

    def wait(self, what: str, channel: int, sequence: int, first: int, distance: int, count: int) -> None:
        """Begin to wait for `count` ranks: `first`, `first + distance`, and so on."""
        if self.is_on:
            now = time.monotonic_ns()
            self._waits.write(now, channel, sequence, first, distance, count, what.encode())
            # After the slot: a reader in between sees the old word, which does not match the new slot.
            self._words[WAITING] = now

    def end_wait(self) -> None:
        """End the wait."""
        if self.is_on:
            self._words[WAITING] = 0

    @contextmanager
    def waiting(self, what: str, channel: int, world_size: int) -> Iterator[None]:
        """Wrap a collective of all ranks."""
        if self.is_on:
            self.wait(what, channel, self.begin(channel, what), 0, 1, world_size)
        try:
            yield
        finally:
            self.end_wait()

    def _store_in(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self._activities, self._waits = pairs(memory)
        self._words[PID] = os.getpid()
        # Last of the words: from here on a reader takes the record as valid.
        self._words[0] = MAGIC
        self.is_on = True
        self.enter(Activity.INITIALIZING)
