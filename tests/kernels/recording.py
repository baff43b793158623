"""Records the launches of Triton kernels, and starts none: to look at them, or to compile them for any GPU."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from triton.runtime.jit import KernelInterface


@dataclass(frozen=True)
class Launch:
    """A kernel with all inputs of its compilation and start."""

    kernel: Any  # result of @triton.jit
    grid: tuple[int, ...]
    args: Mapping[str, Any]  # all parameters of the kernel by name: tensors, numbers, constants
    num_warps: int
    num_stages: int
    enable_fp_fusion: bool


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Put every launch within the context into the list. Takes meta tensors too."""
    launches: list[Launch] = []

    def start_of(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        options = ("num_warps", "num_stages", "enable_fp_fusion")

        def start(**args: Any) -> None:
            of_compiler = {name: args.pop(name) for name in options}
            launches.append(Launch(kernel, grid, args, **of_compiler))

        return start

    with mock.patch.object(KernelInterface, "__getitem__", start_of):
        yield launches
