"""The config's learning rates as functions of the number of optimizer steps already taken.

t = optimizer steps already taken, so the first update uses t = 0. w = warmup_num_steps, T = total_num_steps. Formulas
of torch's schedulers are in torch; those of DeepSpeed are here (its lr_schedules.py; OneCycle: arXiv 1803.09820).

[Note: DeepSpeed's first step] DeepSpeed's warm-ups advance after the update, starting from "before the first
iteration", so the updates t = 0 and t = 1 both use iteration i = 0: i = max(t - 1, 0). This is kept, so that an
existing file gives the same learning rate at each update. A skipped update (fp16 overflow) does not advance t.
OneCycle and LRRangeTest give the update t the value of iteration t.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler

from ..config.scheduler import (
    ConstantParams,
    DecayParams,
    LRRangeTestParams,
    OneCycleParams,
    SchedulerConfig,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
)

Schedule = Callable[[float, int], float]
"""(learning rate of a parameter group, optimizer steps taken so far) -> the group's learning rate of the next step."""
_SECOND_BETA = 0.99  # DeepSpeed's in a OneCycle, whatever the optimizer's is


def schedule_of(section: SchedulerConfig) -> Schedule:
    """Return the schedule of a config section. Learning rates are never negative."""
    params: Any = section.params
    if isinstance(params, ConstantParams):
        return _after_warmup(section.type, params)
    if section.type == "CosineAnnealingWarmRestarts":
        # Over a length of 1 the closed form of CosineAnnealingLR takes the position in the period as its step.
        length, times, cosine = params.T_0, params.T_mult, _torchs("CosineAnnealingLR", T_max=1, eta_min=params.eta_min)
        return lambda base_lr, step: cosine(base_lr, _share_of_period(length, times, step))
    deepspeeds = _DEEPSPEEDS.get(section.type)
    if deepspeeds is not None:
        return partial(deepspeeds, params)
    return _torchs(section.type, **params.model_dump())


def betas_at(section: SchedulerConfig, step: int) -> tuple[float, float] | None:
    """Return the betas of the update after `step` updates; None: the optimizer's.

    OneCycle: max - (max - min) x height(t) in the cycle; then max x (1 + rate x (t - size) / decay steps). The first
    update has the minimum, as DeepSpeed sets it when it is made.
    """
    params = section.params
    if not isinstance(params, OneCycleParams) or not params.cycle_momentum:
        return None
    low, high = params.cycle_min_mom, params.cycle_max_mom
    if step == 0:
        return low, _SECOND_BETA
    if _is_in_cycle(params, step):
        return high - (high - low) * _height(params, step), _SECOND_BETA
    if not params.decay_step_size or not params.decay_mom_rate:
        return high, _SECOND_BETA
    return high * (1 + params.decay_mom_rate * _decay_intervals(params, step)), _SECOND_BETA


# -- torch's ------------------------------------------------------------------------------------------------------


def _torchs(kind: str, **params: Any) -> Callable[[float, float], float]:
    """Return torch's scheduler in its closed form: a checkpoint may continue at any step, and a skipped update does not
    count.
    """
    # torch's scheduler needs an optimizer, but its closed form reads only the base and the step, which `rate` sets.
    made: Any = getattr(lr_scheduler, kind)(torch.optim.SGD([torch.empty(0)]), **params)

    def rate(base_lr: float, step: float) -> float:
        made.base_lrs, made.last_epoch = [base_lr], step
        return float(made._get_closed_form_lr()[0])

    return rate


def _share_of_period(length: int, times: int, step: int) -> float:
    """Return the position in the period of CosineAnnealingWarmRestarts, from 0 to 1; periods grow by `times`."""
    if times == 1:
        return step % length / length
    while step >= length:
        step, length = step - length, length * times
    return step / length


def _after_warmup(kind: str, params: ConstantParams) -> Schedule:
    """t / w for t < w; then constant, or m + (1 - m) x f(p), with p = min(1, (t - w) / max(1, T - w)), m = min_ratio.

    linear: f(p) = 1 - p; cosine: f(p) = (1 + cos(pi p)) / 2.
    """
    warmup, decay_steps = params.warmup_num_steps, 1
    if not isinstance(params, DecayParams):
        decay = _torchs("ConstantLR", factor=1.0, total_iters=0)
    else:
        decay_steps, end = max(1, params.total_num_steps - warmup), params.min_ratio
        if kind == "linear":
            decay = _torchs("LinearLR", start_factor=1.0, end_factor=end, total_iters=decay_steps)
        else:
            decay = _torchs("CosineAnnealingLR", T_max=decay_steps, eta_min=end)

    def rate(base_lr: float, step: int) -> float:
        # `min`: beyond T_max the cosine would rise again.
        return base_lr * (step / warmup if step < warmup else decay(1.0, min(step - warmup, decay_steps)))

    return rate


