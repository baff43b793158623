"""What scripts import as `deepspeed.runtime.lr_schedules`: the schedulers of the config, as objects over an optimizer.

The formulas are those of `engine/lr_schedule.py`. Iterations count from 0; before the first `step()` there is none,
which the update at that time takes for iteration 0: [Note: DeepSpeed's first step] there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import TypeAdapter

from ..engine.config.scheduler import SCHEDULER_PARAMS, SchedulerConfig
from ..engine.lr_schedule import betas_at, learning_rate_at

LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

_SECTION: TypeAdapter[Any] = TypeAdapter(SchedulerConfig)


class Scheduler:
    """Sets the learning rates of an optimizer's groups, iteration by iteration."""

    kind: ClassVar[str]
    optimizer: Any

    @classmethod
    def over(cls, optimizer: Any, params: Mapping[str, Any]) -> Scheduler:
        """With all parameters of the config's section."""
        made = cls.__new__(cls)
        made._begin(optimizer, params, -1)
        return made

    def _begin(self, optimizer: Any, params: Mapping[str, Any], last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._sections = [
            _SECTION.validate_python({"type": self.kind, "params": _of_group(params, index, len(self._base_lrs))})
            for index in range(len(self._base_lrs))
        ]
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._apply()

    def get_lr(self) -> list[float]:
        """Of each group, at the last iteration."""
        return [
            learning_rate_at(section, base, self.last_batch_iteration + 1)
            for section, base in zip(self._sections, self._base_lrs, strict=True)
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
            group["lr"] = lr
            betas = betas_at(section, self.last_batch_iteration + 1)
            if betas is not None and "betas" in group:
                group["betas"] = betas


class WarmupLR(Scheduler):
    """From the minimum to the maximum (None: the optimizer's), then constant."""

    kind = WARMUP_LR

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        params = {
            "warmup_min_lr": warmup_min_lr,
            "warmup_max_lr": warmup_max_lr,
            "warmup_num_steps": warmup_num_steps,
            "warmup_type": warmup_type,
        }
        self._begin(optimizer, params, last_batch_iteration)


class WarmupDecayLR(Scheduler):
    """Warm-up, then a straight line to 0."""

    kind = WARMUP_DECAY_LR

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        params = {
            "total_num_steps": total_num_steps,
            "warmup_min_lr": warmup_min_lr,
            "warmup_max_lr": warmup_max_lr,
            "warmup_num_steps": warmup_num_steps,
            "warmup_type": warmup_type,
        }
        self._begin(optimizer, params, last_batch_iteration)


class WarmupCosineLR(Scheduler):
    """Warm-up, then half a cosine, as ratios of the optimizer's learning rates."""

    kind = WARMUP_COSINE_LR

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        params = {
            "total_num_steps": total_num_steps,
            "warmup_min_ratio": warmup_min_ratio,
            "warmup_num_steps": warmup_num_steps,
            "cos_min_ratio": cos_min_ratio,
            "warmup_type": warmup_type,
        }
        self._begin(optimizer, params, last_batch_iteration)


class _ByParams(Scheduler):
    """Of which the config knows the parameters."""

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1, **params: Any) -> None:
        if self.kind not in SCHEDULER_PARAMS:
            raise NotImplementedError(
                f"{self.kind}: expected one of {', '.join(SCHEDULER_PARAMS)}, or a scheduler of torch's"
            )
        self._begin(optimizer, params, last_batch_iteration)


class OneCycle(_ByParams):
    """See `scheduler` in the config. It sets the `betas` of the optimizer's groups too."""

    kind = ONE_CYCLE

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group, as they were set last; None without cycle_momentum."""
        if not self._sections[0].params.cycle_momentum:
            return None
        return [group["betas"] for group in self.optimizer.param_groups]


class LRRangeTest(_ByParams):
    """See `scheduler` in the config."""

    kind = LR_RANGE_TEST


CLASSES: dict[str, type[Scheduler]] = {
    one.kind: one for one in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def scheduler_of(section: Any, optimizer: Any) -> Scheduler:
    """What the config's `scheduler` is over this optimizer. section: checked."""
    kind: str = section.type
    made: type[Scheduler] = CLASSES.get(kind) or type(kind, (Scheduler,), {"kind": kind})
    return made.over(optimizer, section.params.model_dump())


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """The learning rate that such a section ends its warm-up with, or None and why not."""
    if "type" not in config or "params" not in config:
        return None, "a scheduler needs a type and params"
    params = config["params"]
    keys = {LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}
    return params[keys.get(config["type"], "warmup_max_lr")], ""


def _of_group(params: Mapping[str, Any], index: int, num_groups: int) -> dict[str, Any]:
    """The parameters with one number for each that is given as a list, by group."""
    found = {}
    for key, value in params.items():
        if isinstance(value, (list, tuple)) and key.endswith("_lr"):
            if len(value) != num_groups:
                raise ValueError(f"{key}: expected a number for each of {num_groups} groups, found {len(value)}")
            value = value[index]
        found[key] = value
    return found
