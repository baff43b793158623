"""One try of the search for the largest model: a job in which each rank may take so much memory, and no more."""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _contenders import Contender
from _ranks import JobError, environment_of, run_ranks
from _trainers import OFFLOAD_FOLDER

WORKER = Path(__file__).with_name("_largest_worker.py")


@dataclass(frozen=True)
class BudgetWork:
    """What every contender does alike, with a model of so many layers. budget_bytes: of a rank."""

    size: str
    num_layers: int
    ranks: int
    threads: int
    microbatch: int
    warmup: int
    steps: int
    device: str
    recompute_blocks: bool
    budget_bytes: int
    timeout_seconds: float
    dtype: str = "fp32"
    backend: str | None = None  # of the process group; None: as each contender makes it
    sequence_length: int | None = None  # of the model of `_longest.py`; None: the size's, of that of `_model.py`
    text_file: str = argparse.__file__  # real text that does not change in a run; every interpreter reads this one


@dataclass(frozen=True)
class BudgetResult:
    """What one job gave. peak_bytes: the maximum over its ranks, None in the timed jobs of a CPU."""

    losses: list[float]  # of the global batch, every step
    seconds: list[float]  # of the slowest rank, every step, warm-up left out
    peak_bytes: int | None
    wall_seconds: float

    @property
    def step_seconds(self) -> float:
        """The median step."""
        return statistics.median(self.seconds)


def run_budget_job(
    contender: Contender, work: BudgetWork, python: str, offload_folder: Path, allocator: str | None
) -> BudgetResult:
    """Runs one job from start to end; on a CPU it measures memory with an `allocator`, and else time.

    Raises OverBudget when a rank needs more than the budget, and JobError when one fails, the time is over, or the
    losses are not those of a model that is trained. No process and no file is left behind.
    """
    started = time.monotonic()
    job = {**asdict(work), **contender.as_dict(), "measures_memory": allocator is not None}
    job["global_rows"] = work.ranks * work.microbatch
    with tempfile.TemporaryDirectory(prefix="offload-", dir=offload_folder) as folder:
        environment = environment_of(work.threads, allocator, work.device) | {OFFLOAD_FOLDER: folder}
        num_processes = contender.num_processes(work.ranks)
        found = run_ranks(WORKER, job, num_processes, python, environment, work.timeout_seconds)
    result = _gathered(found, work.warmup, time.monotonic() - started)
    check_losses(result.losses)
    return result


def _gathered(found: list[dict[str, Any]], warmup: int, wall_seconds: float) -> BudgetResult:
    peaks = [one["peak_bytes"] for one in found]
    return BudgetResult(
        losses=[statistics.fmean(step) for step in zip(*(one["losses"] for one in found), strict=True)],
        seconds=[max(step) for step in zip(*(one["seconds"] for one in found), strict=True)][warmup:],
        peak_bytes=None if None in peaks else max(peaks),
        wall_seconds=wall_seconds,
    )


def check_losses(losses: Sequence[float]) -> None:
    """Raises JobError unless these, of steps on one and the same batch, are those of a model that is trained."""
    if not all(math.isfinite(loss) for loss in losses):
        raise JobError(f"expected finite losses, found {_listed(losses)}")
    if len(set(losses)) == 1:
        raise JobError(f"expected losses that change from step to step on one batch, found {_listed(losses)}")


def _listed(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses)
