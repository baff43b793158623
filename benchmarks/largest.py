"""Searches the largest GPT that trains in a given memory, with lowtide and its peers, and how fast it trains there.

The number of layers is doubled until a model does not fit, then bisected. Each try is a job of fresh processes that
build the model, as users build one that is too large for a process (`_contenders.py`), and train it on one batch; the
loss must be finite and change. What building takes counts.

The host's memory stands in for a GPU's: a rank may hold so much more than it held when torch and the contender's
library were imported, and is stopped when it exceeds that. Memory that ranks share counts once, divided; GPUs share
none.

tokens/s are measured at each contender's largest, in jobs of their own, which nothing stops at the budget;
compare.py measures speeds at one size. With --sequence the length of the sequence grows instead, of the model
`LONG_SHAPE`, which has the proportions of Llama 3 8B.

Example:

    python benchmarks/largest.py --size 10M --budget-mib 200 --json largest.json --png largest.png
    python benchmarks/largest.py --budget-mib 200 --sequence
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import _worker
from _contenders import BUILDERS, CONTENDERS, OFFLOAD_FOLDER, Setup, import_libraries
from _harness import (
    MIB,
    Column,
    JobError,
    JobParser,
    OverBudget,
    Result,
    Row,
    begin,
    conclude,
    count,
    gathered,
    mib,
    over,
    run_job,
)
from _model import SIZES, GPTSize, build_batches, build_model
from _worker import PeakSampler, timed_steps

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT = ["ddp", "fsdp2", *(f"deepspeed-{stage}" for stage in (1, 2, 3))]
DEFAULT += [f"lowtide-{place}" for place in ("0", "1", "2", "3", "3-states-nvme", "3-nvme", "3-least")]
LONG = ["lowtide-3", "lowtide-3-recompute", "lowtide-3-tiles", "lowtide-3-long"]
LONG_START, LONG_MOST = 64, 1 << 20  # tokens
LONG_SHAPE = GPTSize(16, width=128, num_heads=4, sequence_length=0, vocabulary=32 * 128, has_positions=False)
RESOLUTION = 0.05
STEPS, TIMED_STEPS = 3, 5
_SAMPLING_SECONDS = 0.005  # steps of a small model are short


# -- a rank ----------------------------------------------------------------------------------------------------------


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train on a rank; return losses, seconds and the peak bytes, above its start.

    All steps train on one batch, so that a loss that never changes means that nothing was trained. The rank leaves with
    OVER_BUDGET_STATUS as soon as it needs more than the budget.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shape = GPTSize(**job["shape"])
    ((tokens, targets),) = build_batches(shape, 1, job["ranks"])
    share = slice(rank * len(tokens) // ranks, (rank + 1) * len(tokens) // ranks)
    measures_memory = job["allocator"] is not None
    if measures_memory:
        import_libraries(job["kind"])
    sampler = PeakSampler(measures_memory, _SAMPLING_SECONDS, job["budget_bytes"])
    with sampler:
        trainer = BUILDERS[job["kind"]](partial(build_model, shape), Setup(), **job["options"])
        batches = [(tokens[share], targets[share])] * (job["warmup"] + job["steps"])
        found = timed_steps(trainer.step, batches, job["warmup"], PeakSampler(False))
    trainer.close()
    return found | {"peak_bytes": sampler.peak_bytes - sampler.start_bytes if measures_memory else None}


# -- a job -----------------------------------------------------------------------------------------------------------


def check_losses(losses: Sequence[float]) -> None:
    """Raise JobError unless these, of steps on one and the same batch, are those of a model that is trained."""
    listed = ", ".join(f"{loss:.6g}" for loss in losses)
    if not all(math.isfinite(loss) for loss in losses):
        raise JobError(f"expected finite losses, found {listed}")
    if len(set(losses)) == 1:
        raise JobError(f"expected losses that change from step to step on one batch, found {listed}")


# -- the search ------------------------------------------------------------------------------------------------------


@dataclass
class LargestRow(Row):
    """All jobs of one contender. tries: layers, or tokens of a sequence, to peak bytes, None if over the budget."""

    tries: dict[int, int | None] = field(default_factory=dict)

    @property
    def has_jobs(self) -> bool:
        return bool(self.tries)

    @property
    def largest(self) -> int:
        """The largest amount that fits, 0 where none does."""
        return max((amount for amount, peak in self.tries.items() if peak is not None), default=0)


def most_layers(fits: Callable[[int], bool], start: int, most: int, resolution: float) -> int:
    """Return the most layers that fit, 0 where not even one does: doubled until too many, then bisected.

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
        what = f"GPT of {shape.num_layers} layers" if o.sequence else f"GPT of width {shape.width}"
        tokens = "" if o.sequence else f" x {shape.sequence_length} tokens"
        self.title = f"{what}, fp32, in {o.budget_mib:,} MiB a rank, {o.ranks} rank(s), microbatch 1{tokens}"
        self.unit, self.start, self.most = 1, o.start_layers, o.max_layers  # of what is doubled and bisected
        if o.sequence:
            self.unit, self.start, self.most = LONG_START, 1, LONG_MOST // LONG_START

    @property
    def peer(self) -> LargestRow | None:
        """The row whose largest is the measure: the first peer that trains a model at all, else the first lowtide."""
        found = [row for row in self.rows if row.largest]
        return min(found, key=lambda row: row.contender.kind == "lowtide", default=None)

    def name(self, amount: int) -> str:
        return f"{amount:,} tokens" if self.options.sequence else f"{amount} layers"

    def shape(self, amount: int) -> GPTSize:
        if self.options.sequence:
            return replace(LONG_SHAPE, sequence_length=amount)
        return replace(SIZES[self.options.size], num_layers=amount)

    def parameters(self, row: LargestRow) -> float | None:
        return self.shape(row.largest).num_parameters if row.largest else None

    def ratio(self, row: LargestRow) -> float | None:
        """Return the row's largest over the peer's: parameters, or tokens."""
        if self.peer is None or self.options.sequence:
            return over(row.largest, self.peer.largest) if self.peer else None
        return over(self.parameters(row), self.parameters(self.peer))

    def tokens_per_second(self, row: LargestRow) -> float | None:
        """Return the tokens of all ranks in a second of the median step at the row's largest model."""
        tokens = self.options.ranks * self.shape(row.largest).sequence_length
        return over(tokens, row.step_seconds)

    def run(self) -> None:
        """Search for every contender, then measure times; a contender that failed is left out from there on."""
        for row in self.rows:
            try:
                most_layers(partial(self._fits, row), self.start, self.most, RESOLUTION)
            except JobError as error:
                self._fail(row, str(error))
        for row in self.rows:
            if row.largest and not row.failure:
                self._time(row)

    def _fits(self, row: LargestRow, number: int) -> bool:
        """Try a model. Raises JobError, with the layers in its text, where the job fails in another way."""
        amount, budget = number * self.unit, self.options.budget_mib
        name, peak = self.name(amount), None
        try:
            peak = self._run(row, amount, 0, STEPS, "exact").peak_bytes
        except OverBudget:
            pass
        except JobError as error:
            raise JobError(f"{name}: {error}") from error
        if peak is not None and peak > budget * MIB:
            peak = None
        row.tries[amount] = peak
        found = f"peak {peak / MIB:.0f} MiB, fits" if peak is not None else f"over {budget} MiB, does not fit"
        self._say(row, f"{name}, {self.shape(amount).num_parameters / 1e6:.1f} M parameters: {found}")
        return peak is not None

    def _time(self, row: LargestRow) -> None:
        try:
            row.timed[0] = self._run(row, row.largest, 1, TIMED_STEPS, None)
        except JobError as error:
            self._fail(row, f"timed at {self.name(row.largest)}: {error}")
            return
        speed = f"{self.tokens_per_second(row):,.0f} tokens/s"
        self._say(row, f"{self.name(row.largest)}: {row.step_seconds:.3f} s/step, {speed}")

    def _run(self, row: LargestRow, amount: int, warmup: int, steps: int, allocator: str | None) -> Result:
        """Run one job; it measures memory with an `allocator`, and else time. No file is left behind.

        Raises OverBudget when a rank needs more than the budget, and JobError when one fails, the time is over, or the
        losses are not those of a model that is trained.
        """
        o = self.options
        work: dict[str, Any] = {"shape": asdict(self.shape(amount)), "warmup": warmup, "steps": steps}
        with (
            tempfile.TemporaryDirectory(prefix="offload-", dir=o.offload_folder) as folder,
            mock.patch.dict(os.environ, {OFFLOAD_FOLDER: folder}),
        ):
            found = run_job("largest:train", o, row, allocator, budget_bytes=o.budget_mib * MIB, **work)
        result = gathered(found)
        check_losses(result.losses)
        return result

    def _say(self, row: LargestRow, line: str) -> None:
        self.console.print(f"{row.contender.label}  {line}", markup=False, highlight=False)

    def _fail(self, row: LargestRow, reason: str) -> None:
        row.failure = reason
        self._say(row, f"FAILED: {reason}")


