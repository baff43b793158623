"""Starts the ranks of one job, each a fresh process, waits for them and gathers what they wrote.

In a rehearsal that is mostly their imports, so there they are copies of a process that has made them: `fork_ranks`.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from _memory import OVER_BUDGET_STATUS

# Settings of the C library's allocator for memory runs. `exact`: a block of 64 KiB or more has its own map, which goes
# back to the system when the block is freed, and the top of the heap goes back at once.
ALLOCATORS: dict[str, dict[str, str]] = {
    "glibc": {},
    "exact": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_MAX_": "1000000"},
}


class JobError(Exception):
    """A job did not end well; the text says why."""


class OverBudget(JobError):
    """A rank has stopped because the model needs more memory than the rank may take."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def environment_of(threads: int, allocator: str | None, device: str = "cpu") -> dict[str, str]:
    """Gives the environment of every rank: this process's own, but for the allocator, the threads and the devices."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    return {
        **inherited,
        **(ALLOCATORS[allocator] if allocator else {}),
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }


class _Forks:
    """A copy of this process, which starts and watches ranks that are copies of itself."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        if os.fork() == 0:
            self._pipe.close()
            _serve(theirs)
        theirs.close()

    def start(self, command: list[str], environment: dict[str, str], log: Path) -> int:
        """Gives the process's number."""
        self._pipe.send((command, environment, log))
        pid: int = self._pipe.recv()
        return pid

    def poll(self, pid: int) -> int | None:
        """Its status, once, or None while it runs."""
        self._pipe.send(pid)
        status: int | None = self._pipe.recv()
        return status


def _serve(pipe: Connection) -> NoReturn:
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            os._exit(0)
        if isinstance(asked, int):
            pid, ended = os.waitpid(asked, os.WNOHANG)
            pipe.send(os.waitstatus_to_exitcode(ended) if pid else None)
            continue
        pid = os.fork()
        if pid == 0:
            pipe.close()
            _run_script(*asked)
        os.setpgid(pid, pid)
        pipe.send(pid)


def _run_script(command: list[str], environment: dict[str, str], log: Path) -> NoReturn:
    """What Python does with a command, a script and its arguments."""
    with log.open("wb") as said:
        for descriptor in (1, 2):
            os.dup2(said.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class _Forked:
    """A rank as `subprocess.Popen` has it."""

    def __init__(self, forks: _Forks, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._forks = forks
        self._status: int | None = None
        self.pid = forks.start(command, environment, log)

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._forks.poll(self.pid)
        return self._status

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


Process = subprocess.Popen[bytes] | _Forked
_forks: list[_Forks] = []  # one at most


def fork_ranks() -> None:
    """From now on ranks have what this process has imported so far, and the allocator's settings that it has."""
    _forks.append(_Forks())


def _start(python: str, worker: Path, description: Path, environment: dict[str, str], log: Path) -> Process:
    command = [str(worker), str(description)]
    if _forks:
        return _Forked(_forks[-1], command, environment, log)
    with log.open("wb") as said:
        return subprocess.Popen([python, *command], env=environment, stdout=said, stderr=said, start_new_session=True)


def _stop(processes: list[Process]) -> None:
    """Ends what still runs: each rank leads a process group of its own."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(log: Path) -> str:
    """Gives the last line that a failed rank said, which names the error in a Python traceback."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.split(":")[0].split("(")[0].endswith(("Error", "Exception", "Exit"))]
    return (errors or lines or ["no output"])[-1]


def _wait(processes: list[Process], logs: list[Path], timeout_seconds: float) -> None:
    """Waits for all ranks; raises JobError as soon as one fails or the time is over."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        codes = [process.poll() for process in processes]
        if OVER_BUDGET_STATUS in codes:  # first: the others fail too, since they lose this one
            raise OverBudget(f"rank {codes.index(OVER_BUDGET_STATUS)} needs more memory than it may take")
        for rank, code in enumerate(codes):
            if code:
                raise JobError(f"rank {rank} ended with status {code}: {_reason(logs[rank])}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise JobError(f"not done after {timeout_seconds:.0f} s (--timeout); ranks {_unfinished(codes)} still ran")
        time.sleep(0.05)


def _unfinished(codes: list[int | None]) -> list[int]:
    return [rank for rank, code in enumerate(codes) if code is None]


def run_ranks(
    worker: Path,
    job: dict[str, Any],
    num_processes: int,
    python: str,
    environment: dict[str, str],
    timeout_seconds: float,
) -> list[dict[str, Any]]:
    """Runs the worker once for each rank, with the job as its JSON file; gives what each rank wrote beside that.

    Raises JobError when a rank fails or the time is over, OverBudget when one needs too much memory; no process is
    left behind.
    """
    environment = environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        description = folder / "job.json"
        description.write_text(json.dumps(job))
        logs = [folder / f"rank{rank}.log" for rank in range(num_processes)]
        processes: list[Process] = []
        try:
            for rank, log in enumerate(logs):
                ranked = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(_start(python, worker, description, ranked, log))
            _wait(processes, logs, timeout_seconds)
        finally:
            _stop(processes)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_processes)]
