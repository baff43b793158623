"""The processes below this one: bound to its life, found again when orphaned, and ended together."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies, so that none is lost. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn` with which a child is killed as soon as this process is gone, however it went. Linux only."""
    parent = os.getpid()

    def bind() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

    return bind


def kill_descendants() -> list[psutil.Process]:
    """Sends SIGKILL to every process below this one, and gives those that it met.

    Repeats until none is left that was not seen before: a process may start another while it is being ended.
    """
    met: dict[int, psutil.Process] = {}
    while True:
        new = [child for child in psutil.Process().children(recursive=True) if child.pid not in met]
        if not new:
            return list(met.values())
        for child in new:
            met[child.pid] = child
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue


def reap_all(timeout_seconds: float) -> None:
    """Takes the exit status of every child, adopted ones too, until none is left or the time is over."""
    deadline = time.monotonic() + timeout_seconds
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
