"""Starts one job, one fresh process a rank, waits for it and gathers what its ranks wrote."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _contenders import Contender
from _memory import OVER_BUDGET_STATUS

WORKER = Path(__file__).with_name("_worker.py")

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


@dataclass(frozen=True)
class Work:
    """What every contender does alike."""

    size: str
    ranks: int
    threads: int
    microbatch: int
    warmup: int
    steps: int
    tied: bool
    timeout_seconds: float
    text_file: str = argparse.__file__  # real text that does not change in a run; every interpreter reads this one


@dataclass
class JobResult:
    """What one job gave; bytes are the maximum over its ranks, 0 in timed runs."""

    losses: list[float]  # of the global batch, every step
    seconds: list[float]  # of the slowest rank, every step, warm-up left out
    peak_bytes: int = 0
    rest_bytes: int = 0
    baseline_bytes: int = 0
    wall_seconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        """The median step."""
        return statistics.median(self.seconds)


def _free_port() -> int:
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


def _gathered(found: list[dict[str, Any]], warmup: int, wall_seconds: float) -> JobResult:
    return JobResult(
        losses=[statistics.fmean(step) for step in zip(*(one["losses"] for one in found), strict=True)],
        seconds=[max(step) for step in zip(*(one["seconds"] for one in found), strict=True)][warmup:],
        peak_bytes=max(one["peak_bytes"] or 0 for one in found),
        rest_bytes=max(one["rest_bytes"] or 0 for one in found),
        baseline_bytes=max(one["baseline_bytes"] or 0 for one in found),
        wall_seconds=wall_seconds,
    )


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
    environment = environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
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


def run_job(contender: Contender, work: Work, python: str, allocator: str | None = None) -> JobResult:
    """Runs one job from start to end; with an `allocator` it is a memory run, else a timed one.

    Raises JobError when a rank fails or the time is over; no process is left behind.
    """
    started = time.monotonic()
    job = {**asdict(work), **contender.as_dict(), "allocator": allocator, "global_rows": work.ranks * work.microbatch}
    environment, num_processes = environment_of(work.threads, allocator), contender.num_processes(work.ranks)
    found = run_ranks(WORKER, job, num_processes, python, environment, work.timeout_seconds)
    return _gathered(found, work.warmup, time.monotonic() - started)
