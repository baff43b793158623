"""Starts Triton kernels. All launches go through here, so that they can also be recorded and compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """A kernel with all that its compilation and its start need."""

    kernel: Any  # what @triton.jit makes
    grid: tuple[int, ...]
    args: Mapping[str, Any]  # every parameter of the kernel by name: tensors, numbers, constants
    num_warps: int
    num_stages: int
    enable_fp_fusion: bool = True


_RECORDED: ContextVar[list[Launch] | None] = ContextVar("recorded", default=None)


def launch(kernel: Any, grid: tuple[int, ...], num_warps: int = 4, num_stages: int = 2, **args: Any) -> None:
    """Runs `kernel` on `grid` programs; does nothing where the grid is empty. args: the kernel's parameters by name.

    enable_fp_fusion among them: whether the compiler may make a fused multiply-add of a product and a sum; True if not.
    """
    enable_fp_fusion = bool(args.pop("enable_fp_fusion", True))
    recorded = _RECORDED.get()
    if recorded is not None:
        recorded.append(Launch(kernel, grid, args, num_warps, num_stages, enable_fp_fusion))
        return
    if not all(grid):
        return
    device = next((value.device for value in args.values() if isinstance(value, Tensor)), None)
    # Triton starts kernels on the current device, which need not be that of the tensors.
    on_device = torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()
    with on_device:
        kernel[grid](**args, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=enable_fp_fusion)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Within the context nothing is launched: what would have been is put into the list. Takes meta tensors too."""
    launches: list[Launch] = []
    token = _RECORDED.set(launches)
    try:
        yield launches
    finally:
        _RECORDED.reset(token)


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()


def num_processors(device: torch.device) -> int:
    """How many programs run side by side on a GPU: its multiprocessors. A stand-in where there is no GPU."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
