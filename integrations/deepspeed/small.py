"""Small helpers of DeepSpeed's `runtime.utils`, `utils.torch`, `utils.timer` and further modules."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class OnDevice:
    """A context that makes tensors on a device, in a dtype."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled

    def __enter__(self) -> None:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._enabled:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Return whether torch is of a version from min_version to max_version, by the first two numbers."""
    own = _numbers(torch.__version__)
    at_least = min_version is None or own >= _numbers(str(min_version))
    return at_least and (max_version is None or own <= _numbers(str(max_version)))


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0, mpu: Any = None) -> Tensor:
    """Clip gradients as torch does. The engine clips its gradients by `gradient_clipping`."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return a nested attribute like "a.b"."""
    for part in module_name.split("."):
        model = getattr(model, part)
    return model


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set a nested attribute like "a.b"."""
    owner, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, name, module)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy all tensors in a nested structure to the device, without the storage around views."""
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, Mapping):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):
        return type(item)([clone_tensors_for_torch_save(value, device) for value in item])
    return item


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return the text of a call."""
    given = [repr(arg) for arg in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{base}({', '.join(given)})"


class ThroughputTimer:
    """`engine.tput_timer`: samples per second, timed from the forward of a microbatch to its `step`.

    It does not synchronize with the device, and skips the first two steps. A call of a pipeline's `train_batch` counts
    as a microbatch. The config's monitors have separate numbers.
    """

    _SKIPPED_STEPS = 2

    def __init__(self, batch_size: int) -> None:
        """batch_size: samples of a step; may change."""
        self.batch_size = batch_size
        self.started = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0  # seconds
        self._samples = 0

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        self.started, self._began = True, time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Stop the timer, if it was started. global_step: whether a step has ended."""
        if not self.started:
            return
        self.started = False
        # The first steps allocate states and compile kernels.
        if self.global_step_count >= self._SKIPPED_STEPS:
            self.total_elapsed_time += time.perf_counter() - self._began
            self._samples += self.batch_size * global_step
        self.micro_step_count += 1
        self.global_step_count += global_step

    def avg_samples_per_sec(self) -> float:
        """Return samples per second, minus infinity before the third step."""
        return self._samples / self.total_elapsed_time if self._samples else float("-inf")
