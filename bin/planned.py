"""Tables and the picture of `lowtide plan CONFIG`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..engine.config.config import Config
from ..engine.config.errors import quoted
from ..engine.plan.choice import KEYS, Choice, value_at
from ..engine.plan.machine import gigabytes
from ..engine.plan.plan import Alternative, Plan
from .arguments import numbers, picture

_LINKS = {
    "intra": "to devices of the host",
    "inter": "to other hosts",
    "pipe": "to the stages before and after",
}


def show(plan: Plan, console: Console, tokens: float | None) -> None:
    """Print the plan, faster and smaller configs, and the reason for each chosen value."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    for line in (plan.summary, *_totals(plan, tokens)):
        say(line)
    say("memory of the fullest rank; its kinds peak at different times:")
    console.print(_bytes_table(plan))
    say(f"time of a step, {plan.step_seconds:.4g} s:")
    console.print(_time_table(plan))
    if plan.alternatives:
        say(f"the {len(plan.alternatives)} fastest of {plan.num_choices:,} ({plan.num_evaluated:,} were computed):")
        _show_alternatives(plan.alternatives, console)
    if plan.beyond:
        say("faster, but they do not fit:")
        _show_alternatives(plan.beyond, console)
    if plan.reasons:
        say('values for "auto", and why:')
        console.print(_decisions(plan))


def _bytes_table(plan: Plan) -> Table:
    table = Table("kind", *numbers("GB"))
    for kind, nbytes in plan.bytes.items():
        table.add_row(kind.removesuffix("_bytes"), _gb(nbytes, ""))
    table.add_section()
    table.add_row("peak", _gb(plan.peak_bytes, ""))
    for name, nbytes in (("in host memory", plan.host_bytes), ("on nvme", plan.nvme_bytes)):
        if nbytes:
            table.add_row(name, _gb(nbytes, ""))
    return table


def _time_table(plan: Plan) -> Table:
    table = Table("part", *numbers("s", "share"))
    for name, seconds in plan.seconds.items():
        if seconds:
            table.add_row(name, f"{seconds:.4g}", f"{seconds / plan.step_seconds:.1%}")
    table.add_section()
    for name, seconds in plan.hidden_seconds.items():
        if seconds:
            table.add_row(f"{name}, overlapped", f"{seconds:.4g}", "")
    return table


def _totals(plan: Plan, tokens: float | None) -> list[str]:
    sent = ", ".join(f"{_gb(n)} {_LINKS[link]}" for link, n in plan.wire_bytes.items() if n) or "nothing"
    speed = f"{plan.tokens_per_second:,.0f} tokens/s"
    step = f"{plan.samples_per_step:,} samples and {plan.tokens_per_step:,} tokens a step: {speed}"
    lines = [f"each rank sends in a step: {sent}", step]
    if tokens is not None:
        days = tokens / plan.tokens_per_second / 86400
        hours = days * 24 * plan.machine.num_devices
        lines.append(f"{tokens:.4g} tokens: {days:.4g} days, {hours:,.0f} GPU hours")
    return lines


def _decisions(plan: Plan) -> Table:
    table = Table("key", "value", "why")
    chosen = Config.load(plan.config).as_dict()
    for key, reason in plan.reasons.items():
        table.add_row(key, quoted(value_at(chosen, key)), reason)
    return table


def _show_alternatives(rows: Sequence[Alternative], console: Console) -> None:
    """Print a table with a column for each key in which the rows differ, and a line with the equal keys."""
    names = _different(rows)
    table = Table(*numbers(*map(_label, names), "s a step", "samples/s", "peak, GB"))
    has_missing = any(row.missing for row in rows)
    if has_missing:
        table.add_column("missing")
    for row in rows:
        cells = [_cell(getattr(row.choice, name)) for name in names]
        cells += [f"{row.step_seconds:.4g}", f"{row.samples_per_second:.4g}", _gb(row.peak_bytes, "")]
        missing = ", ".join(f"{_gb(nbytes)} of {where}" for where, nbytes in row.missing.items())
        table.add_row(*cells, *([missing] if has_missing else []))
    console.print(table)
    same = _named(rows[0].choice, [name for name in KEYS if name not in names])
    console.print(f"the same in all: {same}", highlight=False, soft_wrap=True)


