"""An engine's optimizer and schedule, as the loops of Accelerate and of the Trainer call them."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from ..engine.engine import Engine
from ..engine.step.features import StepResult


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate has no types
    """`step` is the engine's: norm, clipping, update of the shards. Schedulers act on its `param_groups`.

    Acts, as AcceleratedOptimizer does, at the end of an accumulation alone.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer | None) -> None:
        """optimizer: the one that the engine was made with; None: the config's."""
        super().__init__(engine.optimizer if optimizer is None else optimizer, device_placement=False)
        self.engine = engine
        self.last: StepResult | None = None
        """What the last step has given."""
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        """Raises ValueError for a closure: the gradients of a step are those of its backwards."""
        if closure is not None:
            raise ValueError("optimizer.step(): expected no closure, found one; call backward before it")
        if self.gradient_state.sync_gradients:
            self.last = self.engine.step()
            self._is_overflow = self.last.skipped

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self.gradient_state.sync_gradients:
            self.engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Of the options alone. Raises StateError once there are states, which no rank has as a whole."""
        found: dict[str, Any] = self.engine.optimizer.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.engine.optimizer.load_state_dict(state_dict)


class EngineSchedule:
    """The schedule of the config, to be looked at: the engine follows it by itself, and keeps it in its checkpoints."""

    def __init__(self, optimizer: EngineOptimizer) -> None:
        self.optimizer = optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def get_last_lr(self) -> list[float]:
        """That of the last step; before the first one, that of the first."""
        last = self.optimizer.last
        return [self.optimizer.engine.lr if last is None else float(last.lr)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing."""
