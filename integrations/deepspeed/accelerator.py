"""`deepspeed.accelerator`: this process's device by DeepSpeed's names."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor

__path__: list[str] = []  # DeepSpeed has modules below this name

_OLD_NAMES = {
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
}
_MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_ON_CPU: dict[str, Callable[..., Any]] = {  # calls that torch has for accelerators only
    **dict.fromkeys(_MEMORY, lambda *_: 0),
    **dict.fromkeys(("set_device", "empty_cache", "reset_peak_memory_stats", "default_stream"), lambda *_: None),
    "memory_stats": lambda *_: {},
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    "initial_seed": torch.initial_seed,
}
_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class TorchAccelerator:
    """The CPU, or torch's accelerator. Memory numbers of the CPU are 0."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._facts: dict[str, Any] = {  # call -> what it returns
            "is_available": True,
            "is_synchronized_device": kind == "cpu",
            "use_host_timers": kind == "cpu",
            "is_fp16_supported": True,
            "is_fp64_supported": kind != "mps",
            "is_triton_supported": kind in ("cuda", "xpu"),
            "supported_dtypes": [torch.float32, torch.float16, torch.bfloat16],
            "random": torch.random,  # torch's module of random states
        }

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda", or "cuda:1" with an index. The CPU has no index."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return nullcontext() if self._name == "cpu" else torch.accelerator.device_index(device_index)

    def current_device(self) -> Any:
        return "cpu" if self._name == "cpu" else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        return "cpu" if self._name == "cpu" else f"{self._name}:{self.current_device()}"

    def device_count(self) -> int:
        """Return the number of devices. The CPU counts as a device for each rank on this host."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if self._name == "cpu" else torch.accelerator.device_count()

    def communication_backend_name(self) -> str:
        return {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}.get(self._name, "gloo")

    def is_bf16_supported(self) -> bool:
        return self._name != "cuda" or torch.cuda.is_bf16_supported()

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device, or of the host for the CPU."""
        if self._name == "cpu":
            return int(psutil.virtual_memory().total)
        return int(torch.get_device_module(self._name).get_device_properties(device_index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free bytes of the device, or of the host for the CPU."""
        if self._name == "cpu":
            return int(psutil.virtual_memory().available)
        return self.total_memory(device_index) - int(self.memory_allocated(device_index))

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._name == "cpu" or tensor.is_pinned()

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def default_generator(self, device_index: int) -> torch.Generator:
        if self._name == "cpu":
            return torch.default_generator
        found: torch.Generator = torch.get_device_module(self._name).default_generators[device_index]
        return found

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self, domain: Any = None) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        name = _OLD_NAMES.get(name, name)
        if name in self.__dict__.get("_facts", ()):
            return lambda: self._facts[name]
        if name in _TENSORS:
            dtype, device = _TENSORS[name], self._name
            return lambda data: torch.tensor(data, dtype=dtype, device=device)
        found = _ON_CPU.get(name) if self._name == "cpu" else None
        if found is None and not name.startswith("_"):
            found = getattr(torch.get_device_module(self._name), name, None)  # torch.cpu, torch.cuda, ...
        if found is None:
            raise AttributeError(
                f"get_accelerator(): no '{name}' here; torch.accelerator and torch.get_device_module have what torch "
                "knows of the device"
            )
        return found


@cache
def get_accelerator() -> TorchAccelerator:
    """Return torch's accelerator, else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return TorchAccelerator("cpu" if found is None or found.type == "mps" else found.type)


def __getattr__(name: str) -> Any:
    """Find a name of DeepSpeed that is not here: see `names.find`."""
    from .names import find

    return find("accelerator", name)
