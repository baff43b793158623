"""Trains the same GPT with lowtide, torch's DDP and FSDP2, and DeepSpeed; compares time, memory and losses.

A round runs every contender once, each as a fresh job of its own; the next round begins with another contender. So a
slow minute of the machine meets all of them, and a ratio compares two jobs of the same round. Memory is measured in
jobs that are not timed, once for each allocator setting; `_memory.py` says what is counted.

Example, the whole comparison and then a quick look:

    python benchmarks/compare.py --size 85M --json compare.json --png compare.png
    python benchmarks/compare.py --size 10M --contenders ddp fsdp2 lowtide-3 --rounds 1 --memory none
    python benchmarks/compare.py --size 85M --contenders ddp lowtide-3 lowtide-3-states-nvme lowtide-3-nvme
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _memory
from _conclusion import conclude
from _contenders import CONTENDERS, Contender, choose
from _job import JobResult, Work, run_job
from _ranks import ALLOCATORS, JobError
from _report import Comparison, Row, make_table, write_chart
from rich.console import Console

DEFAULT_STEPS = {"tiny": 5, "10M": 10, "85M": 3}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=DEFAULT_STEPS, default="10M", help="parameters of the model (default: 10M)")
    add("--contenders", nargs="+", metavar="NAME", help=f"some of: {', '.join(CONTENDERS)}; 'lowtide*' stands for many")
    add("--rounds", type=int, default=3, help="timed jobs of each contender (default: 3)")
    add("--warmup", type=int, default=1, help="steps before the timed ones (default: 1)")
    add("--steps", type=int, help="timed steps of a job (default: 3 for 85M, 10 for 10M, 5 for tiny)")
    add("--memory", choices=[*ALLOCATORS, "both", "none"], default="both", help="allocator settings of the memory jobs")
    add("--memory-steps", type=int, default=4, help="steps of a memory job; with glibc, peaks still grow (default: 4)")
    add("--ranks", type=int, default=2, help="processes of a job (default: 2)")
    add("--threads", type=int, default=1, help="threads of a process (default: 1)")
    add("--microbatch", type=int, default=1, help="sequences of a rank in a forward (default: 1)")
    add("--accumulation", type=int, default=1, help="forwards and backwards of a step (default: 1)")
    add("--clip", type=float, default=0.0, metavar="NORM", help="clip the norm of the gradients (default: it is not)")
    add("--tied", action="store_true", help="the head is the embedding")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="longest time of one job (default: 300)")
    add("--loss-tolerance", type=float, default=1e-4, help="relative difference of a loss that fails (default: 1e-4)")
    add("--deepspeed-python", type=Path, metavar="PATH", help="interpreter of an environment that has DeepSpeed")
    add("--offload-folder", type=Path, metavar="FOLDER", help="where offload puts its files (default: a new one, here)")
    add("--json", type=Path, metavar="FILE", help="write every raw number")
    add("--png", type=Path, metavar="FILE", help="write a bar chart")
    options = parser.parse_args(arguments)
    for name in ["rounds", "steps", "ranks", "threads", "microbatch", "accumulation", "memory_steps"]:
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, found {value}")
    if options.warmup < 0:
        parser.error(f"--warmup: expected at least 0, found {options.warmup}")
    if options.deepspeed_python and not os.access(options.deepspeed_python, os.X_OK):
        parser.error(f"--deepspeed-python: expected an interpreter, found nothing to run at {options.deepspeed_python}")
    if options.memory != "none" and not _memory.supported():
        parser.error(f"memory jobs need {_memory.ROLLUP} with Pss_Shmem (Linux 5.0 or newer); use --memory none")
    has_deepspeed = options.deepspeed_python is not None or importlib.util.find_spec("deepspeed") is not None
    try:
        options.contenders = choose(options.contenders, with_deepspeed=has_deepspeed)
    except ValueError as error:
        parser.error(str(error))
    return options


class Runner:
    """Runs the jobs of a comparison one after the other and says what it does."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self.console = console
        self.allocators = {"both": list(ALLOCATORS), "none": []}.get(options.memory, [options.memory])
        self.rows = [Row(contender) for contender in options.contenders]
        self.num_jobs = len(self.rows) * (options.rounds + len(self.allocators))
        self.num_done = 0

    def work(self, warmup: int, steps: int) -> Work:
        """Gives what a job does, from the command line."""
        o = self.options
        return Work(o.size, o.ranks, o.threads, o.microbatch, o.accumulation, o.clip, warmup, steps, o.tied, o.timeout)

    def timed_work(self) -> Work:
        """Gives what a timed job does."""
        return self.work(self.options.warmup, self.options.steps or DEFAULT_STEPS[self.options.size])

    def _python(self, contender: Contender) -> str:
        other = self.options.deepspeed_python if contender.kind == "deepspeed" else None
        return str(other or sys.executable)

    def _run(self, row: Row, what: str, work: Work, allocator: str | None) -> JobResult | None:
        self.num_done += 1
        if row.failure:
            return None
        try:
            job = run_job(row.contender, work, self._python(row.contender), allocator)
        except JobError as error:
            row.failure = f"{what}: {error}"
            self._say(f"{what}  {row.contender.label}: [red]FAILED[/red]", str(error))
            return None
        peak = f", peak {job.peak_bytes / 2**20:.0f} MiB" if allocator else f", {job.step_seconds:.3f} s/step"
        self._say(
            f"{what}  {row.contender.label}{peak}, loss {job.losses[-1]:.5f} [dim](job {job.wall_seconds:.0f} s)[/dim]"
        )
        return job

    def _say(self, line: str, detail: str = "") -> None:
        self.console.print(f"[{self.num_done}/{self.num_jobs}]".replace("[", r"\["), line, highlight=False)
        if detail:
            self.console.print("   ", detail, markup=False, highlight=False)

    def run(self) -> None:
        """Runs all rounds, then the memory jobs; a contender that failed is left out from there on."""
        timed = self.timed_work()
        for number in range(self.options.rounds):
            first = number * len(self.rows) // self.options.rounds
            for row in self.rows[first:] + self.rows[:first]:
                job = self._run(row, f"round {number + 1}", timed, None)
                if job:
                    row.timed[number] = job
        for allocator in self.allocators:
            for row in self.rows:
                job = self._run(row, f"memory {allocator}", self.work(0, self.options.memory_steps), allocator)
                if job:
                    row.memory[allocator] = job


