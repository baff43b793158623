"""Kill the remaining processes of a job on a host without living agent and guard.

    python -P -m lowtide.launch.agent.orphans IDENTITY

kills every process with the job's LOWTIDE_JOB_ID in its environment, anywhere in the process tree. The launcher runs it
by a second connection to the host when it has lost the first: see `Sweeps`. It cannot find processes with another
environment (`env -i`), or of another user. Linux only.
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
MAGIC = "=== lowtide orphans ==="  # starts the line of the answer; a remote shell may print lines before
_SECONDS = 2.0
_POLL_SECONDS = 0.02
_CLEAR_LOOKS = 2  # during its exec a process has no environment for a moment


def kill_orphans(identity: str, seconds: float = _SECONDS) -> dict[int, str]:
    """Send SIGKILL to all processes of the job until none is left or the time is over; return {id: name} of them."""
    import psutil  # see [Note: psutil is imported late] in process_tree.py: the launcher imports this module

    met: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    num_clear = 0
    while num_clear < _CLEAR_LOOKS:
        found = _processes_of(identity)
        num_clear = 0 if found else num_clear + 1
        for process in found:
            with contextlib.suppress(psutil.Error):  # it has ended already
                met.setdefault(process.pid, process.name())
                process.kill()
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return met


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line above: print MAGIC and the killed processes, and return 0."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or not arguments[0]:  # no job has an empty identity
        print(f"lowtide orphans: expected the identity of a job, found {list(arguments)}", file=sys.stderr)
        return 2
    met = kill_orphans(arguments[0])
    # With guard and agent gone, nothing else removes the records of their ranks.
    remove_dead_folders()
    print(MAGIC, ", ".join(f"{name} (process {pid})" for pid, name in met.items()), flush=True)
    return 0


def _processes_of(identity: str) -> "list[psutil.Process]":
    """Return the job's processes. Zombies and foreign processes have no readable environment."""
    import psutil

    found = psutil.process_iter(["environ"])
    return [p for p in found if (p.info["environ"] or {}).get(VARIABLE) == identity and p.pid != os.getpid()]


if __name__ == "__main__":
    sys.exit(main())
