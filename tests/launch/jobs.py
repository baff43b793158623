"""Starting `lowtide launch` in a process of its own, here or on hosts, and looking for what it leaves behind."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.kit.ranks import slowness
from tests.launch.network import Network, main_process

LAUNCH = [sys.executable, "-c", "import sys; from lowtide.bin.main import main; sys.exit(main())", "launch"]
STARTED_SECONDS = 120.0  # on a machine that is busy with other things, ranks that import torch take their time


class Result(NamedTuple):
    """How a launcher ended. status: as a shell has it, 128 + n for a signal."""

    status: int
    out: str
    err: str


class Job:
    """`lowtide launch OPTIONS script.py ARGUMENTS`, where `source` is the text of the script, in its folder.

    A mark in the environment tells its processes from others.
    """

    hang_seconds = 90.0

    def __init__(
        self,
        folder: Path,
        source: str,
        *options: str,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        script = folder / "script.py"
        script.write_text(source, encoding="utf-8")
        self.process = self._start([*LAUNCH, *options, str(script), *arguments], dict(variables or {}))

    @property
    def launcher(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def finish(self, timeout: float | None = None) -> Result:
        """Waits for the launcher's end, at which no process of the job is left; what hangs is killed and named."""
        result = self.end(timeout)
        self.wait_until_gone(0.0)
        return result

    def end(self, timeout: float | None = None) -> Result:
        """As `finish`, but others may be left."""
        limit = (timeout or self.hang_seconds) * slowness()
        try:
            out, err = self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            hanging = [described(process) for process in self.processes()]
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            out, err = self.process.communicate()
            text = f"the job did not end in {limit:g} s; these hang: {hanging}\nstdout:\n{out}\nstderr:\n{err}"
            raise AssertionError(text) from None
        status = self.process.returncode
        return Result(128 - status if status < 0 else status, out, err)

    def wait_for_files(self, *names: str) -> None:
        """Returns when the ranks have made all these files."""
        self.wait_for(lambda: all((self.folder / name).exists() for name in names), f"no {names}")

    def wait_for(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Returns when the condition holds; fails after a while, or when the launcher ends without it."""
        deadline = time.monotonic() + STARTED_SECONDS
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"{otherwise}; {self.end(1)}")
            time.sleep(0.02)

    def wait_until_gone(self, limit: float) -> None:
        """Returns when no process of the job is left; fails after `limit` seconds of an idle machine."""
        deadline = time.monotonic() + limit * slowness()
        while left := self.processes():
            if time.monotonic() > deadline:
                raise AssertionError(f"after {limit:g} s these are left: {list(map(described, left))}")
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """Those of the job that are alive, the launcher included."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _start(self, command: list[str], variables: dict[str, str]) -> "subprocess.Popen[str]":
        self._mark = f"LOWTIDE_TEST_{uuid.uuid4().hex}"
        unset = {"OMP_NUM_THREADS", "RANK", "WORLD_SIZE"}
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        environment = {**inherited, **variables, self._mark: "1"}
        return subprocess.Popen(command, **PIPES, text=True, cwd=self.folder, env=environment)

    def _is_ours(self, process: psutil.Process) -> bool:
        """Zombies are not: they have no environment. It is asked of every process of the machine, so without psutil."""
        try:
            return f"{self._mark}=1".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            return False


class HostsJob(Job):
    """The launcher runs on host `at` of a network. Its folder is on all hosts; all processes on them are the job's."""

    hang_seconds = 120.0

    def __init__(
        self, network: Network, folder: Path, source: str, *options: str, at: str = "login", **given: Any
    ) -> None:
        self.network, self._at = network, at
        super().__init__(folder, source, *options, **given)
        self._launcher = main_process(self.process)

    @property
    def launcher(self) -> psutil.Process:
        return self._launcher

    def processes(self) -> list[psutil.Process]:
        """Zombies too."""
        return [process for host in self.network.hosts.values() for process in host.processes()]

    def agents(self, host: str) -> list[psutil.Process]:
        """The agent and its guard on a host, the outer one first."""
        names = ["lowtide guard", "lowtide agent"]
        found = [process for process in self.network[host].processes() if process.name() in names]
        return sorted(found, key=lambda process: names.index(process.name()))

    def _start(self, command: list[str], variables: dict[str, str]) -> "subprocess.Popen[str]":
        return self.network[self._at].popen(command, variables, self.folder, **PIPES)


PIPES: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def described(process: psutil.Process) -> str:
    """Process id, state and command."""
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline()) or process.name()}"[:160]
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"
