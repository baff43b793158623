"""What all benchmarks do alike: jobs of ranks, interleaved rounds, the command line, tables, JSON files and pictures.

A job starts its ranks (`_worker.py`), waits for them and gathers what they wrote. A rank is a fork of the script where
that measures the same, and else a fresh process: [Note: Forks and processes]. A round runs every contender once, so
that a slow minute of the machine meets all of them, and a ratio compares two jobs of the same round. Memory is measured
in jobs that are not timed. A comparison is data: contenders, the function that a rank calls, and the columns of its
table, which the JSON file has too, and of which some are panels of the picture.

[Note: Forks and processes]
A script has imported torch and computed nothing, so a fork of it saves the 3 s of the import, and its steps take as
long as those of a fresh process. A fresh process is started for memory jobs, since the C library reads the settings of
its allocator once and a fork maps fewer pages of libraries; for devices, which may be in use here already; for another
interpreter; and for a rank on another host.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.metadata
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import _worker

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WORKER = Path(__file__).with_name("_worker.py")
MIB = 1 << 20

# Settings of the C library's allocator for memory runs. `exact`: a block of 64 KiB or more has its own map, which goes
# back to the system when the block is freed, and the top of the heap goes back at once.
ALLOCATORS: dict[str, dict[str, str]] = {
    "glibc": {},
    "exact": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_MAX_": "1000000"},
}


class JobError(Exception):
    """A job did not end well; the text says why."""


class OverBudget(JobError):
    """A rank has stopped because the model needs more memory than the rank may take."""


def environment_of(threads: int, allocator: str | None, device: str = "cpu") -> dict[str, str]:
    """Gives the environment of every rank: this process's own, but for the allocator, the threads and the devices."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    return {
        **inherited,
        **(ALLOCATORS[allocator] if allocator else {}),
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }


Process = tuple[int, Callable[[], int | None]]
"""The id of a rank that was started, in a process group of its own; and what gives its status, None while it runs."""


Start = Callable[[list[str], dict[str, str], Path], Process]
"""Starts a rank, given its command, its environment, and the file that gets its output."""


Place = Callable[[int], tuple[list[str], dict[str, str]]]
"""Gives of a rank what stands before its command, and more of its environment."""


def start_process(command: list[str], environment: dict[str, str], log: Path) -> Process:
    with log.open("wb") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    return process.pid, process.poll


def start_fork(command: list[str], environment: dict[str, str], log: Path, context: Any = None) -> Process:
    """Fork this process, or the server of a context of multiprocessing."""
    process: Any = (context or multiprocessing.get_context("fork")).Process(
        target=_worker.run_fork, args=(command[-1], environment, str(log))
    )
    process.start()
    return process.pid, lambda: process.exitcode


def can_fork(job: Mapping[str, Any], python: str, environment: Mapping[str, str]) -> bool:
    """Return whether a fork of this script measures what a fresh process does. [Note: Forks and processes]"""
    measures_memory = job.get("allocator") is not None or any(name.startswith("MALLOC_") for name in environment)
    return python == sys.executable and environment.get("CUDA_VISIBLE_DEVICES") == "" and not measures_memory


def _stop(processes: list[Process]) -> None:
    """Ends what still runs: each rank leads a process group of its own."""
    for pid, status in processes:
        while status() is None:
            with contextlib.suppress(ProcessLookupError):  # a fork leads its group a moment after its start
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.01)


