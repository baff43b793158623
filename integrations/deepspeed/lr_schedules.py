"""`deepspeed.runtime.lr_schedules`: the config's schedulers as objects over an optimizer.

`engine/step/lr_schedule.py` has the formulas. Iterations count from 0. Before the first `step()` the iteration is -1,
and the update at that time uses iteration 0: see its [Note: DeepSpeed's first step].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

from torch import Tensor

from ..engine.config.config import Config
from ..engine.config.scheduler import SCHEDULER_PARAMS
from ..engine.step.lr_schedule import betas_at, schedule_of


class Scheduler:
    """Set the learning rates of an optimizer's groups for each iteration.

    The arguments are those of the config's section, in DeepSpeed's order. A rate or a momentum may be a list with a
    number for each group. The parameters of the first group are attributes too.
    """

    kind: ClassVar[str]
    defaults: ClassVar[dict[str, Any]] = {}  # DeepSpeed's, if they differ from the config's
    optimizer: Any

    def __init__(self, optimizer: Any, *args: Any, last_batch_iteration: int = -1, **params: Any) -> None:
        """Raises ConfigError for an illegal value, ValueError for a list of the wrong length."""
        fields = sorted(SCHEDULER_PARAMS[self.kind].model_fields, key=lambda name: name != "total_num_steps")
        order = [*fields, "last_batch_iteration"]
        if len(args) > len(order) or (given := set(order[: len(args)]) & params.keys()):
            found = f"{len(args)} by position" if len(args) > len(order) else f"{min(given)} twice"
            raise TypeError(f"{self.kind}: expected each of {', '.join(order)} once, found {found}")
        params = {**self.defaults, **dict(zip(order, args, strict=False)), **params}
        self.last_batch_iteration = params.pop("last_batch_iteration", last_batch_iteration)
        sections = [
            Config.load({"scheduler": {"type": self.kind, "params": values}}).scheduler
            for values in _by_group(params, len(optimizer.param_groups))
        ]
        self._begin(optimizer, sections)

    @classmethod
    def over(cls, optimizer: Any, section: Any) -> Scheduler:
        """Make the scheduler of a checked config section."""
        made = cls.__new__(cls)
        made.last_batch_iteration = -1
        made._begin(optimizer, [section] * len(optimizer.param_groups))
        return made

    def _begin(self, optimizer: Any, sections: list[Any]) -> None:
        self.optimizer = optimizer
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._sections = sections
        self._schedules = [schedule_of(section) for section in sections]
        # A scheduler that continues sets rates with its next `step`, as in DeepSpeed.
        if self.last_batch_iteration == -1:
            self._apply()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in type(self._sections[0].params).model_fields:
            raise AttributeError(f"{self.kind} has no attribute '{name}'")
        return getattr(self._sections[0].params, name)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at the last iteration."""
        return [
            schedule(base, self.last_batch_iteration + 1)
            for schedule, base in zip(self._schedules, self._base_lrs, strict=True)
        ]

    def get_lr_ratio(self) -> float:
        """Return the ratio of the rate of a WarmupCosineLR to the optimizer's, at the last iteration."""
        return self._schedules[0](1.0, self.last_batch_iteration + 1)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group at the last iteration of a OneCycle; None without cycle_momentum.

        Before the first step it returns the maxima, though the groups have the minima, as in DeepSpeed.
        """
        step = self.last_batch_iteration + 1
        found = [(betas_at(section, step), section.params.cycle_max_mom) for section in self._sections]
        return [(betas[0] if step else most, betas[1]) for betas, most in found if betas is not None] or None

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Move to the next or the given iteration."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Restore the iteration. As in DeepSpeed, its learning rates are set by the next `step`."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr, section in zip(self.optimizer.param_groups, self._last_lr, self._sections, strict=True):
            if isinstance(group["lr"], Tensor):
                # In place: a captured graph or a compiled step reads this tensor.
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            betas = betas_at(section, self.last_batch_iteration + 1)
            if betas is not None and "betas" in group:
                group["betas"] = betas


_KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # docstring, and DeepSpeed's defaults that differ from the config's
    "WarmupLR": ("Warm up from the minimum to the maximum (None: the optimizer's rate), then stay constant.", {}),
    "WarmupDecayLR": ("Warm up, then decay linearly to 0.", {"warmup_max_lr": 0.001}),
    "WarmupCosineLR": ("Warm up, then follow half a cosine, as ratios of the optimizer's learning rates.", {}),
    "OneCycle": ('Follow `scheduler` "OneCycle" of the config. Sets the `betas` of the groups too.', {}),
    "LRRangeTest": ('Follow `scheduler` "LRRangeTest" of the config.', {}),
}
VALID_LR_SCHEDULES = sorted(_KINDS)


@cache
def class_of(kind: str) -> type[Scheduler]:
    """Return the class of a schedule. DeepSpeed has classes for those of `_KINDS`."""
    text, defaults = _KINDS.get(kind, ("", {}))
    return type(kind, (Scheduler,), {"kind": kind, "defaults": defaults, "__doc__": text, "__module__": __name__})


WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest = map(class_of, _KINDS)


def scheduler_of(section: Any, optimizer: Any) -> Scheduler:
    """Make the scheduler of a checked `scheduler` section over this optimizer."""
    return class_of(section.type).over(optimizer, section)


def _by_group(params: Mapping[str, Any], num_groups: int) -> list[dict[str, Any]]:
    """Return the parameters of each group. A list has a number for each group."""
    lists = {key: value for key, value in params.items() if isinstance(value, (list, tuple))}
    for key, value in lists.items():
        if len(value) != num_groups:
            raise ValueError(f"{key}: expected a number for each of {num_groups} groups, found {len(value)}")
    return [{**params, **{key: value[index] for key, value in lists.items()}} for index in range(num_groups)]


_OWN = ("_scheduler", "_num_samples", "kwargs")


class SteppedScheduler:
    """Call a scheduler's `step` after each update with the arguments of `engine.step(lr_kwargs)`.

    If `step` needs an argument and got none, it gets the samples of the step: Megatron's schedulers count these.
    All remaining attributes are the scheduler's.
    """

    def __init__(self, scheduler: Any, num_samples: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._num_samples = num_samples
        self.kwargs: dict[str, Any] = {}

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Open a context in which a load of a checkpoint finds no scheduler, so it leaves the schedule as it is."""
        scheduler, self._scheduler = self._scheduler, None
        try:
            yield
        finally:
            self._scheduler = scheduler

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
    """Return the number of arguments without a default."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(call).parameters.values()
    return sum(param.kind in named and param.default is inspect.Parameter.empty for param in parameters)