def columns(search: Search) -> list[Column]:
    """ ">=" where nothing larger was tried; "x" compares with the peer's largest."""
    peer, is_sequence = search.peer, search.options.sequence

    def amount(row: LargestRow) -> str:
        if not row.largest:
            return "-" if row.failure else "none fits"
        return f"{'>= ' if row.largest == search.most * search.unit else ''}{row.largest:,}"

    more = f"x {peer.contender.label if peer else 'peer'}"
    panel = "millions of parameters of the largest model that trains (more is better)"
    return [
        Column("tokens of\na rank" if is_sequence else "layers", amount),
        Column(
            "largest, M\nparameters",
            lambda row: over(search.parameters(row), 1e6),
            ".1f",
            None if is_sequence else panel,
        ),
        Column(more, search.ratio, panel=f"{more}: the longest sequence" if is_sequence else None),
        Column("peak MiB\nof a rank", lambda row: mib(row.tries.get(row.largest)), ".0f"),
        Column("tokens/s,\nits largest", search.tokens_per_second, ",.0f"),
    ]


# -- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the checked command line; end the program with a message if it is not legal."""
    parser = JobParser(__doc__, CONTENDERS)
    add = parser.add_argument
    add("--budget-mib", type=count(), metavar="MIB", required=True, help="memory of a rank, such as 200")
    add("--size", choices=SIZES, default="10M", help="width, heads and sequence of this size (default: 10M)")
    add("--sequence", action="store_true", help="search the longest sequence of one model, whatever --size")
    add("--start-layers", type=count(), default=2, help="of the first model that is tried (default: 2)")
    add("--max-layers", type=count(), default=1024, help="of the largest model that is tried (default: 1024)")
    add("--ranks", type=count(), default=2, help="processes of a job (default: 2)")
    add("--offload-folder", type=Path, default=Path.cwd(), metavar="FOLDER", help="where offload puts its files")
    options = parser.parse_args(arguments)
    least, most = options.start_layers, options.max_layers
    if most < least:
        parser.error(f"--max-layers: expected at least --start-layers ({least}), found {most}")
    if not _worker.supported():
        parser.error(f"expected {_worker.ROLLUP} with Pss_Shmem (Linux 5.0 or newer) to measure memory, found none")
    return parser.check(options, LONG if options.sequence else DEFAULT)


def main() -> int:
    options = parse_arguments()
    console = begin()
    search = Search(options, console)
    search.run()
    return conclude(options, console, search.rows, {search.title: columns(search)}, search.title)


if __name__ == "__main__":
    sys.exit(main())
