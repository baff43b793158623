"""What scripts import as `deepspeed.runtime.lr_schedules`: the schedulers of the config, as objects over an optimizer.

The formulas are those of `engine/step/lr_schedule.py`. Iterations count from 0; before the first `step()` there is
none, which the update at that time takes for iteration 0: [Note: DeepSpeed's first step] there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from ..engine.config.config import Config
from ..engine.config.scheduler import SCHEDULER_PARAMS
from ..engine.step.lr_schedule import betas_at, schedule_of


class Scheduler:
    """Sets the learning rates of an optimizer's groups, iteration by iteration.

    Its parameters are those of the config's section, in DeepSpeed's order. A rate or a momentum may be a list with a
    number for each group. The parameters of the first group are attributes too.
    """

    kind: ClassVar[str]
    defaults: ClassVar[dict[str, Any]] = {}
    """Of DeepSpeed's, where the config's are others."""
    optimizer: Any

    def __init__(self, optimizer: Any, *args: Any, last_batch_iteration: int = -1, **params: Any) -> None:
        """Raises ConfigError for a value that is not allowed, ValueError for a list of another length."""
        fields = sorted(SCHEDULER_PARAMS[self.kind].model_fields, key=lambda name: name != "total_num_steps")
        order = [*fields, "last_batch_iteration"]
        if len(args) > len(order) or (given := set(order[: len(args)]) & params.keys()):
            found = f"{len(args)} by position" if len(args) > len(order) else f"{min(given)} twice"
            raise TypeError(f"{self.kind}: expected each of {', '.join(order)} once, found {found}")
        params = {**self.defaults, **dict(zip(order, args, strict=False)), **params}
        self.last_batch_iteration = params.pop("last_batch_iteration", last_batch_iteration)
        sections = [
            Config.load({"scheduler": {"type": self.kind, "params": one}}).scheduler
            for one in _by_group(params, len(optimizer.param_groups))
        ]
        self._begin(optimizer, sections)

    @classmethod
    def over(cls, optimizer: Any, section: Any) -> Scheduler:
        """As the config's section says, which is checked."""
        made = cls.__new__(cls)
        made.last_batch_iteration = -1
        made._begin(optimizer, [section] * len(optimizer.param_groups))
        return made

    def _begin(self, optimizer: Any, sections: list[Any]) -> None:
        self.optimizer = optimizer
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._sections = sections
        self._schedules = [schedule_of(section) for section in sections]
        if self.last_batch_iteration == -1:
            self._apply()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in type(self._sections[0].params).model_fields:
            raise AttributeError(f"{self.kind} has no attribute '{name}'")
        return getattr(self._sections[0].params, name)

    def get_lr(self) -> list[float]:
        """Of each group, at the last iteration."""
        return [
            schedule(base, self.last_batch_iteration + 1)
            for schedule, base in zip(self._schedules, self._base_lrs, strict=True)
        ]

    def get_last_lr(self) -> list[float]:
        """Of each group, as it was set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes to the next iteration, or to the given one."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """The learning rates follow at once."""
        self.last_batch_iteration = sd["last_batch_iteration"]
        self._apply()

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr, section in zip(self.optimizer.param_groups, self._last_lr, self._sections, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            betas = betas_at(section, self.last_batch_iteration + 1)
            if betas is not None and "betas" in group:
                group["betas"] = betas


class WarmupLR(Scheduler):
    """From the minimum to the maximum (None: the optimizer's), then constant."""

    kind = "WarmupLR"


class WarmupDecayLR(Scheduler):
    """Warm-up, then a straight line to 0."""

    kind = "WarmupDecayLR"
    defaults: ClassVar[dict[str, Any]] = {"warmup_max_lr": 0.001}


class WarmupCosineLR(Scheduler):
    """Warm-up, then half a cosine, as ratios of the optimizer's learning rates."""

    kind = "WarmupCosineLR"

    def get_lr_ratio(self) -> float:
        """Of the last iteration."""
        return self._schedules[0](1.0, self.last_batch_iteration + 1)


class OneCycle(Scheduler):
    """See `scheduler` in the config. It sets the `betas` of the optimizer's groups too."""

    kind = "OneCycle"

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group, at the last iteration; None without cycle_momentum.

        Before the first step these are the maxima, though the groups have the minima: so are DeepSpeed's.
        """
        step = self.last_batch_iteration + 1
        found = [(betas_at(section, step), section.params.cycle_max_mom) for section in self._sections]
        return [(betas[0] if step else most, betas[1]) for betas, most in found if betas is not None] or None


class LRRangeTest(Scheduler):
    """See `scheduler` in the config."""

    kind = "LRRangeTest"


CLASSES: dict[str, type[Scheduler]] = {
    one.kind: one for one in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(CLASSES)


def scheduler_of(section: Any, optimizer: Any) -> Scheduler:
    """What the config's `scheduler` is over this optimizer. section: checked."""
    kind: str = section.type
    made: type[Scheduler] = CLASSES.get(kind) or type(kind, (Scheduler,), {"kind": kind})
    return made.over(optimizer, section)


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """The learning rate that such a section ends its warm-up with, or None and why not."""
    if "type" not in config or "params" not in config:
        return None, "a scheduler needs a type and params"
    keys = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}
    key, params = keys.get(config["type"], "warmup_max_lr"), config["params"]
    if key not in params:
        return None, f"the params of {config['type']} have no {key}; the optimizer has the learning rate"
    return params[key], ""


def _by_group(params: Mapping[str, Any], num_groups: int) -> list[dict[str, Any]]:
    """The parameters of each group: those that are given as a list have a number for each."""
    lists = {key: value for key, value in params.items() if isinstance(value, (list, tuple))}
    for key, value in lists.items():
        if len(value) != num_groups:
            raise ValueError(f"{key}: expected a number for each of {num_groups} groups, found {len(value)}")
    return [{**params, **{key: value[index] for key, value in lists.items()}} for index in range(num_groups)]


_OWN = ("_scheduler", "_num_samples", "kwargs")


class SteppedScheduler:
    """After each update `step` is called with what `engine.step(lr_kwargs)` was given; where it needs one argument and
    got none, that is the number of samples of the step: Megatron's count these.

    Everything else is the scheduler's own.
    """

    def __init__(self, scheduler: Any, num_samples: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._num_samples = num_samples
        self.kwargs: dict[str, Any] = {}

    def step(self) -> None:
        needed = _num_needed(self._scheduler.step)
        if needed and not self.kwargs:
            self._scheduler.step(self._num_samples())
        else:
            self._scheduler.step(**self.kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._scheduler, name, value)


def _num_needed(call: Callable[..., Any]) -> int:
    """How many arguments have no default."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(call).parameters.values()
    return sum(one.kind in named and one.default is inspect.Parameter.empty for one in parameters)
