"""Random states by name, as Megatron's and DeepSpeed's scripts keep them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from torch import Tensor

from .accelerator import get_accelerator

_DEFAULT = "model-parallel-rng"


class CudaRNGStatesTracker:
    """States of the device's random generator, each of which goes on where it was left."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}

    def reset(self) -> None:
        self.states_.clear()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Raises ValueError for a name that there is already."""
        if name in self.states_:
            raise ValueError(f"random state '{name}': expected a new name, found one that is there already")
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _DEFAULT) -> Iterator[None]:
        """A context with this state; after it the generator goes on as it was. ValueError for an unknown name."""
        if name not in self.states_:
            raise ValueError(f"random state '{name}': expected one of {sorted(self.states_)}; add it before")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


@cache
def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """That of this process."""
    return CudaRNGStatesTracker()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the device's generator, and a state of its own for what differs between ranks of one model."""
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    get_accelerator().manual_seed(seed)
    tracker.add(_DEFAULT, seed + 2718)
