"""The optimizer that `initialize` returns: the engine's, with the names that DeepSpeed's optimizers have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..engine.engine import Engine
from .lent import LendsStates


class DeepSpeedOptimizer(LendsStates, torch.optim.Optimizer):
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
    def cur_scale(self) -> float:
        return self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        fp16 = self._engine.config.fp16
        return fp16.enabled and not fp16.loss_scale

    @property
    def scale_window(self) -> int:
        return self._engine.config.fp16.loss_scale_window

    @property
    def min_loss_scale(self) -> float:
        return self._engine.config.fp16.min_loss_scale

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raises StateError: see `engine.step()`."""
        self._engine.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._zero_grad()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """With the loss scale, without a division by the accumulation steps."""
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
