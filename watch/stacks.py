"""The Python stacks of a running rank, when the agent of its host asks: also of one that hangs, and whatever it does.

A rank that was started with LOWTIDE_PROGRESS_FILE=PATH in its environment claims PATH when `lowtide` is imported. From
then on it answers `SIGNAL` from a handler in C, without the interpreter's lock, by writing the stacks of all its
threads to PATH.stacks, the innermost call first.

The agent chooses a PATH that does not exist, anew for every start of a rank, and may at any time call

    collect_stacks({rank: path for the ranks of this host})  ->  {rank: text}

which takes about a tenth of a second, and at most `timeout_seconds` where a rank does not answer. `end_with_parent` is
for a process that nobody else would end.
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
"""A real-time signal, which neither torch nor schedulers send or take; SIGUSR2 where a system has none."""

SUFFIX = ".stacks"
_POLL_SECONDS = 0.03
_PR_SET_PDEATHSIG = 1


def claim(path: str) -> bool:
    """Makes this process the rank that `path` is for; False where another one is, such as the parent of this one.

    May be called again. Raises OSError where no file can be made there.
    """
    stacks = path + SUFFIX
    try:
        handle = os.open(stacks, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return owner(path) == os.getpid()
    # The handler holds `handle` for as long as the process lives. What asks for stacks looks for the line that follows,
    # because the signal would end a process without the handler.
    faulthandler.register(SIGNAL, file=handle, all_threads=True)
    os.write(handle, f"{os.getpid()} {_started(os.getpid())}\n".encode())
    return True


def claim_as_asked() -> None:
    """For the import of `lowtide`: `claim` of what the environment names. Without a word where that fails.

    `lowtide.initialize` tries again, and warns.
    """
    with contextlib.suppress(OSError):
        claim(os.environ[VARIABLE])


def owner(path: str) -> int | None:
    """The process that has claimed `path`; None where none has, or it is gone."""
    try:
        with open(path + SUFFIX, encoding="ascii") as file:
            words = file.readline().split()
    except OSError:
        return None
    if len(words) != 2 or _started(int(words[0])) != words[1]:  # the number may be another process's by now
        return None
    return int(words[0])


def request_stack(path: str) -> int | None:
    """Asks the rank of `path` for its stacks. Gives what `read_stack` needs to know; None where no process answers."""
    pid = owner(path)
    if pid is None:
        return None
    offset = os.stat(path + SUFFIX).st_size
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        return None
    return offset


def read_stack(path: str, offset: int) -> str:
    """What the rank has written since `request_stack` gave `offset`: nothing yet, a part or the whole."""
    with open(path + SUFFIX, encoding="ascii", errors="replace") as file:
        file.seek(offset)
        return file.read()


def collect_stacks(paths: Mapping[int, str], timeout_seconds: float = 2.0) -> dict[int, str]:
    """The stacks of all threads of each rank, asked at once; for a rank that gives none, a sentence that says why.

    paths: of the ranks of this host, by rank.
    """
    found = dict.fromkeys(paths, "(no stack: the process has ended, or it has not imported lowtide)")
    offsets = {rank: offset for rank, path in paths.items() if (offset := request_stack(path)) is not None}
    deadline = time.monotonic() + timeout_seconds
    waiting, before = set(offsets), dict.fromkeys(offsets, "")
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        for rank in sorted(waiting):
            now = read_stack(paths[rank], offsets[rank])
            if now and now == before[rank]:  # nothing marks the end of it
                found[rank] = now.rstrip("\n")
                waiting.discard(rank)
            before[rank] = now
    for rank in waiting:
        found[rank] = before[rank].rstrip("\n") or _why_silent(owner(paths[rank]), timeout_seconds)
    return found


def remove(paths: Iterable[str]) -> None:
    """Deletes the files of ranks that have ended."""
    for path in paths:
        for name in (path, path + SUFFIX):
            if os.path.exists(name):
                os.unlink(name)


def _why_silent(pid: int | None, timeout_seconds: float) -> str:
    if pid is None:
        return "(no stack: the process has ended)"
    meaning = {"T": "it is stopped, by SIGSTOP or a debugger", "D": "it waits in the kernel, for a disk or a driver"}
    state = meaning.get(_stat(pid)[0], "it does not come to its signals")
    return f"(no stack: process {pid} did not answer in {timeout_seconds:g} s; {state})"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; without any, an empty state."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return [""]


def _started(pid: int) -> str:
    """When a process was started, in ticks since the boot; "" where there is none, "alive" where that is not told."""
    fields = _stat(pid)
    if len(fields) > 19:
        return fields[19]
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "alive"


def end_with_parent() -> None:
    """Where the parent is killed, this process is told to stop, on Linux. For `preexec_fn`."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
