"""The device that is measured: what torch.accelerator does not say of it, and what takes its place in a rehearsal.

In a rehearsal that is the device "pretend" of the tests (`tests/pretend`), or the CPU: REHEARSAL in the environment
says which, so that the ranks of a job have the same one. All that only CUDA has is in this file.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import _worker
import torch

REHEARSAL = "LOWTIDE_REHEARSAL"
"""The environment variable that makes a rehearsal of a run: "pretend" or "cpu", the device that it has."""

_BF16_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12}
Found = TypeVar("Found")


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


def use(_: object = None) -> None:
    """Allocate on it, as a rank that only shows that it can."""
    prepare()
    torch.empty(1, device=type_of_device())


def is_rehearsal() -> bool:
    return REHEARSAL in os.environ


def type_of_device() -> str:
    """Such as "cuda" or "xpu"; "cpu" where torch has no accelerator, or the rehearsal is on the CPU."""
    if os.environ.get(REHEARSAL) == "cpu":
        return "cpu"
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


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


def synchronize() -> None:
    """Waits for all work of the device."""
    if type_of_device() != "cpu":
        torch.accelerator.synchronize()


def timed(step: Callable[[], Found]) -> tuple[float, float, Found]:
    """Return the seconds of a step, those until the host has launched all of it, and what the step gives."""
    synchronize()
    started = time.perf_counter()
    found = step()
    launched = time.perf_counter()
    synchronize()
    return time.perf_counter() - started, launched - started, found


def trained(step: Callable[..., Any], batches: Sequence[Sequence[Any]], warmup: int) -> dict[str, Any]:
    """Return losses of all steps, and of those after the warm-up seconds, the median until launched, and peaks.

    Losses are read when all steps were made.
    """
    losses, seconds, launched = [], [], []
    for number, batch in enumerate(batches):
        if number == warmup:
            forget_memory()
        took, until_launched, loss = timed(functools.partial(step, *batch))
        losses.append(loss)
        seconds.append(took)
        launched.append(until_launched)
    return {
        "losses": [float(loss) for loss in losses],
        "seconds": seconds[warmup:],
        "ms": statistics.median(seconds[warmup:]) * 1e3,
        "ms until launched": statistics.median(launched[warmup:]) * 1e3,
        # The most since `forget_memory`; None on the CPU, which is not measured here.
        "allocated": torch.accelerator.max_memory_allocated() if type_of_device() != "cpu" else None,
        "reserved": torch.accelerator.max_memory_reserved() if type_of_device() != "cpu" else None,
    }


@contextlib.contextmanager
def memory_errors_leave() -> Iterator[None]:
    """In a rank: a device without memory ends the process with OVER_BUDGET_STATUS."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.print_exc()
        _worker.leave(_worker.OVER_BUDGET_STATUS)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the device had no memory left, also where an error of another class was made of that."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def bf16_flops() -> float | None:
    """Return the most floating-point operations a second of dense products in bf16; None of a device not known here."""
    return next((flops for text, flops in _BF16_FLOPS.items() if text in name()), None)


def forget_memory() -> None:
    """Gives back what nobody uses, and lets peaks begin anew."""
    gc.collect()
    if type_of_device() != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()


def versions() -> dict[str, str]:
    """Return the versions that a number depends on; for packages that are there."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for package in ("torch", "triton", "torchao", "transformers", "liger_kernel", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    with contextlib.suppress(FileNotFoundError):
        found["checkout"] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found
