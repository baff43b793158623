"""The law of memory: in a cgroup with the planned bytes and 3 % more a job ends well, with 3 % less it is killed.

Random models, configs and one to four ranks, each case both ways, in fresh processes. Planned are for each rank the
peak of its tensors, what a process takes beside them as a tiny training shows it, and the kernel's tables of its pages.
The C library gives back what is freed, as the environment tells it. Needs root and memory cgroups.

Example:

    python benchmarks/cgroup_law.py --machine machine.json --cases 50 --json law.json
    python benchmarks/cgroup_law.py --machine machine.json --cases 10 --unlimited     the most that jobs take, no limits
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from _contenders import lowtide_config
from _harness import (
    ALLOCATORS,
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
)
from _model import GPTSize
from _worker import KIB, STATUS, kib_of
from predicted import Case, estimate_of, train

from lowtide.engine.plan.measured import Measured, default_path

MARGIN = 0.03
EXACT = ALLOCATORS["exact"] | {"MALLOC_ARENA_MAX": "1"}  # glibc returns freed memory at once
_TINY = GPTSize(num_layers=2, width=32, num_heads=2, sequence_length=32)
_PAGE_TABLES = 1 / 512  # of what is mapped: 8 bytes for each page of 4 KiB
ROOT = Path("/sys/fs/cgroup")
_SECONDS_TO_EMPTY = 10.0


class NoCgroup(Exception):
    """A memory cgroup cannot be made here; the text says why."""


def files_of_limits() -> tuple[Path, dict[str, str], str, str]:
    """Return where this machine's memory cgroups are, their files without a limit, and those of peak and kills."""
    if (ROOT / "memory").is_dir():  # version 1
        limits = {"memory.limit_in_bytes": "-1", "memory.memsw.limit_in_bytes": "-1"}
        return ROOT / "memory", limits, "memory.max_usage_in_bytes", "memory.oom_control"
    return ROOT, {"memory.max": "max", "memory.swap.max": "0"}, "memory.peak", "memory.events"


@contextlib.contextmanager
def memory_group(limit: int | None) -> Iterator[Path]:
    """Give the folder of a memory cgroup, which is removed at the end. limit: bytes; None, to see the most.

    Without swap: what does not fit is killed. Raises NoCgroup.
    """
    parent, limits, *_ = files_of_limits()
    folder = parent / f"lowtide-law-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoCgroup(f"cannot make {folder}: {error.strerror}; it takes root and a writable {parent}") from error
    try:
        if not (folder / next(iter(limits))).exists():
            raise NoCgroup(f"{parent} has no memory controller; it must be in {ROOT}/cgroup.subtree_control")
        for name, unlimited in limits.items():
            with contextlib.suppress(OSError):  # swap is not accounted for everywhere
                (folder / name).write_text(unlimited if limit is None or unlimited == "0" else str(limit))
        yield folder
    finally:
        deadline = time.monotonic() + _SECONDS_TO_EMPTY
        while folder.exists() and time.monotonic() < deadline:  # until its processes are gone
            with contextlib.suppress(OSError):
                folder.rmdir()
            time.sleep(0.05)


def private_bytes(job: dict[str, Any]) -> int:
    """Train as a worker, and return this process's bytes in heap, stacks and anonymous maps."""
    train(job)
    return kib_of(STATUS.read_text(), "RssAnon") * KIB


@cache
def process_bytes(every: int, is_bf16: bool, timeout: float) -> int:
    """Return bytes of a rank beside its tensors: interpreter, torch and its libraries, threads, engine.

    It depends on the imports: with the first recomputed block torch imports its compiler, 75 MB. In bf16, oneDNN
    keeps about 0.7 MB of generated code for each kind and shape of product.
    """
    config = lowtide_config(0, optimizer={"type": "adamw", "params": {}}, activation_checkpointing={"every": every})
    config |= {"bf16": {"enabled": True}} if is_bf16 else {}
    case = Case("law", "a process", 1, _TINY, config)
    job = {"worker": "cgroup_law:private_bytes", "threads": 1, "cases": [asdict(case)], "rounds": 1, "steps": 1}
    (found,) = run_ranks(job, 1, sys.executable, environment_of(1, None) | EXACT, timeout)
    return int(found)


def planned_bytes(case: Case, measured: Measured, timeout: float) -> int:
    """Of all ranks of a job on one host."""
    estimate = estimate_of(case, measured)
    process = process_bytes(case.config["activation_checkpointing"]["every"], "bf16" in case.config, timeout)
    each = process + estimate.peak_bytes + estimate.host_bytes
    return round(case.ranks * each * (1 + _PAGE_TABLES))


