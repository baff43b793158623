"""Trains the same GPT with lowtide, torch's DDP and FSDP2, and DeepSpeed; compares time, memory and losses.

`_harness.py` says how jobs are interleaved, `_worker.py` what counts as memory.

Example, the whole comparison, and a quick look:

    python benchmarks/compare.py --size 85M --json compare.json --png compare.png
    python benchmarks/compare.py --size 10M --contenders ddp fsdp2 lowtide-3 --rounds 1 --memory none
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from _contenders import BUILDERS, CONTENDERS, DDP, FSDP2, OFFLOAD_FOLDER, Setup
from _harness import LOSSES, Column, JobParser, Row, compare, count, find, mib, over, run_steps
from _model import SIZES, build_batches, build_model
from _worker import PeakSampler, timed_steps


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train on a rank; return losses, seconds and, in a memory job, its bytes."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    memory = PeakSampler(job["allocator"] is not None)
    rows = job["ranks"] * job["microbatch"] * job["accumulation"]
    share = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
    size = SIZES[job["size"]]
    batches = build_batches(size, job["warmup"] + job["steps"], rows)
    setup = Setup(job["microbatch"], job["accumulation"], job["clip"])
    trainer = BUILDERS[job["kind"]](build_model(size), setup, **job["options"])
    mine = [(tokens[share], targets[share]) for tokens, targets in batches]
    found = timed_steps(trainer.step, mine, job["warmup"], memory)
    trainer.close()
    return found


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the checked command line; end the program with a message if it is not legal."""
    parser = JobParser(__doc__, CONTENDERS, memory="both", steps=(1, 5))
    add = parser.add_argument
    add("--ranks", type=count(), default=2, help="processes of a job (default: 2)")
    add("--size", choices=["tiny", "10M", "85M"], default="10M", help="parameters of the model (default: 10M)")
    add("--microbatch", type=count(), default=1, help="sequences of a rank in a forward (default: 1)")
    add("--accumulation", type=count(), default=1, help="forwards and backwards of a step (default: 1)")
    add("--clip", type=float, default=0.0, metavar="NORM", help="clip the norm of the gradients (default: it is not)")
    add("--offload-folder", type=Path, metavar="FOLDER", help="where offload puts its files (default: a new one, here)")
    return parser.check(parser.parse_args(arguments))


def columns(rows: Sequence[Row], allocators: Sequence[str]) -> list[Column]:
    """Times are medians with (lowest-highest) over the rounds; peaks hold torch itself, which is the last column."""

    def bytes_of(allocator: str, row: Row | None, key: str = "peak_bytes") -> float | None:
        job = row.memory.get(allocator) if row else None
        return mib(getattr(job, key)) if job else None

    def to_fsdp2(allocator: str, row: Row) -> float | None:
        return over(bytes_of(allocator, row), bytes_of(allocator, find(rows, FSDP2)))

    found = [
        Column("s/step", lambda row: row.step_seconds, ".3f"),
        Column("x DDP", lambda row: row.ratios(find(rows, DDP)), panel="step time / DDP's in the same round", line=1.0),
        Column("x FSDP2", lambda row: row.ratios(find(rows, FSDP2))),
    ]
    for allocator in allocators:
        panel = f"peak memory of a rank in training, MiB, {allocator}"
        found.append(Column(f"peak MiB\n{allocator}", partial(bytes_of, allocator), ".0f", panel))
        found.append(Column(f"x FSDP2\n{allocator}", partial(to_fsdp2, allocator)))
    found.append(LOSSES)
    if allocators:
        found.append(Column("torch\nitself", lambda row: bytes_of(allocators[0], row, "baseline_bytes"), ".0f"))
    return found


def main() -> int:
    options = parse_arguments()
    clipping = f"clipped at {options.clip:g}, " if options.clip else ""
    title = (
        f"GPT {options.size}, fp32, {options.ranks} ranks x {options.threads} thread(s), "
        f"{options.accumulation} x microbatch {options.microbatch}, {clipping}"
        f"{options.rounds} round(s) of {options.steps} steps"
    )
    with tempfile.TemporaryDirectory(prefix="offload-", dir=options.offload_folder or Path.cwd()) as folder:
        os.environ[OFFLOAD_FOLDER] = folder
        run = partial(run_steps, "compare:train", options)
        return compare(options, title, run, lambda rows: {title: columns(rows, options.allocators)}, judges=True)


if __name__ == "__main__":
    sys.exit(main())
