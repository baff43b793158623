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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _contenders import Contender

WORKER = Path(__file__).with_name("_worker.py")

# Settings of the C library's allocator for memory runs. `exact`: a block of 64 KiB or more has its own map, which goes
# back to the system when the block is freed, and the top of the heap goes back at once.
ALLOCATORS: dict[str, dict[str, str]] = {
    "glibc": {},
    "exact": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_MAX_": "1000000"},
}


class JobError(Exception):
    """A job did not end well; the text says why."""


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
    wall_seconds: float = field(default=0.0)

    @property
    def step_seconds(self) -> float:
        """The median step."""
        return statistics.median(self.seconds)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _environment(work: Work, allocator: str | None) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    threads = str(work.threads)
    return {
        **inherited,
        **(ALLOCATORS[allocator] if allocator else {}),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "CUDA_VISIBLE_DEVICES": "",
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


def _gather(folder: Path, num_processes: int, warmup: int) -> JobResult:
    found: list[dict[str, Any]] = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(num_processes)]
    return JobResult(
        losses=[statistics.fmean(step) for step in zip(*(one["losses"] for one in found), strict=True)],
        seconds=[max(step) for step in zip(*(one["seconds"] for one in found), strict=True)][warmup:],
        peak_bytes=max(one["peak_bytes"] or 0 for one in found),
        rest_bytes=max(one["rest_bytes"] or 0 for one in found),
        baseline_bytes=max(one["baseline_bytes"] or 0 for one in found),
    )


def run_job(contender: Contender, work: Work, python: str, allocator: str | None = None) -> JobResult:
    """Runs one job from start to end; with an `allocator` it is a memory run, else a timed one.

    Raises JobError when a rank fails or the time is over; no process is left behind.
    """
    started = time.monotonic()
    num_processes = contender.num_processes(work.ranks)
    job = {**asdict(work), **contender.as_dict(), "allocator": allocator, "global_rows": work.ranks * work.microbatch}
    environment = _environment(work, allocator)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(num_processes)}
    environment |= {"LOCAL_WORLD_SIZE": str(num_processes)}
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        folder = Path(name)
        description = folder / "job.json"
        description.write_text(json.dumps(job))
        logs = [folder / f"rank{rank}.log" for rank in range(num_processes)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                ranked = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with log.open("wb") as stream:
                    command = [python, str(WORKER), str(description)]
                    processes.append(
                        subprocess.Popen(command, env=ranked, stdout=stream, stderr=stream, start_new_session=True)
                    )
            _wait(processes, logs, work.timeout_seconds)
        finally:
            _stop(processes)
        result = _gather(folder, num_processes, work.warmup)
    result.wall_seconds = time.monotonic() - started
    return result
