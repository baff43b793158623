"""Times one AdamW step on a flat CPU shard: the C++ kernel, torch's kernels, DeepSpeedCPUAdam, and a plain copy.

Gradients are float32, parameters are written in bfloat16. Bandwidth counts what a step moves: master weights and states
read and written, the gradient read, the parameters written. "of copy" compares it with a copy of float32 weights, which
may be exceeded: a step writes where it has read, and reads more than it writes.

Example, everything and then the kernel alone:

    python benchmarks/cpu_optimizer.py --deepspeed-python ../deepspeed/bin/python --json cpu_optimizer.json
    python benchmarks/cpu_optimizer.py --contenders kernel kernel-int8 --rounds 5
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _harness import Column, Contender, JobParser, Row, by_name, compare, count, find, over, run_steps
from _worker import PeakSampler, timed_steps

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
COPY = "copy"
CONTENDERS = by_name(
    Contender("kernel", "C++ kernel", "lowtide", {"state_dtype": "float32"}),
    Contender("kernel-bf16", "C++ kernel, bf16 states", "lowtide", {"state_dtype": "bfloat16"}),
    Contender("kernel-int8", "C++ kernel, int8 states", "lowtide", {"state_dtype": "int8"}),
    Contender("torch-chunked", "torch fused + cast, chunk by chunk", "torch", {"by_chunks": True}),
    Contender("torch-whole", "torch fused, then cast", "torch", {"by_chunks": False}),
    Contender("deepspeed", "DeepSpeedCPUAdam, then cast", "deepspeed"),
    Contender(COPY, "copy of float32, streamed", "copy"),
)

Work = tuple[Callable[[], None], int]
"""A step, and the bytes that it reads and writes."""


# -- a rank: how each makes a step ------------------------------------------------------------------------------------


class Shard:
    """The tensors that a step works on."""

    def __init__(self, numel: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.master = torch.randn(numel, generator=generator)
        self.gradient = 0.01 * torch.randn(numel, generator=generator)
        self.out = torch.empty(numel, dtype=torch.bfloat16)
        self.num_steps = 0

    def moved_bytes(self, state_bytes: int) -> int:
        """Return what a step reads and writes."""
        return 2 * self.master.nbytes + self.gradient.nbytes + 2 * state_bytes + self.out.nbytes


def by_lowtide(shard: Shard, state_dtype: str) -> Work:
    from lowtide.kernels.optimizer_states import new_states, stored_states
    from lowtide.kernels.optimizer_step import CpuKernel, ShardUpdate
    from lowtide.optimizers import OPTIMIZERS

    rule, kernel, runs = OPTIMIZERS["adamw"], CpuKernel(), [(shard.master.numel(), OPTIONS)]
    tensors = list(new_states(rule, shard.master, OPTIONS, getattr(torch, state_dtype)).values())

    def step() -> None:
        shard.num_steps += 1
        stored, number = stored_states(tensors), shard.num_steps
        kernel.update(rule, ShardUpdate(shard.master, shard.gradient, stored, runs, [number], shard.out), number, 1.0)

    return step, shard.moved_bytes(sum(tensor.nbytes for tensor in tensors))


def by_torch(shard: Shard, by_chunks: bool) -> Work:
    from lowtide.kernels.optimizer_states import new_states
    from lowtide.kernels.optimizer_step import CHUNK_NUMEL
    from lowtide.optimizers import OPTIMIZERS

    rule, numel = OPTIMIZERS["adamw"], shard.master.numel()
    tensors = list(new_states(rule, shard.master, OPTIONS).values())
    chunk_numel = CHUNK_NUMEL if by_chunks else numel

    def step() -> None:
        shard.num_steps += 1
        number = torch.tensor(float(shard.num_steps))
        for start in range(0, numel, chunk_numel):
            part = slice(start, start + chunk_numel)
            weight, states = shard.master[part], [state[part] for state in tensors]
            rule.apply(weight, shard.gradient[part], states, number, OPTIONS)
            shard.out[part].copy_(weight)

    return step, shard.moved_bytes(sum(tensor.nbytes for tensor in tensors))


def by_deepspeed(shard: Shard) -> Work:
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

    weight = torch.nn.Parameter(shard.master)
    optimizer = DeepSpeedCPUAdam([weight], lr=1e-3, weight_decay=0.1, adamw_mode=True)
    weight.grad = shard.gradient

    def step() -> None:
        optimizer.step()
        shard.out.copy_(weight.detach())

    return step, shard.moved_bytes(2 * shard.master.nbytes)


def by_copy(shard: Shard) -> Work:
    """The C library's memmove, whose stores go around the cache where there are many bytes."""
    to, source, threads = torch.empty_like(shard.master), shard.master, torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)
    ends = [source.nbytes * number // threads // 4096 * 4096 for number in range(threads)] + [source.nbytes]

    def copy(range_: tuple[int, int]) -> None:
        start, end = range_
        ctypes.memmove(to.data_ptr() + start, source.data_ptr() + start, end - start)

    def step() -> None:
        list(pool.map(copy, pairwise(ends)))

    return step, 2 * source.nbytes


BUILDERS: dict[str, Callable[..., Work]] = {
    "lowtide": by_lowtide,
    "torch": by_torch,
    "deepspeed": by_deepspeed,
    "copy": by_copy,
}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of every step, and what each moves."""
    work, moved_bytes = BUILDERS[job["kind"]](Shard(job["numel"]), **job["options"])
    found = timed_steps(work, [()] * (job["warmup"] + job["steps"]), job["warmup"], PeakSampler(False))
    return found | {"losses": [], "moved_bytes": moved_bytes}


# -- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the checked command line; end the program with a message if it is not legal."""
    parser = JobParser(__doc__, CONTENDERS, rounds=5, steps=(1, 5))
    parser.add_argument("--numel", type=count(), default=100_000_000, help="elements (default: 100000000)")
    parser.set_defaults(threads=2, ranks=1)
    return parser.check(parser.parse_args(arguments))


def columns(rows: Sequence[Row], numel: int) -> list[Column]:
    """Shares and ratios are of jobs of the same round. GB/s: of the fastest step, as STREAM counts."""

    def bandwidth(row: Row | None) -> float | None:
        if row is None or not row.timed:
            return None
        return float(row.more["moved_bytes"]) / min(min(job.seconds) for job in row.timed.values())

    return [
        Column("ms", lambda row: [job.step_seconds * 1e3 for job in row.timed.values()], ".1f"),
        Column("bytes", lambda row: row.more["moved_bytes"] / numel, ".1f"),
        Column("GB/s", lambda row: (bandwidth(row) or 0.0) / 1e9, ".1f", "GB/s of the fastest step (more is better)"),
        Column("of copy", lambda row: over(bandwidth(row), bandwidth(find(rows, COPY))), ".0%"),
        Column("x DeepSpeed", lambda row: row.ratios(find(rows, "deepspeed"))),
    ]


def main() -> int:
    options = parse_arguments()
    repeats = f"{options.rounds} rounds of {options.steps} steps"
    title = f"AdamW, {options.numel:,} elements, {options.threads} threads, {repeats}"
    run = partial(run_steps, "cpu_optimizer:train", options)
    return compare(options, title, run, lambda rows: {title: columns(rows, options.numel)})


if __name__ == "__main__":
    sys.exit(main())
