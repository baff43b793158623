"""Checks every kernel against float64, then times it against torch, torch.compile and Liger on a GPU.

A kernel is timed beside its peers in interleaved rounds; each call begins with fresh inputs and an empty cache, and
the numbers are medians of GPU time. Bandwidth counts the bytes that must move: each input read once, each output
written once. "of copy" is its share of what a copy within the GPU's memory reaches in the same run. Every result and
gradient of every size is compared with float64 before it is timed, which takes tens of GiB for the largest losses.
Liger takes part where `liger_kernel` can be imported. Exits with 1 where a kernel of ours is wrong or fails; a missed
aim of speed is only listed.

Example, everything, a quick look at some, and the checks alone, which without a GPU run in Triton's interpreter:

    python benchmarks/kernels.py --json kernels.json --png kernels.png
    python benchmarks/kernels.py --kernels rms_norm swiglu --dtypes bfloat16 --sizes largest --rounds 10
    python benchmarks/kernels.py --check-only
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _harness import MIB, Parser, count, write_bars
from _harness import make_table as report_table
from _kernel_cases import CASES, CONTENDERS, Case, Draw, Form, Pass, Size, dtype_text, size_text
from _kernel_measure import Checker, Clock, Measured, Problem, time_pass
from rich.console import Console

OURS = "lowtide"
AIMED_SHARE = 0.9
DTYPES = {dtype_text(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


# -- what was found --------------------------------------------------------------------------------------------------


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


def make_table(findings: Findings, peers: list[str]) -> Any:
    """Times are medians; "host us": until Python had launched all; MiB: peak beside the inputs; "x best": our time
    over that of the fastest peer in the same round."""
    headings = ["kernel", "size", "dtype", "pass", "ms", "GB/s", "of copy", "host us", "MiB"]
    table = report_table("", [*headings, *(f"{peer} ms" for peer in peers), "x best"], [])
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
    labels, is_ours, shares = [], [], []
    for row in [r for r in findings.rows if r.is_largest and r.case.is_memory_bound and r.ours.milliseconds]:
        for name in [OURS, *([row.fastest_peer] if row.fastest_peer else [])]:
            labels.append(f"{row.label}, {name}")
            is_ours.append(name == OURS)
            bandwidth = row.moved_bytes / row.measured[name].median * 1e3
            shares.append([bandwidth / findings.copy_bandwidth])
    panel = ("bytes that must move, over copy bandwidth; dotted: the aim", shares, AIMED_SHARE)
    write_bars(path, findings.settings["title"], labels, is_ours, [panel])


# -- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--kernels", nargs="+", choices=CASES, metavar="NAME", help=f"some of: {', '.join(CASES)}")
    add("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME", help=f"some of: {', '.join(CONTENDERS)}")
    add("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"], help="default: float32 bfloat16")
    add("--sizes", choices=["all", "largest", "smallest"], default="all", help="default: all")
    add("--rounds", type=count(), default=30, help="timed calls of each contender, after three untimed (default: 30)")
    add("--check-only", action="store_true", help="time nothing; without a GPU: tiny sizes, in Triton's interpreter")
    add("--seed", type=int, help="of the random inputs (default: another one in every run)")
    options = parser.parse_args(arguments)
    if options.png and options.check_only:
        parser.error("--png: expected times to draw, found --check-only")
    return options


def contenders_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Ours, and the peers that are here."""
    asked = options.contenders or CONTENDERS
    if "liger" in asked and importlib.util.find_spec("liger_kernel") is None:
        if options.contenders:
            raise SystemExit("kernels.py: expected liger_kernel for the contender liger, found none; pip install it")
        asked = [name for name in asked if name != "liger"]
    return (OURS, *(name for name in CONTENDERS if name in asked and name != OURS))


def forms_of(case: Case, names: tuple[str, ...]) -> dict[str, Form]:
    torch._dynamo.reset()
    return {
        name: torch.compile(case.forms[name], dynamic=False) if name == "compile" else case.forms[name]
        for name in names
        if name in case.forms
    }


