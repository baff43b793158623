"""Checks every kernel against float64, then times it against torch, torch.compile and Liger on a GPU.

Each call begins with fresh inputs and an empty cache; the numbers are medians of GPU time. Bandwidth counts each input
read once and each output written once; "of copy" is its share of what a copy reaches in the same run. "host us" is the
time until Python had launched all, "x best" our time over that of the fastest peer in the same round. Checks take tens
of GiB for the largest losses. Exits with 1 where a kernel of ours is wrong or fails.

Example, everything, a quick look at some, and the checks alone, which without a GPU run in Triton's interpreter:

    python benchmarks/kernels.py --json kernels.json --png kernels.png
    python benchmarks/kernels.py --kernels rms_norm swiglu --dtypes bfloat16 --sizes largest --rounds 10
    python benchmarks/kernels.py --check-only
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import _device
import torch
from _harness import Parser, count, make_table, settings_of, write_bars, write_json
from _kernel_cases import CASES, Case, Draw, Form, Pass, Size, dtype_text, size_text
from _kernel_measure import Checker, Clock, Measured, Problem, time_pass
from rich.console import Console

OURS = "lowtide"
AIMED_SHARE = 0.9
DTYPES = {dtype_text(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


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

    def bandwidth(self, name: str = OURS) -> float:
        """Return the bytes a second that a contender moves at the median."""
        return self.moved_bytes / self.measured[name].median * 1e3

    @property
    def fastest_peer(self) -> str | None:
        timed = [name for name, found in self.measured.items() if name != OURS and found.milliseconds]
        return min(timed, key=lambda name: self.measured[name].median, default=None)

    def ratio(self, peer: str) -> float:
        """Return our time over the peer's: the median of the rounds."""
        pairs = zip(self.ours.milliseconds, self.measured[peer].milliseconds, strict=True)
        return statistics.median(a / b for a, b in pairs)


@dataclass
class Check:
    """Errors of our kernel for one problem, over what they may be."""

    what: str
    errors: dict[str, float]
    failure: str | None = None

    @property
    def is_right(self) -> bool:
        return self.failure is None and all(error <= 1.0 for error in self.errors.values())

    @property
    def text(self) -> str:
        worst = ", ".join(f"{name} {error:.2g}" for name, error in self.errors.items() if not error <= 1.0)
        found = self.failure or f"errors over what is allowed, expected at most 1: {worst}"
        return f"wrong: {self.what}: {found}"


@dataclass
class Findings:
    """Everything of one run."""

    rows: list[Row]
    checks: list[Check]
    copy_bandwidth: float = 0.0  # bytes a second

    @property
    def problems(self) -> list[str]:
        """A line for each wrong kernel of ours, and for each pass that it did not finish."""
        wrong = [check.text for check in self.checks if not check.is_right]
        return wrong + [f"failed: {row.label}: {row.ours.failure}" for row in self.rows if row.ours.failure]

    def as_dict(self) -> dict[str, Any]:
        """Return every raw number; inf is Infinity in JSON."""
        rows = []
        for row in self.rows:
            what = {"case": row.case.name, "size": row.size, "dtype": dtype_text(row.dtype), "pass": row.which}
            contenders = {name: asdict(found) for name, found in row.measured.items()}
            rows.append(what | {"moved_bytes": row.moved_bytes, "contenders": contenders})
        checks = [asdict(check) for check in self.checks]
        return {"copy_bytes_per_second": self.copy_bandwidth, "rows": rows, "checks": checks}


def cells_of(row: Row, copy_bandwidth: float) -> dict[str, str]:
    """Return the cells of a row by their columns."""
    ours, best = row.ours, row.fastest_peer
    cells = {"kernel": row.case.name, "size": size_text(row.size), "dtype": dtype_text(row.dtype), "pass": row.which}
    if not ours.milliseconds:
        return cells | {"ms": "FAILED"}
    cells |= {
        "ms": f"{ours.median:.4f}",
        "GB/s": f"{row.bandwidth() / 1e9:.0f}",
        "of copy": f"{row.bandwidth() / copy_bandwidth:.0%}" if row.case.is_memory_bound else "-",
        "host us": f"{statistics.median(ours.host_microseconds):.0f}",
    }
    for name, found in row.measured.items():
        if name != OURS:
            cells[f"{name} ms"] = f"{found.median:.4f}" if found.milliseconds else "failed"
    return cells | {"x best": f"{row.ratio(best):.2f} {best}" if best else "-"}


