"""One job of a contender that saves, loads and exports, and what it gave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _contenders import Contender
from _ranks import environment_of, run_ranks

WORKER = Path(__file__).with_name("_checkpoint_worker.py")


@dataclass(frozen=True)
class SaveWork:
    """What every contender does alike."""

    size: str
    ranks: int
    threads: int
    repeats: int
    timeout_seconds: float
    text_file: str


@dataclass
class SaveResult:
    """What one job gave, operation by operation: "save", "load cold", "load warm" and "export".

    seconds: of the slowest rank; "save.done" and "export.done" are until all is on the disk. cpu_seconds: of the
    processor, the sum over the ranks. extra_bytes: what a rank held above what it held before, the largest; empty in
    timed jobs.
    """

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    extra_bytes: dict[str, int]
    losses_are_equal: bool
    saved_bytes: int
    exported_bytes: int
    wall_seconds: float


def run_save_job(
    contender: Contender, work: SaveWork, python: str, folder: Path, allocator: str | None = None
) -> SaveResult:
    """Runs one job from start to end; its last checkpoint and its last export stay in the folder.

    Raises JobError when a rank fails or the time is over; no process is left behind.
    """
    started = time.monotonic()
    job = {**asdict(work), **contender.as_dict(), "allocator": allocator, "folder": str(folder)}
    environment = environment_of(work.threads, allocator)
    found = run_ranks(WORKER, job, work.ranks, python, environment, work.timeout_seconds)
    return _gathered(found, time.monotonic() - started)


def _gathered(found: list[dict[str, Any]], wall_seconds: float) -> SaveResult:
    def over_ranks(key: str, combine: Callable[[Iterable[float]], float]) -> dict[str, list[float]]:
        names = found[0][key]
        return {name: [combine(of) for of in zip(*(one[key][name] for one in found), strict=True)] for name in names}

    return SaveResult(
        seconds=over_ranks("seconds", max),
        cpu_seconds=over_ranks("cpu_seconds", sum),
        extra_bytes={n: max(one["extra_bytes"][n] for one in found) for n in found[0]["extra_bytes"]},
        losses_are_equal=all(one["losses_are_equal"] for one in found),
        saved_bytes=found[0]["saved_bytes"],
        exported_bytes=found[0]["exported_bytes"],
        wall_seconds=wall_seconds,
    )
