"""The learning rate as a pure function of the number of optimizer steps already taken.

t = optimizer steps already taken, so the first update uses t = 0. w = warmup_num_steps, T = total_num_steps.

[Note: DeepSpeed's first step] DeepSpeed's own types advance after the update, starting from "before the first
iteration", so the updates t = 0 and t = 1 both use iteration i = 0: i = max(t - 1, 0). This is kept, so that an
existing file gives the same learning rate at each update. A skipped update (fp16 overflow) does not advance t.
"""

import math
from typing import Literal

from ..config.cycles import LRRangeTestConfig, OneCycleConfig
from ..config.scheduler import (
    Constant,
    Cosine,
    Linear,
    SchedulerConfig,
    WarmupCosineLRConfig,
    WarmupDecayLRConfig,
    WarmupDecayLRParams,
    WarmupLRConfig,
    WarmupLRParams,
)
from .cycle_schedule import one_cycle_betas, one_cycle_rate, range_test_rate
from .torch_schedule import torch_rate


def learning_rate_at(scheduler: SchedulerConfig, base_lr: float, step: int) -> float:
    """The learning rate of the update after `step` updates; `base_lr` is the optimizer's. Never negative."""
    if isinstance(scheduler, WarmupDecayLRConfig):
        params = scheduler.params
        return _between(params, base_lr, warmup_decay_factor(_iteration(step), params))
    if isinstance(scheduler, WarmupLRConfig):
        return _between(scheduler.params, base_lr, warmup_factor(_iteration(step), scheduler.params))
    if isinstance(scheduler, WarmupCosineLRConfig):
        return base_lr * warmup_cosine_ratio(scheduler, _iteration(step))
    if isinstance(scheduler, OneCycleConfig):
        return one_cycle_rate(scheduler.params, step)
    if isinstance(scheduler, LRRangeTestConfig):
        return range_test_rate(scheduler.params, step)
    if isinstance(scheduler, Constant):
        return base_lr * linear_warmup(step, scheduler.params.warmup_num_steps)
    if isinstance(scheduler, Linear | Cosine):
        return base_lr * decay_ratio(scheduler, step)
    return torch_rate(scheduler, base_lr, step)


def betas_at(scheduler: SchedulerConfig, step: int) -> tuple[float, float] | None:
    """The betas of the update after `step` updates; None: those that the optimizer has."""
    return one_cycle_betas(scheduler.params, step) if isinstance(scheduler, OneCycleConfig) else None


def _iteration(step: int) -> int:
    """See [Note: DeepSpeed's first step]."""
    return max(step - 1, 0)


def _between(params: WarmupLRParams, base_lr: float, factor: float) -> float:
    """min + (max - min) x factor, where a maximum of null is the optimizer's learning rate."""
    peak = base_lr if params.warmup_max_lr is None else params.warmup_max_lr
    return params.warmup_min_lr + (peak - params.warmup_min_lr) * factor


def _warmup(iteration: int, warmup_steps: int, curve: Literal["log", "linear"]) -> float:
    """log: ln(i + 1) / ln(w); linear: i / w. Only for i < w, with w at least 2."""
    if curve == "log":
        return math.log(iteration + 1) / math.log(warmup_steps)
    return iteration / warmup_steps


def warmup_factor(iteration: int, params: WarmupLRParams) -> float:
    """WarmupLR: ln(i + 1) / ln(w) or i / w for i < w, then 1. w is at least 2.

    Source: DeepSpeed's WarmupLR.
    """
    warmup_steps = max(2, params.warmup_num_steps)
    return _warmup(iteration, warmup_steps, params.warmup_type) if iteration < warmup_steps else 1.0


def warmup_decay_factor(iteration: int, params: WarmupDecayLRParams) -> float:
    """WarmupDecayLR: the warm-up of WarmupLR, then max(0, (T - i) / max(1, T - w)).

    Source: DeepSpeed's WarmupDecayLR.
    """
    warmup_steps = max(2, params.warmup_num_steps)
    if iteration < warmup_steps:
        return warmup_factor(iteration, params)
    total_steps = params.total_num_steps
    return max(0.0, (total_steps - iteration) / max(1, total_steps - warmup_steps))


def warmup_cosine_ratio(scheduler: WarmupCosineLRConfig, iteration: int) -> float:
    """r0 + (1 - r0) x warm-up for i < w; then c + (1 - c) x (1 + cos(pi x min(1, (i - w + 1) / max(1, T - w)))) / 2.

    r0 = warmup_min_ratio, c = cos_min_ratio. Source: DeepSpeed's WarmupCosineLR (the update t = 0, for which DeepSpeed
    takes 0 whatever r0 is, takes r0 here).
    """
    params = scheduler.params
    warmup_steps = max(2, params.warmup_num_steps)
    if iteration < warmup_steps:
        factor = _warmup(iteration, warmup_steps, params.warmup_type)
        return params.warmup_min_ratio + (1.0 - params.warmup_min_ratio) * factor
    progress = min(1.0, (iteration - warmup_steps + 1) / max(1, params.total_num_steps - warmup_steps))
    return params.cos_min_ratio + (1.0 - params.cos_min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2


def linear_warmup(step: int, warmup_steps: int) -> float:
    """t / w for t < w, then 1."""
    return step / warmup_steps if step < warmup_steps else 1.0


def decay_ratio(scheduler: Linear | Cosine, step: int) -> float:
    """t / w for t < w; then m + (1 - m) x f(p), with p = min(1, (t - w) / max(1, T - w)) and m = min_ratio.

    linear: f(p) = 1 - p; cosine: f(p) = (1 + cos(pi p)) / 2.
    """
    params = scheduler.params
    if step < params.warmup_num_steps:
        return linear_warmup(step, params.warmup_num_steps)
    decay_steps = max(1, params.total_num_steps - params.warmup_num_steps)
    progress = min(1.0, (step - params.warmup_num_steps) / decay_steps)
    shape = 1.0 - progress if isinstance(scheduler, Linear) else (1.0 + math.cos(math.pi * progress)) / 2
    return params.min_ratio + (1.0 - params.min_ratio) * shape
