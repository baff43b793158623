"""What `lowtide tune` prints and draws: predicted beside measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from .pictures import picture
from .trials import TrialOutcome


@dataclass(frozen=True)
class Tried:
    """planned: {"choice", "seconds", "peak_bytes"} of the plan; {} of a config that could not be planned."""

    name: str
    planned: Mapping[str, Any]
    outcome: TrialOutcome

    @property
    def step_seconds(self) -> float:
        """Of one that was measured."""
        return float(self.outcome.result["step_seconds"])

    @property
    def samples_per_second(self) -> float:
        """Of one that was measured."""
        return float(self.outcome.result["samples"]) / self.step_seconds

    @property
    def planned_seconds(self) -> float | None:
        return sum(self.planned["seconds"].values()) if self.planned else None

    @property
    def speed(self) -> float:
        """For the order of a table: the fastest first, and what was not measured last."""
        return -self.samples_per_second if self.outcome.state == "measured" else 0.0


def ignored_rows(measured: Sequence[Tried]) -> str:
    """What to say of a script whose microbatches stay as they are where the config has another number of rows."""
    for one in measured:
        for other in measured:
            rows, others = (each.planned.get("choice", {}).get("rows") for each in (one, other))
            batch = one.outcome.result.get("batch")
            if None not in (rows, others, batch) and rows != others and batch == other.outcome.result.get("batch"):
                return (
                    f"{one.name} has {rows} rows a microbatch, {other.name} {others}, and the script gave both the "
                    "same: samples/s are not true. Expected batches by engine.config.train_micro_batch_size_per_gpu; "
                    'or give the batch sizes in CONFIG values, and only other keys "auto"'
                )
    return ""


def table(tried: Sequence[Tried]) -> Table:
    """The fastest first. A column for each key of the choices in which they differ."""
    choices = [one.planned["choice"] for one in tried if one.planned]
    names = [name for name in (choices[0] if choices else ()) if len({str(one[name]) for one in choices}) > 1]
    result = Table(title="predicted beside measured")
    result.add_column("")
    for name in (*names, "s a step, planned", "measured", "samples/s", "peak GB, planned", "measured"):
        result.add_column(name.replace("_", " "), justify="right")
    result.add_column("")
    for one in sorted(tried, key=lambda one: one.speed):
        choice = one.planned.get("choice", {})
        is_measured = one.outcome.state == "measured"
        peak = one.outcome.result.get("peak_bytes")
        cells = [str(choice.get(name, "")) for name in names]
        cells += [_number(one.planned_seconds), _number(one.step_seconds if is_measured else None)]
        cells += [_number(one.samples_per_second if is_measured else None)]
        cells += [_gigabytes(one.planned.get("peak_bytes")), _gigabytes(peak)]
        result.add_row(one.name, *cells, "" if is_measured else escape(f"{one.outcome.state}: {one.outcome.words}"))
    return result


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _gigabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e9:.3g}"


def draw(measured: Sequence[Tried], path: Path) -> None:
    """Seconds of a step, planned and measured, beside each other."""
    rows = sorted(measured, key=lambda one: one.speed)
    with picture(path, 8, 1.5 + 0.5 * len(rows)) as axes:
        places = range(len(rows))
        axes.barh([place - 0.2 for place in places], [one.planned_seconds or 0 for one in rows], 0.38, label="planned")
        axes.barh([place + 0.2 for place in places], [one.step_seconds for one in rows], 0.38, label="measured")
        axes.set_yticks(list(places), [_label(one) for one in rows])
        axes.invert_yaxis()
        axes.set_xlabel("seconds a step")
        axes.set_title("the fastest by sample first", loc="left")
        axes.legend()


def _label(one: Tried) -> str:
    choice = one.planned.get("choice")
    if not choice:
        return one.name
    return (
        f"{one.name}: stage {choice['stage']}, pipeline {choice['pipeline']}, {choice['rows']} x "
        f"{choice['accumulation']} rows, checkpointing {choice['every']}"
    )
