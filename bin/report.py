"""`lowtide report RUN`: what a recorded step held on each rank, beside what was predicted."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..engine.report.memory_report import MemoryReport, reports_in
from .arguments import Parser
from .pictures import picture
from .run_page import page_of

HELP = "say what a recorded step held, when, and who held it, beside what was predicted"
_EXAMPLES = """examples:
  lowtide report runs/memory
  lowtide report runs/memory --rank 3 --png timeline.png
  lowtide report tuned/my/trial-1
  lowtide report runs --html run.html

A step is recorded where the config says {"memory_report": {"folder": "runs/memory"}}, in the trials of `lowtide tune`,
or by engine.record_memory() and engine.memory_report().save("runs/memory"). --html takes what csv_monitor and profile
have written below the folder too.
"""
_MAX_ROWS = 12  # of owners, and of modules
_MAX_LABEL = 30


def main(argv: Sequence[str]) -> int:
    """Runs the command; 1 where there is no report."""
    options = parser().parse_args(argv)
    if options.html:
        return _write_page(options.run, options.html)
    try:
        reports = reports_in(options.run)
    except (ValueError, OSError) as error:
        print(f"lowtide report: {error}", file=sys.stderr)
        return 1
    chosen = [one for one in reports if one.rank == options.rank] if options.rank is not None else reports
    if not chosen:
        ranks = ", ".join(str(one.rank) for one in reports)
        print(f"lowtide report: expected a rank of {ranks}, found --rank {options.rank}", file=sys.stderr)
        return 1
    report = max(chosen, key=lambda one: one.peak_bytes or sum(one.now.values()))
    if options.json:
        print(json.dumps(asdict(report), indent=2))
        return 0
    is_fullest = options.rank is None
    _show(report, len(reports), is_fullest, Console() if Console().is_terminal else Console(width=132))
    if options.png:
        if not report.samples:
            print("lowtide report: --png: expected a recorded step, found a report without one", file=sys.stderr)
            return 1
        try:
            draw(report, options.png)
        except (ValueError, OSError) as error:
            print(f"lowtide report: {error}", file=sys.stderr)
            return 1
        print(f"timeline: {options.png}")
    return 0


def _write_page(run: Path, path: Path) -> int:
    try:
        path.write_text(page_of(run), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"lowtide report: {error}", file=sys.stderr)
        return 1
    print(f"page: {path}")
    return 0


def _show(report: MemoryReport, num_ranks: int, is_fullest: bool, console: Console) -> None:
    """num_ranks: of which there is a report. is_fullest: it is the fullest of them; else the one that was asked for."""
    of = f", the fullest of {num_ranks}" if num_ranks > 1 and is_fullest else ""
    of += f" of {report.world_size} ranks (the others have no file here)" if num_ranks < report.world_size else ""
    console.print(f"rank {report.rank}{of}, after step {report.step}", highlight=False)
    console.print(_kinds(report))
    if report.why_not:
        console.print(f"no prediction of activations: {report.why_not}", highlight=False, markup=False, soft_wrap=True)
    if report.peak_bytes is not None:
        console.print(f"the peak was in: {report.moment}", highlight=False, markup=False, soft_wrap=True)
        console.print(_rows("at the peak, beside model states", report.owners[:_MAX_ROWS]))
    if report.allocator_bytes is not None:
        console.print(
            f"the device's allocator had at most {_mb(report.allocator_bytes)} MB in tensors", highlight=False
        )
    modules = [(name, sum(kinds.values())) for name, kinds in report.by_module.items()]
    console.print(_rows("model states by unit, now", modules[:_MAX_ROWS]))


def _kinds(report: MemoryReport) -> Table:
    table = Table(caption="MB; each kind at its most, and the most at one moment")
    for name in ("", "predicted", "measured", "at the peak"):
        table.add_column(name, justify="left" if not name else "right")
    measured, at_peak = report.measured or report.now, report.at_peak or {}
    for kind in dict.fromkeys([*report.predicted, *measured]):
        cells = (report.predicted.get(kind), measured.get(kind), at_peak.get(kind))
        table.add_row(kind.removesuffix("_bytes"), *(_mb(one) for one in cells))
    if report.peak_bytes is not None:
        table.add_section()
        table.add_row("peak", _mb(report.predicted_peak_bytes), _mb(report.peak_bytes), _mb(report.peak_bytes))
    return table


def _rows(title: str, rows: Sequence[tuple[str, int]]) -> Table:
    table = Table(title=title)
    table.add_column("")
    table.add_column("MB", justify="right")
    for name, nbytes in rows:
        table.add_row(escape(name), _mb(nbytes))
    return table


def _mb(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:,.4g}"


def draw(report: MemoryReport, path: Path) -> None:
    """The kinds, one above the other, from moment to moment."""
    samples: Sequence[tuple[str, Mapping[str, int]]] = report.samples
    with picture(path, 11, 5) as axes:
        kinds = list(samples[0][1])
        places = list(range(len(samples)))
        heights = [[one[kind] / 1e6 for _, one in samples] for kind in kinds]
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
    """ "forward of layers.7, microbatch 0" -> "forward of layers.7" """
    text = moment.partition(",")[0].partition(" (")[0]
    return text if len(text) <= _MAX_LABEL else f"{text[:_MAX_LABEL]}..."


def parser() -> Parser:
    """The command line of `lowtide report`."""
    result = Parser(
        prog="lowtide report",
        description=HELP[0].upper() + HELP[1:] + ".",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("run", metavar="FOLDER", type=Path, help="in which ranks have written their reports")
    result.add_argument("--rank", type=int, metavar="N", help="of the ranks, this one (the fullest)")
    result.add_argument("--png", type=Path, metavar="FILE", help="picture of the step from moment to moment")
    result.add_argument("--html", type=Path, metavar="FILE", help="page of the run: metrics, profiles, memory")
    result.add_argument("--json", action="store_true", help="the whole report as JSON, in bytes")
    return result
