"""Searches the largest GPT that trains in a given memory, with lowtide and its peers, and how fast it trains there.

Width and sequence are those of --size; what grows is the number of layers: doubled until a model does not fit, then
bisected. Each try is a job of fresh processes that build the model and train it for some steps, all on one batch; the
loss must be finite and change. Each contender builds its model as its users build one that is too large for a process:
`_contenders.py` says how. What building takes counts.

On a GPU the budget is what torch may take of it (the CUDA context and NCCL's own buffers are outside it), and the peak
is what torch has reserved. On a CPU the host's memory stands in for a GPU's: a rank may hold so much more than it held
when torch and the contender's library were imported; `_worker.py` says what is counted, and a rank that exceeds the
budget is stopped. Memory that ranks share counts once, divided; GPUs share none, so what fits on a CPU does not say
what fits on GPUs. What a contender puts into files is not memory on either.

tokens/s are measured in jobs of their own, at each contender's largest model and at the largest one of the first peer.
On a CPU these use the allocator's own settings, and nothing stops them at the budget: the search says what fits.

Example, two ranks that may take 200 MiB each, and then one GPU of which torch may take 8 GiB:

    python benchmarks/largest.py --device cpu --size 10M --budget-mib 200 --json largest.json --png largest.png
    python benchmarks/largest.py --device cuda --size 85M --budget-mib 8192 --recompute-blocks

With --sequence the model stays as it is, and the sequence is doubled until it does not fit, then bisected. The model,
`LONG_SHAPE`, has the proportions of Llama 3 8B: half as many layers, a vocabulary of 32 times its width, no table of
positions.

    python benchmarks/largest.py --device cpu --budget-mib 200 --sequence
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _device
import _worker
import torch
from _contenders import BUILDERS, CONTENDERS, OFFLOAD_FOLDER, Setup, import_libraries
from _harness import (
    ALLOCATORS,
    MIB,
    Column,
    Contender,
    JobError,
    OverBudget,
    Parser,
    Result,
    Row,
    add_job_options,
    begin,
    check_job_options,
    conclude,
    count,
    environment_of,
    gathered,
    mib,
    over,
    python_of,
    run_ranks,
)
from _model import GPT, SEED, SIZES, GPTSize, build_batches, sized
from _worker import OVER_BUDGET_STATUS, PeakSampler, rank_bytes
from torch import Tensor

if TYPE_CHECKING:
    from rich.console import Console

PEERS = ["ddp", "fsdp2"]
LOWTIDE = [f"lowtide-{place}" for place in ("0", "1", "2", "3", "3-states-nvme", "3-nvme", "3-least")]
ON_GPU = ["lowtide-3-states-cpu"]  # on a CPU that is the memory from which it shall be away
DEEPSPEED = ["deepspeed-1", "deepspeed-2", "deepspeed-3"]
LONG = ["lowtide-3", "lowtide-3-recompute", "lowtide-3-tiles", "lowtide-3-long"]
WARMUP = 3  # steps before the timed ones, 1 on a CPU: a GPU's first ones also choose kernels and fill caches
LONG_START, LONG_MOST = 64, 1 << 20  # tokens
LONG_SHAPE = GPTSize(16, width=128, num_heads=4, sequence_length=0, vocabulary=32 * 128, has_positions=False)
_SAMPLING_SECONDS = 0.005  # steps of a small model are short


# -- a rank ----------------------------------------------------------------------------------------------------------


def train(job: dict[str, Any]) -> dict[str, Any]:
    """On a rank: losses and seconds of every step (warm-up too) and the highest memory of this rank, above its start.

    All steps train on one batch, so that a loss that never changes means that nothing was trained. The rank leaves with
    OVER_BUDGET_STATUS as soon as it needs more than the budget: then an allocation on the GPU fails, or a sample of the
    host's memory is too high.
    """
    _device.prepare()
    if job["device"] != "cpu":
        limit_device(job["budget_bytes"])
    try:
        return _train(job, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.print_exc()
        _worker.leave(OVER_BUDGET_STATUS)


def build_long_batch(length: int, rows: int) -> tuple[Tensor, Tensor]:
    """Gives the global batch: (tokens, targets) of shape (rows, length)."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(LONG_SHAPE.vocabulary, (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _train(job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    setup = Setup(job["microbatch"], device=job["device"], dtype=job["dtype"], recompute_blocks=job["recompute_blocks"])
    rows = job["ranks"] * job["microbatch"]
    share = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
    if job["sequence_length"] is None:
        ((tokens, targets),) = build_batches(job["size"], argparse.__file__, 1, rows)
        shape = sized(job["size"], job["num_layers"])
    else:
        tokens, targets = build_long_batch(job["sequence_length"], rows)
        shape = replace(LONG_SHAPE, num_layers=job["num_layers"])
    batch = (tokens[share].to(setup.device), targets[share].to(setup.device))
    measures_host = job["measures_memory"] and setup.device == "cpu"
    if measures_host:
        import_libraries(job["kind"], setup)
    torch.manual_seed(SEED)
    losses: list[float] = []
    seconds: list[float] = []
    start_bytes = rank_bytes(ranks) if measures_host else None
    sampler = None if start_bytes is None else _sampler(ranks, start_bytes + job["budget_bytes"])
    with sampler or nullcontext():
        trainer = BUILDERS[job["kind"]](partial(GPT, shape), setup, **job["options"])
        for _ in range(job["warmup"] + job["steps"]):
            started = time.perf_counter()
            loss = trainer.step(*batch)
            if setup.device != "cpu":
                _device.synchronize()
            seconds.append(time.perf_counter() - started)
            losses.append(float(loss))
    peak_bytes = None if sampler is None or start_bytes is None else sampler.peak_bytes - start_bytes
    if setup.device != "cpu":
        peak_bytes = _device.Memory.now().peak_reserved
    trainer.close()
    return {"losses": losses, "seconds": seconds, "peak_bytes": peak_bytes}


