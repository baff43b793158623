"""Starts the ranks of a job on this machine, watches them, and ends them together."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import psutil

from .output import RankOutput
from .process_tree import adopt_orphans, die_with_parent, kill_descendants

_KILLED_SECONDS = 5.0  # how long the kernel may take to remove a killed process and close its pipes
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class LocalJob:
    """What to run on this machine: `command` on `nproc` ranks.

    quiet_ranks: show rank 0's output only. log_dir: one file `rank0.log`, `rank1.log`, ... per rank.
    grace_seconds: the time between asking a rank to stop and killing it. master_port: None finds a free one.
    """

    nproc: int
    command: tuple[str, ...]
    quiet_ranks: bool = False
    log_dir: Path | None = None
    grace_seconds: float = 15.0
    master_port: int | None = None


@dataclass(frozen=True)
class Event:
    """A rank ended with a status as `Popen.returncode` has it, or this process received a signal."""

    kind: Literal["ended", "signal"]
    rank: int
    status: int


def rank_environment(rank: int, nproc: int, port: int, num_cores: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """`inherited` with the variables of `rank`: those that torchrun sets, and thread and buffer settings if unset."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, num_cores // nproc)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    fixed = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return defaults | dict(inherited) | fixed


def run(job: LocalJob) -> int:
    """Runs the job to its end and returns the exit status for the shell; leaves no process behind.

    0 if every rank ended with 0; else that of the rank that failed first (128 + n if signal n ended it), or 128 + n if
    signal n came to the launcher first. The calling process belongs to the job: it must have no other children, and its
    handlers of SIGINT, SIGTERM and SIGHUP are replaced until the end.
    """
    adopt_orphans()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def forward(number: int, frame: FrameType | None) -> None:
        events.put(Event("signal", -1, number))

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        return RunningJob(job, events).finish()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class RunningJob:
    """The processes of a job from their start to the closing message."""

    def __init__(self, job: LocalJob, events: "queue.SimpleQueue[Event]") -> None:
        self._job = job
        self._events = events
        self._first_failure: Event | None = None
        self._signal: int | None = None
        self._at_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._processes: list[subprocess.Popen[bytes]] = []
        if job.log_dir is not None:
            job.log_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._start()
        except BaseException:
            kill_descendants()
            raise
        self._outputs = [self._output(rank) for rank in range(job.nproc)]
        self._running = set(range(job.nproc))
        self._waiters = [threading.Thread(target=self._wait_for, args=(rank,), daemon=True) for rank in self._running]
        for waiter in self._waiters:
            waiter.start()

    def finish(self) -> int:
        """Waits for the end of all ranks, stops all after a failure or a signal, and returns the exit status."""
        while self._running and self._first_failure is None and self._signal is None:
            self._note(self._events.get())
        stopped_by = self._signal
        if self._running:
            if stopped_by is None:
                self._send(signal.SIGTERM)
            self._wait_until(time.monotonic() + self._job.grace_seconds)
        self._kill_the_rest()
        if self._first_failure is None:
            return 0
        if stopped_by is not None:
            _say(f"stopped by {signal.Signals(stopped_by).name}; no rank is left")
            return 128 + stopped_by
        _say(self._obituary(self._first_failure))
        return _shell_status(self._first_failure.status)

    def _start(self) -> None:
        job = self._job
        port = job.master_port or _free_port()
        bind = die_with_parent()
        for rank in range(job.nproc):
            plain = rank == 0 and job.log_dir is None
            at_terminal = rank == 0 and self._at_terminal
            self._processes.append(
                subprocess.Popen(
                    job.command,
                    env=rank_environment(rank, job.nproc, port, _num_cores(), os.environ),
                    stdin=None if at_terminal else subprocess.DEVNULL,
                    stdout=None if plain else subprocess.PIPE,
                    stderr=None if plain else subprocess.STDOUT,
                    process_group=None if at_terminal else 0,
                    preexec_fn=bind,  # no thread runs yet in this process
                )
            )

    def _output(self, rank: int) -> RankOutput | None:
        source = self._processes[rank].stdout
        if source is None:
            return None
        log = self._job.log_dir / f"rank{rank}.log" if self._job.log_dir is not None else None
        prefix = f"[rank {rank}] ".encode() if rank else None
        return RankOutput(source, prefix, shown=rank == 0 or not self._job.quiet_ranks, log=log)

    def _wait_for(self, rank: int) -> None:
        self._events.put(Event("ended", rank, self._processes[rank].wait()))

    def _note(self, event: Event) -> None:
        if event.kind == "ended":
            self._running.discard(event.rank)
            if event.status != 0 and self._first_failure is None:
                self._first_failure = event
        else:
            self._forward(event.status)

    def _forward(self, number: int) -> None:
        """Passes a signal on; a second one ends the wait at once."""
        again, self._signal = self._signal is not None, number
        if again:
            kill_descendants()
        else:
            self._send(signal.Signals(number))

    def _send(self, number: signal.Signals) -> None:
        """Sends a signal to every rank that still runs, except a Ctrl-C that the terminal has sent to it already."""
        for rank in self._running:
            if not (rank == 0 and self._at_terminal and number == signal.SIGINT):
                self._processes[rank].send_signal(number)

    def _wait_until(self, deadline: float) -> None:
        while self._running and (left := deadline - time.monotonic()) > 0:
            try:
                self._note(self._events.get(timeout=left))
            except queue.Empty:
                return

    def _kill_the_rest(self) -> None:
        ranks = {process.pid for process in self._processes}
        others = [process for process in kill_descendants() if process.pid not in ranks]
        psutil.wait_procs(others, timeout=_KILLED_SECONDS)
        self._wait_until(time.monotonic() + _KILLED_SECONDS)
        for output in self._outputs:
            if output is not None:
                output.wait(_KILLED_SECONDS)

    def _obituary(self, failure: Event) -> str:
        job, rank = self._job, failure.rank
        pid = self._processes[rank].pid
        if failure.status < 0:
            name = signal.Signals(-failure.status).name
            text = f"rank {rank} of {job.nproc} (process {pid}) was ended by {name}"
            if failure.status == -signal.SIGKILL:
                text += (
                    "; nothing in this job sends it while the ranks run: the kernel's out-of-memory killer is a usual "
                    "cause (`dmesg` shows it), so try less memory per rank"
                )
        else:
            text = f"rank {rank} of {job.nproc} (process {pid}) failed with exit status {failure.status}"
        if job.nproc > 1:
            text += "; the other ranks were stopped"
        output = self._outputs[rank]
        if output is None:
            return text + ". Its output is above."
        lines = "".join(f"\n    {line}" for line in output.last_lines())
        return text + (f". The last lines of its output:{lines}" if lines else ". It printed nothing.")


def _say(text: str) -> None:
    print(f"lowtide launch: {text}", file=sys.stderr, flush=True)


def _shell_status(status: int) -> int:
    return 128 - status if status < 0 else status


def _num_cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
