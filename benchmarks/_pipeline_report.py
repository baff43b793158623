"""What a comparison of pipelines found: the numbers of a row, the tables, the JSON file and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _pipeline_contenders import PipelineContender
from _pipeline_job import PipelineResult, bubble, makespan
from _report import loss_difference
from rich.table import Table

MIB = 1024 * 1024
_COLOURS = {
    "F": ("#4292c6", "#9ecae1"),
    "B": ("#41ab5d", "#a1d99b"),
    "I": ("#1d91a3", "#8fd1cf"),
    "W": ("#fd8d3c", "#fdd0a2"),
}


@dataclass
class PipelineRow:
    """All jobs of one contender on so many ranks: timed ones by round; `failure` ends its part."""

    contender: PipelineContender
    ranks: int
    timed: dict[int, PipelineResult] = field(default_factory=dict)
    memory: PipelineResult | None = None
    failure: str | None = None

    @property
    def losses(self) -> list[list[float]]:
        """The losses of every job, all steps in which the parameters are updated alike."""
        return [job.losses for job in [*self.timed.values(), *([self.memory] if self.memory else [])]]

    @property
    def step_seconds(self) -> float | None:
        """The median over the rounds of each round's median step."""
        return statistics.median(job.step_seconds for job in self.timed.values()) if self.timed else None

    @property
    def middle(self) -> PipelineResult:
        """The job with the median makespan (the shorter of the middle two); for lowtide alone."""
        jobs = sorted(self.timed.values(), key=lambda job: makespan(job.timeline))
        return jobs[(len(jobs) - 1) // 2]

    def ratios(self, other: PipelineRow | None) -> list[float]:
        """This row's step time over the other's, for every round that both finished."""
        if other is None:
            return []
        rounds = sorted(self.timed.keys() & other.timed.keys())
        return [self.timed[number].step_seconds / other.timed[number].step_seconds for number in rounds]

    def loss_difference(self, reference: PipelineRow) -> float | None:
        """`loss_difference` to the reference's first job, None where this row has no losses."""
        return loss_difference(self.losses, reference.losses[0]) if self.losses else None


def peer_of(rows: Sequence[PipelineRow], row: PipelineRow) -> PipelineRow | None:
    """The row that this one is compared with, None where it was not run."""
    fits = [one for one in rows if one.contender.name == row.contender.peer and one.ranks == row.ranks]
    return fits[0] if fits else None


def reference_of(rows: Sequence[PipelineRow], row: PipelineRow) -> PipelineRow:
    """Whose losses are right: a peer's if there is one, else the first row's, on as many ranks."""
    same = [one for one in rows if one.ranks == row.ranks and one.losses]
    return next((one for one in same if one.contender.kind != "lowtide"), same[0] if same else row)


def judge_losses(rows: Sequence[PipelineRow], tolerance: float) -> None:
    """Marks as failed every row whose losses are not those of the reference."""
    for row in rows:
        reference = reference_of(rows, row)
        difference = row.loss_difference(reference) if row.losses else None
        if row.failure is None and difference is not None and not difference <= tolerance:
            row.failure = (
                f"losses differ: expected at most {tolerance:g} (relative) from {reference.contender.name} on "
                f"{row.ranks} ranks, found {difference:.1e}"
            )


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f}-{max(values):.2f})"


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column("ranks", justify="right")
    table.add_column("contender")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def work_table(rows: Sequence[PipelineRow], title: str) -> Table:
    """One line a contender: medians, and (lowest-highest) over the rounds; "x" compares with torch's same schedule."""
    table = _table(title, ["s/step", "x torch", "peak MiB", "x torch", "loss diff"])
    for row in rows:
        seconds, peer = row.step_seconds, peer_of(rows, row)
        difference = row.loss_difference(reference_of(rows, row)) if row.losses else None
        peaks = (row.memory.peak_bytes, peer.memory.peak_bytes) if peer and peer.memory and row.memory else None
        table.add_row(
            str(row.ranks),
            row.contender.name + (" [red]FAILED[/red]" if row.failure else ""),
            "-" if seconds is None else f"{seconds:.3f}",
            _spread(row.ratios(peer)),
            f"{row.memory.peak_bytes / MIB:.0f}" if row.memory else "-",
            f"{peaks[0] / peaks[1]:.2f}" if peaks else "-",
            "-" if difference is None else f"{difference:.0e}",
        )
    return table