def _sampler(ranks: int, most_bytes: int) -> PeakSampler:
    """Ends this process as soon as it holds more than so much."""

    def check(peak_bytes: int) -> None:
        if peak_bytes > most_bytes:
            _worker.leave(OVER_BUDGET_STATUS)

    return PeakSampler(ranks, _SAMPLING_SECONDS, check)


def limit_device(budget_bytes: int) -> None:
    """Chooses this rank's device, and lets torch take no more than the budget of it."""
    _device.choose(int(os.environ["LOCAL_RANK"]))
    _device.limit_memory(budget_bytes)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Says whether the GPU had no memory left, also where an error of another class was made of that."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


# -- a job -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BudgetWork:
    """What every contender does alike, with a model of so many layers. budget_bytes: of a rank."""

    size: str
    num_layers: int
    ranks: int
    threads: int
    microbatch: int
    warmup: int
    steps: int
    device: str
    recompute_blocks: bool
    budget_bytes: int
    timeout: float
    dtype: str = "fp32"
    sequence_length: int | None = None  # of LONG_SHAPE; None: the size's


def run_budget_job(
    contender: Contender, work: BudgetWork, python: str, offload_folder: Path, allocator: str | None
) -> Result:
    """Runs one job from start to end; on a CPU it measures memory with an `allocator`, and else time.

    Raises OverBudget when a rank needs more than the budget, and JobError when one fails, the time is over, or the
    losses are not those of a model that is trained. No process and no file is left behind.
    """
    started = time.monotonic()
    job = {**asdict(work), **asdict(contender), "worker": "largest:train", "measures_memory": allocator is not None}
    with tempfile.TemporaryDirectory(prefix="offload-", dir=offload_folder) as folder:
        environment = environment_of(work.threads, allocator, work.device) | {OFFLOAD_FOLDER: folder}
        found = run_ranks(job, contender.num_processes(work.ranks), python, environment, work.timeout)
    result = gathered(found, work.warmup)
    result.wall_seconds = time.monotonic() - started
    check_losses(result.losses)
    return result


