"""Searches the largest GPT that trains in a given memory, with lowtide and its peers, and how fast it trains there.

Width and sequence are those of --size; what grows is the number of layers: doubled until a model does not fit, then
bisected. Each try is a job of fresh processes that build the model and train it for some steps, all on one batch; the
loss must be finite and change. Each contender builds its model as its users build one that is too large for a process:
`_trainers.py` says how. What building takes counts.

On a GPU the budget is what torch may take of it (the CUDA context and NCCL's own buffers are outside it), and the peak
is what torch has reserved. On a CPU the host's memory stands in for a GPU's: a rank may hold so much more than it held
when torch and the contender's library were imported; `_memory.py` says what is counted, and a rank that exceeds the
budget is stopped. Memory that ranks share counts once, divided; GPUs share none, so what fits on a CPU does not say
what fits on GPUs. What a contender puts into files is not memory on either.

tokens/s are measured in jobs of their own, at each contender's largest model and at the largest one of the first peer.
On a CPU these use the allocator's own settings, and nothing stops them at the budget: the search says what fits.

Example, two ranks that may take 200 MiB each, and then one GPU of which torch may take 8 GiB:

    python benchmarks/largest.py --device cpu --size 10M --budget-mib 200 --json largest.json --png largest.png
    python benchmarks/largest.py --device cuda --size 85M --budget-mib 8192 --recompute-blocks

With --sequence the model stays as it is, and the sequence grows: `_longest.py` says how.

    python benchmarks/largest.py --device cpu --budget-mib 200 --sequence
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import _device
import _memory
from _conclusion import conclude
from _contenders import Contender, choose
from _largest_job import BudgetResult, BudgetWork, run_budget_job
from _largest_report import MIB, Largest, LargestRow, Try, make_table, write_chart
from _largest_search import most_layers
from _longest import LONG, search
from _model import SIZES, sized
from _ranks import ALLOCATORS, JobError, OverBudget
from rich.console import Console

PEERS = ["ddp", "fsdp2"]
LOWTIDE = [f"lowtide-{place}" for place in ("0", "1", "2", "3", "3-states-nvme", "3-nvme", "3-least")]
ON_GPU = ["lowtide-3-states-cpu"]  # on a CPU that is the memory from which it shall be away
WARMUP = 3  # steps before the timed ones, 1 on a CPU: a GPU's first ones also choose kernels and fill caches
DEEPSPEED = ["deepspeed-1", "deepspeed-2", "deepspeed-3"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="auto", help="cpu, cuda or another accelerator (default: the one that is here, else cpu)")
    add("--dtype", choices=["fp32", "bf16"], default="fp32", help="in which models compute (default: fp32)")
    add("--budget-mib", type=int, metavar="MIB", help="memory of a rank (default on a GPU: all of it)")
    add("--size", choices=SIZES, default="10M", help="width, heads and sequence of this size (default: 10M)")
    add("--contenders", nargs="+", metavar="NAME", help="as in compare.py (default: those for which it makes sense)")
    add("--sequence", action="store_true", help="search the longest sequence of one model, whatever --size")
    add("--start-layers", type=int, default=2, help="of the first model that is tried (default: 2)")
    add("--max-layers", type=int, default=1024, help="of the largest model that is tried (default: 1024)")
    add("--resolution", type=float, default=0.05, metavar="SHARE", help="of the number of layers (default: 0.05)")
    add("--steps", type=int, default=3, help="steps of a try (default: 3)")
    add("--timed-steps", type=int, default=5, help="timed steps of a job for tokens/s (default: 5)")
    add("--recompute-blocks", action="store_true", help="activation checkpointing of every block, for all contenders")
    add("--ranks", type=int, help="processes of a job (default: 2, or as many as there are GPUs)")
    add("--threads", type=int, default=1, help="threads of a process (default: 1)")
    add("--microbatch", type=int, default=1, help="sequences of a rank in a step (default: 1)")
    add("--allocator", choices=ALLOCATORS, default="exact", help="settings of a try on a CPU (default: exact)")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="longest time of one job (default: 300)")
    add("--deepspeed-python", type=Path, metavar="PATH", help="interpreter of an environment that has DeepSpeed")
    add("--offload-folder", type=Path, default=Path.cwd(), metavar="FOLDER", help="where offload puts its files")
    add("--json", type=Path, metavar="FILE", help="write every raw number")
    add("--png", type=Path, metavar="FILE", help="write a bar chart")
    options = parser.parse_args(arguments)
    _check_numbers(parser, options)
    _choose_device(parser, options)
    if options.deepspeed_python and not os.access(options.deepspeed_python, os.X_OK):
        parser.error(f"--deepspeed-python: expected an interpreter, found nothing to run at {options.deepspeed_python}")
    if not options.offload_folder.is_dir():
        parser.error(f"--offload-folder: expected a folder, found none at {options.offload_folder}")
    has_deepspeed = options.deepspeed_python is not None or importlib.util.find_spec("deepspeed") is not None
    on_gpu = [] if options.device == "cpu" else ON_GPU
    by_default = LONG if options.sequence else None
    names = options.contenders or by_default or [*PEERS, *(DEEPSPEED if has_deepspeed else []), *LOWTIDE, *on_gpu]
    try:
        options.contenders = choose(names, with_deepspeed=has_deepspeed)
    except ValueError as error:
        parser.error(str(error))
    return options


def _check_numbers(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    least = {"budget_mib": 1, "start_layers": 1, "steps": 2, "timed_steps": 1, "ranks": 1, "threads": 1}
    for name, minimum in (least | {"microbatch": 1, "max_layers": 1}).items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            parser.error(f"--{name.replace('_', '-')}: expected at least {minimum}, found {value}")
    if options.max_layers < options.start_layers:
        parser.error(
            f"--max-layers: expected at least --start-layers ({options.start_layers}), found {options.max_layers}"
        )
    if not 0 < options.resolution < 1:
        parser.error(f"--resolution: expected a share between 0 and 1, such as 0.05, found {options.resolution:g}")


def _choose_device(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fills in the device, and what depends on it: the ranks and the budget."""
    num_gpus, here = _device.count(), _device.type_of_device()
    if options.device == "auto":
        options.device = here
    if options.device not in ("cpu", here):
        parser.error(f"--device {options.device}: expected {' or '.join(dict.fromkeys((here, 'cpu')))}")
    if options.ranks is None:
        options.ranks = 2 if options.device == "cpu" else num_gpus
    if options.device != "cpu":
        if num_gpus < options.ranks:
            parser.error(
                f"--device {here}: expected a GPU for each rank ({options.ranks}), found {num_gpus}; "
                "take fewer --ranks, or --device cpu"
            )
        total_bytes = _device.total_bytes()
        if options.budget_mib is None and total_bytes is None:
            parser.error(f"--budget-mib: must be given on {here}: MiB that a rank may take")
        options.budget_mib = options.budget_mib or (total_bytes or 0) // MIB
        return
    if options.budget_mib is None:
        parser.error("--budget-mib: must be given on a CPU: MiB that a rank may take, such as 200")
    if not _memory.supported():
        parser.error(f"--device cpu needs {_memory.ROLLUP} with Pss_Shmem (Linux 5.0 or newer) to measure memory")


