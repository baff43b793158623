"""The ranks of one host: start, output, signals, and cleanup."""

import contextlib
import os
import signal
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...watch import stacks
from ...watch.progress import RankProgress, read_progress
from ...watch.record import RecordFolder, memory_folder
from ..hosts.host import LaunchError
from ..hosts.plan import RankPlan, command_of, shown_command
from ..wire.loop import Loop
from ..wire.messages import PLAIN_RANK, Ended, Start
from .process_tree import die_with_parent, kill_descendants

KEPT_LINES = 20  # shown of a failed rank, or more if a traceback is longer
_SEARCHED_LINES = 200
_SHOWN_LINES = 80
_LINE_BYTES = 4096  # kept of each of these lines
_CHUNK_BYTES = 1 << 16
_UNENDED_BYTES = 1 << 20  # a longer line is passed on in pieces, each as a line
_STARTS_OF_TRACEBACKS = ("Traceback (most recent call last)", "Fatal Python error")
_BETWEEN_TRACEBACKS = ("During handling of the above exception", "The above exception was the direct cause")


class RankOutput:
    """Reads and owns the pipe `fd`.

    is_plain: pass bytes on at once (rank 0); else whole lines, each as a terminal finally shows it.
    log: gets everything unchanged; `appends_log` keeps its old content. note: called with the
    reason if the log cannot be written.
    """

    def __init__(
        self, fd: int, is_plain: bool, log: Path | None, note: Callable[[str], None], appends_log: bool = False
    ) -> None:
        self.fd = fd
        self.is_open = True
        self._is_plain = is_plain
        self._note = note
        self._log_path = log
        how = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if appends_log else os.O_TRUNC)
        self._log = None if log is None else os.open(log, how, 0o666)
        self._last: deque[bytes] = deque(maxlen=_SEARCHED_LINES)
        self._rest = b""
        os.set_blocking(fd, False)

    def read(self) -> bytes | None:
        """Return the visible part of the next chunk, b"" if none has come yet, None at the end of the pipe."""
        try:
            chunk = os.read(self.fd, _CHUNK_BYTES)
        except BlockingIOError:  # `_bury` may have emptied the pipe after the selector found it readable
            return b""
        return self._take(chunk) if chunk else None

    def read_what_is_there(self) -> bytes:
        """Return the visible part of all that the pipe holds now, at most its capacity."""
        shown = []
        # 1 MiB is the largest pipe that Linux lets a user make (fs.pipe-max-size).
        for _ in range(_UNENDED_BYTES // _CHUNK_BYTES):  # a process may keep writing
            try:
                chunk = os.read(self.fd, _CHUNK_BYTES)
            except BlockingIOError:
                break
            if not chunk:
                break
            shown.append(self._take(chunk))
        return b"".join(shown)

    def close(self) -> bytes:
        """Close pipe and log, and return the visible part of a last line without a newline."""
        self.is_open = False
        os.close(self.fd)
        if self._log is not None:
            os.close(self._log)
        rest, self._rest = self._rest, b""
        # A plain rank's bytes were passed on as they came.
        return b"" if self._is_plain or not rest else self._lines([rest])

    def last_lines(self) -> tuple[str, ...]:
        """Return the last KEPT_LINES lines, oldest first, or all from the start of a final traceback."""
        kept = [*self._last, *([_visible(self._rest)] if self._rest else [])]
        lines = [line.decode(errors="replace") for line in kept]
        start = min(max(0, len(lines) - KEPT_LINES), _start_of_traceback(lines))
        lines = lines[start:]
        if len(lines) > _SHOWN_LINES:
            half = _SHOWN_LINES // 2
            lines = [*lines[:half], f"... ({len(lines) - 2 * half} lines)", *lines[-half:]]
        return tuple(lines)

    def _take(self, chunk: bytes) -> bytes:
        self._write_log(chunk)
        *lines, rest = (self._rest + chunk).split(b"\n")
        # A progress bar may print for days without a newline, so only its final state is kept. Without the last "\r",
        # the next state would be appended to this state.
        self._rest = _visible(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        if len(self._rest) > _UNENDED_BYTES:
            lines.append(self._rest)
            self._rest = b""
        shown = self._lines(lines)
        return chunk if self._is_plain else shown

    def _lines(self, lines: list[bytes]) -> bytes:
        visible = [_visible(line) for line in lines]
        self._last.extend(line[:_LINE_BYTES] for line in visible)
        return b"".join(line + b"\n" for line in visible)

    def _write_log(self, chunk: bytes) -> None:
        if self._log is None:
            return
        try:
            while chunk:
                # A write may take a part, for example when the disk becomes full.
                chunk = chunk[os.write(self._log, chunk) :]
        except OSError as error:
            self._note(f"{self._log_path} cannot be written: {error.strerror}. The ranks continue without this log")
            with contextlib.suppress(OSError):
                os.close(self._log)
            self._log = None


def _is_in_foreground() -> bool:
    """Return whether this process may set the modes of its terminal. In the background, that would stop it."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # another session's, or it is gone
        return False


def _writes_to_a_log() -> bool:
    """Return True if stdout and stderr are the same file or pipe, as in a batch job: no terminal.

    Unbuffered, Python writes a line there in pieces. Without a pipe, lines of more ranks could come between.
    """
    return os.path.samestat(os.fstat(1), os.fstat(2)) and not os.isatty(1)


def _start_of_traceback(lines: list[str]) -> int:
    """Return the index of the last traceback, or of the first that it refers to; len(lines) without a traceback."""
    start = len(lines)
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith(_STARTS_OF_TRACEBACKS):
            start = i
            # CPython prints this sentence between two empty lines, directly above the traceback that follows.
            if not any(line.startswith(_BETWEEN_TRACEBACKS) for line in lines[max(0, i - 3) : i]):
                break
    return start


def _visible(line: bytes) -> bytes:
    """Return the final state of a line with carriage returns, for example of a progress bar."""
    if b"\r" not in line:
        return line
    states = [state for state in line.split(b"\r") if state]
    return states[-1] if states else b""


@dataclass
class _Rank:
    plan: RankPlan
    pid: int
    output: RankOutput | None
    is_running: bool = True


class HostRanks:
    """Starts the ranks of `start` and watches them. This process is their only parent.

    printed: called with a rank and output to show. ended: called when a rank is gone. note: called with a warning.

    Make it in the main thread, as the only thread: see `[Note: one thread]` in loop.py. From then on it reaps
    every child of the process. Raises LaunchError, with nothing left behind, if the ranks cannot start.
    """

    def __init__(
        self,
        loop: Loop,
        start: Start,
        printed: Callable[[int, bytes], None],
        ended: Callable[[Ended], None],
        note: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._start = start
        self._printed, self._ended, self._note = printed, ended, note
        self._at_terminal = start.inherits_terminal and sys.stdin is not None and sys.stdin.isatty()
        # A rank that is killed at a prompt (pdb, getpass) leaves the terminal without echo.
        self._modes = termios.tcgetattr(0) if self._at_terminal and _is_in_foreground() else None
        self._ranks: dict[int, _Rank] = {}
        self._is_paused = False
        try:
            self._records = RecordFolder()
        except OSError as error:
            raise LaunchError(
                f"the ranks cannot be started: cannot make a folder for their records in {memory_folder()}: {error}. "
                "Free space there"
            ) from error
        # Before the first start: else a rank that ends at once would be noticed only with the next child's end.
        loop.on_signal(signal.SIGCHLD, self._reap)
        try:
            if start.log_folder is not None:
                (Path(start.folder) / start.log_folder).mkdir(parents=True, exist_ok=True)
            for plan in start.host.ranks:
                self._ranks[plan.rank] = self._started(plan)
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            self._ranks.clear()  # `_reap` still comes for the killed ranks, and would report their end as a failure
            raise LaunchError(self._why_not(error)) from error
        for rank, state in self._ranks.items():
            if state.output is not None:
                loop.on_readable(state.output.fd, lambda rank=rank: self._read(rank))  # type: ignore[misc]

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in the order of the local ranks."""
        return tuple(state.pid for state in self._ranks.values())

    @property
    def are_running(self) -> bool:
        """Whether a rank still runs."""
        return any(state.is_running for state in self._ranks.values())

    def send_signal(self, number: int) -> None:
        """Send a signal to every running rank, except a Ctrl-C that the terminal has sent to it already."""
        for rank, state in self._ranks.items():
            # That rank stayed in the terminal's foreground process group: see `process_group` in `_started`.
            has_it = rank == PLAIN_RANK and self._at_terminal and number == signal.SIGINT
            if state.is_running and not has_it:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(state.pid, number)

    def pause(self, paused: bool) -> None:
        """Stop or continue reading the ranks' output. A rank waits when its pipe is full."""
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
        """Return the progress of running ranks that report it."""
        found = (read_progress(self._record(rank), rank) for rank, state in self._ranks.items() if state.is_running)
        return tuple(progress for progress in found if progress is not None)

    def stack_paths(self, ranks: tuple[int, ...]) -> Mapping[int, str]:
        """Return the record paths of those `ranks` that run here, for `stacks.collect_stacks`."""
        return {rank: self._record(rank) for rank in ranks if rank in self._ranks and self._ranks[rank].is_running}

    def close(self) -> None:
        """Kill everything that the ranks left, pass on their last output, and remove their records."""
        kill_descendants()
        if self._modes is not None and _is_in_foreground():
            termios.tcsetattr(0, termios.TCSANOW, self._modes)
        for rank, state in self._ranks.items():
            if state.output is not None and state.output.is_open:
                self._print(rank, state.output.read_what_is_there())
                self._end_output(rank)
        self._records.remove()

    def _started(self, plan: RankPlan) -> _Rank:
        start = self._start
        is_plain = plan.rank == PLAIN_RANK
        # Without a pipe `isatty()` holds in the script, so progress bars and colours work. A log needs the pipe.
        has_terminal = is_plain and start.inherits_terminal and start.log_folder is None and not _writes_to_a_log()
        reads_terminal = is_plain and self._at_terminal
        own = dict(plan.environment)
        if has_terminal and sys.stdout.isatty():
            # To a terminal, Python writes whole lines. Unbuffered, it would write each piece of a print, and
            # lines of more ranks could come between.
            own.pop("PYTHONUNBUFFERED", None)
        log = None
        if start.log_folder is not None:
            log = Path(start.folder) / start.log_folder / f"rank{plan.rank}.log"
        read_fd, write_fd = (None, None) if has_terminal else os.pipe()
        output = None
        try:
            if read_fd is not None:
                output = RankOutput(read_fd, is_plain, log, self._note, start.appends_logs)
            # Later entries of `env` win. MASTER_PORT and TORCHELASTIC_* come after the agent's environment, because the
            # launcher may itself run inside a job of torchrun.
            process = subprocess.Popen(
                command_of(start.command, str(plan.local_rank)),
                cwd=start.folder,
                env={
                    **start.defaults,
                    **os.environ,
                    **start.environment,
                    **own,
                    **self._marks(plan.rank),
                },
                stdin=None if reads_terminal else subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                # A reader of the terminal must be in its foreground group, or SIGTTIN stops it. The remaining ranks get
                # Ctrl-C from the agent alone, not a second time from the terminal.
                process_group=None if reads_terminal else 0,
                preexec_fn=_prepared(die_with_parent(), plan.cores),  # this process has a single thread
            )
        except (OSError, subprocess.SubprocessError):
            if output is not None:
                output.close()
            elif read_fd is not None:
                os.close(read_fd)
            raise
        finally:
            if write_fd is not None:
                # Held open here, the pipe would not end with the rank.
                os.close(write_fd)
        process.returncode = 0  # `_reap` reaps it, not Popen
        return _Rank(plan, process.pid, output)

    def _marks(self, rank: int) -> dict[str, str]:
        return {"LOWTIDE_JOB_ID": self._start.identity, stacks.VARIABLE: self._record(rank)}

    def _record(self, rank: int) -> str:
        return os.path.join(self._records.path, f"rank{rank}")

    def _why_not(self, error: Exception) -> str:
        if (logs := self._start.log_folder) is not None and isinstance(error, OSError) and error.filename is not None:
            folder, path = Path(self._start.folder) / logs, Path(error.filename)
            if path.is_relative_to(folder) or folder.is_relative_to(path):
                expected = f"--log-dir {logs}: expected a folder that every host can write"
                found = f"{error.strerror}: {path}"
                return f"the ranks cannot be started: {expected}, found {found}. Name another folder"
        return (
            f"the ranks cannot be started: {error}. The folder {self._start.folder} and the command "
            f"{shown_command(self._start.command)} must exist on every host"
        )

    def _reap(self) -> None:
        """Reap every child that has ended: ranks, and adopted orphans."""
        # The id of a rank that has ended may be an orphan's now.
        ranks = {state.pid: rank for rank, state in self._ranks.items() if state.is_running}
        clock = time.monotonic()
        with contextlib.suppress(ChildProcessError):
            # The kernel merges signals: a single SIGCHLD may stand for several children.
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
                # The traceback may still be in the pipe. The pipe stays open, as children of the rank may write to it.
                self._print(rank, state.output.read_what_is_there())
            last = state.output.last_lines()
        self._ended(Ended(rank, status, clock, last))

    def _print(self, rank: int, shown: bytes) -> None:
        if self._start.sends_output or rank == PLAIN_RANK:
            self._printed(rank, shown)

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
    """Return a `preexec_fn`: bind to this process's life, and to `cores` if given."""

    def prepare() -> None:
        bind()
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)

    return prepare
