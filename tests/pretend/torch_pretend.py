"""`torch.pretend`: what torch, and programs, ask of the module of a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

NUM_DEVICES = 8  # as device.cpp has it

_initialized = True  # torch asks for it by this name
default_generators = [torch.ops.pretend.default_generator(index) for index in range(NUM_DEVICES)]


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return torch.accelerator.current_device_index() if index is None else index


class device:
    """Makes a device the current one for a while."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def is_bf16_supported() -> bool:
    return True


def device_count() -> int:
    return len(default_generators)


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def _generator(device: Any) -> torch.Generator:
    return default_generators[_index(device)]


def get_rng_state(device: Any = None) -> Tensor:
    return _generator(device).get_state()


def set_rng_state(state: Tensor, device: Any = None) -> None:
    _generator(device).set_state(state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: Iterable[Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def initial_seed() -> int:
    return _generator(None).initial_seed()
