"""`lowtide report RUN`: show the memory of a recorded step on the fullest rank, and write an HTML page of the run.

The page is a single file that loads nothing. It has charts of the metrics, and tables of profiles and memory.
"""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from rich import markup
from rich.console import Console
from rich.table import Table

from ..engine.report.memory_report import MemoryReport, reports_in
from ..engine.report.monitors import RUN
from ..engine.report.step_profile import profiles_in
from .arguments import Parser, console_of, numbers, output_file, picture, picture_file, reports, three_figures

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 520, 180, 64, 22
_MAX_ROWS = 12  # of owners, and of modules
_MAX_LABEL = 30
_UNITS = ("", "k", "M", "G")
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


_EXAMPLES = """examples:
  lowtide report runs/memory
  lowtide report runs/memory --rank 3 --png timeline.png
  lowtide report tuned/my/trial-1
  lowtide report runs --html run.html

A step is recorded if the config has {"memory_report": {"folder": "runs/memory"}}, in the trials of `lowtide tune`,
and by engine.record_memory() and engine.memory_report().save("runs/memory"). --html also shows the files of csv_monitor
and profile in this folder.
"""


@reports("report", ValueError, OSError)
def main(argv: Sequence[str]) -> int:
    """Run the command. Return 1 if there is no report."""
    options = parser().parse_args(argv)
    if options.html and options.rank is not None:
        parser().error("--rank: expected none with --html, whose page shows all ranks; leave out one of them")
    if options.html:
        options.html.write_text(page_of(options.run), encoding="utf-8")
        print(f"page: {options.html}")
        return 0
    found = reports_in(options.run)
    chosen = [report for report in found if options.rank in (None, report.rank)]
    if not chosen:
        ranks = ", ".join(str(report.rank) for report in found)
        raise ValueError(f"expected a rank of {ranks}, found --rank {options.rank}")
    report = max(chosen, key=lambda report: report.peak_bytes or sum(report.now.values()))
    if options.json:
        print(json.dumps(asdict(report), indent=2))
        return 0
    is_fullest = options.rank is None
    _show(report, len(found), is_fullest, console_of(132))
    if options.png:
        if not report.samples:
            raise ValueError("--png: expected a recorded step, found a report without a step")
        draw(report, options.png)
        print(f"timeline: {options.png}")
    return 0


def _show(report: MemoryReport, num_ranks: int, is_fullest: bool, console: Console) -> None:
    """Print a report. num_ranks: number of ranks with a report. is_fullest: this rank has the highest peak of them."""
    of = f", the fullest of {num_ranks}" if num_ranks > 1 and is_fullest else ""
    of += f" of {report.world_size} ranks (some have no file here)" if num_ranks < report.world_size else ""
    console.print(f"rank {report.rank}{of}, after step {report.step}", highlight=False)
    console.print(_kinds(report))
    if report.why_not:
        console.print(f"no prediction of activations: {report.why_not}", highlight=False, markup=False, soft_wrap=True)
    if report.peak_bytes is not None:
        console.print(f"the peak was in: {report.moment}", highlight=False, markup=False, soft_wrap=True)
        console.print(_rows("at the peak, without model states", report.owners[:_MAX_ROWS]))
    if report.allocator_bytes is not None:
        console.print(f"peak of tensors in the device's allocator: {_mb(report.allocator_bytes)} MB", highlight=False)
    modules = [(name, sum(kinds.values())) for name, kinds in report.by_module.items()]
    console.print(_rows("model states by unit, now", modules[:_MAX_ROWS]))


def _kinds(report: MemoryReport) -> Table:
    columns = numbers("predicted", "measured", "at the peak")
    table = Table("", *columns, caption="MB; peak of each kind, and of their sum")
    measured, at_peak = report.measured or report.now, report.at_peak or {}
    for kind in dict.fromkeys([*report.predicted, *measured]):
        cells = (report.predicted.get(kind), measured.get(kind), at_peak.get(kind))
        table.add_row(kind.removesuffix("_bytes"), *map(_mb, cells))
    if report.peak_bytes is not None:
        table.add_section()
        table.add_row("peak", _mb(report.predicted_peak_bytes), _mb(report.peak_bytes), _mb(report.peak_bytes))
    return table


def _rows(title: str, rows: Sequence[tuple[str, int]]) -> Table:
    table = Table("", *numbers("MB"), title=title)
    for name, nbytes in rows:
        table.add_row(markup.escape(name), _mb(nbytes))
    return table


def _mb(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:,.4g}"


