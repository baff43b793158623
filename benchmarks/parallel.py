"""Splits the same Llama over ranks with lowtide, torch and DeepSpeed; compares time, peaks and bytes sent.

A round runs every contender once, each as a fresh job of its own, in another order; a ratio compares two jobs of the
same round. Peaks are taken in jobs that are not timed. What is sent is counted by the kernel, on the loopback device of
a network of its own where the processes may have one (root on Linux), with headers of packets and two barriers. All
losses must be those of one process. All run in the same interpreter, since what is installed there is in their peaks:
transformers imports triton and accelerate where it finds them, 36 MiB of a rank.

Example, the whole comparison and then a quick look:

    python benchmarks/parallel.py --deepspeed-python PATH --json parallel.json --png parallel.png
    python benchmarks/parallel.py --contenders dtensor lowtide-tensor --rounds 1 --memory none --layers 2
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import importlib.metadata
import json
import os
import random
import signal
import socket
import statistics
import struct
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import _memory
from _conclusion import conclude
from _ranks import ALLOCATORS, JobError, environment_of, run_ranks
from _report import loss_difference
from gpu import python_path
from rich.console import Console
from rich.table import Table

WORKER = Path(__file__).with_name("_parallel_worker.py")
MIB = 1 << 20
_NEW_NETWORK, _GET_FLAGS, _SET_FLAGS, _UP = 0x40000000, 0x8913, 0x8914, 1


@dataclass(frozen=True)
class ParallelContender:
    """One row; `options` go to the builder of its `kind` in `_parallel_trainers.py`. peer: whom it is compared with."""

    name: str
    label: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    peer: str | None = None


def _lowtide(name: str, label: str, peer: str, parallel: dict[str, Any], route: str) -> ParallelContender:
    options = {"parallel": parallel, "route": route}
    on_wire = route == "sockets"
    return ParallelContender(
        f"lowtide-{name}" + "-sockets" * on_wire, f"lowtide {label}" + ", sockets" * on_wire, "lowtide", options, peer
    )


SINGLE = "single"


def contenders(ranks: int) -> dict[str, ParallelContender]:
    """By name, peers before those who are compared with them."""
    with_parts = {"tensor": ranks, "tensor_sequence": True}
    found = [
        ParallelContender(SINGLE, "one process", "single"),
        ParallelContender("dtensor", "torch DTensor", "dtensor", {"sequence": False}),
        ParallelContender("autotp", "DeepSpeed AutoTP", "autotp"),
        *(_lowtide("tensor", "tensor", "dtensor", {"tensor": ranks}, route) for route in ("auto", "sockets")),
        ParallelContender("dtensor-sequence", "torch DTensor, norms on parts", "dtensor", {"sequence": True}),
        *(
            _lowtide("tensor-sequence", "tensor, norms on parts", "dtensor-sequence", with_parts, route)
            for route in ("auto", "sockets")
        ),
        ParallelContender("ulysses", "DeepSpeed Ulysses", "ulysses"),
        *(_lowtide("sequence", "sequence", "ulysses", {"sequence": ranks}, route) for route in ("auto", "sockets")),
    ]
    return {one.name: one for one in found}


@dataclass
class Job:
    """What one job gave, of the slowest or largest rank; warm-up left out of seconds and bytes."""

    losses: list[float]
    seconds: list[float]
    sent: int  # by all ranks, of a step, as the kernel counts
    peak_bytes: int

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Row:
    """All jobs of a contender; `failure` ends its part."""

    contender: ParallelContender
    timed: dict[int, Job] = field(default_factory=dict)
    memory: Job | None = None
    failure: str | None = None

    @property
    def losses(self) -> list[list[float]]:
        return [job.losses for job in [*self.timed.values(), *([self.memory] if self.memory else [])]]

    @property
    def step_seconds(self) -> float | None:
        return statistics.median(job.step_seconds for job in self.timed.values()) if self.timed else None

    @property
    def sent(self) -> float | None:
        return statistics.median(job.sent for job in self.timed.values()) if self.timed else None

    def ratios(self, peer: Row | None) -> list[float]:
        rounds = sorted(self.timed.keys() & peer.timed.keys()) if peer else []
        return [self.timed[n].step_seconds / peer.timed[n].step_seconds for n in rounds] if peer else []


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Ends the program with what was expected and found where the command line cannot mean anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--contenders", nargs="+", metavar="NAME", help=f"some of: {', '.join(contenders(2))} (default: all)")
    add("--ranks", type=int, default=2, help="that share layers or sequences (default: 2)")
    for name, default in (("layers", 4), ("width", 512), ("inner", 1408), ("heads", 8), ("key-heads", 4)):
        add(f"--{name}", type=int, default=default, help=f"of the Llama (default: {default})")
    add("--vocabulary", type=int, default=8192, help="tokens that there are (default: 8192)")
    add("--tokens", type=int, default=256, help="of a sequence (default: 256)")
    add("--rows", type=int, default=2, help="sequences of a step (default: 2)")
    add("--rounds", type=int, default=5, help="timed jobs of each contender (default: 5)")
    add("--warmup", type=int, default=2, help="steps before the timed ones (default: 2)")
    add("--steps", type=int, default=8, help="timed steps of a job (default: 8)")
    add("--memory", choices=[*ALLOCATORS, "none"], default="exact", help="allocator of the memory jobs")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="longest time of one job (default: 300)")
    add("--loss-tolerance", type=float, default=1e-4, help="relative difference of a loss that fails (default: 1e-4)")
    add("--seed", type=int, default=0, help="of the order of a round (default: 0)")
    add(
        "--deepspeed-python",
        type=Path,
        metavar="PATH",
        help="runs all: has DeepSpeed, and what lowtide needs",
    )
    add("--json", type=Path, metavar="FILE", help="write every number")
    add("--png", type=Path, metavar="FILE", help="write a bar chart")
    options = parser.parse_args(arguments)
    for name in ("ranks", "layers", "rounds", "warmup", "steps", "rows"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, found {getattr(options, name)}")
    if options.deepspeed_python and not os.access(options.deepspeed_python, os.X_OK):
        parser.error(f"--deepspeed-python: expected an interpreter, found nothing to run at {options.deepspeed_python}")
    known = contenders(options.ranks)
    for name in options.contenders or ():
        if name not in known:
            parser.error(f"--contenders: expected some of {', '.join(known)}, found {name!r}")
    chosen = [known[name] for name in options.contenders or known]
    if options.contenders is None and options.deepspeed_python is None:
        chosen = [one for one in chosen if one.kind not in ("autotp", "ulysses")]
    options.contenders = chosen
    return options


def network_of_its_own() -> bool:
    """Whether this process, and all that it starts, now has a loopback device that nobody else uses."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEW_NETWORK):
            return False
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16sH14x", b"lo", 0)
            (flags,) = struct.unpack("16xH14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
    except (OSError, AttributeError):
        return False
    return True


def run_job(contender: ParallelContender, options: argparse.Namespace, allocator: str | None) -> Job:
    """Raises JobError when a rank fails or the time is over; no process is left behind."""
    names = ("layers", "width", "inner", "heads", "key_heads", "vocabulary", "tokens", "rows")
    warmup, steps = (options.warmup, options.steps) if allocator is None else (0, 3)
    job = {
        "kind": contender.kind,
        "options": contender.options,
        "size": {name: getattr(options, name) for name in names},
        "warmup": warmup,
        "steps": steps,
        "threads": 1,
        "allocator": allocator,
    }
    ranks = 1 if contender.kind == "single" else options.ranks
    environment = environment_of(1, allocator) | {"HF_HUB_OFFLINE": "1"}
    with python_path() as path:
        environment |= {"PYTHONPATH": path}
        python = str(options.deepspeed_python or sys.executable)
        found = run_ranks(WORKER, job, ranks, python, environment, options.timeout)
    return Job(
        losses=found[0]["losses"],
        seconds=[max(step) for step in zip(*(one["seconds"] for one in found), strict=True)][warmup:],
        sent=int(statistics.median(found[0]["sent"][warmup:])),
        peak_bytes=max(one["peak_bytes"] or 0 for one in found),
    )


def run(options: argparse.Namespace, console: Console) -> list[Row]:
    """All rounds, then the memory jobs; a contender that failed is left out from there on."""
    rows, order = [Row(one) for one in options.contenders], random.Random(options.seed)
    for number in range(options.rounds):
        for row in order.sample(rows, len(rows)):
            job = _try(row, options, console, f"round {number + 1}", None)
            if job is not None:
                row.timed[number] = job
    if options.memory != "none":
        for row in rows:
            row.memory = _try(row, options, console, "memory", options.memory)
    return rows


def _try(row: Row, options: argparse.Namespace, console: Console, what: str, allocator: str | None) -> Job | None:
    if row.failure:
        return None
    try:
        job = run_job(row.contender, options, allocator)
    except JobError as error:
        row.failure = f"{what}: {error}"
        console.print(f"{what}  {row.contender.label}: FAILED, {error}", markup=False, highlight=False)
        return None
    found = f"peak {job.peak_bytes / MIB:.0f} MiB" if allocator else f"{job.step_seconds:.3f} s/step"
    console.print(f"{what}  {row.contender.label}: {found}, loss {job.losses[-1]:.5f}", highlight=False)
    return job


def judge_losses(rows: list[Row], tolerance: float) -> None:
    """Marks as failed whoever's losses are not those of the first row."""
    expected = next((row.losses[0] for row in rows if row.losses), None)
    for row in rows:
        difference = loss_difference(row.losses, expected) if expected and row.losses else None
        if row.failure is None and difference is not None and not difference <= tolerance:
            row.failure = f"losses differ: expected at most {tolerance:g} (relative), found {difference:.1e}"


def table(rows: list[Row], title: str, counts_bytes: bool) -> Table:
    """One line a contender, times as medians with (lowest-highest) over the rounds."""
    by_name = {row.contender.name: row for row in rows}
    found = Table(title=title)
    found.add_column("contender")
    for heading in ("s/step", "x its peer", "peak MiB", "x its peer", "sent MiB/step", "loss difference"):
        found.add_column(heading, justify="right")
    for row in rows:
        peer = by_name.get(row.contender.peer or "")
        ratios = row.ratios(peer)
        peaks = row.memory, peer.memory if peer else None
        difference = loss_difference(row.losses, rows[0].losses[0]) if row.losses and rows[0].losses else None
        found.add_row(
            row.contender.label + (" FAILED" if row.failure else ""),
            "-" if row.step_seconds is None else f"{row.step_seconds:.3f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-",
            "-" if row.memory is None else f"{row.memory.peak_bytes / MIB:.0f}",
            f"{peaks[0].peak_bytes / peaks[1].peak_bytes:.2f}" if peaks[0] and peaks[1] else "-",
            "-" if row.sent is None or not counts_bytes else f"{row.sent / MIB:.1f}",
            "-" if difference is None else f"{difference:.0e}",
        )
    return found


def write_chart(rows: list[Row], title: str, path: Path) -> None:
    """Bars of step time, peak and bytes sent; lowtide's in blue."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.losses]
    colours = ["tab:blue" if row.contender.kind == "lowtide" else "tab:gray" for row in rows]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 1.5 + 0.4 * len(rows)), sharey=True, layout="constrained")
    panels = (
        ("seconds of a step", [row.step_seconds or 0.0 for row in rows]),
        ("peak of a rank, MiB", [row.memory.peak_bytes / MIB if row.memory else 0.0 for row in rows]),
        ("sent by all ranks in a step, MiB", [(row.sent or 0) / MIB for row in rows]),
    )
    for panel, (label, values) in zip(axes, panels, strict=True):
        panel.barh(range(len(rows)), values, color=colours)
        panel.set_xlabel(label)
    axes[0].set_yticks(range(len(rows)), [row.contender.label for row in rows])
    axes[0].invert_yaxis()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running job is stopped too
    console = Console(width=None if sys.stdout.isatty() else 140)
    started, counts_bytes = time.monotonic(), network_of_its_own()
    if not counts_bytes:
        console.print("What is sent is not counted: a network of its own takes root on Linux.", highlight=False)
    if options.memory != "none" and not _memory.supported():
        console.print(f"Peaks are not taken: they need {_memory.ROLLUP}.", highlight=False)
        options.memory = "none"
    rows = run(options, console)
    judge_losses(rows, options.loss_tolerance)
    title = (
        f"Llama {options.layers} x {options.width}, {options.rows} x {options.tokens} tokens, fp32, "
        f"{options.ranks} ranks, "
        f"{options.rounds} round(s) of {options.steps} steps"
    )
    console.print(table(rows, title, counts_bytes))
    console.print(f"done in {time.monotonic() - started:.0f} s", highlight=False)
    numbers = {"title": title, "torch": importlib.metadata.version("torch"), "rows": [asdict(row) for row in rows]}
    if options.png:
        write_chart(rows, title, options.png)
    return conclude(console, rows, json.loads(json.dumps(numbers)), options.json)


if __name__ == "__main__":
    sys.exit(main())