def _reason(log: Path) -> str:
    """Gives the last error that a failed rank named, with the lines that continue it; else the last line it said."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for number in reversed(range(len(lines))):
        if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception|Exit)\b", lines[number]):
            continued = itertools.takewhile(lambda line: line[0].isspace(), lines[number + 1 :])
            return " ".join([lines[number], *map(str.strip, continued)])
    return lines[-1].strip() if lines else "no output"


def _wait(processes: list[Process], logs: list[Path], timeout_seconds: float) -> None:
    """Waits for all ranks; raises JobError as soon as one fails or the time is over."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        codes = [status() for _, status in processes]
        if _worker.OVER_BUDGET_STATUS in codes:  # first: the others fail too, since they lose this one
            raise OverBudget(f"rank {codes.index(_worker.OVER_BUDGET_STATUS)} needs more memory than it may take")
        for rank, code in enumerate(codes):
            if code:
                raise JobError(f"rank {rank} ended with status {code}: {_reason(logs[rank])}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            unfinished = [rank for rank, code in enumerate(codes) if code is None]
            raise JobError(f"not done after {timeout_seconds:.0f} s (--timeout); ranks {unfinished} still ran")
        time.sleep(0.05)


def run_ranks(
    job: Mapping[str, Any],
    num_processes: int,
    python: str,
    environment: dict[str, str],
    timeout_seconds: float,
    worker: Path = WORKER,
    place: Place | None = None,
    start: Start | None = None,
) -> list[Any]:
    """Runs the worker once for each rank, with the job as its JSON file; gives what each rank wrote beside that.

    job: "worker", the function that a rank calls, and "threads", beside what that function asks for. start: such as
    `warm_start` returns; else a fork of this process or a new one, see [Note: Forks and processes].

    Raises JobError when a rank fails or the time is over, OverBudget when one needs too much memory; no process is
    left behind.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    if start is None:
        is_here = worker == WORKER and place is None
        start = start_fork if is_here and can_fork(job, python, environment) else start_process
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        description = folder / "job.json"
        description.write_text(json.dumps(job))
        logs = [folder / f"rank{rank}.log" for rank in range(num_processes)]
        processes: list[Process] = []
        try:
            for rank, log in enumerate(logs):
                before, more = place(rank) if place else ([], {})
                command = [*before, python, str(worker), str(description)]
                ranked = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), **more}
                processes.append(start(command, ranked, log))
            _wait(processes, logs, timeout_seconds)
        finally:
            _stop(processes)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_processes)]


def warm_start(*modules: str) -> Start:
    """Return what forks a process that has imported modules, or where a fork cannot use the device `start_process`.

    That process imports once for all ranks, and does not touch the device. modules: none of this folder, in which a
    library would find `kernels.py`.
    """
    context, here = multiprocessing.get_context("forkserver"), str(WORKER.parent)
    context.set_forkserver_preload(list(modules))
    with (
        mock.patch.object(sys, "path", [folder for folder in sys.path if folder != here]),
        mock.patch.dict(os.environ, {"PYTHONSAFEPATH": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}),
    ):
        forkserver.ensure_running()
    forks = partial(start_fork, context=context)
    try:
        environment = environment_of(1, None, "any")
        run_ranks({"worker": "_device:use", "threads": 1}, 1, sys.executable, environment, 60.0, start=forks)
    except JobError as error:
        print(f"each rank imports its modules, since a fork cannot use the device: {error}", flush=True)
        return start_process
    return forks


# -- contenders and what their jobs gave -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """One row of a comparison; `options` go to the builder of its `kind`. peer: whom it is compared with, by name."""

    name: str
    label: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    only_when_named: bool = False
    peer: str | None = None

    @property
    def trains(self) -> bool:
        """Whether its weights are updated, so that its losses can be right or wrong."""
        return self.kind != "alone"

    @property
    def needs_deepspeed(self) -> bool:
        return self.kind in ("deepspeed", "autotp", "ulysses")


def by_name(*contenders: Contender) -> dict[str, Contender]:
    return {one.name: one for one in contenders}


@dataclass
class Result:
    """What one job gave; bytes are the maximum over its ranks, None where they were not measured."""

    losses: list[float]  # of the global batch, every step
    seconds: list[float]  # of the slowest rank, every timed step
    peak_bytes: int | None = None
    baseline_bytes: int | None = None
    more: dict[str, Any] = field(default_factory=dict)  # of rank 0, that one benchmark alone knows

    @property
    def step_seconds(self) -> float:
        """The median step."""
        return statistics.median(self.seconds)


def gathered(found: Sequence[Mapping[str, Any]]) -> Result:
    """Combine what the ranks wrote: "losses" (None where a rank does not know them), "seconds", bytes, and `more`."""

    def most(key: str) -> int | None:
        return max((one[key] for one in found if one.get(key) is not None), default=None)

    losses = zip(*(one["losses"] for one in found), strict=True)
    known = ("losses", "seconds", "peak_bytes", "baseline_bytes")
    return Result(
        losses=[statistics.fmean(loss for loss in step if loss is not None) for step in losses],
        seconds=[max(step) for step in zip(*(one["seconds"] for one in found), strict=True)],
        peak_bytes=most("peak_bytes"),
        baseline_bytes=most("baseline_bytes"),
        more={key: value for key, value in found[0].items() if key not in known},
    )


def run_job(
    worker: str,
    options: argparse.Namespace,
    row: Row,
    allocator: str | None,
    python: str | None = None,
    place: Place | None = None,
    **more: Any,
) -> list[Any]:
    """Run one job of a row; with an `allocator` it is a memory job. Return what its ranks wrote.

    The job is told the command line, its contender, and `more`, which replaces what the others say. python: else the
    contender's. place: as `run_ranks` has it, and JobError as it raises it.
    """
    job = job_of(options) | asdict(row.contender) | {"ranks": row.ranks or options.ranks}
    job |= {"worker": worker, "allocator": allocator, "warmup": 0 if allocator else getattr(options, "warmup", 0)}
    if allocator and hasattr(options, "memory_steps"):
        job["steps"] = options.memory_steps
    job |= more
    environment = environment_of(options.threads, allocator, getattr(options, "device", "cpu"))
    num_processes = 1 if row.contender.kind == "single" else job["ranks"]
    if python is None:
        python = str((row.contender.needs_deepspeed and options.deepspeed_python) or sys.executable)
    return run_ranks(job, num_processes, python, environment, options.timeout, place=place)


def run_steps(
    worker: str, options: argparse.Namespace, row: Row, allocator: str | None, python: str | None = None
) -> Result:
    """Run one job whose ranks time steps."""
    return gathered(run_job(worker, options, row, allocator, python))


@dataclass
class Row:
    """All jobs of one contender: timed ones by round, memory ones by allocator; `failure` ends its part.

    ranks: given where a comparison has jobs of several numbers of ranks.
    """

    contender: Contender
    ranks: int | None = None
    timed: dict[int, Result] = field(default_factory=dict)
    memory: dict[str, Result] = field(default_factory=dict)
    failure: str | None = None
    difference: float | None = None  # of its losses from those that are right, relative

    @property
    def label(self) -> str:
        return self.contender.label + (f" on {self.ranks} ranks" if self.ranks else "")

    @property
    def more(self) -> dict[str, Any]:
        """What the first timed job alone knows."""
        return next(job.more for job in self.timed.values())

    @property
    def has_jobs(self) -> bool:
        """Whether there is something to show of it."""
        return bool(self.timed or self.memory)

    @property
    def losses(self) -> list[list[float]]:
        return [job.losses for job in (*self.timed.values(), *self.memory.values()) if job.losses]

    @property
    def step_seconds(self) -> float | None:
        """The median over the rounds of each round's median step."""
        found = [job.step_seconds for job in self.timed.values() if job.seconds]
        return statistics.median(found) if found else None

    @property
    def peak_bytes(self) -> int | None:
        """Of the first allocator."""
        return next((job.peak_bytes for job in self.memory.values()), None)

    def beside(self, other: Row | None) -> list[tuple[Result, Result]]:
        """Gives this row's job and the other's, for every round that both finished."""
        if other is None:
            return []
        rounds = sorted(self.timed.keys() & other.timed.keys())
        return [(self.timed[number], other.timed[number]) for number in rounds]

    def ratios(self, other: Row | None) -> list[float]:
        """Gives this row's step time over the other's, for every round that both finished."""
        return [own.step_seconds / theirs.step_seconds for own, theirs in self.beside(other)]


def row_of(name: str, *rounds: Mapping[str, Any], kind: str = "lowtide") -> Row:
    """Return the row of what this process has measured itself, by round."""
    jobs = {number: Result([], [], more=dict(found)) for number, found in enumerate(rounds)}
    return Row(Contender(name, name, kind), timed=jobs)


def find(rows: Sequence[Row], name: str | None, ranks: int | None = None) -> Row | None:
    """Gives the row of a contender, None where it was not run."""
    return next((row for row in rows if row.contender.name == name and row.ranks == ranks), None)


def peer_of(rows: Sequence[Row], row: Row) -> Row | None:
    """The row that this one is compared with, on as many ranks, None where it was not run."""
    return find(rows, row.contender.peer, row.ranks)


# -- interleaved rounds ----------------------------------------------------------------------------------------------


def run_rounds(
    rows: list[Row],
    run: Callable[[Row, str | None], Result],
    rounds: int,
    allocators: Sequence[str],
    console: Console,
) -> None:
    """Run all rounds, each beginning with another contender, then the memory jobs, and say what was found.

    run: one job of a row, with an allocator a memory job; raises JobError. A contender that failed is left out from
    there on.
    """
    starts = [number * len(rows) // rounds for number in range(rounds)]
    timed = [(row, number, None) for number, first in enumerate(starts) for row in rows[first:] + rows[:first]]
    jobs = [*timed, *((row, 0, allocator) for allocator in allocators for row in rows)]
    for place, (row, number, allocator) in enumerate(jobs, 1):
        if row.failure:
            continue
        what, started = f"memory {allocator}" if allocator else f"round {number + 1}", time.monotonic()
        line = f"\\[{place}/{len(jobs)}] {what}  {row.label}"
        try:
            job = run(row, allocator)
        except JobError as error:
            row.failure = f"{what}: {error}"
            console.print(f"{line}: [red]FAILED[/red]", highlight=False)
            console.print("   ", str(error), markup=False, highlight=False)
            continue
        if allocator:
            row.memory[allocator] = job
        else:
            row.timed[number] = job
        peak = "" if job.peak_bytes is None else f", peak {job.peak_bytes / MIB:.0f} MiB"
        step = "" if allocator or not job.seconds else f", {job.step_seconds:.3f} s/step"
        loss = f", loss {job.losses[-1]:.5f}" if job.losses else ""
        seconds = time.monotonic() - started
        console.print(f"{line}{peak}{step}{loss} [dim](job {seconds:.0f} s)[/dim]", highlight=False)


# -- the command line ------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """The command line of a benchmark, whose docstring is its help. Each can write its numbers and a picture."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--json", type=Path, metavar="FILE", help="write every raw number")
        self.add_argument("--png", type=Path, metavar="FILE", help="write a picture")

    def error(self, message: str) -> NoReturn:
        """Ends the program. What a type has refused is told as all else: by the option alone."""
        super().error(re.sub(r"^argument (--\S+: expected)", r"\1", message))


def count(least: int = 1) -> Callable[[str], int]:
    """Return the type of an option that is a whole number, not smaller than that."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, found {text}")
        return int(text)

    return read


class JobParser(Parser):
    """The command line of a comparison, with the options that all have alike.

    memory: the default of those that measure it in jobs of their own. steps: the defaults of warm-up and timed steps.
    """

    def __init__(
        self,
        doc: str | None,
        contenders: Mapping[str, Contender],
        *,
        rounds: int = 3,
        memory: str | None = None,
        steps: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(doc)
        self._contenders = contenders
        add = self.add_argument
        add("--contenders", nargs="+", metavar="NAME", help=f"some of: {', '.join(contenders)}; 'lowtide*' for many")
        add("--rounds", type=count(), default=rounds, help="timed jobs of each contender (default: %(default)s)")
        add("--threads", type=count(), default=1, help="threads of a process (default: %(default)s)")
        add("--timeout", type=float, default=300.0, metavar="SECONDS", help="longest time of one job (default: 300)")
        add("--deepspeed-python", type=Path, metavar="PATH", help="interpreter of an environment that has DeepSpeed")
        add("--loss-tolerance", type=float, default=1e-4, help="relative difference of a loss that fails (1e-4)")
        if steps:
            add("--warmup", type=count(0), default=steps[0], help="steps before the timed ones (default: %(default)s)")
            add("--steps", type=count(), default=steps[1], help="timed steps of a job (default: %(default)s)")
        if memory:
            choices = [*ALLOCATORS, "both", "none"]
            add("--memory", choices=choices, default=memory, help="allocators of memory jobs (default: %(default)s)")
        if memory and steps:
            add("--memory-steps", type=count(), default=4, help="of a memory job (default: 4)")

    def check(self, options: argparse.Namespace, default: Sequence[str] | None = None) -> argparse.Namespace:
        """Replace the names of contenders by themselves; end the program if an option is not legal.

        A name may be a pattern such as `lowtide*`. default: names; else all but those that run only when they are
        named. Adds `allocators`, of the memory jobs.
        """
        python, table = options.deepspeed_python, self._contenders
        if python and not os.access(python, os.X_OK):
            self.error(f"--deepspeed-python: expected an interpreter, found nothing to run at {python}")
        memory = getattr(options, "memory", "none")
        if memory != "none" and not _worker.supported():
            self.error(f"memory jobs need {_worker.ROLLUP} with Pss_Shmem (Linux 5.0 or newer); use --memory none")
        options.allocators = {"both": list(ALLOCATORS), "none": []}.get(memory, [memory])
        has_deepspeed = python is not None or importlib.util.find_spec("deepspeed") is not None
        can_run = [name for name, one in table.items() if has_deepspeed or not one.needs_deepspeed]
        names = default or [name for name, one in table.items() if not one.only_when_named]
        for pattern in options.contenders or []:
            if not fnmatch.filter(table, pattern):
                self.error(f"--contenders: expected some of {', '.join(table)}; found {pattern!r}")
            if not fnmatch.filter(can_run, pattern):
                self.error(
                    f"--contenders: {pattern} needs DeepSpeed, which is not installed in this environment; "
                    "name one with --deepspeed-python"
                )
        if options.contenders:
            names = [name for name in table if any(fnmatch.fnmatch(name, pattern) for pattern in options.contenders)]
        options.contenders = [table[name] for name in names if name in can_run]
        return options


def job_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a job is told: all that the command line says."""
    told = {key: value for key, value in vars(options).items() if key not in ("contenders", "json", "png")}
    return {key: str(value) if isinstance(value, Path) else value for key, value in told.items()}


def begin(width: int = 140) -> Console:
    """The console of a script, at least so wide in a pipe. From now on a signal to end stops a running job too."""
    from rich.console import Console

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return Console(width=None if sys.stdout.isatty() else width)


# -- what is shown ---------------------------------------------------------------------------------------------------


Value = str | float | list[float] | None


@dataclass(frozen=True)
class Column:
    """A column of a table, and of the JSON file. panel: of the picture, where it has bars of this; line: dotted there.

    of: of a row, a number or one for each round, whose median, least and most are shown. None, or no number: "-".
    """

    heading: str
    of: Callable[[Any], Value]
    form: str = ".2f"
    panel: str | None = None
    line: float | None = None

    def value(self, row: Row) -> Value:
        """None where no job of the row has ended."""
        return self.of(row) if row.has_jobs else None

    def cell(self, row: Row) -> str:
        value = self.value(row)
        if value is None or isinstance(value, str):
            return value or "-"
        return spread(value, self.form) if isinstance(value, list) else shown(value, self.form)


def loss_difference(jobs: Iterable[Sequence[float]], expected: Sequence[float]) -> float | None:
    """Gives the largest relative difference to the expected losses, over all steps of all jobs; NaN is the largest."""
    differences = [abs(loss - one) / abs(one) for losses in jobs for loss, one in zip(losses, expected, strict=False)]
    return max(differences, key=lambda difference: (math.isnan(difference), difference), default=None)


def reference_of(rows: Sequence[Row], row: Row) -> Row:
    """Return the row whose losses are right, on as many ranks: one process's, else the first peer's, else the first."""
    same = [one for one in rows if one.ranks == row.ranks and one.losses and one.contender.trains]
    return min(same, key=lambda one: (one.contender.kind != "single", one.contender.kind == "lowtide"), default=row)


def judge_losses(rows: Sequence[Row], tolerance: float) -> None:
    """Mark as failed every row whose losses are not those of its reference's first job."""
    for row in rows:
        reference = reference_of(rows, row)
        if reference.losses and row.contender.trains:
            row.difference = loss_difference(row.losses, reference.losses[0])
        if row.failure is None and row.difference is not None and not row.difference <= tolerance:
            most = f"expected at most {tolerance:g} (relative) from {reference.label}"
            row.failure = f"losses differ: {most}, found {row.difference:.1e}"


LOSSES = Column("loss diff", lambda row: row.difference, ".0e")


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The median, and (lowest-highest) where there are several."""
    if not values:
        return "-"
    middle, least, most = (f"{one:{form}}" for one in (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} [dim]({least}-{most})[/dim]"


def shown(value: float | None, form: str) -> str:
    """A number in a format such as ".3f", "-" where there is none."""
    return "-" if value is None else f"{value:{form}}"


def mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / MIB


def over(value: float | None, other: float | None) -> float | None:
    """A ratio, None where one of both is unknown."""
    return value / other if value and other else None


Tables = Mapping[str, Sequence[Column]]
"""The columns of each table by its title; every table has a line for each row."""


def step_columns(rows: Sequence[Row], heading: str) -> list[Column]:
    """Return the columns of a comparison in pairs: each row beside its peer, which `heading` names.

    Medians, and (lowest-highest) over the rounds; a ratio is of jobs of the same round.
    """

    def peak_ratio(row: Row) -> float | None:
        peer = peer_of(rows, row)
        return over(row.peak_bytes, peer.peak_bytes if peer else None)

    ratio = f"step time / {heading}'s"
    return [
        Column("s/step", lambda row: row.step_seconds, ".3f", "seconds of a step"),
        Column(f"x {heading}", lambda row: row.ratios(peer_of(rows, row)), panel=ratio, line=1.0),
        Column("peak MiB", lambda row: mib(row.peak_bytes), ".0f", "peak of a rank, MiB"),
        Column(f"peak x {heading}", peak_ratio),
        LOSSES,
    ]


def columns_of(forms: Mapping[str, str], panels: Sequence[str] = ()) -> list[Column]:
    """Return a column of each name that the jobs of `row_of` have found, with its form."""

    def column(name: str) -> Column:
        def of(row: Row) -> list[float]:
            return [job.more[name] for job in row.timed.values() if job.more[name] is not None]

        return Column(name, of, forms[name], name if name in panels else None)

    return [column(name) for name in forms]


def table_of(rows: Sequence[Row], columns: Sequence[Column], title: str) -> Table:
    """Return the table of a line for each row."""
    from rich.table import Table

    table = Table(title=title)
    table.add_column("contender")
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for row in rows:
        label = row.label + (" [red]FAILED[/red]" if row.failure else "")
        table.add_row(label, *(column.cell(row) for column in columns))
    return table


def values_of(row: Row, tables: Tables) -> dict[str, dict[str, Value]]:
    """Return a row's values by table and heading, for JSON."""
    return {title: {one.heading.replace("\n", " "): one.value(row) for one in some} for title, some in tables.items()}


def write_chart(rows: Sequence[Row], tables: Tables, title: str, path: Path) -> None:
    """Write a PNG: a bar a row in each column that is a panel, lowtide's in blue, as the median with least and most."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.has_jobs]
    panels = [column for columns in tables.values() for column in columns if column.panel]
    figure = Figure(figsize=(3 + 4 * len(panels), 1.5 + 0.38 * len(rows)), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    colours = ["tab:blue" if row.contender.kind == "lowtide" else "tab:gray" for row in rows]
    for axes, column in zip(grid, panels, strict=True):
        found = [column.value(row) for row in rows]
        lists: list[Any] = [(value if isinstance(value, list) else [value]) or [0.0] for value in found]
        bars = [[one or 0.0 for one in values] for values in lists]
        middle = [statistics.median(values) for values in bars]
        below = [one - min(values) for one, values in zip(middle, bars, strict=True)]
        above = [max(values) - one for one, values in zip(middle, bars, strict=True)]
        axes.barh(range(len(rows)), middle, xerr=[below, above], color=colours, ecolor="black", capsize=2)
        if column.line is not None:
            axes.axvline(column.line, color="black", linewidth=0.8, linestyle=":")
        axes.set_xlabel(column.panel)
    grid[0].set_yticks(range(len(rows)), [row.label for row in rows])
    grid[0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def failures(rows: Iterable[Row]) -> list[str]:
    """One line for each contender that failed."""
    return [f"{row.contender.name} FAILED: {row.failure}" for row in rows if row.failure]


def conclude(
    options: argparse.Namespace,
    console: Console,
    rows: Sequence[Row],
    tables: Tables,
    title: str,
    *,
    settings: Mapping[str, Any] | None = None,
    draw: Callable[[Path], None] | None = None,
) -> int:
    """Shows tables and failures, writes JSON and picture; 1 where a contender failed, else 0. draw: no bars."""
    for heading, columns in tables.items():
        console.print(table_of(rows, columns, heading))
    lines = failures(rows)
    for line in lines:
        console.print(line, style="red", markup=False, highlight=False)
    found = [{**asdict(row), "tables": values_of(row, tables)} for row in rows]
    machine = {"machine": platform.machine(), "system": platform.platform(), "cpus": os.cpu_count()}
    machine |= {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
    numbers = {"settings": {**job_of(options), "title": title, **(settings or {}), **machine}, "contenders": found}
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    if options.png and any(row.has_jobs for row in rows):
        (draw or (lambda path: write_chart(rows, tables, title, path)))(options.png)
    return 1 if lines else 0


def compare(
    options: argparse.Namespace,
    title: str,
    run: Callable[[Row, str | None], Result],
    tables: Callable[[Sequence[Row]], Tables],
    *,
    judges: bool = False,
    draw: Callable[[Sequence[Row], Path], None] | None = None,
) -> int:
    """Run all jobs of the contenders, with each number of ranks, and conclude.

    run: as `run_rounds` has it. judges: all must have the same losses.
    """
    console, counts = begin(), options.ranks if isinstance(options.ranks, list) else [None]
    rows = [Row(contender, ranks) for ranks in counts for contender in options.contenders]
    run_rounds(rows, run, options.rounds, options.allocators, console)
    if judges:
        judge_losses(rows, options.loss_tolerance)
    return conclude(options, console, rows, tables(rows), title, draw=partial(draw, rows) if draw else None)
