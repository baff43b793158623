"""A process above an agent that outlives it, so that nothing of the job does.

[Note: the guard]
An agent kills what its ranks have left when the launcher is gone. When the agent itself is killed, the kernel kills its
ranks (parent-death signal), but not what they have started in sessions of their own. Such orphans go to the nearest
ancestor that adopts them: the guard, which kills them, and removes the records of the ranks. It does nothing else, so
nothing else can end it; should it be killed all the same, the agent notices by a pipe and ends the job on its host.
"""

import contextlib
import os
import select
import signal
from collections.abc import Callable, Sequence

from ...watch.record import remove_dead_folders
from .process_tree import adopt_orphans, be_called, forked, kill_descendants, reap_all

KILLED_SECONDS = 5.0  # how long the kernel may take to remove a killed process
_TICK_SECONDS = 1.0


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
