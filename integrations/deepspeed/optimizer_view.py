"""The optimizer that `initialize` returns: the engine's, with the names of DeepSpeed's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from ..engine.engine import Engine
from ..engine.step.model_runner import check_loss
from .messages import UsageError
from .parameters import OffloadDeviceEnum, get_z3_leaf_modules

OffloadStateTypeEnum = StrEnum(
    "OffloadStateTypeEnum", ["optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"]
)
"""Kinds of states that `offload_states` can move."""

_KINDS = {
    OffloadStateTypeEnum.optim_states: "optimizer",
    OffloadStateTypeEnum.hp_params: "optimizer",
    OffloadStateTypeEnum.lp_params: "parameters",
    OffloadStateTypeEnum.lp_grads: "gradients",
    OffloadStateTypeEnum.contiguous_grad_buffer: "gradients",
}


def offload_states(
    engine: Engine,
    include: Collection[OffloadStateTypeEnum] | None,
    device: OffloadDeviceEnum,
    pin_memory: bool,
) -> None:
    """Move states off the device until `reload_states`, and wait for the copies, so that the memory is free.

    include: kinds of states; None: all. `optim_states` and `hp_params` each take optimizer states and master weights
    together. device: "none" moves nothing. Raises ValueError for "nvme".
    """
    if OffloadDeviceEnum(device) is OffloadDeviceEnum.none:
        return
    if OffloadDeviceEnum(device) is not OffloadDeviceEnum.cpu:
        raise ValueError(
            f"offload_states: expected device 'cpu', found {device.value!r}. To keep states in files always, set "
            "offload_optimizer and offload_param in the config"
        )
    kinds = None if include is None else {_KINDS[OffloadStateTypeEnum(kind)] for kind in include}
    engine.offload_states(kinds, pin_memory)


@dataclass(frozen=True)
class LossScale:
    """A snapshot of how losses are scaled, by "fp16" of the config: `loss_scaler` and `loss_scale_config`."""

    use_grad_scaling: bool
    dynamic_loss_scale: bool
    cur_scale: float
    cur_iter: int  # steps so far, also skipped steps
    scale_window: int
    min_loss_scale: float
    scale_factor: float = 2.0

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    @property
    def dynamic(self) -> bool:
        return self.dynamic_loss_scale


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """A view of the engine's optimizer: set learning rates in `param_groups`. `engine.step()` makes the updates."""

    def __init__(self, engine: Engine, basic: torch.optim.Optimizer | None, zero_grad: Callable[[], None]) -> None:
        """basic: the optimizer over the caller's parameters, if any. zero_grad: the engine's."""
        self._engine = engine
        self._zero_grad = zero_grad
        self.optimizer = engine.optimizer if basic is None else basic  # the wrapped optimizer
        self.overflow = False  # whether gradients that were not finite skipped the last step
        self._global_grad_norm: torch.Tensor | None = None  # of the last step, before clipping; many loops read it
        sharded = engine.optimizer
        # Not Optimizer.__init__: it makes a new list of groups, and schedulers must change the engine's groups.
        self.__setstate__({"defaults": sharded.defaults, "state": sharded.state, "param_groups": sharded.param_groups})

    @property
    def loss_scale(self) -> float:
        """The factor of losses; 1 except in float16."""
        return float(self._engine.loss_scale)

    @property
    def loss_scaler(self) -> LossScale:
        """How losses are scaled now. As in DeepSpeed, its fields are attributes of the optimizer too."""
        fp16 = self._engine.config.fp16
        return LossScale(
            use_grad_scaling=fp16.enabled,
            dynamic_loss_scale=fp16.enabled and not fp16.loss_scale,
            cur_scale=self.loss_scale,
            cur_iter=self._engine.global_step,
            scale_window=fp16.loss_scale_window,
            min_loss_scale=fp16.min_loss_scale,
        )

    @property
    def loss_scale_config(self) -> LossScale:
        return self.loss_scaler

    def needs_scaler(self) -> bool:
        """Return whether losses have a dynamic scale. The caller's `loss.backward()` is scaled too."""
        return self.loss_scaler.dynamic

    @property
    def leaf_parameters(self) -> dict[torch.nn.Module, list[torch.nn.Parameter]]:
        """The parameters of each leaf module (`set_z3_leaf_modules`)."""
        return {module: list(module.parameters()) for module in get_z3_leaf_modules(self._engine.module)}

    def __getattr__(self, name: str) -> Any:
        if name in LossScale.__dataclass_fields__:
            return getattr(self.loss_scaler, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise StateError: call `engine.step()`."""
        self._engine.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._zero_grad()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run the backward of the scaled loss, without dividing by the accumulation steps."""
        check_loss(loss, "optimizer.backward", UsageError)
        torch.autograd.backward(self._engine.scale(loss), retain_graph=retain_graph)

    def offload_states(
        self,
        include: Collection[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states off the device until `reload_states`: see `offload_states` above."""
        offload_states(self._engine, include, device, pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the offloaded states back to the device."""
        self._engine.reload_states()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._engine.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the options. Raises StateError once states exist: use `engine.save_checkpoint`."""
        return self._engine.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._engine.optimizer.load_state_dict(state_dict)
