"""What all comparisons do alike: contenders, the jobs that train one, their interleaved rounds, and the command line.

A job starts its ranks, each a fresh process (`_worker.py`), waits for them and gathers what they wrote. In a rehearsal
that is mostly their imports, so there ranks are copies of a process that has made them: `fork_ranks`.

A round runs every contender once, so that a slow minute of the machine meets all of them, and a ratio compares two jobs
of the same round. Memory is measured in jobs that are not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import runpy
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import _worker

if TYPE_CHECKING:
    from rich.console import Console

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


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


class _Forks:
    """A copy of this process, which starts and watches ranks that are copies of itself."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        if os.fork() == 0:
            self._pipe.close()
            _serve(theirs)
        theirs.close()

    def start(self, command: list[str], environment: dict[str, str], log: Path) -> int:
        """Gives the process's number."""
        self._pipe.send((command, environment, log))
        pid: int = self._pipe.recv()
        return pid

    def poll(self, pid: int) -> int | None:
        """Its status, once, or None while it runs."""
        self._pipe.send(pid)
        status: int | None = self._pipe.recv()
        return status


def _serve(pipe: Connection) -> NoReturn:
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            os._exit(0)
        if isinstance(asked, int):
            pid, ended = os.waitpid(asked, os.WNOHANG)
            pipe.send(os.waitstatus_to_exitcode(ended) if pid else None)
            continue
        pid = os.fork()
        if pid == 0:
            pipe.close()
            _run_script(*asked)
        os.setpgid(pid, pid)
        pipe.send(pid)


