"""The process that has the store of a job of islands, as the agent of the first host sees it."""

import contextlib
import os
import subprocess
import sys

from .process_tree import die_with_parent


class StoreKeeper:
    """Starts `lowtide.comm.keeper`, which outlives every rank, and ends with the agent. Raises OSError."""

    def __init__(self, port: int, is_local: bool, identity: str) -> None:
        command = [sys.executable, "-P", "-m", "lowtide.comm.keeper", str(port), "local" if is_local else "any"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "LOWTIDE_JOB_ID": identity},
            process_group=0,
            preexec_fn=die_with_parent(),  # no other thread runs in this process
        )
        self._process.returncode = 0  # it is reaped with the ranks, not by Popen

    def bury(self, island: int, why: str) -> None:
        """Whoever waits for that island is told."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: the ranks find the store gone
            self._process.stdin.write(f"{island} {' '.join(why.split())}\n".encode())
            self._process.stdin.flush()
