"""Learning rates of the parameter groups, from the config's schedule or the caller's scheduler."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

import torch

from ...watch.log import logger
from ...zero.loss_scale import LossScaler
from ...zero.optimizer import ShardedOptimizer
from ..archive.run_state import restore_options
from ..config.config import Config
from .features import StepFeature, StepResult
from .lr_schedule import Schedule

Betas = Callable[[int], tuple[float, float] | None]
"""Number of optimizer steps so far -> betas of the next step, for each group with betas; None: unchanged."""


def scheduler_for(optimizer: ShardedOptimizer, given: Any) -> Any:
    """Return the caller's scheduler: `given`, or given(optimizer).

    Raises ValueError if it would not change the learning rates of this optimizer.
    """
    if given is None:
        return None
    is_made = hasattr(given, "step") and not isinstance(given, type)
    if not is_made and not callable(given):
        raise ValueError(
            f"lr_scheduler: expected a scheduler with a step(), or a callable optimizer -> scheduler, found "
            f"{type(given).__name__}"
        )
    scheduler = given if is_made else given(optimizer)
    name = type(scheduler).__name__
    if not callable(getattr(scheduler, "step", None)):
        raise ValueError(f"lr_scheduler: expected a callable that returns a scheduler with a step(), found {name}")
    needed = [key for key, value in inspect.signature(scheduler.step).parameters.items() if _is_needed(value)]
    if needed:
        raise ValueError(
            "lr_scheduler: expected a scheduler with a step() without arguments, since the engine calls it after each "
            f"update, found {name}: its step() needs '{needed[0]}'; make it with engine.optimizer after initialize, "
            "and call its step yourself"
        )
    bound = getattr(scheduler, "optimizer", None)
    groups = getattr(bound, "param_groups", None)
    if groups is not None and list(map(id, groups)) != list(map(id, optimizer.param_groups)):
        raise ValueError(
            "lr_scheduler: expected a scheduler of the optimizer that is passed to initialize, found "
            f"{name} of another {type(bound).__name__}: its rates would have no effect; pass that optimizer too, "
            f"or a callable, for example lambda optimizer: {name}(optimizer, ...)"
        )
    if optimizer.lacks_state:
        raise ValueError(
            f"lr_scheduler: expected momentum 0, with which the optimizer was made and keeps no state, found momentum "
            f"{max(group['momentum'] for group in optimizer.param_groups):g} set by {name} (cycle_momentum); give the "
            "optimizer a momentum, or set cycle_momentum=False"
        )
    return scheduler


def _is_needed(parameter: inspect.Parameter) -> bool:
    may_be_left_out = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not may_be_left_out


def _parts(scheduler: Any) -> list[Any]:
    """Return the schedulers with base rates: the scheduler, or those that a SequentialLR or ChainedScheduler has."""
    inner = [part for one in getattr(scheduler, "_schedulers", ()) for part in _parts(one)]
    return [*inner, scheduler] if hasattr(scheduler, "base_lrs") else inner


def _base_rates(scheduler: Any) -> list[float]:
    return [float(rate) for part in _parts(scheduler) for rate in part.base_lrs]


class LearningRates(StepFeature):
    """Sets the learning rates of the parameter groups after each step. It is off if they are constant."""

    def __init__(
        self, optimizer: ShardedOptimizer, schedule: Schedule | None, betas: Betas | None, scheduler: Any
    ) -> None:
        """schedule, betas: of the config. scheduler: of the caller, with a `step()`."""
        self._optimizer = optimizer
        self._schedule = schedule
        self._betas = betas
        self.scheduler = scheduler
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._base_rates = _base_rates(scheduler)  # in this run, before a load
        self.is_on = schedule is not None or scheduler is not None
        self.apply()

    @classmethod
    def of(cls, parts: Any) -> Self | None:
        found: Self = parts.learning_rates
        return found

    def check_takes(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if a copy of the caller's scheduler fails with another parameter group."""
        bound = getattr(self.scheduler, "optimizer", None)
        if bound is None:
            return
        # Copies of the groups, into which the copy of the scheduler may write.
        groups = [{**one, "params": []} for one in (*self._optimizer.param_groups, group)]
        other = SimpleNamespace(param_groups=groups, defaults=bound.defaults, step=bound.step, _opt_called=True)
        try:
            # The memo puts the stand-in where the scheduler refers to the optimizer, which is neither copied nor
            # changed.
            copy.deepcopy(self.scheduler, {id(bound): other}).step()
        except Exception as error:
            raise ValueError(
                "engine.optimizer.add_param_group(): expected an lr_scheduler that works with a new group, found that "
                f"{type(self.scheduler).__name__} fails: {error}. Extend its lists of values per group first, for "
                "example scheduler.base_lrs.append(lr), or leave it out of initialize and call its step yourself"
            ) from error

    def add(self, group: Mapping[str, Any]) -> None:
        """Add a group, the last group of the optimizer. The config's schedule starts from its learning rate."""
        self._base.append(float(group["lr"]))
        self.apply()

    def apply(self) -> None:
        """Set learning rates and betas for the next step."""
        if self._schedule is not None:
            for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
                group["lr"] = self._schedule(base, self._optimizer.counts.num_steps)
        betas = None if self._betas is None else self._betas(self._optimizer.counts.num_steps)
        if betas is not None:
            for group in self._optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = betas

    def after_step(self, step: int, result: StepResult) -> None:
        if result.skipped:
            return
        self.apply()
        if self.scheduler is not None:
            bound = getattr(self.scheduler, "optimizer", None)
            if isinstance(bound, torch.optim.Optimizer):
                # torch's scheduler warns if its optimizer's `step` was never called. Test: test_own_optimizer.py.
                bound._opt_called = True  # type: ignore[attr-defined]
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the options of the groups, and the state of the scheduler."""
        groups = self._optimizer.param_groups
        has_state = hasattr(self.scheduler, "state_dict")
        return {
            "options": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "base": self._base,
            "scheduler": self.scheduler.state_dict() if has_state else None,
        }

    def load_state_dict(self, saved: Mapping[str, Any], then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. The optimizer's step count and the scheduler are restored before.

        then, now: the optimizer's options in the config of the saved run and in this config. Options that differ keep
        the values of this config.
        """
        if "lr" not in restore_options(self._optimizer.param_groups, saved["options"], then, now):
            self._base = list(saved["base"])
        # The config has another lr than the saved run. torch's schedulers compute a rate from the last rate, so both
        # scale.
        elif loaded := _base_rates(self.scheduler):
            # OneCycleLR, say, starts from the same rates whatever the config says.
            follows = bool(then["lr"]) and loaded != self._base_rates
            if not follows:
                logger.warning(
                    "optimizer.params.lr: %s has no effect on %s, which continues with its saved rates: it sets its "
                    "rates itself, or the saved rate is 0, which cannot be scaled",
                    now["lr"],
                    type(self.scheduler).__name__,
                )
            self._scale_scheduler(saved["options"], now["lr"] / then["lr"] if follows else 1.0)
        self.apply()

    def _scale_scheduler(self, saved: Sequence[Mapping[str, Any]], ratio: float) -> None:
        """Multiply all learning rates of the caller's scheduler by `ratio`."""
        for scheduler in _parts(self.scheduler):
            scheduler.base_lrs = [base * ratio for base in scheduler.base_lrs]
        for group, options in zip(self._optimizer.param_groups, saved, strict=True):
            group.update({key: options[key] * ratio for key in ("lr", "initial_lr") if key in options})


