"""Step times as planned beside those that are measured, over a grid of models, configs and ranks on this machine.

The plan is made of the file that `lowtide env --measure` writes. All cases of as many ranks run in the same processes,
round by round; of each the least step counts. Cases of one group differ in their config alone: their order by
prediction is compared with the measured one (Kendall's tau).

Example:

    lowtide env --measure machine.json --folder /tmp/offload
    python benchmarks/predicted.py --machine machine.json --folder /tmp/offload --json rows.json --png rows.png
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from _contenders import lowtide_config
from _harness import (
    Column,
    JobError,
    Parser,
    Row,
    begin,
    columns_of,
    conclude,
    count,
    environment_of,
    row_of,
    run_ranks,
    shown,
)
from _model import GPTSize, build_batches, build_model

import lowtide
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.plan.choice import Choice
from lowtide.engine.plan.estimate import Estimate
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.measured import Measured, default_path
from lowtide.engine.plan.measuring.measure import num_cores
from lowtide.engine.plan.meta_run import MetaRun
from lowtide.engine.plan.planner import Planner, Profiler

MODELS = {
    "wide": GPTSize(num_layers=2, width=768, num_heads=12, sequence_length=128),
    "even": GPTSize(num_layers=6, width=384, num_heads=6, sequence_length=128),
    "deep": GPTSize(num_layers=24, width=128, num_heads=4, sequence_length=64),
}
_ENOUGH = 1e12  # bytes: nothing is left out for not fitting


@dataclass(frozen=True)
class Case:
    """config: with the microbatch. name: of this case among those it is ranked with; group: those."""

    group: str
    name: str
    ranks: int
    size: GPTSize
    config: dict[str, Any]


def estimate_of(case: Case, measured: Measured) -> Estimate:
    """Return the estimate of the fullest rank."""
    machine = Machine.measured(measured, case.ranks, _ENOUGH)
    with torch.device("meta"):
        model = build_model(case.size)
    config = Config.load(case.config)

    def make_profiler(blueprint: Blueprint) -> Profiler:
        return MetaRun(model, blueprint.units, blueprint.dtypes, "cpu").profile

    (batch,) = build_batches(case.size, 1, 1)
    planner = Planner(model, config.as_dict(), machine, make_profiler, batch)
    return planner.estimate(Choice.of(config.resolve(case.ranks)))


def train(job: dict[str, Any]) -> list[float]:
    """Return the least seconds of a step for each case of a job; the first two steps of a round are left out."""
    least = [math.inf] * len(job["cases"])
    for _ in range(job["rounds"]):
        for place, case in enumerate(job["cases"]):
            size = GPTSize(**case["size"])
            with lowtide.initialize(partial(build_model, size), case["config"]) as engine:
                config = engine.config
                rows = (config.train_micro_batch_size_per_gpu or 1) * (config.gradient_accumulation_steps or 1)
                (data,) = build_batches(size, 1, rows)
                for step in range(job["steps"] + 2):
                    started = time.perf_counter()
                    engine.train_step(data)
                    if step >= 2:
                        least[place] = min(least[place], time.perf_counter() - started)
    return least


def cases(ranks: int, folder: Path | None) -> list[Case]:
    """Return the grid; a group has ten configs or more."""
    return [
        Case(f"{model}, {ranks} ranks", name, ranks, size, config)
        for model, size in MODELS.items()
        for name, config in _configs(ranks, size, folder).items()
    ]


def _configs(ranks: int, size: GPTSize, folder: Path | None) -> dict[str, dict[str, Any]]:
    def config(stage: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
        more = {"train_micro_batch_size_per_gpu": 2, "communication": {"transport": shared}, **more}
        return lowtide_config(stage, gradient_accumulation_steps=accumulation, **more)

    shared, where = ("shared_memory", ", shared memory") if ranks > 1 else ("auto", "")
    found = {
        f"stage {stage}, {accumulation} microbatches{where}": config(stage, accumulation)
        for stage in range(4)
        for accumulation in (1, 3)
    }
    for stage in (0, 1, 3) if ranks > 1 else ():
        found[f"stage {stage}, 1 microbatches, sockets"] = config(stage, communication={"transport": "sockets"})
    found["stage 0, 8 rows"] = config(0, train_micro_batch_size_per_gpu=8)
    found["stage 1, recomputed"] = config(1, activation_checkpointing={"every": 1})
    if folder is not None:
        zero = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}}
        found["stage 1, states in files"] = config(1, zero_optimization=zero)
    for schedule in ("1f1b", "zb-h1") if ranks > 1 and size.num_layers >= ranks else ():
        pipeline: dict[str, Any] = {"parallel": {"pipeline": ranks}, "pipeline": {"schedule": schedule}}
        found[f"pipeline, {schedule}"] = config(0, 2 * ranks, communication={"transport": "auto"}, **pipeline)
    return found


def measured_seconds(some: Sequence[Case], steps: int, rounds: int, timeout: float) -> list[float]:
    """Return the seconds of each case on the slowest rank. some: of as many ranks all. Raises JobError."""
    ranks = some[0].ranks
    threads = max(1, num_cores() // ranks)
    job = {"worker": "predicted:train", "threads": threads, "steps": steps, "rounds": rounds}
    job["cases"] = [asdict(case) for case in some]
    found = run_ranks(job, ranks, sys.executable, environment_of(threads, None), timeout)
    return [max(of_ranks) for of_ranks in zip(*found, strict=True)]


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pairs in the same order minus pairs in the other, by all: 1 where both orders are the same.

    A pair of equal values counts for neither. None of less than two.
    """
    products = [(a - c) * (b - d) for (a, b), (c, d) in combinations(pairs, 2)]
    return sum((one > 0) - (one < 0) for one in products) / len(products) if products else None


