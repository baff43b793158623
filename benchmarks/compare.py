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
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _contenders import BUILDERS, CONTENDERS, DDP, FSDP2, OFFLOAD_FOLDER, REFERENCE, Setup
from _harness import (
    MIB,
    Column,
    Parser,
    Result,
    Row,
    add_job_options,
    check_job_options,
    compare,
    count,
    find,
    gathered,
    job_of,
    losses_column,
    over,
    python_of,
    run_job,
)
from _model import build_batches, build_model
from _worker import RankMemory, timed_steps

DEFAULT_STEPS = {"tiny": 5, "10M": 10, "85M": 3}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """On a rank: losses and seconds of every step (warm-up too) and, in a memory run, the bytes of this rank."""
    rank, ranks, memory = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), RankMemory(job)
    rows = job["ranks"] * job["microbatch"] * job["accumulation"]
    share = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
    batches = [
        (tokens[share], targets[share])
        # Real text that does not change in a run.
        for tokens, targets in build_batches(job["size"], argparse.__file__, job["warmup"] + job["steps"], rows)
    ]
    setup = Setup(job["microbatch"], job["accumulation"], job["clip"])
    trainer = BUILDERS[job["kind"]](build_model(job["size"], tied=job["tied"]), setup, **job["options"])
    found = timed_steps(trainer.step, batches, memory)
    trainer.close()
    return found


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = Parser(__doc__)
    add_job_options(parser, CONTENDERS, memory="both")
    add = parser.add_argument
    add("--size", choices=DEFAULT_STEPS, default="10M", help="parameters of the model (default: 10M)")
    add("--warmup", type=count(0), default=1, help="steps before the timed ones (default: 1)")
    add("--steps", type=count(), help="timed steps of a job (default: 3 for 85M, 10 for 10M, 5 for tiny)")
    add("--memory-steps", type=count(), default=4, help="of a memory job; with glibc, peaks still grow (default: 4)")
    add("--ranks", type=count(), default=2, help="processes of a job (default: 2)")
    add("--microbatch", type=count(), default=1, help="sequences of a rank in a forward (default: 1)")
    add("--accumulation", type=count(), default=1, help="forwards and backwards of a step (default: 1)")
    add("--clip", type=float, default=0.0, metavar="NORM", help="clip the norm of the gradients (default: it is not)")
    add("--tied", action="store_true", help="the head is the embedding")
    add("--offload-folder", type=Path, metavar="FOLDER", help="where offload puts its files (default: a new one, here)")
    options = parser.parse_args(arguments)
    check_job_options(parser, options, CONTENDERS)
    options.steps = options.steps or DEFAULT_STEPS[options.size]
    return options


def reference_of(rows: Sequence[Row]) -> Row | None:
    """The row whose losses are right by definition: one process, else DDP, else the first that ran."""
    candidates = [find(rows, REFERENCE), find(rows, DDP), *rows]
    return next((row for row in candidates if row and row.losses and row.contender.trains), None)


def columns(rows: Sequence[Row], allocators: Sequence[str]) -> list[Column]:
    """Times as medians with (lowest-highest) over the rounds; peaks hold torch itself, which is the last column."""

    def bytes_of(row: Row | None, allocator: str, key: str = "peak_bytes") -> float | None:
        job = row.memory.get(allocator) if row else None
        found = getattr(job, key) if job else None
        return found / MIB if found else None

    def peaks(allocator: str) -> list[Column]:
        label = f"peak memory of a rank in training, MiB, {allocator} (less is better)"
        return [
            Column(f"peak MiB\n{allocator}", lambda row: bytes_of(row, allocator), ".0f", label),
            Column(
                f"x FSDP2\n{allocator}",
                lambda row: over(bytes_of(row, allocator), bytes_of(find(rows, FSDP2), allocator)),
            ),
        ]

    times = "step time / DDP's in the same round (less is better)"
    found = [
        Column("s/step", lambda row: row.step_seconds, ".3f"),
        Column("x DDP", lambda row: row.ratios(find(rows, DDP)), panel=times, line=1.0),
        Column("x FSDP2", lambda row: row.ratios(find(rows, FSDP2))),
        *(column for allocator in allocators for column in peaks(allocator)),
        losses_column(lambda _: reference_of(rows)),
    ]
    if allocators:
        found.append(Column("torch\nitself", lambda row: bytes_of(row, allocators[0], "baseline_bytes"), ".0f"))
    return found


def main() -> int:
    options = parse_arguments()
    rows = [Row(contender) for contender in options.contenders]

    def run(row: Row, allocator: str | None) -> Result:
        warmup, steps = (0, options.memory_steps) if allocator else (options.warmup, options.steps)
        job = job_of(options, warmup=warmup, steps=steps)
        return gathered(
            run_job("compare:train", row.contender, job, python_of(row.contender, options), allocator), warmup
        )

    clipping = f"clipped at {options.clip:g}, " if options.clip else ""
    title = (
        f"GPT {options.size}, fp32, {options.ranks} ranks x {options.threads} thread(s), "
        f"{options.accumulation} x microbatch {options.microbatch}, {clipping}"
        f"{options.rounds} round(s) of {options.steps} steps"
    )
    with tempfile.TemporaryDirectory(prefix="offload-", dir=options.offload_folder or Path.cwd()) as folder:
        os.environ[OFFLOAD_FOLDER] = folder
        tables = {title: columns(rows, options.allocators)}
        return compare(options, rows, run, tables, title, reference_of=lambda _: reference_of(rows))


if __name__ == "__main__":
    sys.exit(main())
