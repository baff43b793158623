"""Fork processes, bind them to this process's life, adopt orphans, and kill descendants.

[Note: psutil is imported late]
A job that ends normally leaves nothing to kill, and the import would take a tenth of the launcher's start.

[Note: the guard]
If the launcher is gone, the agent kills all remaining processes of its ranks. If the agent itself is killed, the kernel
kills its ranks (parent-death signal), but not their children in other sessions. Those are adopted by the nearest
subreaper, the guard, which kills them and removes the ranks' records. It does nothing else, so that nothing else can
end it. If it is killed, the agent notices by a pipe and ends the job on its host.
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

KILLED_SECONDS = 5.0  # for the kernel to remove a killed process
_TICK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
# Loaded here, not in `bind`: between fork and exec the loader's lock may be held by a thread that no longer exists.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_FAULT_STATUS = 70  # exit status of a child that raised an exception
_POLL_SECONDS = 0.002


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent dies, so that none is lost. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def be_called(name: str) -> None:
    """Set the name of this process in ps, top and killall, at most 15 bytes. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_parent() -> Callable[[], None]:
    """Return a `preexec_fn` that has a child killed when this process ends, in any way. Linux only."""
    parent = os.getpid()

    def bind() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

    return bind


def forked(work: Callable[[], int], kept: Collection[int]) -> int:
    """Run `work` in a forked child, whose exit status it returns, and return the child's process id.

    kept: open descriptors of the child besides stdin, stdout and stderr. The child ignores signals until it sets
    handlers. Call it in a process with a single thread.
    """
    assert threading.active_count() == 1, threading.enumerate()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # the child would write buffered text a second time
                stream.flush()
    # Until the child sets handlers, a signal to it would wake the parent's loop: the wakeup pipe is shared.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    status = _FAULT_STATUS
    try:
        gc.freeze()  # collecting the parent's objects here could close a descriptor number that is now ours
        # Before the pipe is closed: its number may be reused, and signals would write into the new file.
        signal.set_wakeup_fd(-1)
        # A copy of the parent's end of a channel would hide the parent's death from the peer.
        _close_all_but({0, 1, 2, *kept})
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Not SIG_IGN: ranks would inherit it through exec. A handler becomes the default action in a rank.
            signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        status = work()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # Not sys.exit: the parent's exit functions and buffers are copied here, and must not run twice.
        os._exit(status)


def reaped(pid: int, timeout_seconds: float) -> int | None:
    """Wait for a child, and return its exit status as Popen.returncode; None if it still runs after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)


def kill_descendants() -> None:
    """Send SIGKILL to every process below this one.

    Repeats until it finds no new process: a process may start another before it ends.
    """
    if not _has_children():
        return
    import psutil  # see [Note: psutil is imported late]

    # A killed process stays in the list until it is reaped, so known ids must not count as new.
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
    """Reap every child, also adopted ones, until none is left or the time is over."""
    deadline = time.monotonic() + timeout_seconds
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(_POLL_SECONDS)


def _has_children() -> bool:
    """Return whether this process has a child, alive or not. Without a child it has no descendant either."""
    if _LIBC is None:
        return True
    try:
        # WNOWAIT leaves the status of an ended rank for `HostRanks._reap`.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _close_all_but(kept: Collection[int]) -> None:
    for name in os.listdir("/dev/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing
                os.close(int(name))


def guarded(work: Callable[[int, int], int], private: Sequence[int], silence_seconds: float | None) -> int:
    """Run `work` in a child, and return its exit status when it and all its descendants are gone. [Note: the guard]

    work: takes a descriptor that closes with the guard, and a descriptor to write a byte to each second. Without a byte
    for `silence_seconds`, the child is killed. private: descriptors for the child alone.
    Needs a single thread.
    """
    # Nothing is ever written: the kernel closes the guard's end when the guard dies, and the agent reads the end.
    guard_alive, _held_by_guard = os.pipe()
    signs_of_life, written_by_work = os.pipe()
    be_called("lowtide guard")
    adopt_orphans()

    def be_agent() -> int:
        be_called("lowtide agent")
        adopt_orphans()
        return work(guard_alive, written_by_work)

    pid = forked(be_agent, (guard_alive, written_by_work, *private))
    # With a copy here, neither the launcher nor `_watch` would see the end of the agent.
    for fd in (guard_alive, written_by_work, *private):
        os.close(fd)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda number, frame: _pass_on(pid, number))
    # It returns when the agent's end of the pipe closes, because the agent has ended.
    _watch(pid, signs_of_life, silence_seconds)
    _, status = os.waitpid(pid, 0)
    # The kernel has given the agent's orphans to this process, the nearest subreaper.
    kill_descendants()
    reap_all(KILLED_SECONDS)
    remove_dead_folders()
    code = os.waitstatus_to_exitcode(status)
    # As a shell reports a signal. `LocalTransport.why_lost` reads it.
    return 128 - code if code < 0 else code


def _pass_on(pid: int, number: int) -> None:
    if number == signal.SIGTERM:  # the terminal sends SIGINT and SIGHUP to the launcher too
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
            # Ticks, not the clock: see [Note: silence] in channel.py.
            silent += _TICK_SECONDS
            # A second later than the launcher, so that the launcher reports the loss.
            if silence_seconds is not None and silent > silence_seconds + _TICK_SECONDS:
                # The id is still the agent's, also if this line runs again a second later: it is reaped after `_watch`.
                os.kill(pid, signal.SIGKILL)
