"""One job of a contender over a pipeline, and what it gave."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _pipeline_contenders import PipelineContender
from _ranks import environment_of, run_ranks

WORKER = Path(__file__).with_name("_pipeline_worker.py")
Timeline = list[tuple[str, int, int, float, float]]  # (op, stage, microbatch, start, end)


@dataclass(frozen=True)
class PipelineWork:
    """What every contender does alike. sleeps: seconds of F, I and W of a rank's share; None for real work."""

    size: str
    ranks: int
    microbatches: int
    rows: int  # of a microbatch
    threads: int
    warmup: int
    steps: int
    sleeps: tuple[float, float, float] | None
    timeout_seconds: float


@dataclass
class PipelineResult:
    """What one job gave, warm-up left out of the seconds and timelines; bytes are the maximum over the ranks.

    timelines: step by step, by rank; empty for peers. predicted: makespan and bubble as the simulator has them for the
    sleeps that were asked for; predicted_as_timed: for the medians of what rank 0's actions and a message took.
    """

    losses: list[float]
    seconds: list[float]  # from the barrier before a step to the end of its last rank
    timelines: list[list[Timeline]]
    predicted: dict[str, float] | None
    predicted_as_timed: dict[str, float] | None
    peak_bytes: int
    baseline_bytes: int
    wall_seconds: float

    @property
    def step_seconds(self) -> float:
        """The median step."""
        return statistics.median(self.seconds)

    @property
    def timeline(self) -> list[Timeline]:
        """By rank, of the step with the median makespan (the shorter of the middle two)."""
        return sorted(self.timelines, key=makespan)[(len(self.timelines) - 1) // 2]


def makespan(timeline: list[Timeline]) -> float:
    """Seconds from the first start to the last end, of all ranks."""
    return max(end for row in timeline for *_, end in row) - min(start for row in timeline for *_, start, _ in row)


def bubble(timeline: list[Timeline]) -> float:
    """The share of all ranks' time in which they do no action, 0 to 1."""
    busy = sum(end - start for row in timeline for *_, start, end in row)
    return 1 - busy / (makespan(timeline) * len(timeline))


def run_pipeline_job(
    contender: PipelineContender, work: PipelineWork, python: str, allocator: str | None = None
) -> PipelineResult:
    """Runs one job from start to end; with an `allocator` it is a memory job, else a timed one.

    Raises JobError when a rank fails or the time is over; no process is left behind.
    """
    started = time.monotonic()
    job = {**asdict(work), "contender": contender.name, "allocator": allocator}
    environment = environment_of(work.threads, allocator)
    found = run_ranks(WORKER, job, work.ranks, python, environment, work.timeout_seconds)
    return _gathered(found, work, time.monotonic() - started)


def _gathered(found: list[dict[str, Any]], work: PipelineWork, wall_seconds: float) -> PipelineResult:
    def last_rank(step: int) -> float:
        """From the last rank that left the barrier."""
        starts: list[float] = [one["started"][step] for one in found]
        ends: list[float] = [one["started"][step] + one["seconds"][step] for one in found]
        return max(ends) - max(starts)

    steps = range(work.warmup, work.warmup + work.steps)
    losses = [
        [loss for loss in step if loss is not None] for step in zip(*(one["losses"] for one in found), strict=True)
    ]
    return PipelineResult(
        losses=[statistics.fmean(step) for step in losses],
        seconds=[last_rank(step) for step in steps],
        timelines=[[one["timelines"][step] for one in found] for step in steps if found[0]["timelines"]],
        predicted=found[0].get("predicted"),
        predicted_as_timed=found[0].get("predicted_as_timed"),
        peak_bytes=max(one["peak_bytes"] for one in found),
        baseline_bytes=max(one["baseline_bytes"] for one in found),
        wall_seconds=wall_seconds,
    )