def median_error(rows: Sequence[Row]) -> float:
    """Return the median of how far predictions are off."""
    return float(statistics.median(abs(row.more["ratio"] - 1) for row in rows))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Ends the program with what was expected and found where the command line cannot mean anything."""
    parser = Parser(__doc__)
    parser.add_argument("--machine", type=Path, default=default_path(), help="what `lowtide env --measure` has written")
    parser.add_argument("--ranks", type=count(), nargs="+", default=[1, 2], help="(1 2)")
    parser.add_argument("--folder", type=Path, help="for files: with it, states in files are among the configs")
    parser.add_argument("--steps", type=count(), default=5, help="of a case in a round, after two (5)")
    parser.add_argument("--rounds", type=count(), default=3, help="(3)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of all cases of as many ranks")
    return parser.parse_args(arguments)


def main() -> int:
    """Measures, plans, prints the table, writes what was asked for."""
    options, console = parse_arguments(), begin(170)
    try:
        machine = Measured.read(options.machine)
    except ValueError as error:
        raise SystemExit(f"predicted: {error}") from error
    groups: dict[str, list[Row]] = {}
    for ranks in options.ranks:
        some = cases(ranks, options.folder)
        try:
            seconds = measured_seconds(some, options.steps, options.rounds, options.timeout)
        except JobError as error:
            raise SystemExit(f"predicted: {ranks} ranks: {error}") from error
        for case, found in zip(some, seconds, strict=True):
            said = estimate_of(case, machine)
            parts = {name: 1e3 * part for name, part in said.seconds.items() if part > 5e-5}
            times = {"predicted": 1e3 * said.step_seconds, "measured": 1e3 * found, "parts": parts}
            row = row_of(f"{case.group}: {case.name}", times | {"ratio": said.step_seconds / found})
            groups.setdefault(case.group, []).append(row)
    columns = columns_of({"predicted": ".1f", "measured": ".1f", "ratio": ".2f"}, ["ratio"])
    columns.append(
        Column("prediction's parts", lambda row: " ".join(f"{name} {ms:.1f}" for name, ms in row.more["parts"].items()))
    )
    for group, rows in groups.items():
        tau = kendall_tau([(row.more["predicted"], row.more["measured"]) for row in rows])
        console.print(f"{group}: median error {100 * median_error(rows):.1f} %, tau {shown(tau, '.2f')}")
    every = [row for rows in groups.values() for row in rows]
    console.print(f"median error of all: {100 * median_error(every):.1f} %")
    return conclude(options, console, every, {"a step, ms": columns}, "Predicted beside measured")


if __name__ == "__main__":
    sys.exit(main())