def check_losses(losses: Sequence[float]) -> None:
    """Raises JobError unless these, of steps on one and the same batch, are those of a model that is trained."""
    if not all(math.isfinite(loss) for loss in losses):
        raise JobError(f"expected finite losses, found {_listed(losses)}")
    if len(set(losses)) == 1:
        raise JobError(f"expected losses that change from step to step on one batch, found {_listed(losses)}")


def _listed(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses)


# -- what was found --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Try:
    """One job of the search. amount: layers, or tokens of a sequence. peak_bytes: None where it is over the budget."""

    amount: int
    num_parameters: int
    peak_bytes: int | None
    wall_seconds: float

    @property
    def fits(self) -> bool:
        return self.peak_bytes is not None


@dataclass
class LargestRow(Row):
    """All jobs of one contender. own: timed at its largest; common: at the peer's largest."""

    tries: list[Try] = field(default_factory=list)
    own: Result | None = None
    common: Result | None = None

    @property
    def has_jobs(self) -> bool:
        return bool(self.tries)

    @property
    def largest(self) -> Try | None:
        """The largest try that fits, None where none does."""
        return max((one for one in self.tries if one.fits), key=lambda one: one.amount, default=None)

    def as_dict(self) -> dict[str, Any]:
        timed = {name: asdict(job) if job else None for name, job in (("own", self.own), ("common", self.common))}
        tries = [asdict(one) | {"fits": one.fits} for one in self.tries]
        return {**super().as_dict(), **timed, "tries": tries, "largest": asdict(self.largest) if self.largest else None}


# -- the search ------------------------------------------------------------------------------------------------------


def most_layers(fits: Callable[[int], bool], start: int, most: int, resolution: float) -> int:
    """Gives the most layers that fit, 0 where not even one does: doubled until too many, then bisected.

    fits: asked for each number once; a model that fits fits with fewer layers too. Where one more layer than those
    given would fit, then less than `resolution` more of them (a share: 0.05). most: the highest number that is tried.
    """
    fitting, layers = 0, min(start, most)
    while fits(layers):
        fitting = layers
        if fitting == most:
            return most
        layers = min(2 * layers, most)
    too_many = layers
    while too_many - fitting > max(1, resolution * fitting):
        layers = (fitting + too_many) // 2
        if fits(layers):
            fitting = layers
        else:
            too_many = layers
    return fitting


