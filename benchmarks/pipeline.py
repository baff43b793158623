"""Trains over pipelines with lowtide, torch.distributed.pipelining and DeepSpeed; measures time, memory and bubbles.

--mode work: a GPT with AdamW, the same blocks in the same stages for every contender. A round runs all of them once,
in random order, each as a fresh job; a ratio compares a schedule with torch's same one in the same round. Memory is
measured in jobs that are not timed; `_memory.py` says what is counted. A step is the schedule and the update.

--mode sleep: sleeps in place of work, so that a few cores do for many ranks. Measured makespans and bubbles stand
beside those that the simulator predicts for the same costs, and beside torch's steps with the same sleeps.

Example, both parts whole, and then a quick look at each:

    python benchmarks/pipeline.py --mode work --ranks 2 4 --json work.json
    python benchmarks/pipeline.py --mode sleep --ranks 2 4 --json sleep.json --png docs/images/pipeline_measured.png
    python benchmarks/pipeline.py --mode work --size tiny-deep --ranks 2 --rounds 1 --memory none
    python benchmarks/pipeline.py --mode sleep --ranks 2 --rounds 1 --contenders 1f1b zb-v torch-zb-v
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import random
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _memory
from _conclusion import conclude
from _pipeline_contenders import CONTENDERS, choose
from _pipeline_job import PipelineResult, PipelineWork, run_pipeline_job
from _pipeline_models import PIPELINE_SIZES, SLEEPING_ROWS
from _pipeline_report import PipelineRow, as_dict, judge_losses, sleep_table, work_table, write_timelines
from _ranks import ALLOCATORS, JobError
from rich.console import Console


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mode", choices=["work", "sleep"], required=True, help="real training, or sleeps in place of it")
    add("--ranks", type=int, nargs="+", default=[2, 4], help="processes of a pipeline, one or several (default: 2 4)")
    add("--contenders", nargs="+", metavar="NAME", help=f"some of: {', '.join(CONTENDERS)}; 'torch-*' for many")
    add("--microbatches", type=int, default=8, help="of a step (default: 8)")
    add("--rounds", type=int, default=3, help="timed jobs of each contender (default: 3)")
    add("--warmup", type=int, default=1, help="steps before the timed ones (default: 1)")
    add("--steps", type=int, default=3, help="timed steps of a job (default: 3)")
    add("--threads", type=int, default=1, help="threads of a process (default: 1)")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="longest time of one job (default: 300)")
    add("--seed", type=int, default=0, help="of the order of the jobs (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write every raw number")
    work = parser.add_argument_group("with --mode work")
    work.add_argument("--size", choices=PIPELINE_SIZES, default="100M", help="parameters of the model (default: 100M)")
    work.add_argument("--rows", type=int, default=1, help="sequences of a microbatch (default: 1)")
    work.add_argument("--memory", choices=[*ALLOCATORS, "none"], default="exact", help="allocator of the memory jobs")
    work.add_argument("--memory-steps", type=int, default=2, help="steps of a memory job (default: 2)")
    work.add_argument("--loss-tolerance", type=float, default=1e-4, help="relative; what differs more fails")
    work.add_argument("--deepspeed-python", type=Path, metavar="PATH", help="interpreter that has DeepSpeed")
    sleep = parser.add_argument_group("with --mode sleep")
    sleep.add_argument(
        "--milliseconds",
        type=float,
        nargs=3,
        metavar=("F", "I", "W"),
        default=[60.0, 60.0, 60.0],
        help="of the forward and the two halves of the backward of a rank's share of the model (default: 60 60 60)",
    )
    sleep.add_argument("--png", type=Path, metavar="FILE", help="draw what each rank did when")
    options = parser.parse_args(arguments)
    for name in ["microbatches", "rounds", "steps", "threads", "rows", "memory_steps"]:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, found {getattr(options, name)}")
    if min(options.ranks) < 2:
        parser.error(f"--ranks: expected at least 2, found {min(options.ranks)}")
    if options.warmup < 1:
        parser.error(f"--warmup: expected at least 1, the step in which shapes are learned; found {options.warmup}")
    if options.deepspeed_python and not os.access(options.deepspeed_python, os.X_OK):
        parser.error(f"--deepspeed-python: expected an interpreter, found nothing to run at {options.deepspeed_python}")
    if options.mode == "sleep":
        options.memory, options.deepspeed_python = "none", None
    elif options.memory != "none" and not _memory.supported():
        parser.error(f"memory jobs need {_memory.ROLLUP} with Pss_Shmem (Linux 5.0 or newer); use --memory none")
    try:
        options.contenders = choose(options.contenders, with_deepspeed=options.deepspeed_python is not None)
    except ValueError as error:
        parser.error(str(error))
    return options


class Runner:
    """Runs the jobs one after the other and says what it does."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self.console = console
        self.rows = [PipelineRow(contender, ranks) for ranks in options.ranks for contender in options.contenders]
        self.num_jobs = len(self.rows) * (options.rounds + (options.memory != "none"))
        self.num_done = 0

    def work(self, ranks: int, warmup: int, steps: int) -> PipelineWork:
        """Gives what a job does, from the command line."""
        o = self.options
        sleeps = tuple(milliseconds / 1000 for milliseconds in o.milliseconds) if o.mode == "sleep" else None
        rows = SLEEPING_ROWS if sleeps else o.rows
        return PipelineWork(o.size, ranks, o.microbatches, rows, o.threads, warmup, steps, sleeps, o.timeout)

    def run(self) -> None:
        """Runs all rounds, then the memory jobs; a contender that failed is left out from there on."""
        order = random.Random(self.options.seed)
        for number in range(self.options.rounds):
            for ranks in self.options.ranks:
                rows = [row for row in self.rows if row.ranks == ranks]
                for row in order.sample(rows, len(rows)):
                    work = self.work(ranks, self.options.warmup, self.options.steps)
                    job = self._run(row, f"round {number + 1}", work, None)
                    if job:
                        row.timed[number] = job
        if self.options.memory != "none":
            for row in self.rows:
                work = self.work(row.ranks, 0, self.options.memory_steps)
                row.memory = self._run(row, "memory", work, self.options.memory)

    def _run(self, row: PipelineRow, what: str, work: PipelineWork, allocator: str | None) -> PipelineResult | None:
        self.num_done += 1
        if row.failure:
            return None
        python = str(self.options.deepspeed_python) if row.contender.kind == "deepspeed" else sys.executable
        what = f"{what}  {row.ranks} ranks, {row.contender.name}"
        try:
            job = run_pipeline_job(row.contender, work, python, allocator)
        except JobError as error:
            row.failure = f"{what}: {error}"
            self._say(f"{what}: [red]FAILED[/red]")
            self.console.print("   ", str(error), markup=False, highlight=False)
            return None
        found = f"peak {job.peak_bytes / 2**20:.0f} MiB" if allocator else f"{job.step_seconds:.3f} s/step"
        self._say(f"{what}: {found}, loss {job.losses[-1]:.5f} [dim](job {job.wall_seconds:.0f} s)[/dim]")
        return job

    def _say(self, line: str) -> None:
        self.console.print(f"\\[{self.num_done}/{self.num_jobs}]", line, highlight=False)


