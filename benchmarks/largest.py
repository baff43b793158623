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
`LONG_SHAPE`, has the proportions of Llama 3 8B: half as many layers, a vocabulary of 32 times its width, an MLP in a
module of its own, no table of positions.

    python benchmarks/largest.py --device cpu --budget-mib 200 --sequence
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
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
    Contender,
    JobError,
    OverBudget,
    Result,
    Row,
    add_job_options,
    begin,
    check_counts,
    check_job_options,
    environment_of,
    gathered,
    python_of,
    run_ranks,
    settings_of,
)
from _model import GPT, SEED, SIZES, GPTSize, build_batches, sized
from _report import Panel, conclude, label_of, make_table, shown, write_row_bars
from _worker import OVER_BUDGET_STATUS, PeakSampler, rank_bytes
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from rich.console import Console

PEERS = ["ddp", "fsdp2"]
LOWTIDE = [f"lowtide-{place}" for place in ("0", "1", "2", "3", "3-states-nvme", "3-nvme", "3-least")]
ON_GPU = ["lowtide-3-states-cpu"]  # on a CPU that is the memory from which it shall be away
DEEPSPEED = ["deepspeed-1", "deepspeed-2", "deepspeed-3"]
LONG = ["lowtide-3", "lowtide-3-recompute", "lowtide-3-tiles", "lowtide-3-long"]
WARMUP = 3  # steps before the timed ones, 1 on a CPU: a GPU's first ones also choose kernels and fill caches
LONG_START, LONG_MOST = 64, 1 << 20  # tokens
LONG_SHAPE = GPTSize(num_layers=16, width=128, num_heads=4, sequence_length=0)
LONG_VOCABULARY = 32 * LONG_SHAPE.width
_SAMPLING_SECONDS = 0.005  # steps of a small model are short


# -- the model of --sequence -----------------------------------------------------------------------------------------


