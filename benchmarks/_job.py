"""One training job of a contender, and what it gave."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _contenders import Contender
from _ranks import environment_of, run_ranks

WORKER = Path(__file__).with_name("_worker.py")


@dataclass(frozen=True)
class Work:
    """What every contender does alike."""

    size: str
    ranks: int
    threads: int
    microbatch: int
    accumulation: int
    clip: float
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


def _gathered(found: list[dict[str, Any]], warmup: int, wall_seconds: float) -> JobResult:
    return JobResult(
        losses=[statistics.fmean(step) for step in zip(*(one["losses"] for one in found), strict=True)],
        seconds=[max(step) for step in zip(*(one["seconds"] for one in found), strict=True)][warmup:],
        peak_bytes=max(one["peak_bytes"] or 0 for one in found),
        rest_bytes=max(one["rest_bytes"] or 0 for one in found),
        baseline_bytes=max(one["baseline_bytes"] or 0 for one in found),
        wall_seconds=wall_seconds,
    )


def run_job(contender: Contender, work: Work, python: str, allocator: str | None = None) -> JobResult:
    """Runs one job from start to end; with an `allocator` it is a memory run, else a timed one.

    Raises JobError when a rank fails or the time is over; no process is left behind.
    """
    started = time.monotonic()
    rows = work.ranks * work.microbatch * work.accumulation
    job = {**asdict(work), **contender.as_dict(), "allocator": allocator, "global_rows": rows}
    environment, num_processes = environment_of(work.threads, allocator), contender.num_processes(work.ranks)
    found = run_ranks(WORKER, job, num_processes, python, environment, work.timeout_seconds)
    return _gathered(found, work.warmup, time.monotonic() - started)
