"""Starting `lowtide launch` on one of the hosts of `network.py`, and watching what becomes of it on all of them."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.launch.jobs import LAUNCH
from tests.launch.network import Network
from tests.launch.virtual_host import main_process

HANG_SECONDS = 50.0  # a job of these tests takes seconds
STARTED_SECONDS = 60.0  # on a machine that is busy with other things, ranks that import torch take their time


@dataclass(frozen=True)
class Result:
    """How a launcher ended. status: as a shell has it, 128 + n for a signal. seconds: since its start."""

    status: int
    out: str
    err: str
    seconds: float


class HostsJob:
    """`lowtide launch OPTIONS script.py ARGUMENTS` on host `at`, where `source` is the text of the script.

    The script's folder is `folder`, which all hosts share, and the launcher's current one.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        source: str,
        *options: str,
        at: str = "login",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        script = folder / "script.py"
        script.write_text(source, encoding="utf-8")
        command = [*LAUNCH, *options, str(script), *arguments]
        self.network, self.folder = network, folder
        self._started = time.monotonic()
        self._process = network[at].popen(
            command,
            environment,
            folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.launcher = main_process(self._process)

    def finish(self, timeout: float = HANG_SECONDS) -> Result:
        """Waits for the launcher's end; what hangs is named, and is killed with its hosts."""
        try:
            out, err = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            hanging = self.processes()
            for process in hanging:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            out, err = self._process.communicate()
            raise AssertionError(
                f"the job did not end in {timeout:g} s; these hang: {hanging}\nstdout:\n{out}\nstderr:\n{err}"
            ) from None
        status = self._process.returncode
        return Result(128 - status if status < 0 else status, out, err, time.monotonic() - self._started)

    def wait_for_files(self, *names: str) -> None:
        """Returns when the ranks have made all these files."""
        self.wait_for(lambda: all((self.folder / name).exists() for name in names), f"no {names}")

    def wait_for(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Returns when the condition holds; fails after a while, or when the launcher ends without it."""
        deadline = time.monotonic() + STARTED_SECONDS
        while not condition():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise AssertionError(f"{otherwise}; {self.finish(1)}")
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """A signal to the launcher alone."""
        self.launcher.send_signal(number)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on any of the hosts, zombies too."""
        return [process for host in self.network.hosts.values() for process in host.processes()]

    def wait_until_gone(self, limit: float = 30.0, besides: Sequence[psutil.Process] = ()) -> None:
        """Returns when no process is left on any host; fails after `limit` seconds. besides: those that may stay."""
        start = time.monotonic()
        while left := [process for process in self.processes() if process not in besides]:
            seconds = time.monotonic() - start
            if seconds > limit:
                raise AssertionError(f"after {seconds:.1f} s these are left: {list(map(described, left))}")
            time.sleep(0.05)

    def rank_process(self, rank: int) -> psutil.Process:
        """The process of a rank, found by its environment."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if environment.get("RANK") == str(rank) and "script.py" in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"there is no rank {rank} among {[described(process) for process in self.processes()]}")


def described(process: psutil.Process) -> str:
    """Process id, state and command."""
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline()) or process.name()}"[:160]
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"
