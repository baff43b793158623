"""The Python stacks of a running rank, on request of the agent of its host, even if the rank hangs.

A rank that was started with LOWTIDE_PROGRESS_FILE=PATH in its environment claims PATH when `lowtide` is imported. From
then on a handler in C, which needs no GIL, answers `SIGNAL`: it writes the stacks of all threads to PATH.stacks, the
innermost call first.

The agent chooses a new PATH for every start of a rank, and may at any time call

    collect_stacks({rank: path for the ranks of this host})  ->  {rank: text}

which takes about a tenth of a second, and at most `timeout_seconds` if a rank does not answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Mapping

VARIABLE = "LOWTIDE_PROGRESS_FILE"
SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - (3 if hasattr(signal, "SIGRTMAX") else 0)
"""A real-time signal that neither torch nor schedulers use; SIGUSR2 if the system has no real-time signals."""

SUFFIX = ".stacks"
_POLL_SECONDS = 0.03
_PR_SET_PDEATHSIG = 1


def claim(path: str) -> bool:
    """Make this process the rank of `path`. Returns False if another process has claimed it, as the parent.

    May be called again. Raises OSError if no file can be made there.
    """
    stacks, how = path + SUFFIX, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    try:
        # O_EXCL: the variable is inherited, so a child of the rank finds the path claimed.
        handle = os.open(stacks, os.O_CREAT | os.O_EXCL | how, 0o600)
    except FileExistsError:
        if owner(path) != os.getpid():
            return False
        if not _catches_signal(os.getpid()):  # the rank has executed another program, without the handler
            faulthandler.register(SIGNAL, file=os.open(stacks, how), all_threads=True)
        return True
    # The handler keeps `handle` as long as the process lives. The next line tells readers that the handler exists: the
    # signal would end a process without it.
    faulthandler.register(SIGNAL, file=handle, all_threads=True)
    try:
        os.write(handle, f"{os.getpid()} {_started(os.getpid())}\n".encode())
    except OSError:
        # Else the next call would find the path claimed, by nobody.
        faulthandler.unregister(SIGNAL)
        os.close(handle)
        os.unlink(stacks)
        raise
    return True


def claim_as_asked() -> None:
    """Claim the path in the environment, when `lowtide` is imported. Ignores errors.

    `lowtide.initialize` tries again, and warns.
    """
    with contextlib.suppress(OSError):
        claim(os.environ[VARIABLE])


def owner(path: str) -> int | None:
    """Return the process that has claimed `path`. None if nobody has, or if it has ended."""
    try:
        with open(path + SUFFIX, encoding="ascii") as file:
            words = file.readline().split()
    except OSError:
        return None
    if len(words) != 2 or _started(int(words[0])) != words[1]:  # the system may have reused the pid
        return None
    return int(words[0])


def request_stack(path: str) -> int | None:
    """Ask the rank of `path` for its stacks. Returns the offset for `read_stack`, or None if there is no process."""
    pid = owner(path)
    if pid is None or not _catches_signal(pid):
        return None
    # Before the signal: the answer may be written at once.
    offset = os.stat(path + SUFFIX).st_size
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        return None
    return offset


def read_stack(path: str, offset: int) -> str:
    """Return the text that the rank has written since `request_stack`: nothing yet, a part, or all."""
    with open(path + SUFFIX, encoding="ascii", errors="replace") as file:
        file.seek(offset)
        return file.read()


def collect_stacks(paths: Mapping[int, str], timeout_seconds: float = 2.0) -> dict[int, str]:
    """Collect the stacks of all threads of several ranks. For a silent rank, the text says why it is silent.

    paths: by rank, for the ranks of this host.
    """
    found = dict.fromkeys(paths, "(no stack: the process has ended, or it has not imported lowtide)")
    offsets = {rank: offset for rank, path in paths.items() if (offset := request_stack(path)) is not None}
    deadline = time.monotonic() + timeout_seconds
    waiting, before = set(offsets), dict.fromkeys(offsets, "")
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        for rank in sorted(waiting):
            now = read_stack(paths[rank], offsets[rank])
            if now and now == before[rank]:  # the text has no end mark: it is complete if it stops growing
                found[rank] = now.rstrip("\n")
                waiting.discard(rank)
            before[rank] = now
    for rank in waiting:
        found[rank] = before[rank].rstrip("\n") or _why_silent(owner(paths[rank]), timeout_seconds)
    return found


def remove(paths: Iterable[str]) -> None:
    """Delete the files of ranks that have ended."""
    for path in paths:
        for name in (path, path + SUFFIX):
            if os.path.exists(name):
                os.unlink(name)


def _why_silent(pid: int | None, timeout_seconds: float) -> str:
    if pid is None:
        return "(no stack: the process has ended)"
    meaning = {"T": "it is stopped, by SIGSTOP or a debugger", "D": "it waits in the kernel, for a disk or a driver"}
    state = meaning.get(_stat(pid)[0], "it does not handle signals")
    return f"(no stack: process {pid} did not answer in {timeout_seconds:g} s; {state})"


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, or an empty state."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The name of the program comes before it, in parentheses, and may contain spaces and parentheses.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return [""]


def _catches_signal(pid: int) -> bool:
    """Return whether a process has a handler for SIGNAL, which would else end it: an exec ends handlers."""
    caught = ""  # unknown: the system has no /proc, or not this line in it (gVisor)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "")
    return not caught or bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def _started(pid: int) -> str:
    """Return the start time of a process in ticks since boot; "" if it has ended, "alive" if the time is unknown."""
    fields = _stat(pid)
    # starttime, field 22 of proc(5): this list begins with field 3.
    if len(fields) > 19:
        return fields[19]
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "alive"


def age_seconds(pid: int) -> float:
    """Return the time since a process started; 0 if it is unknown."""
    ticks = _started(pid)
    if not ticks.isdigit():
        return 0.0
    # The kernel counts the start in ticks of this clock, suspended time included.
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK"))


def end_with_parent() -> None:
    """Let Linux send SIGTERM to this process when its parent ends. For `preexec_fn`."""
    with contextlib.suppress(OSError, AttributeError):
        # Linux keeps this setting over exec.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
