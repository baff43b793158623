"""What scripts import as `deepspeed.checkpointing`: forwards that are computed again in the backward.

The engine has a switch of its own for whole blocks (activation_checkpointing in the config); this is for scripts that
call `checkpoint` themselves.
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

# What `configure` has said, for all calls of `checkpoint` in this process, as DeepSpeed has it.
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
    """How `checkpoint` keeps its inputs. checkpoint_in_cpu: in host memory; arguments go before the config.

    Activations are not divided over ranks: `partition_activations` and what goes with it have no effect, and say so.
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
    """Forgets what `configure` has said of host memory."""
    _STATE["on_host"] = False


def set_num_layers(nlayers: int) -> None:
    """Nothing: no buffers are sized by it."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Says that activations are not divided over ranks."""
    if partition_activation:
        warning_once(
            "activation checkpointing: partition_activations has no effect, each rank keeps its own inputs; "
            "checkpoint_in_cpu keeps them in host memory"
        )


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What function(*args) gives, computed again in the backward; nothing but its inputs is kept."""
    with _kept_on_host():
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def _kept_on_host() -> AbstractContextManager[Any]:
    return (
        torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()) if _STATE["on_host"] else nullcontext()
    )
