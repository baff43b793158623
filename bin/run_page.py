"""The page of a run: its numbers drawn by step, its profile and its memory in tables. One file, nothing is loaded."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from ..engine.report.memory_report import MemoryReport, reports_in
from ..engine.report.monitors import RUN
from ..engine.report.step_profile import profiles_in

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 520, 180, 64, 22
_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#718096")
_CHARTS = (  # title, unit, columns
    ("Loss", "", ("train/loss",)),
    ("Gradient norm", "", ("train/grad_norm",)),
    ("Learning rate", "", ("train/lr",)),
    ("Loss scale", "", ("train/loss_scale",)),
    ("Tokens a second", "tokens/s", ("speed/tokens_per_second",)),
    ("Model flops of a rank", "TFLOPS", ("speed/tflops",)),
    ("Model-flops utilisation", "", ("speed/mfu",)),
    ("Time of a step", "s", ("speed/step_seconds",)),
    (
        "Seconds by phase",
        "s",
        tuple(f"seconds/{phase}" for phase in ("data", "forward", "backward", "pipeline", "update", "wait")),
    ),
    ("Memory", "bytes", tuple(f"memory/{kind}_bytes" for kind in ("parameter", "gradient", "optimizer"))),
)
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a202c; margin: 2rem auto; max-width: 1120px; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1.2rem; } figure { margin: 0; } figcaption { font-weight: 600; }
.key { font-weight: 400; margin-left: .7em; } svg { background: #f7fafc; border: 1px solid #e2e8f0; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: .2rem .7rem; border-bottom: 1px solid #e2e8f0; }
th { text-align: left; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
"""


