"""The optimizer that `initialize` returns: the engine's, with the names that DeepSpeed's optimizers have.

And what it shares with the engine: states that leave the device between steps.
"""

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


class OffloadStateTypeEnum(StrEnum):
    """What `offload_states` may take."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


_KINDS = {
    OffloadStateTypeEnum.optim_states: "optimizer",
    OffloadStateTypeEnum.hp_params: "optimizer",
    OffloadStateTypeEnum.lp_params: "parameters",
    OffloadStateTypeEnum.lp_grads: "gradients",
    OffloadStateTypeEnum.contiguous_grad_buffer: "gradients",
}


class OffloadsStates:
    """What DeepSpeed's engine and its optimizer both have."""

    @property
    def _lender(self) -> Engine:
        raise NotImplementedError

    def offload_states(
        self,
        include: Collection[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """States leave the device until `reload_states`: the optimizer's with master weights, whichever is named.

        device: "none" takes nothing. non_blocking: of no effect; the copies are waited for, since the memory is to be
        free.
        """
        if OffloadDeviceEnum(device) is OffloadDeviceEnum.none:
            return
        if OffloadDeviceEnum(device) is not OffloadDeviceEnum.cpu:
            raise ValueError(
                f"offload_states: expected device 'cpu', found {device.value!r}; what is always to rest in files is "
                "named by offload_optimizer and offload_param in the config"
            )
        kinds = None if include is None else {_KINDS[OffloadStateTypeEnum(one)] for one in include}
        self._lender.offload_states(kinds, pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        self._lender.reload_states()


@dataclass(frozen=True)
class LossScale:
    """`loss_scaler` and `loss_scale_config` of an optimizer, as they are when they are asked for: "fp16" of the config
    says how losses are scaled.
    """

    use_grad_scaling: bool
    dynamic_loss_scale: bool
    cur_scale: float
    cur_iter: int
    """Steps so far, skipped ones too."""
    scale_window: int
    min_loss_scale: float
    scale_factor: float = 2.0

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    @property
    def dynamic(self) -> bool:
        return self.dynamic_loss_scale


class DeepSpeedOptimizer(OffloadsStates, torch.optim.Optimizer):
    """`param_groups` are the caller's own: learning rates may be set there. Updates are made by `engine.step()`."""

    def __init__(self, engine: Engine, basic: torch.optim.Optimizer | None, zero_grad: Callable[[], None]) -> None:
        """basic: over which the caller, or the config, has the parameters. zero_grad: the engine's."""
        self._engine = engine
        self._zero_grad = zero_grad
        self.optimizer = engine.optimizer if basic is None else basic
        """The one of which this is a wrapper."""
        self.overflow = False
        """Whether the last step was skipped, for gradients that were not finite."""
        sharded = engine.optimizer
        self.__setstate__({"defaults": sharded.defaults, "state": sharded.state, "param_groups": sharded.param_groups})

    @property
    def loss_scale(self) -> float:
        """By which losses are multiplied; 1 but in float16."""
        return float(self._engine.loss_scale)

    @property
    def loss_scaler(self) -> LossScale:
        """How losses are scaled now. Its names are here too, as DeepSpeed has them: `cur_scale`, `scale_window`, ..."""
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
        """Whether losses are multiplied by a scale that changes. A backward of the caller's own is scaled as well."""
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
        """Raises StateError: see `engine.step()`."""
        self._engine.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._zero_grad()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """With the loss scale, without a division by the accumulation steps."""
        check_loss(loss, "optimizer.backward", UsageError)
        torch.autograd.backward(self._engine.scale(loss), retain_graph=retain_graph)

    @property
    def _lender(self) -> Engine:
        return self._engine

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._engine.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Of the options alone; StateError once there are states: `engine.save_checkpoint` saves them."""
        return self._engine.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._engine.optimizer.load_state_dict(state_dict)