def draw(report: MemoryReport, path: Path) -> None:
    """Draw the kinds of memory, stacked, over the moments of the step."""
    samples: Sequence[tuple[str, Mapping[str, int]]] = report.samples
    with picture(path, 11, 5) as axes:
        kinds = list(samples[0][1])
        places = list(range(len(samples)))
        heights = [[nbytes[kind] / 1e6 for _, nbytes in samples] for kind in kinds]
        axes.stackplot(places, *heights, labels=[kind.removesuffix("_bytes") for kind in kinds], step="mid")
        peak = max(places, key=lambda place: sum(samples[place][1].values()))
        total = sum(samples[peak][1].values()) / 1e6
        axes.annotate(
            f"{samples[peak][0]}: {total:.4g} MB", (peak, total), (0, 12), textcoords="offset points", ha="center"
        )
        if report.predicted_peak_bytes is not None:
            axes.axhline(report.predicted_peak_bytes / 1e6, color="black", linestyle="--", label="predicted peak")
        axes.margins(y=0.15)
        every = max(1, len(samples) // 30)
        axes.set_xticks(places[::every], [_short(samples[place][0]) for place in places[::every]], rotation=90)
        axes.set_ylabel("MB")
        axes.set_title(f"rank {report.rank}, one step", loc="left")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _short(moment: str) -> str:
    """Shorten "forward of layers.7, microbatch 0" to "forward of layers.7"."""
    text = moment.partition(",")[0].partition(" (")[0]
    return text if len(text) <= _MAX_LABEL else f"{text[:_MAX_LABEL]}..."


def page_of(run: Path) -> str:
    """Return the HTML page of all files below the folder. Raises ValueError if there are none of a run."""
    tables = sorted(run.rglob("metrics.csv")) if run.is_dir() else []
    rows = _metrics(tables[0]) if tables else []
    profiles = profiles_in(run) if run.is_dir() else []
    try:
        reports = reports_in(run)
    except (ValueError, OSError):
        reports = []
    if not (rows or profiles or reports):
        raise ValueError(
            f"{run}: expected a folder with metrics.csv (csv_monitor), a profile or a memory report, found none of them"
        )
    about = _about(tables[0].with_name(RUN)) if tables else {}
    title = ": ".join(str(about[key]) for key in ("job", "script") if about.get(key)) or run.resolve().name
    parts = [f"<h1>{escape(title)}</h1><p>{escape(_facts(about, rows, run))}</p>"]
    if len(tables) > 1:
        more = ", ".join(str(table.parent.relative_to(run)) for table in tables[1:])
        parts.append(f"<p>{escape(f'This folder has more runs; write a page for each: {more}')}</p>")
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
        # Other programs write files of this name too, and the last row may not be complete yet.
        return [row for row in csv.DictReader(file) if (row.get("step") or "").isdecimal()]


def _about(path: Path) -> dict[str, Any]:
    """Read the run's description; {} for a run of a version that wrote none."""
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
    """Return (step, value) for each finite value."""
    found = []
    for row in rows:
        try:
            value = float(row.get(name) or "")
        except ValueError:
            continue
        # False for NaN too.
        if abs(value) < float("inf"):
            found.append((float(row["step"]), value))
    return found


def _chart(title: str, unit: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    steps = [step for points in lines.values() for step, _ in points]
    values = [value for points in lines.values() for _, value in points]
    first, last = min(steps), max(steps)
    low, high = min(values), max(values)
    # An axis from 0 shows ratios. Values in a narrow band far from 0 would be a flat line on it.
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
    top, bottom = (three_figures(value, _UNITS) for value in (high, low))
    labels = [
        f'<text x="{_LEFT - 6}" y=16 text-anchor=end font-size=11>{top}</text>',
        f'<text x="{_LEFT - 6}" y="{_HEIGHT - _BOTTOM}" text-anchor=end font-size=11>{bottom}</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}" font-size=11>step {first:g}</text>',
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 6}" text-anchor=end font-size=11>{last:g}</text>',
    ]
    caption = escape(title) + (f", {escape(unit)}" if unit else "") + "".join(key)
    svg = f'<svg width="{_WIDTH}" height="{_HEIGHT}" role=img aria-label="{escape(title)}">'
    return f"<figure><figcaption>{caption}</figcaption>{svg}{''.join(drawn)}{''.join(labels)}</svg></figure>"


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
    peak = "" if report.peak_bytes is None else f"<p>Peak: {report.peak_bytes:,} bytes, in: {escape(report.moment)}</p>"
    table = _table(("memory of model states", "bytes now", "predicted"), rows)
    return f"<h2>Memory of rank {report.rank} after step {report.step}</h2>{table}{peak}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table. The first column is text, the rest are numbers."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><td>{escape(row[0])}</td>" + "".join(f"<td class=n>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>" if body else ""


def parser() -> Parser:
    """Return the command line of `lowtide report`."""
    result = Parser.of("report", _EXAMPLES)
    result.add_argument("run", metavar="FOLDER", type=Path, help="the folder with the ranks' reports")
    result.add_argument("--rank", type=int, metavar="N", help="show this rank (default: the fullest)")
    output = result.add_mutually_exclusive_group()
    output.add_argument("--png", type=picture_file, metavar="FILE", help="draw the memory of the step over time")
    output.add_argument(
        "--html", type=output_file, metavar="FILE", help="write the page of the run: metrics, profiles, memory"
    )
    output.add_argument("--json", action="store_true", help="print the whole report as JSON, in bytes")
    return result
