"""Parts `checks` and `bandwidth` of benchmarks/gpu.sh: kernels beside float64, and beside a copy and their peers.

Part `checks` also says what the device is, and runs the tests that are marked gpu.
"""

from __future__ import annotations

import importlib.util
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import _device
import torch
from _gpu_part import Cell, Record
from _kernel_cases import CASES, Draw, size_text
from _kernel_measure import WAIT_MICROSECONDS, Clock, Problem
from rich.console import Console

import kernels
from kernels import OURS, Findings, Row

ROOT = Path(__file__).parents[1]
MARK = "mark.gpu"
ROUNDS = 10
LEAST_SECONDS = 45.0  # that a kernel may take, with the compiling of its peers
_REHEARSED = ("rms_norm", "sum_of_squares")


def check(record: Record) -> None:
    total = _device.total_bytes()
    record.add("devices", device=_device.name(), number=_device.count(), MiB=total and total // _device.MIB)
    if _device.type_of_device() != "cuda":
        record.note("Triton's kernels are not for this device: they were compared at tiny sizes in its interpreter")
    for name in CASES:
        if record.wants(name) and (name in _REHEARSED or not _device.is_rehearsal()):
            with record.measuring(name):
                check_kernel(record, name)
    if record.wants("tests"):
        with record.measuring("tests marked gpu"):
            run_tests(record)


def check_kernel(record: Record, name: str) -> None:
    """Every size in each dtype, and a size that no block divides."""
    dtypes = ["bfloat16"] if _device.is_rehearsal() else list(kernels.DTYPES)
    arguments = ["--kernels", name, "--check-only", "--contenders", OURS, "--dtypes", *dtypes]
    findings = kernels.run_all(kernels.parse_arguments(arguments), Console(width=170))
    ours = [check for check in findings.checks if check.contender == OURS]
    errors = [error for check in ours for error in check.errors.values()]
    record.add(
        "kernels against float64",
        kernel=name,
        dtypes=", ".join(dict.fromkeys(check.dtype for check in ours)),
        largest=size_text(ours[-1].size),
        comparisons=len(ours),
        right=sum(check.is_right for check in ours),
        largest_error_over_allowed=max(errors, default=None),
    )
    for check in findings.wrong:
        record.fail(name, check.text)


def run_tests(record: Record) -> None:
    """Only the files that have such tests are collected, for others may need packages that are not here."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text()]
    names = [str(path.relative_to(ROOT)) for path in files]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # lowtide comes from PYTHONPATH: the folder of that name in the checkout is not all of it.
    environment["PYTHONSAFEPATH"] = "1"
    start = "import sys, lowtide, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "-q", "-m", "gpu", "-p", "no:cacheprovider", *names]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=record.left_seconds, check=False
    )
    print(ended.stdout, ended.stderr, sep="\n", flush=True)
    counted = {
        what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", ended.stdout)
    }
    passed, skipped = counted.get("passed", 0), counted.get("skipped", 0)
    record.add("tests marked gpu", files=len(files), passed=passed, skipped=skipped, status=ended.returncode)
    if ended.returncode:
        said = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        record.fail("tests marked gpu", "; ".join(said) or ended.stderr.strip()[-300:] or ended.stdout.strip()[-300:])
    elif skipped and not _device.is_rehearsal():
        record.note(f"{skipped} tests marked gpu were skipped: log.txt says why")


# -- part bandwidth --------------------------------------------------------------------------------------------------


class HostClock:
    """Takes a Clock's place where nothing can be timed: the work is done."""

    def run(self, work: Callable[[], object], wait_microseconds: float = WAIT_MICROSECONDS) -> tuple[float, float]:
        started = time.perf_counter()
        work()
        seconds = time.perf_counter() - started
        return seconds * 1e3, seconds * 1e6

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return 0


def measure(record: Record) -> None:
    is_rehearsal = _device.is_rehearsal()
    if not is_rehearsal and _device.type_of_device() != "cuda":
        record.note(f"Triton's kernels are not for {_device.type_of_device()}: nothing was timed")
        return
    if importlib.util.find_spec("liger_kernel") is None:
        record.note("Liger is not installed (liger_kernel): it has no times here")
    for dtype in ["bfloat16"] if is_rehearsal else ["bfloat16", "float32"]:
        for name, case in CASES.items():
            what = f"{name}, {dtype}"
            is_left_out = kernels.DTYPES[dtype] not in case.dtypes or (is_rehearsal and name not in _REHEARSED)
            if is_left_out or not record.wants(what, LEAST_SECONDS):
                continue
            with record.measuring(what):
                add_rows(record, rehearsed(name) if is_rehearsal else timed(name, dtype))


def timed(name: str, dtype: str) -> Findings:
    """At its largest size."""
    arguments = ["--kernels", name, "--dtypes", dtype, "--sizes", "largest", "--rounds", str(ROUNDS)]
    return kernels.run_all(kernels.parse_arguments(arguments), Console(width=170))


def rehearsed(name: str) -> Findings:
    """At a tiny size, in Triton's interpreter."""
    case, dtype = CASES[name], torch.bfloat16
    findings = Findings({}, [], [], copy_bandwidth=1e9)
    problem = Problem(case, case.tiny, dtype, Draw("cpu", torch.Generator().manual_seed(0)))
    clock: Clock = HostClock()  # type: ignore[assignment]  # it has what time_pass asks for
    kernels.run_problem(findings, problem, (OURS, "torch"), clock, 1)
    return findings


def add_rows(record: Record, findings: Findings) -> None:
    """A row for each pass; what is wrong or broken is a failure."""
    for row in findings.rows:
        if row.ours.milliseconds:
            record.add("kernels beside their peers", **cells_of(row, findings.copy_bandwidth))
    for check in findings.wrong:
        record.fail(check.case, check.text)
    for line in findings.broken:
        record.fail("timed", line)


def cells_of(row: Row, copy_bandwidth: float) -> dict[str, Cell]:
    share = row.bandwidth / copy_bandwidth
    timed_peers = {name: found for name, found in row.measured.items() if name != OURS and found.milliseconds}
    peers = {f"{name}_ms": found.median for name, found in timed_peers.items()}
    best = row.fastest_peer
    return {
        "kernel": row.case.name,
        "size": size_text(row.size),
        "dtype": str(row.dtype).removeprefix("torch."),
        "pass": row.which,
        "ms": row.ours.median,
        "GB/s": row.bandwidth / 1e9,
        "of_copy": share if row.case.is_memory_bound else None,
        "host_us": statistics.median(row.ours.host_microseconds),
        "peak_MiB": row.ours.peak_bytes / _device.MIB,
        **peers,
        "x_best": f"{row.ratio(best):.2f} {best}" if best else None,
    }