class TrainingState:
    """The state that all ranks of an engine have in common, and the caller's state."""

    def __init__(
        self, config: Config, optimizer: ShardedOptimizer, learning_rates: LearningRates, loss_scaler: LossScaler
    ) -> None:
        self.global_step = 0
        self.client_state: dict[str, Any] = {}
        self.learning_rates = learning_rates
        self._config = config
        self._optimizer = optimizer
        self._loss_scaler = loss_scaler

    def described(self) -> dict[str, Any]:
        """Return the common state for a checkpoint."""
        averages = self._optimizer.averages
        return {
            "global_step": self.global_step,
            "num_steps": self._optimizer.num_steps,
            "optimizer": self._optimizer.kind,
            "learning_rates": self.learning_rates.state_dict(),
            "loss_scaler": self._loss_scaler.state_dict(),
            "averages": None if averages is None else {"decay": averages.decay, "num_updates": averages.num_updates},
        }

    def restore(self, saved: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Restore a state of `described`. config: of the saved run."""
        self.global_step = saved["global_step"]
        self._loss_scaler.load_state_dict(saved["loss_scaler"])
        then, now = ((values.get("optimizer") or {}).get("params", {}) for values in (config, self._config.as_dict()))
        # The schedule reads the optimizer's number of steps, which `Checkpointer.load` has set.
        self.learning_rates.load_state_dict(saved["learning_rates"], then, now)

    def restore_client_state(self, saved: Mapping[str, Any]) -> None:
        """Restore the caller's values in place, except objects that load their state themselves."""
        for key, value in saved.items():
            if key in self.client_state and not hasattr(self.client_state[key], "load_state_dict"):
                self.client_state[key] = value