def sleep_table(rows: Sequence[PipelineRow], title: str) -> Table:
    """One line a schedule: predicted and measured, of the job with the median makespan; and torch's step over ours.

    Makespan: from the first start of F, B, I or W to the last end, of all ranks. Bubble: the share of all ranks' time
    in which they do none of these; as timed: predicted from what actions and messages really took, points: what is
    above that. Work: how much longer than told the actions themselves took. Torch's time is from a
    barrier to the end of the last rank, the update of the few parameters included, and compared with ours of the same
    kind.
    """
    headings = ["predicted ms", "measured", "x", "bubble predicted", "as timed", "measured", "points", "work"]
    headings += ["torch step", "ours"]
    table = _table(title, headings)
    for row in rows:
        if row.contender.kind != "lowtide" or not row.timed:
            continue
        found = row.middle.timeline
        told, timed = row.middle.predicted, row.middle.predicted_as_timed
        assert told is not None and timed is not None
        length, share = makespan(found), bubble(found)
        work = length * (1 - share) / (told["makespan"] * (1 - told["bubble"]))
        peer = peer_of(rows, row)
        other = peer.step_seconds if peer else None
        table.add_row(
            str(row.ranks),
            row.contender.name + (" [red]FAILED[/red]" if row.failure else ""),
            f"{told['makespan'] * 1e3:.0f}",
            f"{length * 1e3:.0f}",
            f"{length / told['makespan']:.3f}",
            f"{told['bubble']:.1%}",
            f"{timed['bubble']:.1%}",
            f"{share:.1%}",
            f"{(share - timed['bubble']) * 100:+.1f}",
            f"{work - 1:+.1%}",
            f"{other * 1e3:.0f}" if other else "-",
            f"{row.step_seconds * 1e3:.0f}" if row.step_seconds else "-",
        )
    return table


def as_dict(rows: Sequence[PipelineRow], settings: dict[str, Any]) -> dict[str, Any]:
    """Gives every raw number, for JSON."""
    found = [
        {
            **asdict(row.contender),
            "ranks": row.ranks,
            "failure": row.failure,
            "step_seconds": row.step_seconds,
            "ratios": row.ratios(peer_of(rows, row)),
            "rounds": {str(number): asdict(job) for number, job in row.timed.items()},
            "memory": asdict(row.memory) if row.memory else None,
        }
        for row in rows
    ]
    return {"settings": settings, "contenders": found}


def write_timelines(rows: Sequence[PipelineRow], title: str, path: Path) -> None:
    """Writes a PNG: what each rank did when, on the most ranks of the run; dotted where the simulator sees the end."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.contender.kind == "lowtide" and row.timed]
    shown = [row for row in shown if row.ranks == max(one.ranks for one in shown)]
    figure = Figure(figsize=(12, 1 + len(shown) * (0.6 + 0.3 * shown[0].ranks)), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)
    for (axes,), row in zip(panels, shown, strict=True):
        job = row.middle
        length, told = makespan(job.timeline) * 1e3, job.predicted
        assert told is not None
        begin = min(start for actions in job.timeline for *_, start, _ in actions)
        for rank, actions in enumerate(job.timeline):
            for op, stage, microbatch, start, end in actions:
                colour = _COLOURS[op][row.contender.stages_of_rank(rank, row.ranks).index(stage) % 2]
                left, width = (start - begin) * 1e3, (end - start) * 1e3
                axes.barh(rank, width, left=left, height=0.86, color=colour, edgecolor="white", linewidth=0.5)
                axes.text(left + width / 2, rank, str(microbatch), ha="center", va="center", fontsize=6)
        axes.axvline(told["makespan"] * 1e3, color="black", linewidth=1, linestyle=":")
        axes.set_title(
            f"{row.contender.name}: {length:.0f} ms, predicted {told['makespan'] * 1e3:.0f}; "
            f"bubble {bubble(job.timeline):.1%}, predicted {told['bubble']:.1%}",
            loc="left",
            fontsize=9,
        )
        axes.set_yticks(range(row.ranks), [f"rank {rank}" for rank in range(row.ranks)])
        axes.set_ylim(row.ranks - 0.5, -0.5)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1][0].set_xlabel("ms; dotted: the end as predicted; light: a rank's second stage")
    handles = [panels[0][0].barh(0, 0, color=colours[0], label=op) for op, colours in _COLOURS.items()]
    figure.legend(handles=handles, ncols=4, loc="outside upper right", frameon=False)
    figure.suptitle(f"measured: {title}", fontsize=10)
    figure.savefig(path, dpi=110)
