"""The engine's optimizer and schedule with the methods that Hugging Face's loops call."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer

from ..engine.engine import Engine
from ..engine.step.features import StepResult


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate has no types
    """An optimizer with the engine's `step`: norm, clipping, update of the shards.

    Schedulers act on its `param_groups`. Like AcceleratedOptimizer, it acts only at the end of an accumulation.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer | None) -> None:
        """optimizer: the optimizer that the engine was made with; None: the config's."""
        super().__init__(engine.optimizer if optimizer is None else optimizer, device_placement=False)
        self.engine = engine
        self.last: StepResult | None = None
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        """Run the engine's step. Raises ValueError for a closure: gradients come from the backwards."""
        if closure is not None:
            raise ValueError("optimizer.step(): expected a call without a closure; call backward first")
        if self.gradient_state.sync_gradients:
            self.last = self.engine.step()
            self._is_overflow = self.last.skipped

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self.gradient_state.sync_gradients:
            self.engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the options. Raises StateError once there are states, not held as a whole by any rank."""
        found: dict[str, Any] = self.engine.optimizer.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.engine.optimizer.load_state_dict(state_dict)


class EngineSchedule:
    """A view of the config's schedule. The engine steps and saves it by itself."""

    def __init__(self, optimizer: EngineOptimizer) -> None:
        self.optimizer = optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine steps the schedule."""

    def get_last_lr(self) -> list[float]:
        """Return the rate of the last step, or of the first step before it."""
        last = self.optimizer.last
        return [self.optimizer.engine.lr if last is None else float(last.lr)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the engine's checkpoint has the schedule."""


@contextmanager
def same_random_state() -> Iterator[None]:
    """Open a context that restores the generators of Python, numpy and torch at its end."""
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)
