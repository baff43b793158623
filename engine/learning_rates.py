"""The learning rates of the parameter groups: from the config's schedule, or from a scheduler of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..zero.optimizer import ShardedOptimizer
from .run_state import restore_options

Schedule = Callable[[float, int], float]
"""(learning rate of a parameter group, optimizer steps taken so far) -> the group's learning rate of the next step."""


class LearningRates:
    """Sets them before each step."""

    def __init__(self, optimizer: ShardedOptimizer, schedule: Schedule | None, scheduler: Any) -> None:
        """scheduler: the caller's, with a `step()`."""
        self._optimizer = optimizer
        self._schedule = schedule
        self.scheduler = scheduler
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self.apply()

    def apply(self) -> None:
        """What the schedule says for the next step."""
        if self._schedule is not None:
            for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
                group["lr"] = self._schedule(base, self._optimizer.num_steps)

    def advance(self) -> None:
        """After a step that updated."""
        self.apply()
        if self.scheduler is not None:
            bound = getattr(self.scheduler, "optimizer", None)
            if isinstance(bound, torch.optim.Optimizer):
                # Its own `step` is never called; torch's scheduler warns without this. Test: test_own_optimizer.py.
                bound._opt_called = True  # type: ignore[attr-defined]
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The groups' options, and where the schedule stands."""
        groups = self._optimizer.param_groups
        has_state = hasattr(self.scheduler, "state_dict")
        return {
            "options": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "base": self._base,
            "scheduler": self.scheduler.state_dict() if has_state else None,
        }

    def load_state_dict(self, saved: Mapping[str, Any], then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, after the optimizer's number of steps and the scheduler were restored.

        then, now: the optimizer's options in the config of the saved run, and of this one; what differs stays as it is.
        """
        if "lr" not in restore_options(self._optimizer.param_groups, saved["options"], then, now):
            self._base = list(saved["base"])
        elif hasattr(self.scheduler, "base_lrs"):
            self._scale_scheduler(saved["options"], now["lr"] / then["lr"])
        self.apply()

    def _scale_scheduler(self, saved: Sequence[Mapping[str, Any]], ratio: float) -> None:
        """The caller's schedule goes on from where it stood, with all of its learning rates `ratio` times as high."""
        self.scheduler.base_lrs = [base * ratio for base in self.scheduler.base_lrs]
        for group, options in zip(self._optimizer.param_groups, saved, strict=True):
            group.update({key: options[key] * ratio for key in ("lr", "initial_lr") if key in options})
