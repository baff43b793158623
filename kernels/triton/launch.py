"""Starts Triton kernels.

[Note: Cost of a launch] Triton looks at each argument of each launch: name, type, alignment, value of an integer. That
costs the host more than a small kernel costs the device. A `PreparedLaunch` has the grid and the scalars; its call
passes tensors alone. After the first call on a device it starts the compiled kernel directly, if every pointer is a
multiple of 16 bytes, as Triton assumed when it compiled the kernel. Every other case goes through Triton.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from triton import knobs

ALIGNMENT_BYTES = 16  # that Triton distinguishes


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 2,
    enable_fp_fusion: bool = True,
    **args: Any,
) -> Any:
    """Run `kernel` on `grid` programs; do nothing if the grid is empty. args: the kernel's parameters by name.

    enable_fp_fusion: whether the compiler may fuse a product and a sum into one rounding.
    Returns Triton's compiled kernel, None if there is none.
    """
    if not all(grid):
        return None
    device = next((value.device for value in args.values() if isinstance(value, Tensor)), None)
    # Triton starts kernels on the current device, which need not be that of the tensors.
    on_device = torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()
    with on_device:
        return kernel[grid](**args, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=enable_fp_fusion)


class PreparedLaunch:
    """A launch with a fixed grid and fixed scalars. A call passes the tensors. [Note: Cost of a launch]

    kernel: its parameters are pointers first, then scalars and constants. scalars: values of these by name.
    The dtypes of the tensors must be the same in every call.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], num_warps: int = 4, num_stages: int = 2, **scalars: Any):
        self._kernel, self._num_warps, self._num_stages, self._scalars = kernel, num_warps, num_stages, scalars
        # Pointers come first in the kernel's signature, so the names without a scalar are those of the tensors.
        self._names = kernel.arg_names[: -len(scalars)]
        self._grid, self._whole_grid = grid, (*grid, 1, 1)[:3]
        self._trailing = tuple(scalars[name] for name in kernel.arg_names[-len(scalars) :])
        # By device: launcher, function and metadata of the compiled kernel.
        self._started: dict[int, tuple[Any, ...]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        """Start the kernel on the device of the first tensor. tensors: in the order of the kernel's pointers."""
        # -1 on a CPU. Triton's interpreter returns no compiled kernel, so each launch there goes through Triton.
        device = tensors[0].get_device()  # type: ignore[union-attr]  # the first pointer is of each call
        started = self._started.get(device)
        if (
            started is None
            or device != torch._C._cuda_getDevice()  # torch.cuda.current_device costs more
            or not _are_aligned(tensors)
            or _is_watched()
        ):
            self._start_by_triton(device, tensors)
            return
        run, function, metadata = started
        stream = torch._C._cuda_getCurrentRawStream(device)
        # As at the end of `JITFunction.run` in triton/runtime/jit.py. The three None: metadata and hooks of the launch.
        run(*self._whole_grid, stream, function, metadata, None, None, None, *tensors, *self._trailing)

    def _start_by_triton(self, device: int, tensors: tuple[Tensor | None, ...]) -> None:
        args = dict(zip(self._names, tensors, strict=True)) | self._scalars
        compiled = launch(self._kernel, self._grid, self._num_warps, self._num_stages, **args)
        # Kept only if aligned: for unaligned addresses Triton compiles a second kernel with narrow loads.
        if compiled is not None and _are_aligned(tensors):
            self._started[device] = compiled.run, compiled.function, compiled.packed_metadata


def _are_aligned(tensors: tuple[Tensor | None, ...]) -> bool:
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            # The low bits of an OR are zero only if they are zero in all addresses.
            bits |= tensor.data_ptr()
    return not bits % ALIGNMENT_BYTES


def _is_watched() -> bool:
    """Tell if a profiler has hooks on launches: Triton gives them the metadata of each launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is at least `number`; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()


def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return 8  # for the interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
