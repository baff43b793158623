"""Times one optimizer step on a flat CPU shard: the C++ kernel, torch's kernels, DeepSpeedCPUAdam, and plain copies.

A round runs every contender once; the next round begins with another one. So a slow minute of the machine meets all of
them, and a ratio compares two steps of the same round. Bandwidth counts what a step must move: master weights and
states read and written, the gradient read, the parameters written. The copy bandwidth is the best of two ways to copy
float32 weights, bytes read plus bytes written as in STREAM; a share above 100 % is possible, since a step that writes
where it has read moves no line of the cache in vain, and reads more than it writes.

Example, everything and then the kernel alone with bfloat16 gradients:

    python benchmarks/cpu_optimizer.py --deepspeed-python ../deepspeed/bin/python --json cpu_optimizer.json
    python benchmarks/cpu_optimizer.py --contenders kernel kernel-int8 --gradient bfloat16 --rounds 5
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _harness import check_counts, settings_of
from _report import make_table
from rich.console import Console
from torch import Tensor

from lowtide.kernels.cpu_build import load_library
from lowtide.kernels.optimizer_states import new_states, stored_states
from lowtide.kernels.optimizer_step import CHUNK_NUMEL, CpuKernel, ShardUpdate
from lowtide.optimizers import OPTIMIZERS
from lowtide.optimizers.optimizer import Optimizer

OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "adagrad": {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10, "initial_accumulator_value": 0.0},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
}
STATE_DTYPES = {"kernel": torch.float32, "kernel-bf16": torch.bfloat16, "kernel-int8": torch.int8}
LABELS = {
    "kernel": "C++ kernel",
    "kernel-bf16": "C++ kernel, bf16 states",
    "kernel-int8": "C++ kernel, int8 states",
    "torch-chunked": "torch fused + cast, chunk by chunk",
    "torch-whole": "torch fused, then cast",
    "deepspeed": "DeepSpeedCPUAdam, then cast",
    "copy-torch": "copy of float32, torch",
    "copy-streamed": "copy of float32, streamed",
}
PAUSE_SECONDS = 0.02  # threads of the step before have stopped waiting for work


@dataclass
class Row:
    """One contender: a step of it takes no argument and gives its seconds."""

    name: str
    moved_bytes: float
    step: Callable[[], float]
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the fastest step, as STREAM counts."""
        return self.moved_bytes / min(self.seconds)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--numel", type=int, default=100_000_000, help="elements of the shard (default: 100000000)")
    add("--threads", type=int, default=2, help="threads of a step (default: 2)")
    add("--rounds", type=int, default=15, help="timed steps of each contender, after one untimed (default: 15)")
    add("--rule", choices=OPTIONS, default="adamw", help="optimizer (default: adamw)")
    add("--gradient", choices=["float32", "bfloat16", "float16"], default="float32", help="default: float32")
    add("--out", choices=["bfloat16", "float16", "none"], default="bfloat16", help="parameters (default: bfloat16)")
    add("--contenders", nargs="+", choices=LABELS, metavar="NAME", help=f"some of: {', '.join(LABELS)}")
    add("--deepspeed-python", type=Path, metavar="PATH", help="interpreter of an environment that has DeepSpeed")
    add("--json", type=Path, metavar="FILE", help="write every raw number")
    options = parser.parse_args(arguments)
    check_counts(parser, options, ["numel", "threads", "rounds"])
    if options.deepspeed_python and not os.access(options.deepspeed_python, os.X_OK):
        parser.error(f"--deepspeed-python: expected an interpreter, found nothing to run at {options.deepspeed_python}")
    asked = options.contenders or list(LABELS)
    if "deepspeed" in asked and (options.deepspeed_python is None or options.rule != "adamw"):
        if options.contenders:
            parser.error("deepspeed: expected --deepspeed-python and --rule adamw")
        asked.remove("deepspeed")
    options.contenders = asked
    return options


def timed(work: Callable[[], None]) -> Callable[[], float]:
    """A step that measures itself."""

    def step() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return step