class LongBlock(nn.Module):
    """One pre-norm block, as `_model.Block`, with an `mlp` that is a module."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        heads = self.attention_in(self.attention_norm(x)).view(batch, sequence, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class LongGPT(nn.Module):
    """Gives the mean cross-entropy; tokens, targets: (batch, sequence) int64 -> () float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LONG_VOCABULARY, LONG_SHAPE.width)
        self.blocks = nn.ModuleList(
            LongBlock(LONG_SHAPE.width, LONG_SHAPE.num_heads) for _ in range(LONG_SHAPE.num_layers)
        )
        self.final_norm = nn.LayerNorm(LONG_SHAPE.width)
        self.head = nn.Linear(LONG_SHAPE.width, LONG_VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_long_batch(length: int, rows: int) -> tuple[Tensor, Tensor]:
    """Gives the global batch: (tokens, targets) of shape (rows, length)."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(LONG_VOCABULARY, (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


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


def _train(job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    setup = Setup(job["microbatch"], device=job["device"], dtype=job["dtype"], recompute_blocks=job["recompute_blocks"])
    rows = job["ranks"] * job["microbatch"]
    share = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
    if job["sequence_length"] is None:
        ((tokens, targets),) = build_batches(job["size"], argparse.__file__, 1, rows)
        model: Callable[[], torch.nn.Module] = partial(GPT, sized(job["size"], job["num_layers"]))
    else:
        tokens, targets = build_long_batch(job["sequence_length"], rows)
        model = LongGPT
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
        trainer = BUILDERS[job["kind"]](model, setup, **job["options"])
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
    sequence_length: int | None = None  # of a LongGPT; None: the size's, of a GPT


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
    """One job of the search. peak_bytes: None where the job was stopped, since that is more than the budget."""

    num_layers: int
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
    def largest(self) -> Try | None:
        """The try with the most layers that fits, None where none does."""
        return max((one for one in self.tries if one.fits), key=lambda one: one.num_layers, default=None)


@dataclass
class Largest:
    """All rows of one run. title, tokens_per_step and most_layers say how it was made."""

    rows: list[LargestRow]
    title: str
    tokens_per_step: int
    most_layers: int

    @property
    def peer(self) -> LargestRow | None:
        """Whose largest model is the measure: the first contender that is not lowtide and that trains one at all."""
        return next((row for row in self.rows if row.contender.kind != "lowtide" and row.largest), None)

    def ratio(self, row: LargestRow) -> float | None:
        """Gives the parameters of the row's largest model over those of the peer's."""
        peer = self.peer.largest if self.peer else None
        return row.largest.num_parameters / peer.num_parameters if peer and row.largest else None

    def tokens_per_second(self, job: Result | None) -> float | None:
        """Gives the tokens of all ranks in a second of the median step."""
        return self.tokens_per_step / job.step_seconds if job else None

    def as_dict(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Gives every raw number and what was made of it, for JSON."""
        return {"settings": settings, "contenders": [self._row_as_dict(row) for row in self.rows]}

    def _row_as_dict(self, row: LargestRow) -> dict[str, Any]:
        return {
            **row.as_dict(),
            "largest": asdict(row.largest) if row.largest else None,
            "ratio_to_peer": self.ratio(row),
            "tokens_per_second_at_largest": self.tokens_per_second(row.own),
            "tokens_per_second_at_common": self.tokens_per_second(row.common),
            "tries": [asdict(one) | {"fits": one.fits} for one in row.tries],
            "timed_at_largest": asdict(row.own) if row.own else None,
            "timed_at_common": asdict(row.common) if row.common else None,
        }


def _size_cells(found: Largest, row: LargestRow) -> list[str]:
    """Layers, parameters, ratio and peak of the largest model; ">=" where nothing larger was tried."""
    one = row.largest
    if one is None or one.peak_bytes is None:
        return ["-" if row.failure else "none fits", "-", "-", "-"]
    more = ">= " if one.num_layers == found.most_layers else ""
    cells = [f"{more}{one.num_layers}", f"{more}{one.num_parameters / 1e6:.1f} M"]
    return [*cells, shown(found.ratio(row), ".2f"), f"{one.peak_bytes / MIB:.0f}"]


def table(found: Largest) -> Any:
    """One row a contender; "x" compares the parameters with those of the first peer's largest."""
    peer = found.peer
    common = f"at {peer.largest.num_layers} layers" if peer and peer.largest else "at one size"
    headings = ["contender", "layers", "largest,\nparameters", f"x {peer.contender.label if peer else 'peer'}"]
    headings += ["peak MiB\nof a rank", "tokens/s,\nits largest", f"tokens/s,\n{common}"]
    lines = []
    for row in found.rows:
        speeds = (found.tokens_per_second(row.own), found.tokens_per_second(row.common))
        lines.append([label_of(row), *_size_cells(found, row), *(shown(speed, ",.0f") for speed in speeds)])
    return make_table(found.title, headings, lines)


def write_chart(found: Largest, path: Path) -> None:
    """A bar for the largest model of each contender."""
    rows = [(row, row.largest) for row in found.rows if row.largest]
    parameters = [[one.num_parameters / 1e6] for _, one in rows]
    ratios = [found.ratio(row) for row, _ in rows]
    notes = ["" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
    label = "millions of parameters of the largest model that trains (more is better)"
    write_row_bars(path, found.title, [row for row, _ in rows], [Panel(label, parameters, notes=notes)])


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


def work_of(options: argparse.Namespace, **more: Any) -> BudgetWork:
    """A job of the command line. more: other fields."""
    o = options
    work = {name: getattr(o, name) for name in ("size", "ranks", "threads", "microbatch", "device", "dtype", "timeout")}
    return BudgetWork(**work, recompute_blocks=o.recompute_blocks, budget_bytes=o.budget_mib * MIB, **more)


class Search:
    """Runs the jobs one after the other and says what it does."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self.console = console
        shape = SIZES[options.size]
        title = (
            f"GPT of width {shape.width}, {options.dtype}, in {options.budget_mib:,} MiB a rank, {options.device}, "
            f"{options.ranks} rank(s), microbatch {options.microbatch} x {shape.sequence_length} tokens"
            f"{', blocks recomputed' if options.recompute_blocks else ''}"
        )
        tokens = options.ranks * options.microbatch * shape.sequence_length
        rows = [LargestRow(contender) for contender in options.contenders]
        self.found = Largest(rows, title, tokens, options.max_layers)
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

    def _timed(self, row: LargestRow, num_layers: int) -> Result | None:
        try:
            job = self._run(row, num_layers, self.warmup, self.options.timed_steps, None)
        except JobError as error:
            self._fail(row, f"timed at {num_layers} layers: {error}")
            return None
        speed = f"{self.found.tokens_per_second(job):,.0f} tokens/s"
        self._say(row, f"{num_layers} layers: {job.step_seconds:.3f} s/step, {speed}", job.wall_seconds)
        return job

    def _run(self, row: LargestRow, num_layers: int, warmup: int, steps: int, allocator: str | None) -> Result:
        work = work_of(self.options, num_layers=num_layers, warmup=warmup, steps=steps)
        self.num_jobs += 1
        python = python_of(row.contender, self.options)
        return run_budget_job(row.contender, work, python, self.options.offload_folder, allocator)

    def _say(self, row: LargestRow, line: str, wall_seconds: float) -> None:
        self.console.print(f"{row.contender.label}  {line} [dim](job {wall_seconds:.0f} s)[/dim]", highlight=False)

    def _fail(self, row: LargestRow, reason: str) -> None:
        row.failure = reason
        self.console.print(f"{row.contender.label}: [red]FAILED[/red]", highlight=False)
        self.console.print("   ", reason, markup=False, highlight=False)


def search_longest(options: argparse.Namespace, console: Console) -> dict[str, int | None]:
    """Gives the longest sequence of each contender by its name: 0 where none fits, None where a job failed."""
    found: dict[str, int | None] = {}
    lines, first = [], None
    for contender in options.contenders:
        fits = partial(_fits_length, options, console, contender)
        try:
            longest = LONG_START * most_layers(fits, 1, LONG_MOST // LONG_START, options.resolution)
        except JobError as error:
            console.print(f"{contender.label}: [red]FAILED[/red]", str(error), highlight=False)
            found[contender.name] = None
            continue
        found[contender.name] = longest
        first = longest if first is None else first
        lines.append([contender.label, f"{longest:,}", f"{longest / first:.1f}" if first else "-"])
    title = f"longest sequence of a GPT of {LONG_SHAPE.num_layers} layers, {options.budget_mib} MiB a rank, "
    console.print(make_table(title + options.dtype, ["contender", "tokens of a rank", "x the first"], lines))
    return found


def _fits_length(options: argparse.Namespace, console: Console, contender: Contender, num_starts: int) -> bool:
    length, started = LONG_START * num_starts, time.monotonic()
    work = work_of(options, num_layers=LONG_SHAPE.num_layers, warmup=0, steps=options.steps, sequence_length=length)
    try:
        job = run_budget_job(contender, work, sys.executable, options.offload_folder, options.allocator)
        fits = job.peak_bytes is not None and job.peak_bytes <= options.budget_mib * MIB
        peak = f"peak {(job.peak_bytes or 0) / MIB:.0f} MiB"
    except OverBudget:
        fits, peak = False, f"over {options.budget_mib} MiB"
    seconds, says = time.monotonic() - started, "fits" if fits else "does not fit"
    console.print(f"{contender.label}  {length:,} tokens: {peak}, {says} [dim]({seconds:.0f} s)[/dim]", highlight=False)
    return fits


# -- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_job_options(parser, CONTENDERS)
    add = parser.add_argument
    add("--device", default="auto", help="cpu, cuda or another accelerator (default: the one that is here, else cpu)")
    add("--dtype", choices=["fp32", "bf16"], default="fp32", help="in which models compute (default: fp32)")
    add("--budget-mib", type=int, metavar="MIB", help="memory of a rank (default on a GPU: all of it)")
    add("--size", choices=SIZES, default="10M", help="width, heads and sequence of this size (default: 10M)")
    add("--sequence", action="store_true", help="search the longest sequence of one model, whatever --size")
    add("--start-layers", type=int, default=2, help="of the first model that is tried (default: 2)")
    add("--max-layers", type=int, default=1024, help="of the largest model that is tried (default: 1024)")
    add("--resolution", type=float, default=0.05, metavar="SHARE", help="of the number of layers (default: 0.05)")
    add("--steps", type=int, default=3, help="steps of a try (default: 3)")
    add("--timed-steps", type=int, default=5, help="timed steps of a job for tokens/s (default: 5)")
    add("--recompute-blocks", action="store_true", help="activation checkpointing of every block, for all contenders")
    add("--ranks", type=int, help="processes of a job (default: 2, or as many as there are GPUs)")
    add("--microbatch", type=int, default=1, help="sequences of a rank in a step (default: 1)")
    add("--allocator", choices=ALLOCATORS, default="exact", help="settings of a try on a CPU (default: exact)")
    add("--offload-folder", type=Path, default=Path.cwd(), metavar="FOLDER", help="where offload puts its files")
    options = parser.parse_args(arguments)
    check_counts(parser, options, ["budget_mib", "start_layers", "max_layers", "timed_steps", "ranks", "microbatch"])
    check_counts(parser, options, ["steps"], least=2)
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
    if not _worker.supported():
        parser.error(f"--device cpu needs {_worker.ROLLUP} with Pss_Shmem (Linux 5.0 or newer) to measure memory")


def main() -> int:
    options = parse_arguments()
    console, started = begin(), time.monotonic()
    if options.sequence:
        longest = search_longest(options, console)
        if options.json:
            options.json.write_text(json.dumps(longest, indent=2))
        return 0 if None not in longest.values() else 1
    search = Search(options, console)
    search.run()
    found = search.found
    console.print(table(found))
    console.print(f"{search.num_jobs} jobs in {time.monotonic() - started:.0f} s.", highlight=False)
    gpu = {} if options.device == "cpu" else {"gpu": _device.name()}
    settings = settings_of(options, found.title, tokens_per_step=found.tokens_per_step, **gpu)
    status = conclude(console, found.rows, found.as_dict(settings), options.json)
    if options.png:
        write_chart(found, options.png)
    return status


if __name__ == "__main__":
    sys.exit(main())
