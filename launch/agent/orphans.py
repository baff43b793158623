"""What a job has left on a host where neither its agent nor the guard above that lives any more.

    python -P -m lowtide.launch.agent.orphans IDENTITY

kills every process there that has the job's LOWTIDE_JOB_ID in its environment, wherever it has gone in the process
tree. The launcher starts this by a second way to the host when it has lost the first one; see `Sweeps`. What was
started with another environment (`env -i`), or belongs to another user, is not found. Linux only.
"""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...watch.record import remove_dead_folders

if TYPE_CHECKING:
    import psutil

VARIABLE = "LOWTIDE_JOB_ID"
MAGIC = "=== lowtide orphans ==="  # begins the one line of the answer; a remote shell may talk before
_SECONDS = 2.0
_POLL_SECONDS = 0.02
_CLEAR_LOOKS = 2  # a process in the middle of its exec has no environment, for a moment


def kill_orphans(identity: str, seconds: float = _SECONDS) -> dict[int, str]:
    """Sends SIGKILL to all processes of the job, until none is there or the time is over: id -> name of those met."""
    import psutil  # see [Note: psutil is imported late] in process_tree.py: the launcher imports this module

    met: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    num_clear = 0
    while num_clear < _CLEAR_LOOKS:
        found = _processes_of(identity)
        num_clear = 0 if found else num_clear + 1
        for process in found:
            with contextlib.suppress(psutil.Error):  # it has ended by itself
                met.setdefault(process.pid, process.name())
                process.kill()
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return met


def main(argv: Sequence[str] | None = None) -> int:
    """The command line above; prints MAGIC and the processes that it met, and gives 0."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or not arguments[0]:  # an empty one would be that of no job
        print(f"lowtide orphans: expected the identity of a job, found {list(arguments)}", file=sys.stderr)
        return 2
    met = kill_orphans(arguments[0])
    remove_dead_folders()
    print(MAGIC, ", ".join(f"{name} (process {pid})" for pid, name in met.items()), flush=True)
    return 0


def _processes_of(identity: str) -> "list[psutil.Process]":
    """Without those of other users, and zombies, which have no environment any more."""
    import psutil

    found = psutil.process_iter(["environ"])
    return [one for one in found if (one.info["environ"] or {}).get(VARIABLE) == identity and one.pid != os.getpid()]


if __name__ == "__main__":
    sys.exit(main())
