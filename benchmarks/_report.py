"""What comparisons make of their numbers: differences of losses, tables, pictures, and the exit status."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _harness import Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def loss_difference(jobs: Iterable[Sequence[float]], expected: Sequence[float]) -> float | None:
    """Gives the largest relative difference to the expected losses, over all steps of all jobs; NaN is the largest."""
    differences = [abs(loss - one) / abs(one) for losses in jobs for loss, one in zip(losses, expected, strict=False)]
    return max(differences, key=lambda difference: (math.isnan(difference), difference), default=None)


def difference_of(row: Row, reference: Row | None) -> float | None:
    """Gives `loss_difference` to the reference's first job, None where one has none, or never updates."""
    if not reference or not reference.losses or not row.contender.trains:
        return None
    return loss_difference(row.losses, reference.losses[0])


def judge_losses(rows: Sequence[Row], reference_of: Callable[[Row], Row | None], tolerance: float) -> None:
    """Marks as failed every row whose losses are not those of its reference."""
    for row in rows:
        reference = reference_of(row)
        difference = difference_of(row, reference)
        if row.failure is None and reference and difference is not None and not difference <= tolerance:
            row.failure = (
                f"losses differ: expected at most {tolerance:g} (relative) from {reference.label}, "
                f"found {difference:.1e}"
            )


def spread(values: Sequence[float]) -> str:
    """The median, and (lowest-highest) where there are several."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} [dim]({min(values):.2f}-{max(values):.2f})[/dim]"


def shown(value: float | None, form: str) -> str:
    """A number in a format such as ".3f", "-" where there is none."""
    return "-" if value is None else f"{value:{form}}"


def ratio(value: float | None, other: float | None) -> str:
    return shown(value / other if value and other else None, ".2f")


def label_of(row: Row) -> str:
    return row.contender.label + (" [red]FAILED[/red]" if row.failure else "")


def make_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], num_texts: int = 1) -> Table:
    """A table whose first columns are texts, the others numbers."""
    from rich.table import Table

    table = Table(title=title)
    for number, heading in enumerate(headings):
        is_text = number < num_texts
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)
    for cells in rows:
        table.add_row(*cells)
    return table


@dataclass(frozen=True)
class Panel:
    """Bars. values: of each bar, by round: the median is drawn, with lowest and highest; notes: beside the bars."""

    label: str
    values: Sequence[Sequence[float]]
    line: float | None = None  # dotted
    notes: Sequence[str] | None = None


def write_bars(path: Path, title: str, labels: Sequence[str], is_ours: Sequence[bool], panels: Sequence[Panel]) -> None:
    """Writes a PNG: a bar a contender in each panel, lowtide's in blue."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 + 4 * len(panels), 1.5 + 0.38 * len(labels)), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    places = range(len(labels))
    for axes, panel in zip(grid, panels, strict=True):
        values = [one or [0.0] for one in panel.values]
        middle = [statistics.median(one) for one in values]
        errors = [[m - min(one) for m, one in zip(middle, values, strict=True)]]
        errors.append([max(one) - m for m, one in zip(middle, values, strict=True)])
        colours = ["tab:blue" if ours else "tab:gray" for ours in is_ours]
        bars = axes.barh(places, middle, xerr=errors, color=colours, ecolor="black", capsize=2)
        if panel.notes:
            axes.bar_label(bars, panel.notes, padding=3)
            axes.margins(x=0.12)
        if panel.line is not None:
            axes.axvline(panel.line, color="black", linewidth=0.8, linestyle=":")
        axes.set_xlabel(panel.label)
    grid[0].set_yticks(places, labels)
    grid[0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def write_row_bars(path: Path, title: str, rows: Sequence[Row], panels: Sequence[Panel]) -> None:
    labels, is_ours = [row.contender.label for row in rows], [row.contender.kind == "lowtide" for row in rows]
    write_bars(path, title, labels, is_ours, panels)


def failures(rows: Iterable[Row]) -> list[str]:
    """One line for each contender that failed."""
    return [f"{row.contender.name} FAILED: {row.failure}" for row in rows if row.failure]


def conclude(console: Console, rows: Iterable[Row], numbers: dict[str, Any], path: Path | None) -> int:
    """Prints `failures`, writes the numbers to `path` as JSON; 1 where a contender failed, else 0."""
    lines = failures(rows)
    for line in lines:
        console.print(line, style="red", markup=False, highlight=False)
    if path:
        path.write_text(json.dumps(numbers, indent=1) + "\n")
    return 1 if lines else 0
