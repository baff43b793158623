"""The outcome of an attempt: a signal or the first failure, and the text about it."""

import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...watch.waiting import named
from ..wire.loop import Loop

_SAME_SIGNAL_SECONDS = 0.2  # a terminal, a resource manager and `timeout` may all send the same signal
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Signals that came to this process or to an agent. A second signal kills.

    first: called with the first signal. number: the last signal that counts; None before any. time: of the first.
    """

    def __init__(self, loop: Loop, first: Callable[[int], None]) -> None:
        self._first = first
        self.number: int | None = None
        self.time = 0.0
        self.count = 0
        self.is_killed = False
        for number in _PASSED_ON:
            # `nohup` starts a program with SIGHUP ignored, so that it outlives the login.
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            loop.on_signal(number, lambda number=number: self.take(number))  # type: ignore[misc]

    def take(self, number: int) -> None:
        """Take a signal."""
        now = time.monotonic()
        self.count += 1
        if self.number is None:
            self.number, self.time = number, now
            self._first(number)
        # A second signal in earnest: the ranks get no more time to save.
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
    """An event that ends an attempt: a rank's end, a lost host, or a decision of the launcher.

    clock: its time by the launcher's time.monotonic(), within `uncertainty` seconds. rank: None: the whole host, or the
    launcher's decision. status: as Popen.returncode. text: the event, if no status says it. last_lines: None: unknown.
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
        """The exit status for the shell."""
        return 128 - self.status if self.status < 0 else self.status


def first_of(failures: Sequence[Failure]) -> Failure | None:
    """Return the likely cause among failures, in the order of their messages.

    It is the first message, unless by the clocks another failure surely came before.
    """
    first = None
    for failure in failures:
        # Both clocks at their worst still say so. Without certainty the order of the messages decides.
        if first is None or failure.clock + failure.uncertainty < first.clock - first.uncertainty:
            first = failure
    return first


def obituary(failure: Failure, world_size: int, has_many_hosts: bool, ended: Sequence[int] = ()) -> str:
    """Return the closing message. ended: ranks that had ended with exit status 0 before the failure."""
    if failure.rank is None:
        return failure.text
    where = f"host {failure.host}, process {failure.pid}" if has_many_hosts else f"process {failure.pid}"
    text = f"rank {failure.rank} of {world_size} ({where}) {_reason(failure.status)}"
    if world_size > 1:
        text += "; the other ranks were stopped" if len(ended) < world_size - 1 else ""
    # A frequent mistake with an obscure symptom: the remaining ranks fail in a collective of the ended rank.
    if ended:
        text += (
            f". {named(ended)} had ended before with exit status 0: if rank {failure.rank} still trained, the ranks "
            "have different numbers of batches. Put the loop into `with engine.join():`, let a DistributedSampler pad "
            "the batches, or end all ranks after the smallest number. If it saved, every rank must call save_checkpoint"
        )
    if failure.last_lines is None:
        return text + ". Its output is above."
    if not failure.last_lines:
        return text + ". It printed nothing."
    title = f" host {failure.host}, rank {failure.rank} " if has_many_hosts else f" rank {failure.rank} "
    return text + ". The last lines of its output:\n" + box(title, failure.last_lines)


def box(title: str, lines: Sequence[str]) -> str:
    """Draw a frame at the left, above and below whole lines."""
    columns = shutil.get_terminal_size().columns
    width = max(_LEAST_WIDTH, min(_MOST_WIDTH, columns - 1, 4 + max(map(len, lines), default=0)))
    middle = "".join(f"\n│ {line}" for line in lines)
    return f"┌─{title}".ljust(width, "─") + middle + "\n" + "└".ljust(width, "─")


def _reason(status: int) -> str:
    text = f"failed with exit status {status}" if status >= 0 else f"was ended by {_signal_name(-status)}"
    if status == -signal.SIGKILL:
        text += (
            " before this job sent it. A usual cause is the kernel's out-of-memory killer (see `dmesg`): try less "
            "memory per rank"
        )
    return text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class JobOutcome:
    """The outcome of an attempt. status: for the shell. failure: the first; None without, or after a signal.

    stopped_by: a signal that ended the attempt, or came after the failure. lost_hosts: hosts with lost agents.
    was_started: whether ranks ran. ended: ranks with exit status 0 before the failure.
    """

    status: int
    failure: Failure | None = None
    stopped_by: int | None = None
    lost_hosts: tuple[str, ...] = ()
    was_started: bool = False
    ended: tuple[int, ...] = ()


def outcome_of(
    failures: Sequence[Failure], lost_hosts: Sequence[str], ended: Sequence[int], stop: StopSignals, was_started: bool
) -> JobOutcome:
    """Return the outcome. failures: in the order of their messages. The rest as in JobOutcome."""
    failure = first_of(failures)
    # If the clocks do not tell whether the signal or a rank's end came first, the signal caused the end.
    latest = float("inf") if failure is None else failure.clock + failure.uncertainty
    if stop.number is not None and latest > stop.time and (failure is not None or not was_started):
        # As a shell reports a program that a signal has ended.
        return JobOutcome(128 + stop.number, None, stop.number, tuple(lost_hosts), was_started)
    status = 0 if failure is None else failure.exit_status
    stopped_by = None if failure is None else stop.number
    return JobOutcome(status, failure, stopped_by, tuple(lost_hosts), was_started, tuple(ended))
