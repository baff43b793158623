"""The device that is measured: what torch.accelerator does not say of it, and what takes its place in a rehearsal.

In a rehearsal that is the device "pretend" of the tests (`tests/pretend`), or the CPU: REHEARSAL in the environment
says which, so that the ranks of a job have the same one. All that only CUDA has is in this file.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REHEARSAL = "LOWTIDE_REHEARSAL"
"""The environment variable that makes a rehearsal of a run: "pretend" or "cpu", the device that it has."""

MIB = 2**20
_PACKAGES = ("torch", "triton", "numpy", "liger_kernel", "deepspeed")
_ROOT = Path(__file__).parents[1]
_SYNCHRONIZING = "called a synchronizing CUDA operation"


def prepare() -> None:
    """To be called in each process before it computes: makes the device of a rehearsal known to torch."""
    if os.environ.get(REHEARSAL) == "pretend":
        from tests.pretend.device import load
        from tests.pretend.group import register

        load()
        register()
        _without_autocast()


@functools.cache
def _without_autocast() -> Any:
    """ "pretend" has no rules of what autocast casts: nothing. Kept, as the library's end would take that back."""
    library = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")  # type: ignore[no-untyped-call]  # torch's
    library.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]  # torch's
    return library


def is_rehearsal() -> bool:
    return REHEARSAL in os.environ


def type_of_device() -> str:
    """Such as "cuda" or "xpu"; "cpu" where torch has no accelerator, or the rehearsal is on the CPU."""
    if os.environ.get(REHEARSAL) == "cpu":
        return "cpu"
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def config_name() -> str:
    """The device as a config of lowtide names it."""
    return "cpu" if type_of_device() == "cpu" else "auto"


def count() -> int:
    """Of the accelerators that this process sees."""
    return 0 if type_of_device() == "cpu" else torch.accelerator.device_count()


def name() -> str:
    kind = type_of_device()
    if kind == "cpu":
        return platform.processor() or platform.machine()
    named = getattr(torch.get_device_module(kind), "get_device_name", None)
    return kind if named is None else str(named())


def total_bytes() -> int | None:
    """Of the device's memory; None where it does not say."""
    return torch.cuda.get_device_properties(0).total_memory if type_of_device() == "cuda" else None


def num_threads() -> int:
    """Of a process that has the host to itself: what is offloaded is updated there."""
    return 1 if is_rehearsal() else len(os.sched_getaffinity(0))


def synchronize() -> None:
    """Waits for all work of the device."""
    if type_of_device() != "cpu":
        torch.accelerator.synchronize()


def choose(local_rank: int) -> None:
    """Makes a device this process's own; ranks share devices where there are fewer."""
    if count():
        torch.accelerator.set_device_index(local_rank % count())


def limit_memory(budget_bytes: int) -> None:
    """Lets torch take no more than so much of the current device, where that can be asked for."""
    if type_of_device() == "cuda":
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total))


@dataclass(frozen=True)
class Memory:
    """Bytes of the device's memory in this process; None on the CPU, which is not measured here."""

    allocated: int | None
    peak: int | None  # allocated
    reserved: int | None
    peak_reserved: int | None

    @classmethod
    def now(cls) -> Memory:
        if type_of_device() == "cpu":
            return cls(None, None, None, None)
        of = torch.accelerator
        return cls(of.memory_allocated(), of.max_memory_allocated(), of.memory_reserved(), of.max_memory_reserved())


def forget_memory() -> None:
    """Gives back what nobody uses, and lets peaks begin anew."""
    gc.collect()
    if type_of_device() != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """The list that takes a line for each wait of the host for the device: the innermost calls, outermost first.

    Those of threads that copy and update beside the training are not among them. On CUDA they are what the sync debug
    mode tells, which says nothing of a call of `synchronize`. On the CPU nothing waits.
    """
    found: list[str] = []
    kind = type_of_device()
    if kind == "cuda":
        with _cuda_waits(found):
            yield found
    elif kind == "pretend":
        from tests.pretend.device import host_waits as of_pretend

        with of_pretend() as waits:
            yield found
        found += [f"{wait.why}: {_place(wait.stack)}" for wait in waits if not _is_beside(wait.stack)]
    else:
        yield found


@contextmanager
def _cuda_waits(found: list[str]) -> Iterator[None]:
    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if _SYNCHRONIZING in str(message):
            stack = traceback.extract_stack()[:-1]
            if not _is_beside(stack):
                found.append(_place(stack))
        else:
            sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _is_beside(stack: Any) -> bool:
    """Whether it is a stack of a thread that Python has started; autograd's are not."""
    return bool(stack) and stack[0].name == "_bootstrap"


def _place(stack: Any) -> str:
    """The last calls of lowtide's own code in a stack, or the last ones at all, outermost first."""
    frames = [one for one in stack if not {"_device.py", "pretend"} & set(Path(one.filename).parts[-2:])]
    own = [one for one in frames if _is_product(one.filename)]
    return " > ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in (own or frames)[-3:])


@functools.cache
def _is_product(filename: str) -> bool:
    """Whether a file is of the package, which may have been reached by a link."""
    path = Path(filename).resolve()
    if not path.is_file() or not path.is_relative_to(_ROOT):
        return False
    return path.relative_to(_ROOT).parts[0] not in ("benchmarks", "tests", ".venv")


def activities() -> list[Any]:
    """What a profiler records: the host, and the device where it can be."""
    from torch.profiler import ProfilerActivity, supported_activities

    supported: set[Any] = supported_activities()  # type: ignore[no-untyped-call]  # torch's
    of_device = {"cuda": "CUDA", "xpu": "XPU"}.get(type_of_device())
    return [one for one in supported if one == ProfilerActivity.CPU or one.name == of_device]


def records_kernels() -> bool:
    """Whether a profiler sees the kernels of the device."""
    return len(activities()) > 1


def versions() -> dict[str, str]:
    """Of everything that a number depends on; "not installed" where a package is missing."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        found[package] = _version(package)
    found["cuda"] = torch.version.cuda or "torch is built without it"
    if torch.version.hip:
        found["hip"] = torch.version.hip
    found["driver"] = _driver()
    if type_of_device() == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    found["system"] = platform.platform()
    found["cpus"] = str(os.cpu_count())
    found["checkout"] = _commit()
    return found


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "not installed"
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # some builds have another name


def _driver() -> str:
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.split()
        if said:
            return said[0]
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module\s.*?(\d+\.\d+[.\d]*)", file.read_text()) if file.exists() else None
    return found[1] if found else "none"


def _commit() -> str:
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    except FileNotFoundError:
        said = ""
    return said or "unknown"