def _settings(options: argparse.Namespace, timed: Work) -> dict[str, Any]:
    clipping = f"clipped at {options.clip:g}, " if options.clip else ""
    title = (
        f"GPT {options.size}, fp32, {options.ranks} ranks x {options.threads} thread(s), "
        f"{options.accumulation} x microbatch {options.microbatch}, {clipping}"
        f"{options.rounds} round(s) of {timed.steps} steps"
    )
    machine = {"machine": platform.machine(), "system": platform.platform(), "cpus": os.cpu_count()}
    versions = {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
    return {"title": title, **asdict(timed), "rounds": options.rounds, "allocators": ALLOCATORS, **machine, **versions}


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running job is stopped too
    console = Console(width=None if sys.stdout.isatty() else 140)
    started = time.monotonic()
    runner = Runner(options, console)
    with tempfile.TemporaryDirectory(prefix="offload-", dir=options.offload_folder or Path.cwd()) as folder:
        os.environ["LOWTIDE_OFFLOAD_FOLDER"] = folder
        runner.run()
    timed = runner.timed_work()
    comparison = Comparison(runner.rows, _settings(options, timed), options.loss_tolerance)
    comparison.judge_losses()
    console.print(make_table(comparison, runner.allocators))
    if comparison.baseline_bytes:
        console.print(
            f"Peaks hold torch itself: {comparison.baseline_bytes / 2**20:.0f} MiB a rank after `import torch`."
        )
    console.print(f"{runner.num_jobs} jobs in {time.monotonic() - started:.0f} s.", highlight=False)
    status = conclude(console, comparison.rows, comparison.as_dict(), options.json)
    if options.png:
        write_chart(comparison, runner.allocators, options.png)
    return status


if __name__ == "__main__":
    sys.exit(main())
