"""The processes below this one: forked, bound to its life, found again when orphaned, and ended together.

[Note: psutil is imported late]
A job that ends by itself leaves nothing to be killed, and the import would take a tenth of its launcher's start.

[Note: the guard]
An agent kills what its ranks have left when the launcher is gone. When the agent itself is killed, the kernel kills its
ranks (parent-death signal), but not what they have started in sessions of their own. Such orphans go to the nearest
ancestor that adopts them: the guard, which kills them, and removes the records of the ranks. It does nothing else, so
nothing else can end it; should it be killed all the same, the agent notices by a pipe and ends the job on its host.
"""

import contextlib
import ctypes
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence

from ...watch.record import remove_dead_folders

KILLED_SECONDS = 5.0  # how long the kernel may take to remove a killed process
_TICK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_FAULT_STATUS = 70  # of a child that ended with an exception
_POLL_SECONDS = 0.002


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies, so that none is lost. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def be_called(name: str) -> None:
    """How ps, top and killall name this process; at most 15 bytes. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn` with which a child is killed as soon as this process is gone, however it went. Linux only."""
    parent = os.getpid()

    def bind() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

    return bind


def forked(work: Callable[[], int], kept: Collection[int]) -> int:
    """Runs `work` in a child, whose exit status is what it gives, and comes back with the child's process id.

    kept: the descriptors besides stdin, stdout and stderr that the child has. Signals that reach the child do nothing
    until it has handlers of its own. To be called while no other thread runs.
    """
    assert threading.active_count() == 1, threading.enumerate()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # what is unwritten now, the child would write a second time
                stream.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    status = _FAULT_STATUS
    try:
        gc.freeze()  # an object of the parent that were collected here would close a descriptor that is ours by then
        signal.set_wakeup_fd(-1)
        _close_all_but({0, 1, 2, *kept})
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        status = work()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def reaped(pid: int, timeout_seconds: float) -> int | None:
    """The exit status of a child, as Popen.returncode has it, when it has ended; None: it runs on after that time."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)


def kill_descendants() -> None:
    """Sends SIGKILL to every process below this one.

    Repeats until none is left that was not seen before: a process may start another while it is being ended.
    """
    if not _has_children():
        return
    import psutil  # see [Note: psutil is imported late]

    met: set[int] = set()
    while True:
        new = [child for child in psutil.Process().children(recursive=True) if child.pid not in met]
        if not new:
            return
        for child in new:
            met.add(child.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def reap_all(timeout_seconds: float) -> None:
    """Takes the exit status of every child, adopted ones too, until none is left or the time is over."""
    deadline = time.monotonic() + timeout_seconds
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(_POLL_SECONDS)


def _has_children() -> bool:
    """Whether there is a child, alive or not; without one there is no descendant, where orphans are adopted."""
    if _LIBC is None:
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _close_all_but(kept: Collection[int]) -> None:
    for name in os.listdir("/dev/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(name))


def guarded(work: Callable[[int, int], int], private: Sequence[int], silence_seconds: float | None) -> int:
    """Runs `work` in a child and gives its exit status when it and all of its descendants are gone.

    work: takes a descriptor that ends with the guard, and one to which it writes a byte each second; after
    `silence_seconds` without one the child is killed. private: descriptors for the child alone. To be called while no
    other thread runs.
    """
    guard_alive, _held_by_guard = os.pipe()
    signs_of_life, written_by_work = os.pipe()
    be_called("lowtide guard")
    adopt_orphans()

    def be_agent() -> int:
        be_called("lowtide agent")
        adopt_orphans()
        return work(guard_alive, written_by_work)

    pid = forked(be_agent, (guard_alive, written_by_work, *private))
    for fd in (guard_alive, written_by_work, *private):
        os.close(fd)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda number, frame: _pass_on(pid, number))
    _watch(pid, signs_of_life, silence_seconds)
    _, status = os.waitpid(pid, 0)
    kill_descendants()
    reap_all(KILLED_SECONDS)
    remove_dead_folders()
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _pass_on(pid: int, number: int) -> None:
    if number == signal.SIGTERM:  # the others come from the terminal, which sends them to the launcher too
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _watch(pid: int, signs_of_life: int, silence_seconds: float | None) -> None:
    silent = 0.0
    while True:
        if select.select([signs_of_life], [], [], _TICK_SECONDS)[0]:
            silent = 0.0
            if not os.read(signs_of_life, 4096):
                return
        else:
            silent += _TICK_SECONDS
            # A second later than the launcher, which can say what has happened.
            if silence_seconds is not None and silent > silence_seconds + _TICK_SECONDS:
                os.kill(pid, signal.SIGKILL)