class Search:
    """Runs the jobs one after the other and says what it does. Of layers, or with --sequence of tokens."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = o = options
        self.console = console
        self.rows = [LargestRow(contender) for contender in options.contenders]
        shape = LONG_SHAPE if o.sequence else SIZES[o.size]
        self.tokens_per_step = o.ranks * o.microbatch * shape.sequence_length
        what = f"GPT of {shape.num_layers} layers" if o.sequence else f"GPT of width {shape.width}"
        rows = f"microbatch {o.microbatch}" + ("" if o.sequence else f" x {shape.sequence_length} tokens")
        self.title = (
            f"{what}, {o.dtype}, in {o.budget_mib:,} MiB a rank, {o.device}, {o.ranks} rank(s), {rows}"
            f"{', blocks recomputed' if o.recompute_blocks else ''}"
        )
        self.num_jobs = 0
        self.warmup = 1 if options.device == "cpu" else WARMUP
        self.unit = LONG_START if o.sequence else 1  # of what is doubled and bisected
        self.start: int = 1 if o.sequence else o.start_layers
        self.most: int = LONG_MOST // LONG_START if o.sequence else o.max_layers

    @property
    def peer(self) -> LargestRow | None:
        """Whose largest is the measure: the first contender that is not lowtide and trains one at all; else the first.

        Of sequences it is the first of all.
        """
        found = [row for row in self.rows if row.largest]
        others = [row for row in found if row.contender.kind != "lowtide"]
        return next(iter(found if self.options.sequence else others), None)

    def ratio(self, row: LargestRow) -> float | None:
        """Gives the row's largest over the peer's: parameters, or tokens."""
        key = "amount" if self.options.sequence else "num_parameters"
        own, peer = (getattr(one.largest, key, None) if one else None for one in (row, self.peer))
        return over(own, peer)

    def tokens_per_second(self, job: Result | None) -> float | None:
        """Gives the tokens of all ranks in a second of the median step."""
        return self.tokens_per_step / job.step_seconds if job else None

    def run(self) -> None:
        """Searches for every contender, then measures times; a contender that failed is left out from there on."""
        for row in self.rows:
            try:
                most_layers(partial(self._fits, row), self.start, self.most, self.options.resolution)
            except JobError as error:
                self._fail(row, str(error))
        if self.options.sequence:
            return
        peer = self.peer
        for row in self.rows:
            if row.largest and not row.failure:
                row.own = self._timed(row, row.largest.amount)
        for row in self.rows:
            if peer is None or peer.largest is None or row.largest is None or row.failure:
                continue
            layers = peer.largest.amount
            if row.largest.amount == layers:
                row.common = row.own
            elif row.largest.amount > layers:
                row.common = self._timed(row, layers)

    def _name(self, amount: int) -> str:
        return f"{amount:,} tokens" if self.options.sequence else f"{amount} layers"

    def _fits(self, row: LargestRow, number: int) -> bool:
        """Tries a model. Raises JobError, with the layers in its text, where the job fails in another way."""
        o, amount, started = self.options, number * self.unit, time.monotonic()
        shape = LONG_SHAPE if o.sequence else sized(o.size, amount)
        peak: int | None = None
        try:
            peak = self._run(row, amount, 0, o.steps, o.allocator).peak_bytes
        except OverBudget:
            pass
        except JobError as error:
            raise JobError(f"{self._name(amount)}: {error}") from error
        if peak is not None and peak > o.budget_mib * MIB:
            peak = None
        one = Try(amount, shape.num_parameters, peak, time.monotonic() - started)
        row.tries.append(one)
        found = f"peak {peak / MIB:.0f} MiB, fits" if peak is not None else f"over {o.budget_mib} MiB, does not fit"
        self._say(
            row, f"{self._name(amount)}, {shape.num_parameters / 1e6:.1f} M parameters: {found}", one.wall_seconds
        )
        return one.fits

    def _timed(self, row: LargestRow, num_layers: int) -> Result | None:
        try:
            job = self._run(row, num_layers, self.warmup, self.options.timed_steps, None)
        except JobError as error:
            self._fail(row, f"timed at {num_layers} layers: {error}")
            return None
        speed = f"{self.tokens_per_second(job):,.0f} tokens/s"
        self._say(row, f"{num_layers} layers: {job.step_seconds:.3f} s/step, {speed}", job.wall_seconds)
        return job

    def _run(self, row: LargestRow, amount: int, warmup: int, steps: int, allocator: str | None) -> Result:
        o = self.options
        names = ("size", "ranks", "threads", "microbatch", "device", "dtype", "timeout", "recompute_blocks")
        work = BudgetWork(
            **{name: getattr(o, name) for name in names},
            num_layers=LONG_SHAPE.num_layers if o.sequence else amount,
            sequence_length=amount if o.sequence else None,
            warmup=warmup,
            steps=steps,
            budget_bytes=o.budget_mib * MIB,
        )
        self.num_jobs += 1
        return run_budget_job(row.contender, work, python_of(row.contender, o), o.offload_folder, allocator)

    def _say(self, row: LargestRow, line: str, wall_seconds: float) -> None:
        self.console.print(f"{row.contender.label}  {line} [dim](job {wall_seconds:.0f} s)[/dim]", highlight=False)

    def _fail(self, row: LargestRow, reason: str) -> None:
        row.failure = reason
        self.console.print(f"{row.contender.label}: [red]FAILED[/red]", highlight=False)
        self.console.print("   ", reason, markup=False, highlight=False)


def columns(search: Search) -> list[Column]:
    """ ">=" where nothing larger was tried; "x" compares with the peer's largest."""
    peer = search.peer

    def amount(row: LargestRow) -> str:
        if row.largest is None:
            return "-" if row.failure else "none fits"
        return f"{'>= ' if row.largest.amount == search.most * search.unit else ''}{row.largest.amount:,}"

    def parameters(row: LargestRow) -> float | None:
        return row.largest.num_parameters / 1e6 if row.largest else None

    more = f"x {peer.contender.label if peer else 'peer'}"
    common = f"tokens/s,\nat {peer.largest.amount} layers" if peer and peer.largest else "tokens/s,\nat one size"
    panel = "millions of parameters of the largest model that trains (more is better)"
    found = [
        Column("tokens of\na rank" if search.options.sequence else "layers", amount),
        Column("largest, M\nparameters", parameters, ".1f", None if search.options.sequence else panel),
        Column(more, search.ratio, panel=f"{more}: the longest sequence" if search.options.sequence else None),
        Column("peak MiB\nof a rank", lambda row: mib(row.largest and row.largest.peak_bytes), ".0f"),
    ]
    if not search.options.sequence:
        found.append(Column("tokens/s,\nits largest", lambda row: search.tokens_per_second(row.own), ",.0f"))
        found.append(Column(common, lambda row: search.tokens_per_second(row.common), ",.0f"))
    return found