def drawn(generator: random.Random, ranks: int) -> Case:
    """A model of 5 to 40 million parameters, and a config of what the engine has."""
    width = 64 * generator.randint(6, 10)
    size = GPTSize(generator.randint(3, 8), width, width // 64, generator.choice((32, 64, 128)))
    stage, accumulation = generator.randint(0, 3), generator.randint(1, 3)
    config = lowtide_config(
        stage,
        train_micro_batch_size_per_gpu=generator.randint(1, 4),
        gradient_accumulation_steps=accumulation,
        optimizer={"type": generator.choice(("adamw", "lion")), "params": {"lr": 1e-4}},
        activation_checkpointing={"every": generator.choice((0, 1))},
        communication={"transport": generator.choice(("shared_memory", "sockets")) if ranks > 1 else "auto"},
    )
    if generator.random() < 0.3:
        config["bf16"] = {"enabled": True}
    transport = config["communication"]["transport"]
    name = (
        f"{size.num_layers} x {width}, {size.sequence_length} tokens x {config['train_micro_batch_size_per_gpu']}, "
        f"stage {stage}, {accumulation} microbatches, {config['optimizer']['type']}, {ranks} ranks"
        + (f", {transport}" if ranks > 1 else "")
        + (", recomputed" if config["activation_checkpointing"]["every"] else "")
        + (", bf16" if "bf16" in config else "")
    )
    return Case("law", name, ranks, size, config)


def run(case: Case, limit: int | None, steps: int, timeout: float) -> tuple[bool, int]:
    """Return whether it was killed for its memory, and the most bytes that were charged, with page cache.

    Raises JobError for any other end, NoCgroup.
    """
    *_, peak, kills = files_of_limits()
    is_killed = False
    with memory_group(limit) as folder:
        job = {"worker": "predicted:train", "threads": 1, "cases": [asdict(case)], "rounds": 1}
        job |= {"steps": steps, "cgroup": str(folder)}
        try:
            run_ranks(job, case.ranks, sys.executable, environment_of(1, None) | EXACT, timeout)
        except JobError:
            is_killed = re.search(r"^oom_kill [1-9]", (folder / kills).read_text(), re.MULTILINE) is not None
            if not is_killed:
                raise
        return is_killed, int((folder / peak).read_text())


def judged(case: Case, planned: int, options: argparse.Namespace) -> Row:
    """Return the row of a case, both ways or without a limit; it fails where the law does not hold."""
    row = row_of(case.name, {"planned": planned / 1e6, "taken": None, "above": None})
    try:
        if options.unlimited:
            peak = run(case, None, options.steps, options.timeout)[1]
            row.more.update({"taken": peak / 1e6, "above": planned / peak - 1})
            return row
        for sign, must_be_killed in ((1, False), (-1, True)):
            limit = round(planned * (1 + sign * MARGIN))
            if run(case, limit, options.steps, options.timeout)[0] != must_be_killed:
                row.failure = f"{sign * MARGIN:+.0%}: {'ended well' if must_be_killed else 'was killed'}"
    except JobError as error:
        row.failure = str(error)
    return row


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--machine", type=Path, default=default_path(), help="what `lowtide env --measure` has written")
    parser.add_argument("--cases", type=count(), default=50, help="each both ways (50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=count(), default=4, help="of each run (4)")
    parser.add_argument("--unlimited", action="store_true", help="no limits: planned bytes, and the most there are")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of a run (300)")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the cases; the status is 1 where the law does not hold."""
    options, console = parse_arguments(), begin()
    generator = random.Random(options.seed)
    rows = []
    try:
        measured = Measured.read(options.machine)
        for number in range(options.cases):
            case = drawn(generator, 1 + number % 4)
            rows.append(judged(case, planned_bytes(case, measured, options.timeout), options))
            console.print(f"{case.name}: {rows[-1].failure or 'ended as planned'}", markup=False, highlight=False)
    except (NoCgroup, ValueError) as error:
        raise SystemExit(f"cgroup_law: {error}") from error
    if not options.unlimited:
        print(f"the law holds for {sum(row.failure is None for row in rows)} of {len(rows)} cases")
    title = "planned bytes, MB"
    columns = columns_of({"planned": ".1f", "taken": ".1f", "above": "+.1%"}, ["planned", "taken"])
    return conclude(options, console, rows, {title: columns}, title)


if __name__ == "__main__":
    sys.exit(main())
