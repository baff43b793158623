"""Part `checks` of benchmarks/gpu.sh: the checks of kernels.py, and the tests that are marked gpu."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import _device
from _gpu_part import Record
from _harness import MIB
from _kernel_cases import CASES, size_text
from rich.console import Console

import kernels

ROOT = Path(__file__).parents[1]
MARK = "mark.gpu"
_REHEARSED = ("rms_norm", "sum_of_squares")


def check(record: Record) -> None:
    total = _device.total_bytes()
    record.add("devices", device=_device.name(), number=_device.count(), MiB=total and total // MIB)
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
    """Compare every size in each dtype, and a size that no block divides."""
    dtypes = ["bfloat16"] if _device.is_rehearsal() else list(kernels.DTYPES)
    arguments = ["--kernels", name, "--check-only", "--contenders", kernels.OURS, "--dtypes", *dtypes]
    findings = kernels.run_all(kernels.parse_arguments(arguments), Console(width=170))
    ours = [check for check in findings.checks if check.contender == kernels.OURS]
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
    for problem in findings.problems:
        record.fail(name, problem)


def run_tests(record: Record) -> None:
    """Run the tests that are marked gpu. Other files are not collected: their packages may be missing here."""
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
    counted = {what: int(number) for number, what in re.findall(r"(\d+) (passed|skipped)\b", ended.stdout)}
    passed, skipped = counted.get("passed", 0), counted.get("skipped", 0)
    record.add("tests marked gpu", files=len(files), passed=passed, skipped=skipped, status=ended.returncode)
    if ended.returncode:
        said = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        record.fail("tests marked gpu", "; ".join(said) or ended.stderr.strip()[-300:] or ended.stdout.strip()[-300:])
    elif skipped and not _device.is_rehearsal():
        record.note(f"{skipped} tests marked gpu were skipped: log.txt says why")
