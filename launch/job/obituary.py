"""How a job has failed, in words: the first failure, in a box with its host, rank, reason and last lines."""

import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ...watch.waiting import named

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
