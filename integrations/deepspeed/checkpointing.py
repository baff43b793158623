"""`deepspeed.checkpointing`: recompute forwards in the backward.

For scripts that call `checkpoint` themselves. activation_checkpointing in the config does the same for whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .accelerator import get_accelerator
from .config import DeepSpeedConfig, Source
from .messages import warning_once

_DEFAULT = "model-parallel-rng"


class CudaRNGStatesTracker:
    """Named states of the device's random generator, each of them continued by the next use."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}

    def reset(self) -> None:
        self.states_.clear()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a seeded state. Raises ValueError for a name that exists."""
        if name in self.states_:
            raise ValueError(f"random state '{name}': expected a new name, found an existing name")
        device = get_accelerator()
        # Adding a state must not change the numbers that the script draws next.
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _DEFAULT) -> Iterator[None]:
        """Open a context that uses this state, and restore the generator after it. ValueError for an unknown name."""
        if name not in self.states_:
            raise ValueError(f"random state '{name}': expected one of {sorted(self.states_)}; add it first")
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
    """Return the tracker of this process."""
    return CudaRNGStatesTracker()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator, and a separate state for values that differ between the ranks of a model."""
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    get_accelerator().manual_seed(seed)
    # Megatron's offset, as in DeepSpeed: the numbers differ from those of the plain generator.
    tracker.add(_DEFAULT, seed + 2718)


__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed

# The settings of `configure`. They apply to the whole process, as in DeepSpeed.
_STATE = {"configured": False, "on_host": False}


def configure(
    mpu_: Any,
    deepspeed_config: Source | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how `checkpoint` keeps its inputs. checkpoint_in_cpu: in host memory. Arguments override the config.

    `partition_activations` and its related arguments have no effect, with a warning: each rank keeps its inputs.
    """
    section: dict[str, Any] = {}
    if deepspeed_config is not None:
        section = DeepSpeedConfig(deepspeed_config).section("activation_checkpointing") or {}
    on_host = section.get("cpu_checkpointing", False) if checkpoint_in_cpu is None else checkpoint_in_cpu
    if section.get("partition_activations") if partition_activations is None else partition_activations:
        partition_activations_in_checkpoint(True)
    _STATE.update(configured=True, on_host=bool(on_host))


def is_configured() -> bool:
    return _STATE["configured"]


def reset() -> None:
    """Forget `checkpoint_in_cpu`."""
    _STATE["on_host"] = False


def set_num_layers(nlayers: int) -> None:
    """Do nothing: no buffers depend on it."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Warn that activations are not divided over ranks."""
    if partition_activation:
        warning_once(
            "activation checkpointing: partition_activations has no effect, each rank keeps its own inputs; "
            "checkpoint_in_cpu keeps them in host memory"
        )


class _TrackedStates:
    """A context that gives the tracker's states of now to a recomputation, which must draw the forward's numbers."""

    def __init__(self) -> None:
        self._states = get_cuda_rng_tracker().get_states()

    def __enter__(self) -> None:
        self._before = get_cuda_rng_tracker().get_states()
        get_cuda_rng_tracker().set_states(self._states)

    def __exit__(self, *error: object) -> None:
        get_cuda_rng_tracker().set_states(self._before)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return function(*args), keeping only its inputs and recomputing it in the backward."""
    # A compiler takes no such contexts.
    if not torch.compiler.is_compiling() and get_cuda_rng_tracker().states_:
        contexts = nullcontext(), _TrackedStates()
        kwargs["context_fn"] = lambda: contexts
    with _kept_on_host():
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def _kept_on_host() -> AbstractContextManager[Any]:
    return (
        torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()) if _STATE["on_host"] else nullcontext()
    )
