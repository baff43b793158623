"""Formulas of DeepSpeed's OneCycle and LRRangeTest, of t: optimizer steps already taken.

Both give the update t the value of iteration t; [Note: DeepSpeed's first step] in lr_schedule.py is not for them.
Source: DeepSpeed's lr_schedules.py, arXiv 1803.09820.
"""

import math

from ..config.cycles import LRRangeTestParams, OneCycleParams

_SECOND_BETA = 0.99  # DeepSpeed's, whatever the optimizer's is


def range_test_rate(params: LRRangeTestParams, step: int) -> float:
    """min x (1 + rate x t / size), with a whole t / size on a staircase."""
    interval = step / params.lr_range_test_step_size
    grown = math.floor(interval) if params.lr_range_test_staircase else interval
    return params.lr_range_test_min_lr * (1 + params.lr_range_test_step_rate * grown)


def one_cycle_rate(params: OneCycleParams, step: int) -> float:
    """min + (max - min) x height(t) in the cycle; then min / (1 + rate x (t - size) / decay steps)."""
    low, high = params.cycle_min_lr, params.cycle_max_lr
    if _is_in_cycle(params, step):
        return low + (high - low) * _height(params, step)
    if not params.decay_step_size or not params.decay_lr_rate:
        return low
    return low / (1 + params.decay_lr_rate * _decay_intervals(params, step))


def one_cycle_betas(params: OneCycleParams, step: int) -> tuple[float, float] | None:
    """max - (max - min) x height(t) in the cycle; then max x (1 + rate x (t - size) / decay steps).

    The first update has the minimum, as DeepSpeed sets it when it is made. None: the optimizer's own.
    """
    if not params.cycle_momentum:
        return None
    low, high = params.cycle_min_mom, params.cycle_max_mom
    if step == 0:
        return low, _SECOND_BETA
    if _is_in_cycle(params, step):
        return high - (high - low) * _height(params, step), _SECOND_BETA
    if not params.decay_step_size or not params.decay_mom_rate:
        return high, _SECOND_BETA
    return high * (1 + params.decay_mom_rate * _decay_intervals(params, step)), _SECOND_BETA


def _sizes(params: OneCycleParams) -> tuple[int, int]:
    first, second = params.cycle_first_step_size, params.cycle_second_step_size
    return first, first if second is None else second


def _is_in_cycle(params: OneCycleParams, step: int) -> bool:
    return step <= sum(_sizes(params))


def _decay_intervals(params: OneCycleParams, step: int) -> float:
    return (step - sum(_sizes(params))) / params.decay_step_size


def _height(params: OneCycleParams, step: int) -> float:
    """From 0 to 1 and back; in whole stairs where there are some."""
    first, second = _sizes(params)
    position = step % (first + second)
    is_first = position <= first
    height = position / first if is_first else (first + second - position) / second
    stairs = params.cycle_first_stair_count
    if not is_first and params.cycle_second_stair_count is not None:
        stairs = params.cycle_second_stair_count
    return math.floor(height * stairs + 1e-9) / stairs if stairs else height
