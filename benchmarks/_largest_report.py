"""What the search for the largest models found: the numbers of a row, the table, the JSON file and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _contenders import Contender
from _largest_job import BudgetResult
from rich.table import Table

MIB = 1024 * 1024


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
class LargestRow:
    """All jobs of one contender; `failure` ends its part. own: timed at its largest; common: at the peer's largest."""

    contender: Contender
    tries: list[Try] = field(default_factory=list)
    own: BudgetResult | None = None
    common: BudgetResult | None = None
    failure: str | None = None

    @property
    def largest(self) -> Try | None:
        """The try with the most layers that fits, None where none does."""
        return max((one for one in self.tries if one.fits), key=lambda one: one.num_layers, default=None)


@dataclass
class Largest:
    """All rows of one run, and how it was made. settings: has "title", "tokens_per_step" and "most_layers"."""

    rows: list[LargestRow]
    settings: dict[str, Any]

    @property
    def peer(self) -> LargestRow | None:
        """Whose largest model is the measure: the first contender that is not lowtide and that trains one at all."""
        return next((row for row in self.rows if row.contender.kind != "lowtide" and row.largest), None)

    def ratio(self, row: LargestRow) -> float | None:
        """Gives the parameters of the row's largest model over those of the peer's."""
        peer = self.peer.largest if self.peer else None
        return row.largest.num_parameters / peer.num_parameters if peer and row.largest else None

    def tokens_per_second(self, job: BudgetResult | None) -> float | None:
        """Gives the tokens of all ranks in a second of the median step."""
        return float(self.settings["tokens_per_step"] / job.step_seconds) if job else None

    def as_dict(self) -> dict[str, Any]:
        """Gives every raw number and what was made of it, for JSON."""
        return {"settings": self.settings, "contenders": [self._row_as_dict(row) for row in self.rows]}

    def _row_as_dict(self, row: LargestRow) -> dict[str, Any]:
        return {
            **row.contender.as_dict(),
            "failure": row.failure,
            "largest": asdict(row.largest) if row.largest else None,
            "ratio_to_peer": self.ratio(row),
            "tokens_per_second_at_largest": self.tokens_per_second(row.own),
            "tokens_per_second_at_common": self.tokens_per_second(row.common),
            "tries": [asdict(one) | {"fits": one.fits} for one in row.tries],
            "timed_at_largest": asdict(row.own) if row.own else None,
            "timed_at_common": asdict(row.common) if row.common else None,
        }


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _size_cells(found: Largest, row: LargestRow) -> list[str]:
    """Layers, parameters, ratio and peak of the largest model; ">=" where nothing larger was tried."""
    one, ratio = row.largest, found.ratio(row)
    if one is None or one.peak_bytes is None:
        return ["-" if row.failure else "none fits", "-", "-", "-"]
    more = ">= " if one.num_layers == found.settings["most_layers"] else ""
    cells = [f"{more}{one.num_layers}", f"{more}{one.num_parameters / 1e6:.1f} M"]
    return [*cells, "-" if ratio is None else f"{ratio:.2f}", f"{one.peak_bytes / MIB:.0f}"]


def make_table(found: Largest) -> Table:
    """Gives the table: one row a contender; "x" compares the parameters with those of the first peer's largest."""
    peer = found.peer
    table = Table(title=found.settings["title"])
    table.add_column("contender")
    headings = [
        "layers",
        "largest,\nparameters",
        f"x {peer.contender.label if peer else 'peer'}",
        "peak MiB\nof a rank",
    ]
    common = f"at {peer.largest.num_layers} layers" if peer and peer.largest else "at one size"
    for heading in [*headings, "tokens/s,\nits largest", f"tokens/s,\n{common}"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(
            row.contender.label + (" [red]FAILED[/red]" if row.failure else ""),
            *_size_cells(found, row),
            _whole(found.tokens_per_second(row.own)),
            _whole(found.tokens_per_second(row.common)),
        )
    return table


def write_chart(found: Largest, path: Path) -> None:
    """Writes a PNG: a bar for the largest model of each contender."""
    from matplotlib.figure import Figure

    rows: Sequence[tuple[LargestRow, Try]] = [(row, row.largest) for row in found.rows if row.largest]
    figure = Figure(figsize=(9, 1.5 + 0.38 * len(rows)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        range(len(rows)),
        [one.num_parameters / 1e6 for _, one in rows],
        color=["tab:blue" if row.contender.kind == "lowtide" else "tab:gray" for row, _ in rows],
    )
    ratios = [found.ratio(row) for row, _ in rows]
    axes.bar_label(bars, ["" if ratio is None else f"{ratio:.2f}x" for ratio in ratios], padding=3)
    axes.set_yticks(range(len(rows)), [row.contender.label for row, _ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("millions of parameters of the largest model that trains (more is better)")
    figure.suptitle(found.settings["title"], fontsize=10)
    figure.savefig(path, dpi=120)
