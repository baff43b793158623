"""Trains the same GPT with lowtide, torch's DDP and FSDP2, and DeepSpeed; compares time, memory and losses.

A round runs every contender once, each as a fresh job of its own; the next round begins with another contender. So a
slow minute of the machine meets all of them, and a ratio compares two jobs of the same round. Memory is measured in
jobs that are not timed, once for each allocator setting; `_worker.py` says what is counted.

Example, the whole comparison and then a quick look:

    python benchmarks/compare.py --size 85M --json compare.json --png compare.png
    python benchmarks/compare.py --size 10M --contenders ddp fsdp2 lowtide-3 --rounds 1 --memory none
    python benchmarks/compare.py --size 85M --contenders ddp lowtide-3 lowtide-3-states-nvme lowtide-3-nvme
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from _contenders import BUILDERS, CONTENDERS, DDP, FSDP2, OFFLOAD_FOLDER, REFERENCE, Setup
from _harness import (
    ALLOCATORS,
    MIB,
    Result,
    Row,
    Runner,
    add_job_options,
    begin,
    check_counts,
    check_job_options,
    find,
    gathered,
    python_of,
    run_job,
    settings_of,
)
from _model import build_batches, build_model
from _report import (
    Panel,
    conclude,
    difference_of,
    judge_losses,
    label_of,
    make_table,
    ratio,
    shown,
    spread,
    write_row_bars,
)
from _worker import PeakSampler, rank_bytes

DEFAULT_STEPS = {"tiny": 5, "10M": 10, "85M": 3}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """On a rank: losses and seconds of every step (warm-up too) and, in a memory run, the bytes of this rank."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    measures_memory = job["allocator"] is not None
    baseline_bytes = rank_bytes(ranks) if measures_memory else None
    rows = job["ranks"] * job["microbatch"] * job["accumulation"]
    share = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
    batches = [
        (tokens[share], targets[share])
        # Real text that does not change in a run.
        for tokens, targets in build_batches(job["size"], argparse.__file__, job["warmup"] + job["steps"], rows)
    ]
    model = build_model(job["size"], tied=job["tied"])
    setup = Setup(job["microbatch"], job["accumulation"], job["clip"])
    trainer = BUILDERS[job["kind"]](model, setup, **job["options"])
    del model
    losses: list[float] = []
    seconds: list[float] = []
    sampler = PeakSampler(ranks) if measures_memory else None
    with sampler or nullcontext():
        for tokens, targets in batches:
            started = time.perf_counter()
            loss = trainer.step(tokens, targets)
            seconds.append(time.perf_counter() - started)
            losses.append(float(loss))
    peak_bytes = sampler.peak_bytes if sampler else None
    trainer.close()
    return {"losses": losses, "seconds": seconds, "baseline_bytes": baseline_bytes, "peak_bytes": peak_bytes}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_job_options(parser, CONTENDERS)
    add = parser.add_argument
    add("--size", choices=DEFAULT_STEPS, default="10M", help="parameters of the model (default: 10M)")
    add("--warmup", type=int, default=1, help="steps before the timed ones (default: 1)")
    add("--steps", type=int, help="timed steps of a job (default: 3 for 85M, 10 for 10M, 5 for tiny)")
    add("--memory", choices=[*ALLOCATORS, "both", "none"], default="both", help="allocator settings of the memory jobs")
    add("--memory-steps", type=int, default=4, help="steps of a memory job; with glibc, peaks still grow (default: 4)")
    add("--ranks", type=int, default=2, help="processes of a job (default: 2)")
    add("--microbatch", type=int, default=1, help="sequences of a rank in a forward (default: 1)")
    add("--accumulation", type=int, default=1, help="forwards and backwards of a step (default: 1)")
    add("--clip", type=float, default=0.0, metavar="NORM", help="clip the norm of the gradients (default: it is not)")
    add("--tied", action="store_true", help="the head is the embedding")
    add("--loss-tolerance", type=float, default=1e-4, help="relative difference of a loss that fails (default: 1e-4)")
    add("--offload-folder", type=Path, metavar="FOLDER", help="where offload puts its files (default: a new one, here)")
    options = parser.parse_args(arguments)
    check_counts(parser, options, ["steps", "ranks", "microbatch", "accumulation", "memory_steps"])
    check_counts(parser, options, ["warmup"], least=0)
    check_job_options(parser, options, CONTENDERS)
    options.steps = options.steps or DEFAULT_STEPS[options.size]
    options.allocators = {"both": list(ALLOCATORS), "none": []}.get(options.memory, [options.memory])
    return options


def run(row: Row, options: argparse.Namespace, allocator: str | None) -> Result:
    """One job: with an `allocator` a memory job, else a timed one. Raises JobError."""
    names = ("size", "ranks", "threads", "microbatch", "accumulation", "clip", "tied", "timeout")
    job = {name: getattr(options, name) for name in names}
    warmup, steps = (0, options.memory_steps) if allocator else (options.warmup, options.steps)
    job |= {"warmup": warmup, "steps": steps}
    python = python_of(row.contender, options)
    return gathered(run_job("compare:train", row.contender, job, python, allocator), warmup)