def check(problem: Problem, forms: dict[str, Form]) -> list[Check]:
    """Ours alone must be right; errors of peers are there to compare."""
    checker, found = Checker(problem), []
    for name, form in forms.items():
        one = Check(problem.case.name, problem.size, dtype_text(problem.dtype), name, {})
        try:
            one.errors = checker.errors(form, poisoned=name == OURS)
        except Exception as error:
            one.failure = f"{type(error).__name__}: {error}"
        found.append(one)
    return found


def run_problem(findings: Findings, problem: Problem, names: tuple[str, ...], clock: Clock | None, rounds: int) -> None:
    """Adds what a problem gives: checks, and a row a pass where there is a clock."""
    forms = forms_of(problem.case, names)
    findings.checks += check(problem, forms)
    if clock is None:
        return
    for which in problem.case.passes:
        measured = time_pass(problem, which, forms, clock, rounds)
        findings.rows.append(Row(problem.case, problem.size, problem.dtype, which, problem.moved[which], measured))


def sizes_of(case: Case, options: argparse.Namespace, has_gpu: bool) -> tuple[Size, ...]:
    if not has_gpu:
        return (case.tiny,)
    timed = {"all": case.sizes, "largest": case.sizes[-1:], "smallest": case.sizes[:1]}[options.sizes]
    return (case.tiny, *timed) if options.check_only else timed


def version_of(name: str) -> str:
    """That of the package that was installed under the name; some builds have another."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def settings_of(options: argparse.Namespace, device: str, seed: int) -> dict[str, Any]:
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    for name in ("triton", "liger_kernel"):
        if importlib.util.find_spec(name) is not None:
            versions[name] = version_of(name)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    title = f"{name}, " + ", ".join(f"{key} {value}" for key, value in versions.items())
    chosen = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    return {"title": title, "device": name, "versions": versions, "seed": seed, "options": chosen}


def run_all(options: argparse.Namespace, console: Console) -> Findings:
    """Every case that was asked for; what was found so far is written to the JSON file after each problem."""
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    draw = Draw(device, torch.Generator(device).manual_seed(seed))
    names = contenders_of(options) if has_gpu else (OURS,)
    findings = Findings(settings_of(options, device, seed), [], [])
    console.print(f"{findings.settings['title']}, seed {seed}")
    clock = None if options.check_only else Clock()
    if clock is not None:
        findings.copy_bandwidth = clock.copy_bandwidth()
        console.print(f"copy within the GPU's memory: {findings.copy_bandwidth / 1e9:.0f} GB/s")
    for case in [CASES[name] for name in options.kernels or CASES]:
        for size in sizes_of(case, options, has_gpu):
            for dtype in [DTYPES[name] for name in options.dtypes if DTYPES[name] in case.dtypes]:
                label = f"{case.name} {size_text(size)} {dtype_text(dtype)}"
                console.print(label, style="dim", highlight=False)
                try:
                    run_problem(findings, Problem(case, size, dtype, draw), names, clock, options.rounds)
                except Exception as error:
                    failure = f"{type(error).__name__}: {error}"
                    findings.checks.append(Check(case.name, size, dtype_text(dtype), OURS, {}, failure))
                if has_gpu:
                    torch.cuda.empty_cache()  # the next one has other sizes
                if options.json:
                    findings.write_json(options.json)
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
    peers = [name for name in CONTENDERS if name != OURS and any(name in row.measured for row in findings.rows)]
    if findings.rows:
        console.print(make_table(findings, peers))
        for line in findings.missed_aims:
            console.print(f"missed aim: {line}", highlight=False)
    if options.png:
        write_chart(findings, options.png)
    problems = [f"wrong: {check.text}" for check in findings.wrong] + [f"failed: {line}" for line in findings.broken]
    for line in problems:
        console.print(line, style="red", highlight=False, markup=False)
    num_right = sum(check.contender == OURS and check.is_right for check in findings.checks)
    console.print(f"{num_right} comparisons with float64 are right, {len(findings.wrong)} are not")
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