class Runner:
    """Runs the jobs one after the other and says what it does."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self.console = console
        self.found = Largest([LargestRow(contender) for contender in options.contenders], _settings(options))
        self.num_jobs = 0
        self.warmup = 1 if options.device == "cpu" else WARMUP

    def run(self) -> None:
        """Searches for every contender, then measures times; a contender that failed is left out from there on."""
        o = self.options
        for row in self.found.rows:
            try:
                most_layers(partial(self._fits, row), o.start_layers, o.max_layers, o.resolution)
            except JobError as error:
                self._fail(row, str(error))
        peer = self.found.peer
        for row in self.found.rows:
            if row.largest and not row.failure:
                row.own = self._timed(row, row.largest.num_layers)
        for row in self.found.rows:
            if peer is None or peer.largest is None or row.largest is None or row.failure:
                continue
            layers = peer.largest.num_layers
            if row.largest.num_layers == layers:
                row.common = row.own
            elif row.largest.num_layers > layers:
                row.common = self._timed(row, layers)

    def _fits(self, row: LargestRow, num_layers: int) -> bool:
        """Tries a model. Raises JobError, with the layers in its text, where the job fails in another way."""
        o = self.options
        parameters, started = sized(o.size, num_layers).num_parameters, time.monotonic()
        peak: int | None = None
        try:
            peak = self._run(row, num_layers, 0, o.steps, o.allocator).peak_bytes
        except OverBudget:
            pass
        except JobError as error:
            raise JobError(f"{num_layers} layers: {error}") from error
        if peak is not None and peak > o.budget_mib * MIB:
            peak = None
        one = Try(num_layers, parameters, peak, time.monotonic() - started)
        row.tries.append(one)
        found = f"peak {peak / MIB:.0f} MiB, fits" if peak is not None else f"over {o.budget_mib} MiB, does not fit"
        self._say(row, f"{num_layers} layers, {parameters / 1e6:.1f} M parameters: {found}", one.wall_seconds)
        return one.fits

    def _timed(self, row: LargestRow, num_layers: int) -> BudgetResult | None:
        try:
            job = self._run(row, num_layers, self.warmup, self.options.timed_steps, None)
        except JobError as error:
            self._fail(row, f"timed at {num_layers} layers: {error}")
            return None
        speed = f"{self.found.tokens_per_second(job):,.0f} tokens/s"
        self._say(row, f"{num_layers} layers: {job.step_seconds:.3f} s/step, {speed}", job.wall_seconds)
        return job

    def _run(self, row: LargestRow, num_layers: int, warmup: int, steps: int, allocator: str | None) -> BudgetResult:
        o = self.options
        work = BudgetWork(
            size=o.size,
            num_layers=num_layers,
            ranks=o.ranks,
            threads=o.threads,
            microbatch=o.microbatch,
            warmup=warmup,
            steps=steps,
            device=o.device,
            recompute_blocks=o.recompute_blocks,
            dtype=o.dtype,
            budget_bytes=o.budget_mib * MIB,
            timeout_seconds=o.timeout,
        )
        self.num_jobs += 1
        return run_budget_job(row.contender, work, self._python(row.contender), o.offload_folder, allocator)

    def _python(self, contender: Contender) -> str:
        other = self.options.deepspeed_python if contender.kind == "deepspeed" else None
        return str(other or sys.executable)

    def _say(self, row: LargestRow, line: str, wall_seconds: float) -> None:
        self.console.print(f"{row.contender.label}  {line} [dim](job {wall_seconds:.0f} s)[/dim]", highlight=False)

    def _fail(self, row: LargestRow, reason: str) -> None:
        row.failure = reason
        self.console.print(f"{row.contender.label}: [red]FAILED[/red]", highlight=False)
        self.console.print("   ", reason, markup=False, highlight=False)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    shape = SIZES[options.size]
    title = (
        f"GPT of width {shape.width}, {options.dtype}, in {options.budget_mib:,} MiB a rank, {options.device}, "
        f"{options.ranks} rank(s), microbatch {options.microbatch} x {shape.sequence_length} tokens"
        f"{', blocks recomputed' if options.recompute_blocks else ''}"
    )
    chosen = {key: value for key, value in vars(options).items() if key not in ("contenders", "json", "png")}
    texts = {key: str(value) if isinstance(value, Path) else value for key, value in chosen.items()}
    tokens = options.ranks * options.microbatch * shape.sequence_length
    machine = {"machine": platform.machine(), "system": platform.platform(), "cpus": os.cpu_count()}
    if options.device != "cpu":
        machine["gpu"] = _device.name()
    versions = {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
    needed = {"title": title, "tokens_per_step": tokens, "most_layers": options.max_layers}
    return {**needed, **texts, **machine, **versions}


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running job is stopped too
    console = Console(width=None if sys.stdout.isatty() else 140)
    if options.sequence:
        longest = search(options, console)
        if options.json:
            options.json.write_text(json.dumps(longest, indent=2))
        return 0 if None not in longest.values() else 1
    started = time.monotonic()
    runner = Runner(options, console)
    runner.run()
    found = runner.found
    console.print(make_table(found))
    console.print(f"{runner.num_jobs} jobs in {time.monotonic() - started:.0f} s.", highlight=False)
    status = conclude(console, found.rows, found.as_dict(), options.json)
    if options.png:
        write_chart(found, options.png)
    return status


if __name__ == "__main__":
    sys.exit(main())
