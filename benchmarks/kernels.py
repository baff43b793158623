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
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import _device
import torch
from _harness import Column, Parser, Result, Row, begin, conclude, count, over, row_of
from _kernel_cases import CASES, Case, Draw, Form, dtype_text, size_text
from _kernel_measure import Checker, Clock, Problem, time_pass
from rich.console import Console

OURS = "lowtide"
AIMED_SHARE = 0.9
DTYPES = {dtype_text(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass
class Findings:
    """Everything of one run. checks: more is, of one problem, each error of our kernel over what it may be."""

    rows: list[Row]
    checks: list[Row]
    copy_bandwidth: float = 0.0  # bytes a second

    @property
    def wrong(self) -> list[str]:
        """A line for each wrong kernel of ours."""
        return [f"wrong: {check.label}: {check.failure}" for check in self.checks if check.failure]


def columns(rows: Sequence[Row], copy_bandwidth: float) -> list[Column]:
    """Medians; "x best" compares a pass of ours with the fastest peer, round by round."""

    def bandwidth(row: Row) -> float:
        """Return the bytes a second that a kernel which memory bounds moves at the median."""
        return (row.more["bytes"] or 0) / (row.step_seconds or 1.0)

    def fastest_peer(row: Row) -> Row | None:
        peers = [one for one in rows if one.contender.peer == row.contender.peer and one.timed and one is not row]
        return min(peers, key=lambda one: one.step_seconds or 0.0, default=None) if row.contender.kind == OURS else None

    def best(row: Row) -> str | None:
        peer = fastest_peer(row)
        return peer.contender.kind if peer else None

    of_copy = "bytes that must move, over copy bandwidth; dotted: the aim"
    return [
        Column("ms", lambda row: (row.step_seconds or 0.0) * 1e3, ".4f"),
        Column("GB/s", lambda row: bandwidth(row) / 1e9 or None, ".0f"),
        Column("of copy", lambda row: over(bandwidth(row), copy_bandwidth), ".0%", of_copy, AIMED_SHARE),
        Column("host us", lambda row: statistics.median(job.more["host us"] for job in row.timed.values()), ".0f"),
        Column("best", best),
        Column("x best", lambda row: row.ratios(fastest_peer(row)), panel="our time / the fastest peer's", line=1.0),
    ]


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
                check = row_of(label)
                findings.checks.append(check)
                try:
                    problem = Problem(case, size, dtype, draw)
                    errors = Checker(problem).errors(case.forms[OURS], poisoned=True)
                    check.timed[0] = Result([], [], more=errors)
                    if worst := ", ".join(f"{name} {error:.2g}" for name, error in errors.items() if not error <= 1.0):
                        check.failure = f"errors over what is allowed, expected at most 1: {worst}"
                    if clock is not None:
                        forms = forms_of(case)
                        for which in case.passes:
                            findings.rows += time_pass(problem, which, forms, clock, options.rounds)
                except Exception as error:
                    # An error of the timing does not hide that the results are wrong.
                    check.failure = ", ".join(filter(None, (check.failure, f"{type(error).__name__}: {error}")))
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
    console = begin(170)
    findings = run_all(options, console)
    title = f"{_device.name()}, " + ", ".join(f"{key} {value}" for key, value in _device.versions().items())
    settings = {"copy_bytes_per_second": findings.copy_bandwidth, "checks": list(map(asdict, findings.checks))}
    tables = {title: columns(findings.rows, findings.copy_bandwidth)} if findings.rows else {}
    conclude(options, console, findings.rows, tables, title, settings=settings)
    for line in findings.wrong:
        console.print(line, style="red", highlight=False, markup=False)
    num_right = len(findings.checks) - len(findings.wrong)
    console.print(f"{num_right} comparisons with float64 are right, {len(findings.wrong)} are not")
    if findings.wrong or any(row.failure for row in findings.rows if row.contender.kind == OURS):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
