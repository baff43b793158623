"""The ranks of one host, from their start until nothing of them is left."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...watch import stacks
from ...watch.progress import RankProgress, read_progress
from ...watch.record import RecordFolder, memory_folder
from ..hosts.host import LaunchError
from ..hosts.plan import RankPlan, command_of
from ..wire.loop import Loop
from ..wire.messages import Ended, Start
from .process_tree import die_with_parent, kill_descendants
from .rank_output import RankOutput


class RankEvents(Protocol):
    """Whom the ranks' life is told."""

    def printed(self, rank: int, shown: bytes) -> None:
        """A rank has printed what is to be shown."""

    def ended(self, message: Ended) -> None:
        """A rank is gone."""

    def note(self, text: str) -> None:
        """Something is not as it should be."""


@dataclass
class _Rank:
    plan: RankPlan
    pid: int
    output: RankOutput | None
    is_running: bool = True


class HostRanks:
    """Starts the ranks of `start` and watches them; the calling process is their only parent.

    To be made in the main thread while no other runs, see [Note: one thread] in loop.py; from then on every child of
    the process is reaped here. Raises LaunchError, with nothing left behind, where they cannot be started.
    """

    def __init__(self, loop: Loop, start: Start, listener: RankEvents) -> None:
        self._loop = loop
        self._job = start.job
        self._listener = listener
        self._at_terminal = start.job.inherits_terminal and sys.stdin is not None and sys.stdin.isatty()
        self._ranks: dict[int, _Rank] = {}
        self._is_paused = False
        try:
            self._records = RecordFolder()
        except OSError as error:
            raise LaunchError(
                f"the ranks cannot be started: expected a folder for their records in {memory_folder()}, found: "
                f"{error}; free space there"
            ) from error
        loop.on_signal(signal.SIGCHLD, self._reap)
        try:
            if start.job.log_folder is not None:
                (Path(start.job.folder) / start.job.log_folder).mkdir(parents=True, exist_ok=True)
            for plan in start.host.ranks:
                self._ranks[plan.rank] = self._started(plan, start)
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            raise LaunchError(self._why_not(error)) from error
        for rank, state in self._ranks.items():
            if state.output is not None:
                loop.on_readable(state.output.fd, lambda rank=rank: self._read(rank))  # type: ignore[misc]

    @property
    def pids(self) -> tuple[int, ...]:
        """In the order of the local ranks."""
        return tuple(state.pid for state in self._ranks.values())

    @property
    def are_running(self) -> bool:
        """Whether one is left."""
        return any(state.is_running for state in self._ranks.values())

    def send_signal(self, number: int) -> None:
        """To every rank that still runs, except a Ctrl-C that the terminal has sent to it already."""
        for rank, state in self._ranks.items():
            has_it = rank == self._job.plain_rank and self._at_terminal and number == signal.SIGINT
            if state.is_running and not has_it:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(state.pid, number)

    def pause(self, paused: bool) -> None:
        """Stops or goes on reading what they print; a rank whose pipe is full waits."""
        if paused == self._is_paused:
            return
        self._is_paused = paused
        for rank, state in self._ranks.items():
            if state.output is None or not state.output.is_open:
                continue
            if paused:
                self._loop.forget(state.output.fd)
            else:
                self._loop.on_readable(state.output.fd, lambda rank=rank: self._read(rank))  # type: ignore[misc]

    def progress(self) -> tuple[RankProgress, ...]:
        """What those that run, and say so, are doing."""
        found = (read_progress(self._record(rank), rank) for rank, state in self._ranks.items() if state.is_running)
        return tuple(progress for progress in found if progress is not None)

    def stack_paths(self, ranks: tuple[int, ...]) -> Mapping[int, str]:
        """For `stacks.collect_stacks`: of those of `ranks` that are here and run."""
        return {rank: self._record(rank) for rank in ranks if rank in self._ranks and self._ranks[rank].is_running}

    def close(self) -> None:
        """Kills everything that the ranks have left, passes on what they have printed, and removes their records."""
        kill_descendants()
        for rank, state in self._ranks.items():
            if state.output is not None and state.output.is_open:
                self._print(rank, state.output.read_what_is_there())
                self._end_output(rank)
        self._records.remove()

    def _started(self, plan: RankPlan, start: Start) -> _Rank:
        job = self._job
        is_plain = plan.rank == job.plain_rank
        has_terminal = is_plain and job.inherits_terminal and job.log_folder is None
        reads_terminal = is_plain and self._at_terminal
        own = dict(plan.environment)
        if has_terminal and sys.stdout.isatty():
            # Python writes whole lines to a terminal. Unbuffered, each piece of a print is a write, and other ranks'
            # lines come between.
            own.pop("PYTHONUNBUFFERED", None)
        log = None
        if job.log_folder is not None:
            log = Path(job.folder) / job.log_folder / f"rank{plan.rank}.log"
        read_fd, write_fd = (None, None) if has_terminal else os.pipe()
        note = self._listener.note
        output = None if read_fd is None else RankOutput(read_fd, is_plain, log, note, job.appends_logs)
        try:
            process = subprocess.Popen(
                command_of(job.command, str(plan.local_rank)),
                cwd=job.folder,
                env={
                    **start.defaults,
                    **os.environ,
                    **job.environment,
                    **own,
                    **start.environment,
                    **self._marks(plan.rank),
                },
                stdin=None if reads_terminal else subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                process_group=None if reads_terminal else 0,
                preexec_fn=_prepared(die_with_parent(), plan.cores),  # no other thread runs in this process
            )
        finally:
            if write_fd is not None:
                os.close(write_fd)
        process.returncode = 0  # it is reaped below, not by Popen
        return _Rank(plan, process.pid, output)

    def _marks(self, rank: int) -> dict[str, str]:
        return {"LOWTIDE_JOB_ID": self._job.identity, stacks.VARIABLE: self._record(rank)}

    def _record(self, rank: int) -> str:
        return os.path.join(self._records.path, f"rank{rank}")

    def _why_not(self, error: Exception) -> str:
        return (
            f"the ranks cannot be started: {error}; the folder is {self._job.folder}, the command "
            f"{' '.join(self._job.command)}: both must be there on every host"
        )

    def _reap(self) -> None:
        """Takes the exit status of every child that has ended: ranks, and orphans of theirs that came here."""
        ranks = {state.pid: rank for rank, state in self._ranks.items()}
        clock = time.monotonic()
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if pid in ranks:
                    self._bury(ranks[pid], os.waitstatus_to_exitcode(status), clock)

    def _bury(self, rank: int, status: int, clock: float) -> None:
        state = self._ranks[rank]
        state.is_running = False
        last = None
        if state.output is not None:
            if state.output.is_open:
                self._print(rank, state.output.read_what_is_there())
            last = state.output.last_lines()
        self._listener.ended(Ended(rank, status, clock, last))

    def _print(self, rank: int, shown: bytes) -> None:
        if self._job.sends_output or rank == self._job.plain_rank:
            self._listener.printed(rank, shown)

    def _read(self, rank: int) -> None:
        output = self._ranks[rank].output
        assert output is not None
        shown = output.read()
        if shown is None:
            self._end_output(rank)
        elif shown:
            self._print(rank, shown)

    def _end_output(self, rank: int) -> None:
        output = self._ranks[rank].output
        assert output is not None
        self._loop.forget(output.fd)
        if rest := output.close():
            self._print(rank, rest)


def _prepared(bind: Callable[[], None], cores: tuple[int, ...]) -> Callable[[], None]:
    """A `preexec_fn`: bound to the life of this process, and to `cores` where there are any."""

    def prepare() -> None:
        bind()
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)

    return prepare