class Shard:
    """The tensors that the contenders of this process share, and their steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rule: Optimizer = OPTIMIZERS[options.rule]
        self.options = OPTIONS[options.rule]
        numel, generator = options.numel, torch.Generator().manual_seed(0)
        self.master = torch.randn(numel, generator=generator)
        self.gradient = (0.01 * torch.randn(numel, generator=generator)).to(getattr(torch, options.gradient))
        self.out = None if options.out == "none" else torch.empty(numel, dtype=getattr(torch, options.out))
        self.wide = list(new_states(self.rule, self.master, self.options).values())
        self.num_steps = 1  # the first step of all is not timed

    def moved_bytes(self, states: list[Tensor]) -> int:
        """Bytes that a step reads and writes."""
        out_bytes = 0 if self.out is None else self.out.nbytes
        return 2 * self.master.nbytes + self.gradient.nbytes + 2 * sum(state.nbytes for state in states) + out_bytes

    def row(self, name: str) -> Row:
        """A contender that runs in this process."""
        if name not in STATE_DTYPES:
            chunk = CHUNK_NUMEL if name == "torch-chunked" else self.master.numel()
            return Row(name, self.moved_bytes(self.wide), timed(lambda: self.step_by_torch(chunk)))
        kernel, states = CpuKernel(), self.wide
        if name != "kernel":
            states = list(new_states(self.rule, self.master, self.options, STATE_DTYPES[name]).values())
        return Row(name, self.moved_bytes(states), timed(lambda: self.step_by_kernel(kernel, states)))

    def step_by_kernel(self, kernel: CpuKernel, states: list[Tensor]) -> None:
        self.num_steps += 1
        step, runs = self.num_steps, [(self.master.numel(), self.options)]
        stored = stored_states(states)
        kernel.update(self.rule, ShardUpdate(self.master, self.gradient, stored, runs, [step], self.out), step, 1.0)

    def step_by_torch(self, chunk_numel: int) -> None:
        self.num_steps += 1
        step = torch.tensor(float(self.num_steps))
        for start in range(0, self.master.numel(), chunk_numel):
            part = slice(start, start + chunk_numel)
            weight, states = self.master[part], [state[part] for state in self.wide]
            self.rule.apply(weight, self.gradient[part].float(), states, step, self.options)
            if self.out is not None:
                self.out[part].copy_(weight)

    def copy_row(self, name: str, threads: int) -> Row:
        """A copy of the master weights, which the gradient's dtype does not change."""
        to = torch.empty_like(self.master)
        moved = 2 * self.master.nbytes
        if name == "copy-torch":
            return Row(name, moved, timed(lambda: void(to.copy_(self.master))))
        copy = load_library(Path(__file__).with_name("_cpu_optimizer_copy.cpp")).copy_streamed
        copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        pool = ThreadPoolExecutor(threads)
        ends = [self.master.nbytes * i // threads // 4096 * 4096 for i in range(threads)] + [self.master.nbytes]

        def work() -> None:
            tasks = [
                pool.submit(copy, to.data_ptr() + start, self.master.data_ptr() + start, end - start)
                for start, end in pairwise(ends)
            ]
            for task in tasks:
                task.result()

        return Row(name, moved, timed(work))


def void(_: object) -> None:
    """Makes a statement of an expression."""


class DeepSpeed:
    """The process that runs DeepSpeedCPUAdam."""

    def __init__(self, options: argparse.Namespace) -> None:
        worker = Path(__file__).with_name("_cpu_optimizer_deepspeed.py")
        given = [str(options.numel), str(options.threads), options.out, options.gradient]
        folder = options.deepspeed_python.absolute().parent  # where its ninja lies
        environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
        self._process = subprocess.Popen(
            [str(options.deepspeed_python), str(worker), *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        if self._answer() != "ready":
            raise self._failed("expected its worker to get ready, found another answer")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            raise self._failed(f"its worker failed:\n{self._process.stderr.read()[-2000:]}")
        return line.strip()

    def _failed(self, reason: str) -> SystemExit:
        """Ends the process, and gives what ends the program."""
        with self._process:  # which reaps it, and closes its pipes
            self._process.kill()
        return SystemExit(f"deepspeed: {reason}")

    def step(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def measure(rows: list[Row], rounds: int) -> None:
    """One untimed step of each, then rounds that each begin with another contender."""
    for number in range(-1, rounds):
        first = max(number, 0) % len(rows)
        for row in rows[first:] + rows[:first]:
            time.sleep(PAUSE_SECONDS)
            seconds = row.step()
            if number >= 0:
                row.seconds.append(seconds)


def ratios(row: Row, other: Row) -> tuple[float, float]:
    """A row's time over another's: the median over the rounds, and that of the fastest steps."""
    by_round = [a / b for a, b in zip(row.seconds, other.seconds, strict=True)]
    return statistics.median(by_round), min(row.seconds) / min(other.seconds)


def table(rows: list[Row], numel: int) -> Any:
    """What was found. "of copy": share of the copy bandwidth; the last columns: time over DeepSpeed's."""
    copies = [row.bandwidth for row in rows if row.name.startswith("copy")]
    deepspeed = next((row for row in rows if row.name == "deepspeed"), None)
    headings = ["step", "median ms", "least ms", "bytes", "GB/s", "of copy", "DeepSpeed", "least"]
    found = make_table("", headings, [])
    for row in rows:
        compared = deepspeed is not None and not row.name.startswith("copy")
        by_round, of_least = ratios(row, deepspeed) if compared and deepspeed is not None else (0.0, 0.0)
        found.add_row(
            LABELS[row.name],
            f"{row.median * 1e3:.1f}",
            f"{min(row.seconds) * 1e3:.1f}",
            f"{row.moved_bytes / numel:.1f}",
            f"{row.bandwidth / 1e9:.1f}",
            f"{row.bandwidth / max(copies):.0%}" if copies else "",
            f"{by_round:.2f}" if compared else "",
            f"{of_least:.2f}" if compared else "",
        )
    return found


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for the worker
    console = Console(width=max(Console().width, 110))  # as wide in a pipe as the table
    deepspeed = DeepSpeed(options) if "deepspeed" in options.contenders else None
    shard = Shard(options)
    rows = []
    for name in options.contenders:
        if name == "deepspeed" and deepspeed is not None:
            rows.append(Row(name, shard.moved_bytes(shard.wide), deepspeed.step))
        elif name.startswith("copy"):
            rows.append(shard.copy_row(name, options.threads))
        else:
            rows.append(shard.row(name))
    measure(rows, options.rounds)
    if deepspeed is not None:
        deepspeed.close()
    console.print(
        f"{options.rule}, {options.numel:,} elements, {options.threads} threads, {options.gradient} gradient, "
        f"{options.out} parameters, {options.rounds} rounds"
    )
    console.print(table(rows, options.numel))
    if options.json:
        settings = settings_of(options, "cpu_optimizer") | {"processor": platform.processor()}
        found = {row.name: {"moved_bytes": row.moved_bytes, "seconds": row.seconds} for row in rows}
        options.json.write_text(json.dumps({"settings": settings, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