# -- DeepSpeed's --------------------------------------------------------------------------------------------------


def _warmup(iteration: int, params: WarmupLRParams | WarmupCosineLRParams) -> float | None:
    """Return ln(i + 1) / ln(w) (log) or i / w (linear) for i < w, with w at least 2; None after the warm-up."""
    # At least 2, as in DeepSpeed: ln(1) = 0 cannot divide.
    warmup_steps = max(2, params.warmup_num_steps)
    if iteration >= warmup_steps:
        return None
    return math.log(iteration + 1) / math.log(warmup_steps) if params.warmup_type == "log" else iteration / warmup_steps


def _warmup_lr(params: WarmupLRParams, base_lr: float, step: int) -> float:
    """Return min + (max - min) x factor. If the maximum is null, it is the optimizer's learning rate.

    WarmupLR: the factor is 1 after the warm-up. WarmupDecayLR: max(0, (T - i) / max(1, T - w)).
    """
    iteration = max(step - 1, 0)  # see [Note: DeepSpeed's first step]
    factor = _warmup(iteration, params)
    if factor is None:
        factor = 1.0
        if isinstance(params, WarmupDecayLRParams):
            decay_steps = max(1, params.total_num_steps - max(2, params.warmup_num_steps))
            factor = max(0.0, (params.total_num_steps - iteration) / decay_steps)
    peak = base_lr if params.warmup_max_lr is None else params.warmup_max_lr
    return params.warmup_min_lr + (peak - params.warmup_min_lr) * factor


def _warmup_cosine_lr(params: WarmupCosineLRParams, base_lr: float, step: int) -> float:
    """r0 + (1 - r0) x warm-up for i < w; then c + (1 - c) x (1 + cos(pi x min(1, (i - w + 1) / max(1, T - w)))) / 2.

    r0 = warmup_min_ratio, c = cos_min_ratio. The update t = 0 takes 0 for any r0, as in DeepSpeed.
    """
    if step == 0:
        return 0.0
    iteration = step - 1  # see [Note: DeepSpeed's first step]
    low, factor = params.warmup_min_ratio, _warmup(iteration, params)
    if factor is None:
        warmup_steps = max(2, params.warmup_num_steps)
        progress = min(1.0, (iteration - warmup_steps + 1) / max(1, params.total_num_steps - warmup_steps))
        low, factor = params.cos_min_ratio, (1.0 + math.cos(math.pi * progress)) / 2
    return base_lr * (low + (1.0 - low) * factor)


def _range_test(params: LRRangeTestParams, base_lr: float, step: int) -> float:
    """min x (1 + rate x t / size), with a whole t / size on a staircase."""
    interval = step / params.lr_range_test_step_size
    grown = math.floor(interval) if params.lr_range_test_staircase else interval
    return params.lr_range_test_min_lr * (1 + params.lr_range_test_step_rate * grown)


def _one_cycle(params: OneCycleParams, base_lr: float, step: int) -> float:
    """min + (max - min) x height(t) in the cycle; then min / (1 + rate x (t - size) / decay steps)."""
    low, high = params.cycle_min_lr, params.cycle_max_lr
    if _is_in_cycle(params, step):
        return low + (high - low) * _height(params, step)
    if not params.decay_step_size or not params.decay_lr_rate:
        return low
    return low / (1 + params.decay_lr_rate * _decay_intervals(params, step))


def _sizes(params: OneCycleParams) -> tuple[int, int]:
    first, second = params.cycle_first_step_size, params.cycle_second_step_size
    return first, first if second is None else second


def _is_in_cycle(params: OneCycleParams, step: int) -> bool:
    return step <= sum(_sizes(params))


def _decay_intervals(params: OneCycleParams, step: int) -> float:
    return (step - sum(_sizes(params))) / params.decay_step_size


def _height(params: OneCycleParams, step: int) -> float:
    """Return the height in the cycle: from 0 to 1 and back; in stairs if the config has a stair count."""
    first, second = _sizes(params)
    position = step % (first + second)
    is_first = position <= first
    height = position / first if is_first else (first + second - position) / second
    stairs = params.cycle_first_stair_count
    if not is_first and params.cycle_second_stair_count is not None:
        stairs = params.cycle_second_stair_count
    # 1e-9: rounding may leave a whole number of stairs just below it.
    return math.floor(height * stairs + 1e-9) / stairs if stairs else height


_DEEPSPEEDS: dict[str, Callable[[Any, float, int], float]] = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