def reference_of(rows: Sequence[Row]) -> Row | None:
    """The row whose losses are right by definition: one process, else DDP, else the first that ran."""
    candidates = [find(rows, REFERENCE), find(rows, DDP), *rows]
    return next((row for row in candidates if row and row.losses and row.contender.trains), None)


def baseline_bytes(rows: Sequence[Row]) -> int | None:
    """What a rank holds after `import torch`, at the median of the memory runs of all ranks."""
    jobs = [job for row in rows if row.contender.name != REFERENCE for job in row.memory.values()]
    return int(statistics.median(job.baseline_bytes or 0 for job in jobs)) if jobs else None


def peak_of(row: Row | None, allocator: str) -> int | None:
    job = row.memory.get(allocator) if row else None
    return job.peak_bytes if job else None


def table(rows: Sequence[Row], title: str, allocators: Sequence[str]) -> Any:
    """One row a contender, times as medians with (lowest-highest) over the rounds."""
    ddp, fsdp2, reference = find(rows, DDP), find(rows, FSDP2), reference_of(rows)
    headings = ["contender", "s/step", "x DDP", "x FSDP2"]
    headings += [heading for allocator in allocators for heading in (f"peak MiB\n{allocator}", "x FSDP2")]
    lines = []
    for row in rows:
        cells = [label_of(row), shown(row.step_seconds, ".3f"), spread(row.ratios(ddp)), spread(row.ratios(fsdp2))]
        for allocator in allocators:
            peak = peak_of(row, allocator)
            cells += [shown(peak and peak / MIB, ".0f"), ratio(peak, peak_of(fsdp2, allocator))]
        lines.append([*cells, shown(difference_of(row, reference), ".0e")])
    return make_table(title, [*headings, "loss diff"], lines)


def as_dict(rows: Sequence[Row], settings: dict[str, Any]) -> dict[str, Any]:
    """Gives every raw number and what was made of it, for JSON."""
    ddp, fsdp2, reference = find(rows, DDP), find(rows, FSDP2), reference_of(rows)
    contenders = [
        {
            **row.as_dict(),
            "ratios_to_ddp": row.ratios(ddp),
            "ratios_to_fsdp2": row.ratios(fsdp2),
            "loss_difference": difference_of(row, reference),
        }
        for row in rows
    ]
    return {"settings": settings, "baseline_bytes": baseline_bytes(rows), "contenders": contenders}


def write_chart(rows: Sequence[Row], title: str, allocators: Sequence[str], path: Path) -> None:
    """Bars of the step time over DDP's, and of the peak memory."""
    rows = [row for row in rows if row.losses]
    ddp = find(rows, DDP)
    times = [row.ratios(ddp) for row in rows]
    panels = [Panel("step time / DDP's in the same round (less is better)", times, line=1.0)]
    for allocator in allocators:
        peaks = [[(peak_of(row, allocator) or 0) / MIB] for row in rows]
        panels.append(Panel(f"peak memory of a rank in training, MiB, {allocator} (less is better)", peaks))
    write_row_bars(path, title, rows, panels)


def main() -> int:
    options = parse_arguments()
    console, started = begin(), time.monotonic()
    rows = [Row(contender) for contender in options.contenders]

    def run_row(row: Row, allocator: str | None) -> Result:
        return run(row, options, allocator)

    runner = Runner(rows, run_row, options.rounds, options.allocators, console)
    with tempfile.TemporaryDirectory(prefix="offload-", dir=options.offload_folder or Path.cwd()) as folder:
        os.environ[OFFLOAD_FOLDER] = folder
        runner.run_all()
    reference = reference_of(rows)
    judge_losses(rows, lambda _: reference, options.loss_tolerance)
    clipping = f"clipped at {options.clip:g}, " if options.clip else ""
    title = (
        f"GPT {options.size}, fp32, {options.ranks} ranks x {options.threads} thread(s), "
        f"{options.accumulation} x microbatch {options.microbatch}, {clipping}"
        f"{options.rounds} round(s) of {options.steps} steps"
    )
    console.print(table(rows, title, options.allocators))
    if baseline := baseline_bytes(rows):
        console.print(f"Peaks hold torch itself: {baseline / MIB:.0f} MiB a rank after `import torch`.")
    console.print(f"{runner.num_jobs} jobs in {time.monotonic() - started:.0f} s.", highlight=False)
    status = conclude(console, rows, as_dict(rows, settings_of(options, title)), options.json)
    if options.png:
        write_chart(rows, title, options.allocators, options.png)
    return status


if __name__ == "__main__":
    sys.exit(main())