def _different(rows: Sequence[Alternative]) -> list[str]:
    """Return the keys in which the rows differ."""
    return [name for name in KEYS if len({getattr(row.choice, name) for row in rows}) > 1]


def _named(choice: Choice, names: Sequence[str]) -> str:
    return ", ".join(f"{_label(name)} {_cell(getattr(choice, name))}" for name in names)


def _label(name: str) -> str:
    return "recompute every" if name == "every" else name.replace("_", " ")


def _cell(value: object) -> str:
    return "null" if value is None else str(value)


_BEYOND_DEVICE = 1.5  # the picture's axis ends at this multiple of the device's memory
_APART = 0.03  # fraction of an axis; a point closer than this to a numbered point gets no number


def draw(plan: Plan, path: Path) -> None:
    """Draw the front of time and memory. Points have numbers, and the legend has their configs."""
    device = plan.machine.device_bytes / 1e9
    end = _BEYOND_DEVICE * device
    rows = [*plan.front, *plan.beyond]
    points = [(row.peak_bytes / 1e9, 1 / row.samples_per_second) for row in rows]
    chosen = (plan.peak_bytes / 1e9, plan.step_seconds / plan.samples_per_step)
    num_hosts = plan.machine.num_hosts
    with picture(path, 8, 5) as axes:
        front, beyond = points[: len(plan.front)], points[len(plan.front) :]
        axes.plot(*_columns(front, end), "o-", label="fits, and no config is both faster and smaller")
        if beyond:
            axes.plot(*_columns(beyond, end), "x", label="faster, does not fit")
        label = "the plan" if chosen[0] <= end else f"the plan: {chosen[0]:,.0f} GB"
        axes.plot(*_columns([chosen], end), "*" if chosen[0] <= end else ">", markersize=14, label=label, clip_on=False)
        axes.axvline(device, color="gray", linestyle="--", label=f"device memory, {device:,.3g} GB")
        for number, index in enumerate(_apart(points, end), start=1):
            x, y = points[index]
            place = (min(x, end), y)
            axes.annotate(str(number), place, xytext=(3, 6), textcoords="offset points", fontsize=8)
            size = f", {x:,.0f} GB" if x > end else ""
            # Nothing is drawn: it puts a line of text into the legend.
            axes.plot([], [], " ", label=f"{number}  {_short(rows[index].choice)}{size}")
        axes.set_xlim(0, 1.02 * end)
        axes.set_xlabel("peak of the fullest rank, GB")
        axes.set_ylabel("seconds per sample")
        hosts = f"{num_hosts} host{'s' if num_hosts > 1 else ''}"
        axes.set_title(f"{plan.machine.num_devices} devices on {hosts}", loc="left")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=8, frameon=False)


def _short(choice: Choice) -> str:
    """Return the rows of a microbatch, and the values that are not the default."""
    return _named(choice, [name for name in KEYS if name == "rows" or getattr(choice, name) != getattr(Choice(), name)])


def _columns(points: Sequence[tuple[float, float]], end: float) -> tuple[list[float], list[float]]:
    """Return the x and the y values. A point beyond the end of the axis is drawn at the end."""
    return [min(x, end) for x, _ in points], [y for _, y in points]


def _apart(points: Sequence[tuple[float, float]], end: float) -> list[int]:
    """Return the indices of points that are far enough apart for numbers beside them."""
    found: list[int] = []
    height = max((y for _, y in points), default=0.0) - min((y for _, y in points), default=0.0)
    for index, (x, y) in enumerate(points):
        near = (abs(x - points[i][0]) < _APART * end and abs(y - points[i][1]) <= _APART * height for i in found)
        if not any(near):
            found.append(index)
    return found


def _gb(nbytes: float, unit: str = " GB") -> str:
    return f"{gigabytes(nbytes)}{unit}"
