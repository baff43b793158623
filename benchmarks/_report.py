"""What a comparison found: the numbers of a row, the table, the JSON file and the picture."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _contenders import DDP, FSDP2, REFERENCE, Contender
from _job import JobResult
from rich.table import Table

MIB = 1024 * 1024


def loss_difference(jobs: list[list[float]], expected: list[float]) -> float | None:
    """Gives the largest relative difference to the expected losses, over all steps of all jobs; NaN is the largest."""
    differences = [abs(loss - one) / abs(one) for losses in jobs for loss, one in zip(losses, expected, strict=False)]
    return max(differences, key=lambda difference: (math.isnan(difference), difference), default=None)


@dataclass
class Row:
    """All jobs of one contender: timed ones by round, memory ones by allocator; `failure` ends its part."""

    contender: Contender
    timed: dict[int, JobResult] = field(default_factory=dict)
    memory: dict[str, JobResult] = field(default_factory=dict)
    failure: str | None = None

    @property
    def step_seconds(self) -> float | None:
        """The median over the rounds of each round's median step."""
        return statistics.median(job.step_seconds for job in self.timed.values()) if self.timed else None

    def ratios(self, other: Row | None) -> list[float]:
        """Gives this row's step time over the other's, for every round that both finished."""
        rounds = sorted(self.timed.keys() & other.timed.keys()) if other else []
        return [self.timed[r].step_seconds / other.timed[r].step_seconds for r in rounds] if other else []

    def loss_difference(self, reference: Row | None) -> float | None:
        """Gives `loss_difference` to the reference's first job, None where one has none, or never updates."""
        if not reference or not reference.losses or not self.contender.trains:
            return None
        return loss_difference(self.losses, reference.losses[0])

    @property
    def losses(self) -> list[list[float]]:
        """The losses of every job: timed ones first."""
        return [job.losses for job in [*self.timed.values(), *self.memory.values()]]


@dataclass
class Comparison:
    """All rows of one run, and how it was made."""

    rows: list[Row]
    settings: dict[str, Any]
    loss_tolerance: float

    def row(self, name: str) -> Row | None:
        """Gives the row of a contender, None where it was not run."""
        return next((row for row in self.rows if row.contender.name == name), None)

    @property
    def loss_reference(self) -> Row | None:
        """The row whose losses are right by definition: one process, else DDP, else the first that ran."""
        for row in [self.row(REFERENCE), self.row(DDP), *self.rows]:
            if row and row.losses and row.contender.trains:
                return row
        return None

    def judge_losses(self) -> None:
        """Marks as failed every row whose losses are not those of the reference."""
        for row in self.rows:
            difference = row.loss_difference(self.loss_reference)
            if row.failure is None and difference is not None and not difference <= self.loss_tolerance:
                row.failure = (
                    f"losses differ: expected at most {self.loss_tolerance:g} (relative) from "
                    f"{self.loss_reference.contender.label if self.loss_reference else ''}, found {difference:.1e}"
                )

    @property
    def baseline_bytes(self) -> int | None:
        """What a rank holds after `import torch`, at the median of the memory runs of all ranks."""
        found = [
            job.baseline_bytes for row in self.rows if row.contender.name != REFERENCE for job in row.memory.values()
        ]
        return int(statistics.median(found)) if found else None

    def as_dict(self) -> dict[str, Any]:
        """Gives every raw number and what was made of it, for JSON."""
        return {
            "settings": self.settings,
            "baseline_bytes": self.baseline_bytes,
            "contenders": [self._row_as_dict(row) for row in self.rows],
        }

    def _row_as_dict(self, row: Row) -> dict[str, Any]:
        return {
            **row.contender.as_dict(),
            "failure": row.failure,
            "step_seconds": row.step_seconds,
            "ratios_to_ddp": row.ratios(self.row(DDP)),
            "ratios_to_fsdp2": row.ratios(self.row(FSDP2)),
            "loss_difference": row.loss_difference(self.loss_reference),
            "rounds": {str(number): asdict(job) for number, job in row.timed.items()},
            "memory": {allocator: asdict(job) for allocator, job in row.memory.items()},
        }


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} [dim]({min(values):.2f}-{max(values):.2f})[/dim]"


def _memory_cells(row: Row, fsdp2: Row | None, allocator: str) -> list[str]:
    job = row.memory.get(allocator)
    if job is None:
        return ["-", "-"]
    other = fsdp2.memory.get(allocator) if fsdp2 else None
    return [f"{job.peak_bytes / MIB:.0f}", f"{job.peak_bytes / other.peak_bytes:.2f}" if other else "-"]


def make_table(comparison: Comparison, allocators: list[str]) -> Table:
    """Gives the table: one row a contender, times as medians with (lowest-highest) over the rounds."""
    ddp, fsdp2 = comparison.row(DDP), comparison.row(FSDP2)
    table = Table(title=comparison.settings["title"])
    table.add_column("contender")
    for heading in ["s/step", "x DDP", "x FSDP2"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for allocator in allocators:
        table.add_column(f"peak MiB\n{allocator}", justify="right")
        table.add_column("x FSDP2", justify="right")
    table.add_column("loss diff", justify="right")
    for row in comparison.rows:
        seconds, difference = row.step_seconds, row.loss_difference(comparison.loss_reference)
        table.add_row(
            row.contender.label + (" [red]FAILED[/red]" if row.failure else ""),
            "-" if seconds is None else f"{seconds:.3f}",
            _spread(row.ratios(ddp)),
            _spread(row.ratios(fsdp2)),
            *(cell for allocator in allocators for cell in _memory_cells(row, fsdp2, allocator)),
            "-" if difference is None else f"{difference:.0e}",
        )
    return table


def write_chart(comparison: Comparison, allocators: list[str], path: Path) -> None:
    """Writes a PNG: bars of the step time over DDP's (with lowest and highest), and bars of the peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in comparison.rows if row.losses]
    labels, places = [row.contender.label for row in rows], range(len(rows))
    colours = ["tab:blue" if row.contender.kind == "lowtide" else "tab:gray" for row in rows]
    panels = 2 if allocators else 1
    figure, grid = pyplot.subplots(
        1, panels, figsize=(7 * panels, 1.5 + 0.38 * len(rows)), sharey=True, squeeze=False, layout="constrained"
    )
    time_axes = grid[0][0]
    ratios = [row.ratios(comparison.row(DDP)) or [0.0] for row in rows]
    middle = [statistics.median(values) for values in ratios]
    errors = [[m - min(v) for m, v in zip(middle, ratios, strict=True)]]
    errors.append([max(v) - m for m, v in zip(middle, ratios, strict=True)])
    time_axes.barh(places, middle, xerr=errors, color=colours, ecolor="black", capsize=2)
    time_axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    time_axes.set_xlabel("step time / DDP's in the same round (less is better)")
    time_axes.set_yticks(places, labels)
    time_axes.invert_yaxis()
    for number, allocator in enumerate(allocators):
        peaks = [row.memory[allocator].peak_bytes / MIB if allocator in row.memory else 0.0 for row in rows]
        height = 0.8 / len(allocators)
        where = [place - 0.4 + height * (number + 0.5) for place in places]
        grid[0][1].barh(where, peaks, height=height, color=colours, alpha=0.5 + 0.5 * (number == 0), label=allocator)
    if allocators:
        grid[0][1].set_xlabel("peak memory of a rank in training, MiB (less is better)")
        grid[0][1].legend(title="allocator (dark first)", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(comparison.settings["title"])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
