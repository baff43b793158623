"""Launch Triton kernels (`launch`). All launches go through this file, so that tests can record and compile them."""

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
    """A recorded launch: a kernel with all inputs of its compilation and start."""

    kernel: Any  # result of @triton.jit
    grid: tuple[int, ...]
    args: Mapping[str, Any]  # all parameters of the kernel by name: tensors, numbers, constants
    num_warps: int
    num_stages: int
    enable_fp_fusion: bool = True


_RECORDED: ContextVar[list[Launch] | None] = ContextVar("recorded", default=None)


def launch(kernel: Any, grid: tuple[int, ...], num_warps: int = 4, num_stages: int = 2, **args: Any) -> None:
    """Run `kernel` on `grid` programs, or nothing for an empty grid. args: the kernel's parameters by name.

    args may contain enable_fp_fusion: True (default) if the compiler may fuse a product and a sum.
    """
    enable_fp_fusion = bool(args.pop("enable_fp_fusion", True))
    recorded = _RECORDED.get()
    if recorded is not None:
        recorded.append(Launch(kernel, grid, args, num_warps, num_stages, enable_fp_fusion))
        return
    if not all(grid):
        return
    device = next((value.device for value in args.values() if isinstance(value, Tensor)), None)
    # Triton starts kernels on the current device, which may differ from the tensors' device.
    on_device = torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()
    with on_device:
        kernel[grid](**args, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=enable_fp_fusion)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Within the context, record launches in the list and run no kernel. Tensors may be on the meta device."""
    launches: list[Launch] = []
    token = _RECORDED.set(launches)
    try:
        yield launches
    finally:
        _RECORDED.reset(token)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is at least `number`; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()


def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return 8  # for recorded launches and the interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