def _run_script(command: list[str], environment: dict[str, str], log: Path) -> NoReturn:
    """What Python does with a command, a script and its arguments."""
    with log.open("wb") as said:
        for descriptor in (1, 2):
            os.dup2(said.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class _Forked:
    """A rank as `subprocess.Popen` has it."""

    def __init__(self, forks: _Forks, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._forks = forks
        self._status: int | None = None
        self.pid = forks.start(command, environment, log)

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._forks.poll(self.pid)
        return self._status

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


Process = subprocess.Popen[bytes] | _Forked
_forks: list[_Forks] = []  # one at most


def fork_ranks() -> None:
    """From now on ranks have what this process has imported so far, and the allocator's settings that it has."""
    _forks.append(_Forks())


def _start(python: list[str], worker: Path, description: Path, environment: dict[str, str], log: Path) -> Process:
    command = [str(worker), str(description)]
    if _forks:
        return _Forked(_forks[-1], command, environment, log)
    with log.open("wb") as said:
        return subprocess.Popen([*python, *command], env=environment, stdout=said, stderr=said, start_new_session=True)


def _stop(processes: list[Process]) -> None:
    """Ends what still runs: each rank leads a process group of its own."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(log: Path) -> str:
    """Gives the last line that a failed rank said, which names the error in a Python traceback."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.split(":")[0].split("(")[0].endswith(("Error", "Exception", "Exit"))]
    return (errors or lines or ["no output"])[-1]


def _wait(processes: list[Process], logs: list[Path], timeout_seconds: float) -> None:
    """Waits for all ranks; raises JobError as soon as one fails or the time is over."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        codes = [process.poll() for process in processes]
        if _worker.OVER_BUDGET_STATUS in codes:  # first: the others fail too, since they lose this one
            raise OverBudget(f"rank {codes.index(_worker.OVER_BUDGET_STATUS)} needs more memory than it may take")
        for rank, code in enumerate(codes):
            if code:
                raise JobError(f"rank {rank} ended with status {code}: {_reason(logs[rank])}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise JobError(f"not done after {timeout_seconds:.0f} s (--timeout); ranks {_unfinished(codes)} still ran")
        time.sleep(0.05)


def _unfinished(codes: list[int | None]) -> list[int]:
    return [rank for rank, code in enumerate(codes) if code is None]


def run_ranks(
    job: Mapping[str, Any],
    num_processes: int,
    python: str,
    environment: dict[str, str],
    timeout_seconds: float,
    worker: Path = WORKER,
    place: Callable[[int], tuple[list[str], dict[str, str]]] | None = None,
) -> list[Any]:
    """Runs the worker once for each rank, with the job as its JSON file; gives what each rank wrote beside that.

    job: "worker", the function that a rank calls, and "threads", beside what that function asks for. place: of a rank,
    what stands before its command, and more of its environment.

    Raises JobError when a rank fails or the time is over, OverBudget when one needs too much memory; no process is
    left behind.
    """
    environment = environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        description = folder / "job.json"
        description.write_text(json.dumps(job))
        logs = [folder / f"rank{rank}.log" for rank in range(num_processes)]
        processes: list[Process] = []
        try:
            for rank, log in enumerate(logs):
                ranked = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                before, more = ([], {}) if place is None else place(rank)
                processes.append(_start([*before, python], worker, description, ranked | more, log))
            _wait(processes, logs, timeout_seconds)
        finally:
            _stop(processes)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_processes)]


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

    def num_processes(self, ranks: int) -> int:
        """Gives how many processes train it: one for the reference, else all ranks."""
        return 1 if self.kind == "single" else ranks


ContenderT = TypeVar("ContenderT", bound=Contender)


def by_name(*contenders: ContenderT) -> dict[str, ContenderT]:
    return {one.name: one for one in contenders}


def choose(
    table: Mapping[str, ContenderT], patterns: Sequence[str] | None, *, with_deepspeed: bool
) -> list[ContenderT]:
    """Gives the contenders whose names fit a pattern such as `lowtide*`, in the table's order; None: all by default.

    Raises ValueError for a pattern that fits none, and for DeepSpeed without an interpreter that has it.
    """
    chosen = set()
    for pattern in ["*"] if patterns is None else patterns:
        fits = [one for name, one in table.items() if fnmatchcase(name, pattern)]
        if not fits:
            raise ValueError(f"--contenders: expected some of {', '.join(table)}; found {pattern!r}")
        can_run = [one.name for one in fits if with_deepspeed or not one.needs_deepspeed]
        if not can_run:
            raise ValueError(
                f"--contenders: {pattern} needs DeepSpeed, which is not installed in this environment; "
                "name one with --deepspeed-python"
            )
        chosen.update(can_run)
    return [one for one in table.values() if one.name in chosen and not (patterns is None and one.only_when_named)]


@dataclass
class Result:
    """What one job gave; bytes are the maximum over its ranks, None where they were not measured."""

    losses: list[float]  # of the global batch, every step
    seconds: list[float]  # of the slowest rank, every step, warm-up left out
    peak_bytes: int | None = None
    baseline_bytes: int | None = None
    wall_seconds: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)  # that one benchmark alone knows

    @property
    def step_seconds(self) -> float:
        """The median step."""
        return statistics.median(self.seconds)


def gathered(found: Sequence[Mapping[str, Any]], warmup: int) -> Result:
    """Of what the ranks wrote: "losses" (None where a rank does not know them), "seconds", "peak_bytes"."""

    def most(key: str) -> int | None:
        return max((one[key] for one in found if one.get(key) is not None), default=None)

    losses = zip(*(one["losses"] for one in found), strict=True)
    return Result(
        losses=[statistics.fmean(loss for loss in step if loss is not None) for step in losses],
        seconds=[max(step) for step in zip(*(one["seconds"] for one in found), strict=True)][warmup:],
        peak_bytes=most("peak_bytes"),
        baseline_bytes=most("baseline_bytes"),
    )


def run_job(
    worker: str, contender: Contender, job: Mapping[str, Any], python: str, allocator: str | None = None
) -> list[Any]:
    """Runs one job from start to end, and gives what its ranks wrote; with an `allocator` it is a memory job.

    job: "ranks", "threads" and "timeout" beside what the worker asks for. Raises JobError as `run_ranks`.
    """
    asked = {**job, **asdict(contender), "worker": worker, "allocator": allocator}
    environment, num_processes = environment_of(job["threads"], allocator), contender.num_processes(job["ranks"])
    return run_ranks(asked, num_processes, python, environment, job["timeout"])


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

    @property
    def label(self) -> str:
        return self.contender.label + (f" on {self.ranks} ranks" if self.ranks else "")

    @property
    def jobs(self) -> list[Result]:
        """Timed ones first."""
        return [*self.timed.values(), *self.memory.values()]

    @property
    def losses(self) -> list[list[float]]:
        return [job.losses for job in self.jobs]

    @property
    def step_seconds(self) -> float | None:
        """The median over the rounds of each round's median step."""
        found = [job.step_seconds for job in self.timed.values() if job.seconds]
        return statistics.median(found) if found else None

    @property
    def peak_bytes(self) -> int | None:
        """Of the first allocator."""
        return next((job.peak_bytes for job in self.memory.values()), None)

    def ratios(self, other: Row | None) -> list[float]:
        """Gives this row's step time over the other's, for every round that both finished."""
        if other is None:
            return []
        rounds = sorted(self.timed.keys() & other.timed.keys())
        return [self.timed[number].step_seconds / other.timed[number].step_seconds for number in rounds]

    def as_dict(self) -> dict[str, Any]:
        """Gives every raw number, for JSON."""
        return {
            **asdict(self.contender),
            "ranks": self.ranks,
            "failure": self.failure,
            "step_seconds": self.step_seconds,
            "rounds": {str(number): asdict(job) for number, job in self.timed.items()},
            "memory": {allocator: asdict(job) for allocator, job in self.memory.items()},
        }


def find(rows: Sequence[Row], name: str | None, ranks: int | None = None) -> Row | None:
    """Gives the row of a contender, None where it was not run."""
    return next((row for row in rows if row.contender.name == name and row.ranks == ranks), None)


# -- interleaved rounds ----------------------------------------------------------------------------------------------


@dataclass
class Runner:
    """Runs the jobs of a comparison one after the other and says what it does.

    run: one job of a row, with an allocator a memory job; raises JobError. seed: of a random order in each round; None:
    each round begins with another contender.
    """

    rows: list[Row]
    run: Callable[[Row, str | None], Result]
    rounds: int
    allocators: Sequence[str]
    console: Console
    seed: int | None = None
    num_done: int = 0

    @property
    def num_jobs(self) -> int:
        return len(self.rows) * (self.rounds + len(self.allocators))

    def run_all(self) -> None:
        """Runs all rounds, then the memory jobs; a contender that failed is left out from there on."""
        for number, rows in enumerate(self._orders()):
            for row in rows:
                if job := self._try(row, f"round {number + 1}", None):
                    row.timed[number] = job
        for allocator in self.allocators:
            for row in self.rows:
                if job := self._try(row, f"memory {allocator}", allocator):
                    row.memory[allocator] = job

    def _orders(self) -> Iterator[list[Row]]:
        generator = random.Random(self.seed)
        for number in range(self.rounds):
            first = number * len(self.rows) // self.rounds
            is_random = self.seed is not None
            yield generator.sample(self.rows, len(self.rows)) if is_random else self.rows[first:] + self.rows[:first]

    def _try(self, row: Row, what: str, allocator: str | None) -> Result | None:
        self.num_done += 1
        if row.failure:
            return None
        place, started = f"\\[{self.num_done}/{self.num_jobs}]", time.monotonic()
        try:
            job = self.run(row, allocator)
        except JobError as error:
            row.failure = f"{what}: {error}"
            self.console.print(place, f"{what}  {row.label}: [red]FAILED[/red]", highlight=False)
            self.console.print("   ", str(error), markup=False, highlight=False)
            return None
        job.wall_seconds = time.monotonic() - started
        peak = "" if job.peak_bytes is None else f", peak {job.peak_bytes / MIB:.0f} MiB"
        step = "" if allocator or not job.seconds else f", {job.step_seconds:.3f} s/step"
        loss = f", loss {job.losses[-1]:.5f}" if job.losses else ""
        line = f"{what}  {row.label}{peak}{step}{loss} [dim](job {job.wall_seconds:.0f} s)[/dim]"
        self.console.print(place, line, highlight=False)
        return job


# -- the command line ------------------------------------------------------------------------------------------------


def add_job_options(parser: argparse.ArgumentParser, contenders: Mapping[str, Contender], rounds: int = 3) -> None:
    """Adds the options that every comparison has."""
    add = parser.add_argument
    add("--contenders", nargs="+", metavar="NAME", help=f"some of: {', '.join(contenders)}; 'lowtide*' for many")
    add("--rounds", type=int, default=rounds, help="timed jobs of each contender (default: %(default)s)")
    add("--threads", type=int, default=1, help="threads of a process (default: 1)")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="longest time of one job (default: 300)")
    add("--deepspeed-python", type=Path, metavar="PATH", help="interpreter of an environment that has DeepSpeed")
    add("--json", type=Path, metavar="FILE", help="write every raw number")
    add("--png", type=Path, metavar="FILE", help="write a picture")


def check_counts(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Sequence[str], least: int = 1
) -> None:
    """Ends the program where one of these is smaller than that, in a list of numbers too."""
    for name in names:
        value = getattr(options, name)
        values = value if isinstance(value, list) else [value]
        if value is not None and min(values) < least:
            parser.error(f"--{name.replace('_', '-')}: expected at least {least}, found {min(values)}")


def check_job_options(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    table: Mapping[str, Contender],
    *,
    default: Sequence[str] | None = None,
) -> None:
    """Ends the program where they are not legal, and replaces the contenders' names by themselves. default: names."""
    check_counts(parser, options, ["rounds", "threads"])
    if options.deepspeed_python and not os.access(options.deepspeed_python, os.X_OK):
        parser.error(f"--deepspeed-python: expected an interpreter, found nothing to run at {options.deepspeed_python}")
    if getattr(options, "memory", "none") != "none" and not _worker.supported():
        parser.error(f"memory jobs need {_worker.ROLLUP} with Pss_Shmem (Linux 5.0 or newer); use --memory none")
    has_deepspeed = options.deepspeed_python is not None or importlib.util.find_spec("deepspeed") is not None
    if options.contenders is None and default is not None:
        options.contenders = [name for name in default if has_deepspeed or not table[name].needs_deepspeed]
    try:
        options.contenders = choose(table, options.contenders, with_deepspeed=has_deepspeed)
    except ValueError as error:
        parser.error(str(error))


def python_of(contender: Contender, options: argparse.Namespace) -> str:
    """The interpreter that trains it."""
    other = options.deepspeed_python if contender.needs_deepspeed else None
    return str(other or sys.executable)


def settings_of(options: argparse.Namespace, title: str, **more: Any) -> dict[str, Any]:
    """What numbers were measured with, and on."""
    chosen = {key: value for key, value in vars(options).items() if key not in ("contenders", "json", "png")}
    texts = {key: str(value) if isinstance(value, Path) else value for key, value in chosen.items()}
    machine = {"machine": platform.machine(), "system": platform.platform(), "cpus": os.cpu_count()}
    versions = {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
    return {**texts, "title": title, **more, **machine, **versions}


def begin() -> Console:
    """The console of a script. From now on a signal to end stops a running job too."""
    from rich.console import Console

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return Console(width=None if sys.stdout.isatty() else 140)