# -- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = Parser(__doc__)
    add_job_options(parser, CONTENDERS)
    add = parser.add_argument
    add("--device", default="auto", help="cpu, cuda or another accelerator (default: the one that is here, else cpu)")
    add("--dtype", choices=["fp32", "bf16"], default="fp32", help="in which models compute (default: fp32)")
    add("--budget-mib", type=count(), metavar="MIB", help="memory of a rank (default on a GPU: all of it)")
    add("--size", choices=SIZES, default="10M", help="width, heads and sequence of this size (default: 10M)")
    add("--sequence", action="store_true", help="search the longest sequence of one model, whatever --size")
    add("--start-layers", type=count(), default=2, help="of the first model that is tried (default: 2)")
    add("--max-layers", type=count(), default=1024, help="of the largest model that is tried (default: 1024)")
    add("--resolution", type=float, default=0.05, metavar="SHARE", help="of the number of layers (default: 0.05)")
    add("--steps", type=count(2), default=3, help="steps of a try (default: 3)")
    add("--timed-steps", type=count(), default=5, help="timed steps of a job for tokens/s (default: 5)")
    add("--recompute-blocks", action="store_true", help="activation checkpointing of every block, for all contenders")
    add("--ranks", type=count(), help="processes of a job (default: 2, or as many as there are GPUs)")
    add("--microbatch", type=count(), default=1, help="sequences of a rank in a step (default: 1)")
    add("--allocator", choices=ALLOCATORS, default="exact", help="settings of a try on a CPU (default: exact)")
    add("--offload-folder", type=Path, default=Path.cwd(), metavar="FOLDER", help="where offload puts its files")
    options = parser.parse_args(arguments)
    if options.max_layers < options.start_layers:
        parser.error(
            f"--max-layers: expected at least --start-layers ({options.start_layers}), found {options.max_layers}"
        )
    if not 0 < options.resolution < 1:
        parser.error(f"--resolution: expected a share between 0 and 1, such as 0.05, found {options.resolution:g}")
    _choose_device(parser, options)
    if not options.offload_folder.is_dir():
        parser.error(f"--offload-folder: expected a folder, found none at {options.offload_folder}")
    on_gpu = [] if options.device == "cpu" else ON_GPU
    default = LONG if options.sequence else [*PEERS, *DEEPSPEED, *LOWTIDE, *on_gpu]
    check_job_options(parser, options, CONTENDERS, default=default)
    return options


def _choose_device(parser: Parser, options: argparse.Namespace) -> None:
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
    if not _worker.supported():
        parser.error(f"--device cpu needs {_worker.ROLLUP} with Pss_Shmem (Linux 5.0 or newer) to measure memory")


def main() -> int:
    options = parse_arguments()
    console, started = begin(), time.monotonic()
    search = Search(options, console)
    search.run()
    console.print(f"{search.num_jobs} jobs in {time.monotonic() - started:.0f} s.", highlight=False)
    gpu = {} if options.device == "cpu" else {"gpu": _device.name()}
    tables = {search.title: columns(search)}
    return conclude(options, console, search.rows, tables, search.title, settings=gpu)


if __name__ == "__main__":
    sys.exit(main())
