"""What `lowtide plan CONFIG` prints and draws."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..engine.config.config import Config
from ..engine.config.errors import shown
from ..engine.planning.choice import KEYS, Choice, value_at
from ..engine.planning.plan import Alternative, Plan
from .pictures import picture

_LINKS = {
    "intra": "to devices of the host",
    "inter": "to other hosts",
    "pipe": "to the stages before and after",
    "outer": "to other islands",
}


def show(plan: Plan, console: Console, tokens: float | None) -> None:
    """The plan itself, what would be faster or smaller, and what is missing."""
    lacks = ", ".join(f"{_gb(nbytes)} of {where}" for where, nbytes in plan.missing.items())
    console.print(
        f"bytes of the fullest rank: {'fits' if plan.fits else f'does not fit, {lacks} missing'}", highlight=False
    )
    console.print(_bytes_table(plan))
    console.print(f"a step takes {plan.step_seconds:.4g} s, on the machine as it was described", highlight=False)
    console.print(_time_table(plan))
    for line in _totals(plan, tokens):
        console.print(line, highlight=False, soft_wrap=True)
    chosen = Config.load(plan.config).as_dict()
    for key, reason in plan.reasons.items():
        console.print(f"{key} = {shown(value_at(chosen, key))}: {reason}", highlight=False, soft_wrap=True)
    if plan.alternatives:
        title = f"the fastest of {plan.num_choices:,}; {plan.num_evaluated:,} were computed, the others cannot be here"
        console.print(_alternatives(title, plan.alternatives))
    if plan.beyond:
        console.print(_alternatives("would be faster, and do not fit", plan.beyond))


def _bytes_table(plan: Plan) -> Table:
    table = Table(caption="each kind at its most; they need not come together")
    table.add_column("kind")
    table.add_column("GB", justify="right")
    for kind, nbytes in plan.bytes.items():
        table.add_row(kind.removesuffix("_bytes"), _gb(nbytes, ""))
    table.add_section()
    table.add_row("peak", _gb(plan.peak_bytes, ""))
    for name, nbytes in (("in host memory", plan.host_bytes), ("on nvme", plan.nvme_bytes)):
        if nbytes:
            table.add_row(name, _gb(nbytes, ""))
    return table


def _time_table(plan: Plan) -> Table:
    table = Table()
    table.add_column("")
    table.add_column("s", justify="right")
    table.add_column("of it", justify="right")
    for name, seconds in plan.seconds.items():
        if seconds:
            table.add_row(name, f"{seconds:.4g}", f"{seconds / plan.step_seconds:.1%}")
    table.add_section()
    for name, seconds in plan.hidden_seconds.items():
        if seconds:
            table.add_row(f"{name} beside it", f"{seconds:.4g}", "")
    return table


def _totals(plan: Plan, tokens: float | None) -> list[str]:
    sent = ", ".join(f"{_gb(n)} {_LINKS[link]}" for link, n in plan.wire_bytes.items() if n) or "nothing"
    speed = f"{plan.tokens_per_second:,.0f} tokens/s"
    step = f"{plan.samples_per_step:,} samples and {plan.tokens_per_step:,} tokens a step: {speed}"
    lines = [f"each rank sends in a step: {sent}", step]
    if tokens is not None:
        days = tokens / plan.tokens_per_second / 86400
        hours = days * 24 * plan.machine.num_devices * plan.machine.num_islands
        lines.append(f"{tokens:.4g} tokens: {days:.4g} days, {hours:,.0f} GPU hours")
    return lines


def _alternatives(title: str, rows: Sequence[Alternative]) -> Table:
    """A column for each key in which they differ."""
    names = [name for name in KEYS if len({getattr(row.choice, name) for row in rows}) > 1]
    table = Table(title=title, caption="the same in all: " + _same(rows[0].choice, names))
    for name in (*names, "s a step", "samples/s", "peak, GB"):
        table.add_column(name.replace("_", " "), justify="right")
    has_missing = any(row.missing for row in rows)
    if has_missing:
        table.add_column("missing")
    for row in rows:
        cells = [str(getattr(row.choice, name)) for name in names]
        cells += [f"{row.step_seconds:.4g}", f"{row.samples_per_second:.4g}", _gb(row.peak_bytes, "")]
        missing = ", ".join(f"{_gb(nbytes)} of {where}" for where, nbytes in row.missing.items())
        table.add_row(*cells, *([missing] if has_missing else []))
    return table


def _same(choice: Choice, names: Sequence[str]) -> str:
    values: Mapping[str, Any] = vars(choice)
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items() if name not in names)


def draw(plan: Plan, path: Path) -> None:
    """The front of time and memory."""
    with picture(path, 8, 5) as axes:
        for label, rows, marker in (("front", plan.front, "o-"), ("do not fit", plan.beyond, "x")):
            axes.plot([r.peak_bytes / 1e9 for r in rows], [1 / r.samples_per_second for r in rows], marker, label=label)
        axes.axvline(plan.machine.device_bytes / 1e9, color="gray", linestyle="--", label="device memory")
        axes.plot(
            [plan.peak_bytes / 1e9], [plan.step_seconds / plan.samples_per_step], "*", markersize=14, label="the plan"
        )
        axes.set_xlabel("peak of the fullest rank, GB")
        axes.set_ylabel("seconds a sample")
        axes.set_title(f"{plan.machine.num_devices} devices on {plan.machine.num_hosts} hosts", loc="left")
        axes.legend()


def _gb(nbytes: float, unit: str = " GB") -> str:
    return f"{nbytes / 1e9:.3g}{unit}"
