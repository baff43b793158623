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
from _harness import JobError, Parser, begin, count, environment_of, make_table, run_ranks, write_bars, write_json
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


@dataclass(frozen=True)
class Row:
    """A case: seconds of a step."""

    group: str
    name: str
    ranks: int
    predicted: float
    measured: float
    parts: dict[str, float]  # of the prediction

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


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


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Pairs in the same order minus pairs in the other, by all: 1 where both orders are the same.

    A pair of equal values counts for neither. Raises ValueError for less than two.
    """
    if len(pairs) < 2:
        raise ValueError(f"expected at least 2 pairs, found {len(pairs)}")
    total = 0
    for (a, b), (c, d) in combinations(pairs, 2):
        product = (a - c) * (b - d)
        total += (product > 0) - (product < 0)
    return total / (len(pairs) * (len(pairs) - 1) / 2)


def conclusions(rows: Sequence[Row]) -> dict[str, Any]:
    """The median of how far predictions are off, by group and of all, and tau by group."""
    groups = dict.fromkeys(row.group for row in rows)
    by_group = {}
    for group in groups:
        own = [row for row in rows if row.group == group]
        tau = kendall_tau([(row.predicted, row.measured) for row in own]) if len(own) > 1 else None
        by_group[group] = {"median_error": statistics.median(abs(row.ratio - 1) for row in own), "tau": tau}
    return {"median_error": statistics.median(abs(row.ratio - 1) for row in rows), "groups": by_group}


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


def main() -> None:
    """Measures, plans, prints the table, writes what was asked for."""
    options, console = parse_arguments(), begin(170)
    try:
        machine = Measured.read(options.machine)
    except ValueError as error:
        raise SystemExit(f"predicted: {error}") from error
    rows = []
    for ranks in options.ranks:
        some = cases(ranks, options.folder)
        try:
            seconds = measured_seconds(some, options.steps, options.rounds, options.timeout)
        except JobError as error:
            raise SystemExit(f"predicted: {ranks} ranks: {error}") from error
        for case, found in zip(some, seconds, strict=True):
            said = estimate_of(case, machine)
            rows.append(Row(case.group, case.name, ranks, said.step_seconds, found, dict(said.seconds)))
    lines = []
    for row in rows:
        parts = " ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in row.parts.items() if seconds > 5e-5)
        times = (f"{1e3 * row.predicted:.1f}", f"{1e3 * row.measured:.1f}", f"{row.ratio:.2f}")
        lines.append([row.group, row.name, *times, parts])
    headings = ["group", "config", "predicted", "measured", "ratio", "prediction's parts"]
    console.print(make_table("a step, ms", headings, lines, num_texts=2))
    for group, one in conclusions(rows)["groups"].items():
        tau = "" if one["tau"] is None else f", tau {one['tau']:.2f}"
        console.print(f"{group}: median error {100 * one['median_error']:.1f} %{tau}")
    write_json(options, {"rows": [asdict(row) for row in rows], **conclusions(rows)})
    if options.png:
        panel = ("predicted over measured seconds of a step", [[row.ratio] for row in rows], 1.0)
        labels = [f"{row.group}: {row.name}" for row in rows]
        write_bars(options.png, "Predicted beside measured", labels, [True] * len(rows), [panel])


if __name__ == "__main__":
    main()
