"""What one rank is doing now, in a small file that it maps into its memory: shared by the rank and its agent.

[Note: the step clock]
It says for how long the step has been going: from the end of the step before, so that data loading counts. Before the
first step it starts with the call of `train_step`. An evaluation, a checkpoint and an export are not part of a step:
each starts the clock anew when it begins and when it ends. `engine.close()` stops it.
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
    """What a rank does; the value is how users read it."""

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


_ACTIVITIES = tuple(Activity)
_CODES = {activity: code for code, activity in enumerate(_ACTIVITIES)}
_FIRST_OF_STEP, _LAST_OF_STEP = _CODES[Activity.DATA_LOADING], _CODES[Activity.UPDATE]
_TOLD = ("enter", "begin", "wait", "end_wait")
T = TypeVar("T")


@dataclass(frozen=True)
class Wait:
    """A collective, or a message, that a rank waits for.

    channel: the ranks that number their collectives together, such as the shard axis of an engine. sequence: the number
    of this one, from 1; 0 where it has none. first, distance, count: of the ranks that take part (for a message, the
    other end).
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
    """What a rank was doing when its record was read; durations in seconds until then.

    step: optimizer steps done. activity: as `Activity` has it, of `unit` ("layers.7", or a pipeline's action "2F0")
    where one is known, for `activity_seconds`. microbatch: None where there is none. step_seconds: of the step clock,
    None while it stands; see [Note: the step clock]. step_limit_seconds: `communication.step_timeout_seconds` of the
    rank's config. begun: how many collectives it has begun, by channel.
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
        """`step 12, forward of layers.7, microbatch 1: waiting in gather of layers.7 (seq 120) for 31 s`."""
        doing = f"step {self.step}, {self.activity}" if self.has_joined else self.activity
        if self.unit:
            doing += f" {self.unit}" if self.activity == Activity.PIPELINE.value else f" of {self.unit}"
        if self.microbatch is not None:
            doing += f", microbatch {self.microbatch}"
        if self.wait is None:
            return f"{doing} for {self.activity_seconds:.0f} s"
        return f"{doing}: waiting in {self.wait} for {self.wait.seconds:.0f} s"

    @property
    def has_joined(self) -> bool:
        """Whether it has come to `lowtide.initialize`, so that there is a record of it."""
        return self.activity != Activity.STARTING.value


def read_progress(path: str, rank: int) -> RankProgress | None:
    """The agent's side: what `rank` does now, whenever it wants; None where it has not imported lowtide yet.

    path: the value of LOWTIDE_PROGRESS_FILE that the rank was started with. See `stacks` for who makes the file. Put it
    where files are in memory, such as /dev/shm: on a disk the kernel would write it back every few seconds.
    """
    found = None
    with suppress(FileNotFoundError), open(path, "rb") as file:
        found = _decoded(file.read(NBYTES))
    pid = stacks.owner(path) if found is None else None
    if pid is None:
        return found
    seconds = time.time() - os.stat(path + stacks.SUFFIX).st_ctime
    return RankProgress(rank, 0, pid, 0, Activity.STARTING.value, max(0.0, seconds))


def _decoded(data: bytes) -> RankProgress | None:
    """The record in `data`, (NBYTES,); None where the rank has not filled it yet."""
    if len(data) != NBYTES:
        return None
    words = memoryview(data).cast("q")
    activities, waits = pairs(data)
    doing, waiting = activities.read(), waits.read()
    if words[0] != MAGIC or doing is None:
        return None
    now = time.monotonic_ns()
    wait = None
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
    return field.rstrip(b"\0").decode(errors="ignore")


class Progress:
    """The rank's side. Off, without memory, where nobody has asked for a record: then every call returns at once.

    Any thread may call any method: what two of them store at the same time is not mixed up.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._memory: mmap.mmap | None = None
        self._doing: tuple[Activity, int, str] = (Activity.INITIALIZING, -1, "")

    @classmethod
    def of_this_process(cls) -> Progress:
        """One that is on where the environment names a file, and no other process has claimed it."""
        progress = cls()
        path = os.environ.get(stacks.VARIABLE)
        try:
            if path and stacks.claim(path):
                progress._store_in(mapped(path))
        except OSError as error:
            warnings.warn(f"{stacks.VARIABLE}={path}: no record of this rank's progress ({error})", stacklevel=2)
        return progress

    def turn_on(self) -> None:
        """From now on there is a record, for this process alone where no file was asked for."""
        if not self.is_on:
            self._store_in(mmap.mmap(-1, NBYTES))

    def snapshot(self) -> RankProgress:
        """What `read_progress` would give now; only where this is on."""
        assert self._memory is not None
        found = _decoded(self._memory[:])
        assert found is not None
        return found

    @property
    def doing(self) -> tuple[Activity, int, str]:
        """(activity, microbatch or -1, unit or ""), where this is on."""
        return self._doing

    def identify(self, rank: int, world_size: int) -> None:
        """Who this is."""
        if self.is_on:
            self._words[RANK], self._words[WORLD_SIZE] = rank, world_size

    def set_limit(self, seconds: float | None) -> None:
        """How long a step may take, as the config says; None: no limit."""
        if self.is_on:
            self._words[LIMIT_MS] = 0 if seconds is None else max(1, round(1000 * seconds))

    def listen(
        self,
        on_enter: Callable[[Activity, str], None],
        on_begin: Callable[[str], None],
        on_wait: Callable[[str], None],
        on_end_wait: Callable[[], None],
    ) -> Callable[[], None]:
        """Tells of each activity with its unit, each collective, each wait and its end, until the result is called.

        The methods themselves are exchanged, so that nothing is asked for where nobody listens. The last one first.
        """
        enter, begin, wait, end_wait = self.enter, self.begin, self.wait, self.end_wait
        before = {name: vars(self)[name] for name in _TOLD if name in vars(self)}

        def told_enter(activity: Activity, microbatch: int = -1, unit: str = "") -> None:
            enter(activity, microbatch, unit)
            on_enter(activity, unit)

        def told_begin(channel: int, what: str = "") -> int:
            on_begin(what)
            return begin(channel, what)

        def told_wait(what: str, channel: int, sequence: int, first: int, distance: int, count: int) -> None:
            on_wait(what)
            wait(what, channel, sequence, first, distance, count)

        def told_end_wait() -> None:
            end_wait()
            on_end_wait()

        def stop() -> None:
            for name in _TOLD:
                vars(self).pop(name, None)
            vars(self).update(before)

        vars(self).update(zip(_TOLD, (told_enter, told_begin, told_wait, told_end_wait), strict=True))
        return stop

    # -- activity -------------------------------------------------------------------------------------------------

    def enter(self, activity: Activity, microbatch: int = -1, unit: str = "") -> None:
        """Another activity begins; one of a step starts the step clock."""
        if self.is_on:
            self._doing = (activity, microbatch, unit)
            now, code = time.monotonic_ns(), _CODES[activity]
            self._words[WAITING] = 0
            self._activities.write(now, code, microbatch, unit.encode())
            if _FIRST_OF_STEP <= code <= _LAST_OF_STEP and not self._words[CLOCK]:
                self._words[CLOCK] = now

    def at_unit(self, unit: str) -> None:
        """The activity has come to another unit."""
        if self.is_on:
            self.enter(self._doing[0], self._doing[1], unit)

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """For what is not part of a step: another activity until the context ends, and a step clock of its own."""
        if not self.is_on:
            yield
            return
        before, clock = self._doing, self._words[CLOCK]
        self.enter(activity)
        self._words[CLOCK] = time.monotonic_ns()
        try:
            yield
        finally:
            if self._doing[0] is not Activity.CLOSED:
                self.enter(*before)
                self._words[CLOCK] = time.monotonic_ns() if clock else 0

    def forward(self, microbatch: int, is_training: bool) -> AbstractContextManager[None]:
        """A forward that the script calls; without a backward it is an evaluation, and not part of a step."""
        if not is_training:
            return self.during(Activity.EVALUATION)
        self.enter(Activity.FORWARD, microbatch)
        return nullcontext()

    def drawn(self, microbatches: Iterator[T]) -> Iterator[T]:
        """The same microbatches: waiting for one is data loading, and what the caller does with it the forward."""
        for index in itertools.count():
            self.enter(Activity.DATA_LOADING, index)
            try:
                microbatch = next(microbatches)
            except StopIteration:
                return
            self.enter(Activity.FORWARD, index)
            yield microbatch

    def end_step(self, step: int) -> None:
        """`step` optimizer steps are done, and the next one begins."""
        if self.is_on:
            self._words[STEP] = step
            self._words[CLOCK] = time.monotonic_ns()
            self.enter(Activity.BETWEEN_STEPS)

    def stop_clock(self, activity: Activity) -> None:
        """No step is expected until one begins."""
        if self.is_on:
            self._words[CLOCK] = 0
            self.enter(activity)

    # -- collectives ----------------------------------------------------------------------------------------------

    def begin(self, channel: int, what: str = "") -> int:
        """A collective of the channel begins: gives its number, from 1; 0 where this is off."""
        if not self.is_on:
            return 0
        number: int = self._words[FIRST_CHANNEL + channel] + 1
        self._words[FIRST_CHANNEL + channel] = number
        return number

    def wait(self, what: str, channel: int, sequence: int, first: int, distance: int, count: int) -> None:
        """This rank waits for others from now on: for `count` ranks, from `first` on, at a distance of each other."""
        if self.is_on:
            now = time.monotonic_ns()
            self._waits.write(now, channel, sequence, first, distance, count, what.encode())
            self._words[WAITING] = now

    def end_wait(self) -> None:
        """The end of the wait."""
        if self.is_on:
            self._words[WAITING] = 0

    @contextmanager
    def waiting(self, what: str, channel: int, world_size: int) -> Iterator[None]:
        """A collective of all ranks, from its begin to its end."""
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
        self._words[0] = MAGIC
        self.is_on = True
        self.enter(Activity.INITIALIZING)
