"""Saves, loads and exports the same training by lowtide, FSDP2 + torch.distributed.checkpoint, and DeepSpeed.

A round runs every contender once, each as a fresh job of its own that trains a step and then saves, loads and exports a
few times; the next round begins with another contender. After each job one process writes as many bytes, plainly and
with O_DIRECT, and reads the job's own files: what the disk could do in that minute. Ratios are of speeds, so that more
is better, and compare within a round. A load counts only if training goes on with the very same losses after it.

Speed is bytes of state over time: 12 a parameter (the parameter and two moments, fp32), 4 for an export. "On the disk"
ends when every file has been synced, by whoever does it. Extra memory is the highest private memory of a rank above
what it had before, in jobs that are not timed.

Example, the whole comparison and then a quick look:

    python benchmarks/checkpoint.py --size 85M --json checkpoint.json --png checkpoint.png
    python benchmarks/checkpoint.py --size 10M --contenders fsdp2 lowtide-3 --rounds 1 --memory none
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _checkpoint_disk
import _memory
import torch
from _checkpoint_contenders import DEFAULT_SAVERS, SAVERS, STATE_BYTES_PER_PARAMETER
from _checkpoint_job import SaveResult, SaveWork, run_save_job
from _checkpoint_report import SaveComparison, SaveRow, disk_lines, make_table, write_chart
from _conclusion import conclude
from _contenders import Contender
from _model import SIZES, build_model
from _ranks import ALLOCATORS, JobError
from rich.console import Console

_COPIES = 4  # of the state that are on the disk at once, at most: two checkpoints, their exports, a scratch file


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=SIZES, default="10M", help="parameters of the model (default: 10M)")
    add("--contenders", nargs="+", metavar="NAME", help=f"some of: {', '.join(SAVERS)}")
    add("--rounds", type=int, default=3, help="timed jobs of each contender (default: 3)")
    add("--repeats", type=int, default=3, help="saves, loads and exports of a job (default: 3)")
    add("--memory", choices=[*ALLOCATORS, "none"], default="exact", help="allocator of the memory jobs, default: exact")
    add("--ranks", type=int, default=2, help="processes of a job (default: 2)")
    add("--threads", type=int, default=1, help="threads of a process (default: 1)")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="longest time of one job (default: 300)")
    add("--folder", type=Path, help="where to write (default: a temporary folder in the working directory)")
    add("--deepspeed-python", type=Path, metavar="PATH", help="interpreter of an environment that has DeepSpeed")
    add("--json", type=Path, metavar="FILE", help="write every raw number")
    add("--png", type=Path, metavar="FILE", help="write a bar chart")
    options = parser.parse_args(arguments)
    for name in ["rounds", "repeats", "ranks", "threads"]:
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, found {getattr(options, name)}")
    if options.deepspeed_python and not os.access(options.deepspeed_python, os.X_OK):
        parser.error(f"--deepspeed-python: expected an interpreter, found nothing to run at {options.deepspeed_python}")
    if options.memory != "none" and not _memory.supported():
        parser.error(f"memory jobs need {_memory.ROLLUP} with Pss_Shmem (Linux 5.0 or newer); use --memory none")
    has_deepspeed = options.deepspeed_python is not None or importlib.util.find_spec("deepspeed") is not None
    try:
        options.contenders = choose(options.contenders, has_deepspeed)
    except ValueError as error:
        parser.error(str(error))
    return options


def choose(names: list[str] | None, has_deepspeed: bool) -> list[Contender]:
    """Gives the contenders to run: those named, or the peers and lowtide's stage 3.

    Raises ValueError for a name that there is not, and for DeepSpeed without an interpreter that has it.
    """
    if names is None:
        return [SAVERS[name] for name in DEFAULT_SAVERS if has_deepspeed or SAVERS[name].kind != "deepspeed"]
    unknown = [name for name in names if name not in SAVERS]
    if unknown:
        raise ValueError(f"--contenders: expected some of {', '.join(SAVERS)}; found {', '.join(unknown)}")
    if not has_deepspeed and any(SAVERS[name].kind == "deepspeed" for name in names):
        raise ValueError(
            "--contenders: DeepSpeed is not installed in this environment; name one with --deepspeed-python"
        )
    return [SAVERS[name] for name in dict.fromkeys(names)]


class Runner:
    """Runs the jobs one after the other, with the disk's own speed after each, and says what it does."""

    def __init__(self, options: argparse.Namespace, folder: Path, num_params: int, console: Console) -> None:
        self.options = options
        self.folder = folder
        self.num_params = num_params
        self.console = console
        self.rows = [SaveRow(contender, num_params) for contender in options.contenders]
        self.num_jobs = len(self.rows) * (options.rounds + (options.memory != "none"))
        self.num_done = 0

    def run(self) -> None:
        """Runs all rounds, then the memory jobs; a contender that failed is left out from there on."""
        for number in range(self.options.rounds):
            first = number * len(self.rows) // self.options.rounds
            for row in self.rows[first:] + self.rows[:first]:
                self._timed_job(row, number)
        if self.options.memory != "none":
            for row in self.rows:
                with self._job(row, f"memory {self.options.memory}", self.options.memory) as (job, _):
                    row.memory = job

    def _timed_job(self, row: SaveRow, number: int) -> None:
        with self._job(row, f"round {number + 1}", None) as (job, folder):
            if job is None:
                return
            if not job.losses_are_equal:
                row.failure = f"round {number + 1}: expected the same losses after a load as before, found others"
                return
            files = [file for saved in folder.glob("save*") for file in _checkpoint_disk.files_below(saved)]
            nbytes = self.num_params * STATE_BYTES_PER_PARAMETER
            row.disk[number] = _checkpoint_disk.measure(folder, nbytes, files, self.options.repeats)
            row.timed[number] = job

    @contextlib.contextmanager
    def _job(self, row: SaveRow, what: str, allocator: str | None) -> Iterator[tuple[SaveResult | None, Path]]:
        """Runs one job in a folder of its own, which is there until the end of the block."""
        self.num_done += 1
        o = self.options
        repeats = 1 if allocator else o.repeats
        work = SaveWork(o.size, o.ranks, o.threads, repeats, o.timeout, argparse.__file__)
        other = o.deepspeed_python if row.contender.kind == "deepspeed" else None
        folder = self.folder / "job"
        folder.mkdir()
        job = None
        try:
            if row.failure is None:
                try:
                    job = run_save_job(row.contender, work, str(other or sys.executable), folder, allocator)
                    self._say(row, what, job)
                except JobError as error:
                    row.failure = f"{what}: {error}"
                    self._say(row, what, None)
            yield job, folder
        finally:
            shutil.rmtree(folder)

    def _say(self, row: SaveRow, what: str, job: SaveResult | None) -> None:
        place = f"[{self.num_done}/{self.num_jobs}]".replace("[", r"\[")
        if job is None:
            self.console.print(place, f"{what}  {row.contender.label}: [red]FAILED[/red]", highlight=False)
            self.console.print("   ", row.failure, markup=False, highlight=False)
            return
        times = ", ".join(f"{name} {min(values):.2f} s" for name, values in job.seconds.items())
        line = f"{what}  {row.contender.label}: {times} [dim](job {job.wall_seconds:.0f} s)[/dim]"
        self.console.print(place, line, highlight=False)