def write_chart(findings: Findings, title: str, path: Path) -> None:
    """Write a PNG: for the largest size of each memory-bound case, our and the fastest peer's share of a copy."""
    labels, is_ours, shares = [], [], []
    for row in findings.rows:
        if row.size != row.case.sizes[-1] or not row.case.is_memory_bound or not row.ours.milliseconds:
            continue
        for name in [OURS, *([row.fastest_peer] if row.fastest_peer else [])]:
            labels.append(f"{row.label}, {name}")
            is_ours.append(name == OURS)
            shares.append([row.bandwidth(name) / findings.copy_bandwidth])
    panel = ("bytes that must move, over copy bandwidth; dotted: the aim", shares, AIMED_SHARE)
    write_bars(path, title, labels, is_ours, [panel])


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--kernels", nargs="+", choices=CASES, metavar="NAME", help=f"some of: {', '.join(CASES)}")
    add("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"], help="default: float32 bfloat16")
    add("--sizes", choices=["all", "largest"], default="all", help="default: all")
    add("--rounds", type=count(), default=30, help="timed calls of each contender, after three untimed (default: 30)")
    add("--check-only", action="store_true", help="time nothing; without a GPU: tiny sizes, in Triton's interpreter")
    options = parser.parse_args(arguments)
    if options.png and options.check_only:
        parser.error("--png: expected times to draw, found --check-only")
    return options


def forms_of(case: Case) -> dict[str, Form]:
    """Return the contenders of a case; Liger takes part where it is installed."""
    torch._dynamo.reset()
    forms = dict(case.forms)
    if importlib.util.find_spec("liger_kernel") is None:
        forms.pop("liger", None)
    if "compile" in forms:
        forms["compile"] = torch.compile(forms["compile"], dynamic=False)
    return forms


def time_problem(findings: Findings, problem: Problem, forms: dict[str, Form], clock: Clock, rounds: int) -> None:
    """Add a row for each pass of a problem."""
    case = problem.case
    for which in case.passes:
        measured = time_pass(problem, which, forms, clock, rounds)
        findings.rows.append(Row(case, problem.size, problem.dtype, which, problem.moved[which], measured))


def run_all(options: argparse.Namespace, console: Console) -> Findings:
    """Run every case that was asked for; without a GPU at tiny sizes."""
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    seed = int.from_bytes(os.urandom(4), "little")
    draw = Draw(device, torch.Generator(device).manual_seed(seed))
    findings = Findings([], [])
    console.print(f"{_device.name()}, seed {seed}")
    clock = None if options.check_only else Clock()
    if clock is not None:
        findings.copy_bandwidth = clock.copy_bandwidth()
        console.print(f"copy within the GPU's memory: {findings.copy_bandwidth / 1e9:.0f} GB/s")
    for case in [CASES[name] for name in options.kernels or CASES]:
        sizes = case.sizes[-1:] if options.sizes == "largest" else case.sizes
        if options.check_only:
            sizes = (case.tiny, *sizes) if has_gpu else (case.tiny,)
        for size in sizes:
            for dtype in [DTYPES[name] for name in options.dtypes if DTYPES[name] in case.dtypes]:
                label = f"{case.name} {size_text(size)} {dtype_text(dtype)}"
                console.print(label, style="dim", highlight=False)
                try:
                    problem = Problem(case, size, dtype, draw)
                    findings.checks.append(Check(label, Checker(problem).errors(case.forms[OURS], poisoned=True)))
                    if clock is not None:
                        time_problem(findings, problem, forms_of(case), clock, options.rounds)
                except Exception as error:
                    findings.checks.append(Check(label, {}, f"{type(error).__name__}: {error}"))
                if has_gpu:
                    torch.cuda.empty_cache()  # the next one has other sizes
    return findings


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if not torch.cuda.is_available():
        if not options.check_only:
            raise SystemExit(
                "kernels.py: expected a GPU to time kernels on, found none that torch can use; without one, "
                "--check-only compares them with float64 in Triton's interpreter"
            )
        os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, which none is yet
    console = Console(width=max(Console().width, 170))  # as wide in a pipe as the table
    findings = run_all(options, console)
    title = f"{_device.name()}, " + ", ".join(f"{key} {value}" for key, value in _device.versions().items())
    if findings.rows:
        rows = [cells_of(row, findings.copy_bandwidth) for row in findings.rows]
        headings = list(dict.fromkeys(name for cells in rows for name in cells))
        console.print(make_table(title, headings, [[cells.get(name, "-") for name in headings] for cells in rows]))
    write_json(options, {"settings": settings_of(options, title), **findings.as_dict()})
    if options.png:
        write_chart(findings, title, options.png)
    for line in findings.problems:
        console.print(line, style="red", highlight=False, markup=False)
    num_right = sum(check.is_right for check in findings.checks)
    console.print(f"{num_right} comparisons with float64 are right, {len(findings.checks) - num_right} are not")
    if findings.problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
