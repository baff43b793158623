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
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REHEARSAL = "LOWTIDE_REHEARSAL"
"""The environment variable that makes a rehearsal of a run: "pretend" or "cpu", the device that it has."""

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
    """Return how many accelerators this process sees."""
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
    """Return the versions that a number depends on; "none" where a package or program is missing."""
    found = {"python": platform.python_version()} | {package: version_of(package) for package in _PACKAGES}
    found["cuda"] = torch.version.cuda or "none"
    found["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if type_of_device() == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    found["cpus"] = str(os.cpu_count())
    found["checkout"] = _said("git", "-C", str(_ROOT), "describe", "--always", "--dirty")
    return found


def version_of(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "none"
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # some builds have another name


def _said(*command: str) -> str:
    """Return the first line that a program says, "none" where it says nothing."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.split("\n")
    except FileNotFoundError:
        return "none"
    return said[0].strip() or "none"
