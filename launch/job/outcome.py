"""How an attempt has ended: by which signal, or by which failure, in words."""

import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...watch.waiting import named
from ..wire.loop import Loop

_SAME_SIGNAL_SECONDS = 0.2  # a terminal, a resource manager and `timeout` may all send the same one
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Those that have come to this process, or to an agent. first: is told of the first one.

    number: of the last one that counts, None before any. time: when the first came. A second one kills.
    """

    def __init__(self, loop: Loop, first: Callable[[int], None]) -> None:
        self._first = first
        self.number: int | None = None
        self.time = 0.0
        self.count = 0
        self.is_killed = False
        for number in _PASSED_ON:
            loop.on_signal(number, lambda number=number: self.take(number))  # type: ignore[misc]

    def take(self, number: int) -> None:
        now = time.monotonic()
        self.count += 1
        if self.number is None:
            self.number, self.time = number, now
            self._first(number)
        elif number != self.number or now - self.time > _SAME_SIGNAL_SECONDS:
            self.number = number
            self.is_killed = True

    @property
    def has_come(self) -> bool:
        return self.number is not None

    @property
    def name(self) -> str:
        return "" if self.number is None else signal.Signals(self.number).name


_LEAST_WIDTH, _MOST_WIDTH = 40, 120


@dataclass(frozen=True)
class Failure:
    """clock: when, by the launcher's time.monotonic(), as exact as `uncertainty` says, in seconds.

    rank: None: the whole host, or the launcher's own decision. status: as Popen.returncode has it. text: what happened,
    where no status says it. last_lines: None: not known.
    """

    clock: float
    status: int
    host: str = ""
    rank: int | None = None
    pid: int = 0
    text: str = ""
    last_lines: Sequence[str] | None = None
    uncertainty: float = 0.0

    @property
    def exit_status(self) -> int:
        """For the shell."""
        return 128 - self.status if self.status < 0 else self.status


def first_of(failures: Sequence[Failure]) -> Failure | None:
    """The one that the others are likely to follow from, of failures in the order in which they were heard of.

    The first that was heard of, unless another one was surely before it by the clocks.
    """
    first = None
    for failure in failures:
        if first is None or failure.clock + failure.uncertainty < first.clock - first.uncertainty:
            first = failure
    return first


def obituary(failure: Failure, world_size: int, has_many_hosts: bool, ended: Sequence[int] = ()) -> str:
    """The closing message. ended: the ranks that had ended with exit status 0 before the failure."""
    if failure.rank is None:
        return failure.text
    where = f"host {failure.host}, process {failure.pid}" if has_many_hosts else f"process {failure.pid}"
    text = f"rank {failure.rank} of {world_size} ({where}) {_reason(failure.status)}"
    if world_size > 1:
        text += "; the other ranks were stopped" if len(ended) < world_size - 1 else ""
    if ended:
        text += (
            f". {named(ended)} had ended before, with exit status 0: if rank {failure.rank} still trained, the ranks "
            "have different numbers of batches; put the loop into `with engine.join():`, let a DistributedSampler pad "
            "them, or end all ranks at the smallest number. If it saved, every rank must call save_checkpoint"
        )
    if failure.last_lines is None:
        return text + ". Its output is above."
    if not failure.last_lines:
        return text + ". It printed nothing."
    title = f" host {failure.host}, rank {failure.rank} " if has_many_hosts else f" rank {failure.rank} "
    return text + ". The last lines of its output:\n" + box(title, failure.last_lines)


def box(title: str, lines: Sequence[str]) -> str:
    """`lines`, whole ones, with a frame at their left, above and below."""
    columns = shutil.get_terminal_size().columns
    width = max(_LEAST_WIDTH, min(_MOST_WIDTH, columns - 1, 4 + max(map(len, lines), default=0)))
    middle = "".join(f"\n│ {line}" for line in lines)
    return f"┌─{title}".ljust(width, "─") + middle + "\n" + "└".ljust(width, "─")


def _reason(status: int) -> str:
    text = f"failed with exit status {status}" if status >= 0 else f"was ended by {_signal_name(-status)}"
    if status == -signal.SIGKILL:
        text += (
            " before anything in this job had sent it: the kernel's out-of-memory killer is a usual cause (`dmesg` "
            "shows it), so try less memory per rank"
        )
    return text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class JobOutcome:
    """status: for the shell. failure: the first, None where none was, or where a signal stopped the job.

    lost_hosts: whose agents were lost. was_started: whether ranks ran. ended: those that had ended with exit status 0
    before the failure.
    """

    status: int
    failure: Failure | None = None
    stopped_by: int | None = None
    lost_hosts: tuple[str, ...] = ()
    was_started: bool = False
    ended: tuple[int, ...] = ()


class Endings:
    """What has come to an end so far, in the order in which it was heard of."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []
        self._lost_hosts: list[str] = []
        self._ended: list[int] = []  # ranks, with exit status 0 before any failure

    @property
    def has_failure(self) -> bool:
        return bool(self._failures)

    def add_failure(self, failure: Failure) -> None:
        """One that ends the attempt."""
        self._failures.append(failure)

    def add_lost_host(self, name: str) -> None:
        """Its agent is lost, whether or not the attempt goes on without it."""
        self._lost_hosts.append(name)

    def add_done(self, rank: int) -> None:
        """It has ended with exit status 0."""
        if not self._failures:
            self._ended.append(rank)

    def outcome(self, stop: StopSignals, was_started: bool) -> JobOutcome:
        """What becomes of it, if nothing more is heard of."""
        failure = first_of(self._failures)
        lost = tuple(self._lost_hosts)
        # Where the clocks do not tell which came first, a rank has ended because it was told to.
        latest = float("inf") if failure is None else failure.clock + failure.uncertainty
        if stop.number is not None and latest > stop.time and (failure is not None or not was_started):
            return JobOutcome(128 + stop.number, None, stop.number, lost, was_started)
        status = 0 if failure is None else failure.exit_status
        return JobOutcome(status, failure, None, lost, was_started, tuple(self._ended))