def page_of(run: Path) -> str:
    """HTML of all that lies below the folder. Raises ValueError where there is nothing of a run."""
    tables = sorted(run.rglob("metrics.csv")) if run.is_dir() else []
    rows = _metrics(tables[0]) if tables else []
    profiles = profiles_in(run) if run.is_dir() else []
    try:
        reports = reports_in(run)
    except (ValueError, OSError):
        reports = []
    if not (rows or profiles or reports):
        raise ValueError(
            f"{run}: expected a folder with metrics.csv (csv_monitor), a profile or a memory report in it, found none"
        )
    about = _about(tables[0].with_name(RUN)) if tables else {}
    title = ": ".join(str(about[key]) for key in ("job", "script") if about.get(key)) or run.resolve().name
    parts = [f"<h1>{escape(title)}</h1><p>{escape(_facts(about, rows, run))}</p>"]
    if len(tables) > 1:
        others = ", ".join(str(one.parent.relative_to(run)) for one in tables[1:])
        parts.append(f"<p>{escape(f'Other runs are below this folder, each with a page of its own: {others}')}</p>")
    if rows:
        parts.append(f"<div class=charts>{''.join(_charts(rows))}</div>")
    if about:
        parts.append(f"<h2>Config, without defaults</h2><pre>{escape(json.dumps(about.get('config'), indent=2))}</pre>")
    parts += [_profile(profile) for profile in profiles]
    parts += [_memory(report) for report in reports]
    head = f'<meta charset="utf-8"><title>{escape(f"lowtide: {title}")}</title><style>{_STYLE}</style>'
    return f"<!doctype html>\n<html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _metrics(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _about(path: Path) -> dict[str, Any]:
    """What the run says of itself; nothing where it was written before there was such a file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _facts(about: Mapping[str, Any], rows: Sequence[Mapping[str, str]], run: Path) -> str:
    facts = [f"started {about['started']}"] if about.get("started") else []
    facts += [f"{about['ranks']} rank{'s' if about['ranks'] != 1 else ''}"] if about.get("ranks") else []
    facts += [f"{len(rows):,} steps, {rows[0]['step']} to {rows[-1]['step']}"] if rows else []
    return "; ".join([*facts, f"folder {run.resolve()}", f"page of {datetime.now(UTC).isoformat(timespec='seconds')}"])


def _charts(rows: Sequence[Mapping[str, str]]) -> Iterable[str]:
    for title, unit, columns in _CHARTS:
        lines = {name: _points(rows, name) for name in columns}
        lines = {name: points for name, points in lines.items() if points}
        if lines:
            yield _chart(title, unit, lines)


def _points(rows: Sequence[Mapping[str, str]], name: str) -> list[tuple[float, float]]:
    """(step, value) of the values that are finite numbers."""
    found = []
    for row in rows:
        try:
            value = float(row.get(name) or "")
        except ValueError:
            continue
        if abs(value) < float("inf"):
            found.append((float(row["step"]), value))
    return found


def _chart(title: str, unit: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    steps = [step for points in lines.values() for step, _ in points]
    values = [value for points in lines.values() for _, value in points]
    first, last = min(steps), max(steps)
    low, high = min(values), max(values)
    low = 0.0 if 0 <= low < 0.5 * high else low
    high = high if high > low else low + (abs(low) or 1.0)

    def place(step: float, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - 8) * ((step - first) / (last - first) if last > first else 0.5)
        y = 8 + (_HEIGHT - _BOTTOM - 8) * (high - value) / (high - low)
        return f"{x:.1f},{y:.1f}"

    drawn, key = [], []
    for colour, (name, points) in zip(_COLOURS, lines.items(), strict=False):
        path = " ".join(place(step, value) for step, value in points)
        mark = place(*points[-1]).split(",")
        drawn.append(f'<polyline fill=none stroke="{colour}" stroke-width=1.6 points="{path}"/>')
        drawn.append(f'<circle cx="{mark[0]}" cy="{mark[1]}" r=2.5 fill="{colour}"/>')
        if len(lines) > 1:
            key.append(f'<span class=key style="color:{colour}">{escape(name.partition("/")[2])}</span>')
    labels = [
        f'<text x="{_LEFT - 6}" y=16 text-anchor=end font-size=11>{_short(high)}</text>',
        f'<text x="{_LEFT - 6}" y="{_HEIGHT - _BOTTOM}" text-anchor=end font-size=11>{_short(low)}</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}" font-size=11>step {first:g}</text>',
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 6}" text-anchor=end font-size=11>{last:g}</text>',
    ]
    caption = escape(title) + (f", {escape(unit)}" if unit else "") + "".join(key)
    svg = f'<svg width="{_WIDTH}" height="{_HEIGHT}" role=img aria-label="{escape(title)}">'
    return f"<figure><figcaption>{caption}</figcaption>{svg}{''.join(drawn)}{''.join(labels)}</svg></figure>"


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _profile(profile: Mapping[str, Any]) -> str:
    steps = f"{profile['steps']} step{'s' if profile['steps'] > 1 else ''}"
    title = f"Profile of rank {profile['rank']}: {steps} from step {profile['first_step']} on"
    lanes = [(lane, f"{seconds:.4f}") for lane, seconds in profile["seconds_by_lane"].items() if seconds]
    collectives = [
        (row["name"], f"{row['count']:,}", _count(row["message_bytes"]), f"{row['seconds']:.4f}")
        for row in profile["collectives"]
    ]
    flops = sorted(profile["flops_by_module"].items(), key=lambda item: -item[1])[:40]
    return (
        f"<h2>{escape(title)}</h2>"
        + _table(("lane", "seconds"), lanes)
        + "<br>"
        + _table(("collective", "count", "bytes", "waited, s"), collectives)
        + "<br>"
        + _table(("module", "flops"), [(name or "all", f"{count:,}") for name, count in flops])
    )


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _memory(report: MemoryReport) -> str:
    rows = [(kind, f"{nbytes:,}", f"{report.predicted.get(kind, 0):,}") for kind, nbytes in report.now.items()]
    peak = (
        "" if report.peak_bytes is None else f"<p>At most {report.peak_bytes:,} bytes, in: {escape(report.moment)}</p>"
    )
    table = _table(("memory of model states", "bytes now", "predicted"), rows)
    return f"<h2>Memory of rank {report.rank} after step {report.step}</h2>{table}{peak}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column is text, the others are numbers."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><td>{escape(row[0])}</td>" + "".join(f"<td class=n>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>" if body else ""
