"""Starts the ranks of one job, each a fresh process, waits for them and gathers what they wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

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


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
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


def _wait(processes: list[subprocess.Popen[bytes]], logs: list[Path], timeout_seconds: float) -> None:
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
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                ranked = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with log.open("wb") as stream:
                    command = [python, str(worker), str(description)]
                    processes.append(
                        subprocess.Popen(command, env=ranked, stdout=stream, stderr=stream, start_new_session=True)
                    )
            _wait(processes, logs, timeout_seconds)
        finally:
            _stop(processes)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_processes)]