@contextlib.contextmanager
def scratch_folder(wanted: Path | None, needed_bytes: int) -> Iterator[Path]:
    """A new folder that is removed at the end. Raises OSError where its file system has not enough room."""
    base = wanted or Path.cwd()
    base.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(base).free
    if free < needed_bytes:
        raise OSError(
            f"{base}: expected {needed_bytes / 1e9:.1f} GB of free space, found {free / 1e9:.1f}; "
            "name another place with --folder, or take a smaller --size"
        )
    with tempfile.TemporaryDirectory(prefix="checkpoint-benchmark-", dir=base) as name:
        yield Path(name).resolve()


def _num_params(size: str) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in build_model(size, tied=False).parameters())


def _settings(options: argparse.Namespace, num_params: int) -> dict[str, Any]:
    title = (
        f"GPT {options.size}, AdamW fp32, {num_params * STATE_BYTES_PER_PARAMETER / 1e6:.0f} MB of state, "
        f"{options.ranks} ranks x {options.threads} thread(s), {options.rounds} round(s) x {options.repeats}"
    )
    chosen = {key: value for key, value in vars(options).items() if key not in ("contenders", "json", "png")}
    machine = {"machine": platform.machine(), "system": platform.platform(), "cpus": os.cpu_count()}
    versions = {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
    texts = {key: str(value) if isinstance(value, Path) else value for key, value in chosen.items()}
    return {"title": title, "num_params": num_params, **texts, **machine, **versions}


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running job is stopped, and its files removed
    console = Console(width=None if sys.stdout.isatty() else 140)
    started = time.monotonic()
    num_params = _num_params(options.size)
    try:
        with scratch_folder(options.folder, _COPIES * STATE_BYTES_PER_PARAMETER * num_params) as folder:
            runner = Runner(options, folder, num_params, console)
            runner.run()
    except OSError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    comparison = SaveComparison(runner.rows, _settings(options, num_params))
    console.print(make_table(comparison))
    for line in disk_lines(comparison):
        console.print(line, highlight=False)
    console.print(f"{runner.num_jobs} jobs in {time.monotonic() - started:.0f} s.", highlight=False)
    status = conclude(console, comparison.rows, comparison.as_dict(), options.json)
    if options.png:
        write_chart(comparison, options.png)
    return status


if __name__ == "__main__":
    sys.exit(main())
