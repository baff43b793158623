"""Starts a kernel through Triton and through a `PreparedLaunch`, on a driver that stands for a GPU's: JSON of both.

For the process of `compiling.py`. Triton's compiler is the real one; the driver writes down what a launch would pass
to the device.
"""

import json
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from lowtide.kernels.triton import launch as launching


@triton.jit  # type: ignore[untyped-decorator]
def _add_kernel(X_ptr, Y_ptr, n, step, SCALE: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(Y_ptr + at, tl.load(X_ptr + at, mask=at < n) * SCALE + step, mask=at < n)


STARTED: list[list[Any]] = []


class Pointer:
    """What Triton and `PreparedLaunch` read of a tensor."""

    dtype = torch.float32

    def __init__(self, address: int, device: int = 0) -> None:
        self.address, self.device_index = address, device

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device_index


class Launcher:
    """Takes the place of the launcher that a driver compiles. Appends to STARTED what it would pass on."""

    def __init__(self, source: Any, metadata: Any) -> None: ...

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, metadata: Any, *rest: Any) -> None:
        of_triton, enter, _, *args = rest
        is_watched = enter is not None and bool(enter.calls)
        assert of_triton is not None or not is_watched  # a hook reads what Triton knows of the launch
        STARTED.append([x, y, z, stream, function, list(metadata), [_shown(arg) for arg in args]])


def _shown(arg: Any) -> Any:
    return arg.address if isinstance(arg, Pointer) else arg


class Runner:
    """One GPU of capability 9.0."""

    launcher_cls = Launcher

    class utils:
        @staticmethod
        def load_binary(*args: Any) -> tuple[Any, ...]:
            return "module", "function", 32, 0, 1024

        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 1 << 20}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _nothing(metadata: Any) -> None: ...


def main() -> None:
    triton.runtime.driver.set_active(Runner())
    through_triton: list[int] = []
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda device: 7
    whole = launching.launch

    def counted(*args: Any, **kwargs: Any) -> Any:
        through_triton.append(len(STARTED))
        return whole(*args, **kwargs)

    launching.launch = counted
    start = launching.PreparedLaunch(_add_kernel, (3,), num_warps=2, n=80, step=0.5, SCALE=2, BLOCK_SIZE=32)
    hooks = triton.knobs.runtime.launch_enter_hook
    for case in ("first", "same", "other values", "not aligned", "same", "watched", "other device"):
        x, y = Pointer(1600), Pointer(3200 if case != "other values" else 4800)
        if case == "not aligned":
            x = Pointer(1604)
        if case == "other device":
            x = Pointer(1600, device=1)
        if case == "watched":
            hooks.add(_nothing)
        before = len(through_triton)
        start(x, y)  # type: ignore[arg-type]
        print(json.dumps([case, len(through_triton) - before, STARTED[-1]]))
        if case == "watched":
            hooks.remove(_nothing)
