"""What a benchmark of kernels found: the table, the JSON file and the picture."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _kernel_case import Case, Pass, Size, dtype_text, size_text
from _kernel_measure import Measured
from rich.table import Table

OURS = "lowtide"
AIMED_SHARE = 0.9
MIB = 2**20


@dataclass
class Row:
    """One pass of one case, size and dtype."""

    case: Case
    size: Size
    dtype: torch.dtype
    which: Pass
    moved_bytes: int
    measured: dict[str, Measured]

    @property
    def label(self) -> str:
        return f"{self.case.name} {size_text(self.size)} {dtype_text(self.dtype)} {self.which}"

    @property
    def ours(self) -> Measured:
        return self.measured[OURS]

    @property
    def bandwidth(self) -> float:
        """Bytes a second of those that must move, at the median."""
        return self.moved_bytes / self.ours.median * 1e3

    @property
    def fastest_peer(self) -> str | None:
        timed = [name for name, found in self.measured.items() if name != OURS and found.milliseconds]
        return min(timed, key=lambda name: self.measured[name].median, default=None)

    def ratio(self, peer: str) -> float:
        """Our time over the peer's: the median of the rounds."""
        pairs = zip(self.ours.milliseconds, self.measured[peer].milliseconds, strict=True)
        return statistics.median(a / b for a, b in pairs)

    @property
    def is_largest(self) -> bool:
        return self.size == self.case.sizes[-1]


@dataclass
class Check:
    """Errors of one contender for one problem, over what they may be."""

    case: str
    size: Size
    dtype: str
    contender: str
    errors: dict[str, float]
    failure: str | None = None

    @property
    def is_right(self) -> bool:
        return self.failure is None and all(error <= 1.0 for error in self.errors.values())

    @property
    def text(self) -> str:
        worst = ", ".join(f"{name} {error:.2g}" for name, error in self.errors.items() if not error <= 1.0)
        found = self.failure or f"errors over what is allowed, expected at most 1: {worst}"
        return f"{self.case} {size_text(self.size)} {self.dtype}, {self.contender}: {found}"


@dataclass
class Findings:
    """Everything of one run."""

    settings: dict[str, Any]
    rows: list[Row]
    checks: list[Check]
    copy_bandwidth: float = 0.0  # bytes a second

    @property
    def wrong(self) -> list[Check]:
        """Checks of our kernels that failed."""
        return [check for check in self.checks if check.contender == OURS and not check.is_right]

    @property
    def broken(self) -> list[str]:
        """One line for each pass that our kernel did not finish."""
        return [f"{row.label}: {row.ours.failure}" for row in self.rows if row.ours.failure]

    @property
    def missed_aims(self) -> list[str]:
        """One line for each row that is slower than a peer, or at the largest size below 90 % of a copy."""
        lines = []
        for row in self.rows:
            if not row.ours.milliseconds:
                continue
            peer = row.fastest_peer
            if peer is not None and row.ratio(peer) > 1.0:
                lines.append(f"{row.label}: {row.ratio(peer):.2f} x {peer}")
            share = row.bandwidth / self.copy_bandwidth
            if row.case.is_memory_bound and row.is_largest and share < AIMED_SHARE:
                lines.append(f"{row.label}: {share:.0%} of copy bandwidth")
        return lines

    def write_json(self, path: Path) -> None:
        """Writes every raw number; inf is Infinity."""
        rows = [
            {
                "case": row.case.name,
                "size": row.size,
                "dtype": dtype_text(row.dtype),
                "pass": row.which,
                "moved_bytes": row.moved_bytes,
                "contenders": {name: asdict(found) for name, found in row.measured.items()},
            }
            for row in self.rows
        ]
        found = {"settings": self.settings, "copy_bytes_per_second": self.copy_bandwidth, "rows": rows}
        path.write_text(json.dumps(found | {"checks": [asdict(check) for check in self.checks]}, indent=1) + "\n")


def make_table(findings: Findings, peers: list[str]) -> Table:
    """Times are medians; "host us": until Python had launched all; MiB: peak beside the inputs; "x best": our time
    over that of the fastest peer in the same round."""
    table = Table()
    table.add_column("kernel", no_wrap=True)
    for title in ["size", "dtype", "pass", "ms", "GB/s", "of copy", "host us", "MiB", *(f"{p} ms" for p in peers)]:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("x best", justify="right", no_wrap=True)
    for row in findings.rows:
        cells = [row.case.name, size_text(row.size), dtype_text(row.dtype), row.which]
        peer, ours = row.fastest_peer, row.ours
        if ours.milliseconds:
            share = f"{row.bandwidth / findings.copy_bandwidth:.0%}" if row.case.is_memory_bound else "-"
            host = statistics.median(ours.host_microseconds)
            cells += [f"{ours.median:.4f}", f"{row.bandwidth / 1e9:.0f}", share, f"{host:.0f}"]
            cells.append(f"{ours.peak_bytes / MIB:.0f}")
        else:
            cells += ["[red]FAILED[/red]", "", "", "", ""]
        cells += [_peer_cell(row.measured.get(name)) for name in peers]
        cells.append(f"{row.ratio(peer):.2f} {peer}" if peer is not None and ours.milliseconds else "-")
        table.add_row(*cells)
    return table


def _peer_cell(found: Measured | None) -> str:
    if found is None:
        return "-"
    return f"{found.median:.4f}" if found.milliseconds else "failed"


def write_chart(findings: Findings, path: Path) -> None:
    """Writes a PNG: for the largest size of each memory-bound case, our and the fastest peer's share of a copy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in findings.rows if r.is_largest and r.case.is_memory_bound and r.ours.milliseconds]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.3 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        peer = row.fastest_peer
        bars = [(place - 0.2, row.ours, "tab:blue")]
        if peer is not None:
            bars.append((place + 0.2, row.measured[peer], "tab:gray"))
        for at, found, colour in bars:
            axes.barh(at, row.moved_bytes / found.median * 1e3 / findings.copy_bandwidth, height=0.38, color=colour)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.axvline(AIMED_SHARE, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("bytes that must move, over copy bandwidth; blue: lowtide, gray: fastest peer; dotted: the aim")
    figure.suptitle(findings.settings["title"])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