def _settings(options: argparse.Namespace, work: PipelineWork) -> dict[str, Any]:
    what = f"GPT {options.size}, fp32, " if options.mode == "work" else "F, I, W = {:g}, {:g}, {:g} ms, "
    what = what.format(*options.milliseconds)
    repeats = f"{options.rounds} round(s) of {options.steps} steps"
    title = f"{what}{options.microbatches} microbatches, {options.threads} thread(s) a rank, {repeats}"
    machine = {"machine": platform.machine(), "system": platform.platform(), "cpus": os.cpu_count()}
    versions = {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
    return {"title": title, **asdict(work), "rounds": options.rounds, **machine, **versions}


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running job is stopped too
    console = Console(width=None if sys.stdout.isatty() else 140)
    started, load = time.monotonic(), os.getloadavg()[0]
    runner = Runner(options, console)
    runner.run()
    judge_losses(runner.rows, options.loss_tolerance)
    settings = _settings(options, runner.work(options.ranks[0], options.warmup, options.steps))
    settings["load_average"] = [load, os.getloadavg()[0]]
    console.print((work_table if options.mode == "work" else sleep_table)(runner.rows, settings["title"]))
    console.print(
        f"{runner.num_jobs} jobs in {time.monotonic() - started:.0f} s; load average {load:.1f} before, "
        f"{settings['load_average'][1]:.1f} after.",
        highlight=False,
    )
    status = conclude(console, runner.rows, as_dict(runner.rows, settings), options.json)
    if options.mode == "sleep" and options.png:
        write_timelines(runner.rows, settings["title"], options.png)
    return status


if __name__ == "__main__":
    sys.exit(main())
