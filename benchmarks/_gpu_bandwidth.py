"""Part `bandwidth` of benchmarks/gpu.sh: kernels beside a copy, torch, torch.compile and Liger."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable

import _device
import torch
from _gpu_record import Cell, Record
from _kernel_case import Draw, size_text
from _kernel_cases import CASES
from _kernel_measure import WAIT_MICROSECONDS, Clock, Problem
from _kernel_report import OURS, Findings, Row
from rich.console import Console

import kernels

ROUNDS = 10
LEAST_SECONDS = 45.0  # that a kernel may take, with the compiling of its peers
_REHEARSED = ("rms_norm", "sum_of_squares")


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
            if is_left_out or not record.wants(what):
                continue
            if record.left_seconds < LEAST_SECONDS:
                record.note(f"{what}: no time was left; `benchmarks/gpu.sh bandwidth --only '{what}'`")
                continue
            with record.measuring(what):
                add(record, rehearsed(name) if is_rehearsal else timed(name, dtype))


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


def add(record: Record, findings: Findings) -> None:
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
