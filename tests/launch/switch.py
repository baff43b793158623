"""The network between the hosts of `network.py`, and the processes that it is made of."""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
START_SECONDS = 20.0


class Switch:
    """A bridge in a network namespace of its own. folder: takes what the processes that are spawned say."""

    def __init__(self, folder: Path) -> None:
        self._output = (folder / "output").open("w+", encoding="utf-8")
        self._process = self.spawn(["unshare", "--net", "sleep", "infinity"])
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + START_SECONDS
        while os.readlink(f"/proc/{self._process.pid}/ns/net") == own:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"no network namespace was made: {self.said()}")
            time.sleep(0.005)
        self.run("ip", "link", "add", "switch", "type", "bridge")
        self.run("ip", "link", "set", "switch", "up")

    def run(self, *command: str) -> None:
        """Runs a command in the switch's network; raises RuntimeError if it fails."""
        done = run(["nsenter", "--target", str(self._process.pid), "--net", *command])
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")

    def spawn(self, command: Sequence[str], **how: Any) -> "subprocess.Popen[str]":
        """Starts a process that ends with this one."""
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *command],
            text=True,
            stderr=self._output,
            env=os.environ | {"PATH": SYSTEM_PATH},
            start_new_session=True,
            **how,
        )

    def said(self) -> str:
        """What the spawned processes have written to stderr."""
        return Path(self._output.name).read_text(encoding="utf-8")

    def close(self) -> None:
        """Ends the network."""
        self._process.kill()
        self._process.wait()
        self._output.close()


def find_program(name: str) -> str | None:
    """Its path, also where only the system's administrator would look."""
    return shutil.which(name, path=SYSTEM_PATH)


def run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Runs a system program to its end, and keeps what it says."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
        env=os.environ | {"PATH": SYSTEM_PATH},
    )
