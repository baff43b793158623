"""Starting `lowtide launch` in a process of its own, and looking for what it leaves behind."""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

LAUNCH = [sys.executable, "-c", "import sys; from lowtide.bin.main import main; sys.exit(main())", "launch"]
START_SECONDS = 60.0  # on a machine that is busy with other things, ranks that import torch take their time


class Job:
    """`lowtide launch OPTIONS SCRIPT ARGS` with a mark in its environment by which its processes are found."""

    def __init__(
        self,
        folder: Path,
        source: str,
        *options: str,
        arguments: tuple[str, ...] = (),
        variables: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        script = folder / "script.py"
        script.write_text(source)
        self.mark = f"LOWTIDE_TEST_{uuid.uuid4().hex}"
        unset = {"OMP_NUM_THREADS", "RANK", "WORLD_SIZE"}
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        self.process = subprocess.Popen(
            [*LAUNCH, *options, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**inherited, **(variables or {}), self.mark: "1"},
        )

    def finish(self, timeout: float = 30) -> tuple[int, str, str]:
        """Exit status, stdout and stderr; no process of the job is left."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self._end()
            raise
        assert self.survivors() == []
        return self.process.returncode, out, err

    def wait_for_files(self, *names: str) -> None:
        """Returns when the ranks have made all these files."""
        deadline = time.monotonic() + START_SECONDS
        while not all((self.folder / name).exists() for name in names):
            if time.monotonic() > deadline or self.process.poll() is not None:
                self._end()
                raise AssertionError(f"no {names}")
            time.sleep(0.02)

    def survivors(self, wait: float = 0.0) -> list[psutil.Process]:
        """The processes of the job that are alive after at most `wait` seconds, the launcher included."""
        deadline = time.monotonic() + wait
        while True:
            found = [process for process in psutil.process_iter() if self._is_ours(process)]
            if not found or time.monotonic() >= deadline:
                return found
            time.sleep(0.05)

    def _end(self) -> None:
        """So that a test that fails leaves no ranks that train on; they end with their launcher."""
        self.process.kill()
        self.process.communicate()

    def _is_ours(self, process: psutil.Process) -> bool:
        """Zombies are not: they have no environment. It is asked of every process of the machine, so without psutil."""
        try:
            return f"{self.mark}=1".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            return False
