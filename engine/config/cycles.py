"""Scheduler types of DeepSpeed that go up and down, or only up: OneCycle and LRRangeTest. See lr_schedule.py."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ...configs.section import Bool, Float, Natural, NonNegative, Positive, Section


def _one_value(value: Any) -> Any:
    """DeepSpeed takes a list with a value for each parameter group; here are as many groups as values: one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


_Rate = Annotated[NonNegative, BeforeValidator(_one_value)]
_Momentum = Annotated[Float, BeforeValidator(_one_value), Field(ge=0, lt=1)]


class OneCycleParams(Section):
    """DeepSpeed's OneCycle: from the minimum to the maximum and back, then decay; the first beta goes against it."""

    cycle_min_lr: _Rate
    """Learning rate at the start and the end of the cycle. Must be given."""
    cycle_max_lr: _Rate
    """Learning rate in the middle of the cycle. Must be given."""
    decay_lr_rate: NonNegative = 0.0
    """Behind the cycle: the minimum over 1 + this x decay steps. 0: the minimum."""
    cycle_first_step_size: Positive = 2000
    """Steps of the first half of the cycle."""
    cycle_second_step_size: Natural | None = None
    """Steps of the second half. null: as the first."""
    cycle_first_stair_count: Natural = 0
    """Stairs in which the first half goes. 0: each step."""
    cycle_second_stair_count: Natural | None = None
    """Stairs of the second half. null: as the first."""
    decay_step_size: Natural = 0
    """Steps of one decay step. 0: no decay."""
    cycle_momentum: Bool = True
    """Whether the first of an optimizer's `betas` moves too; the second is 0.99 then, as in DeepSpeed."""
    cycle_min_mom: _Momentum = 0.8
    """The first beta in the middle of the cycle, and of the first update."""
    cycle_max_mom: _Momentum = 0.9
    """The first beta at the end of the cycle."""
    decay_mom_rate: NonNegative = 0.0
    """Behind the cycle: the maximum x (1 + this x decay steps)."""


class LRRangeTestParams(Section):
    """DeepSpeed's LRRangeTest: a rate that only grows, to find the largest one that trains."""

    lr_range_test_min_lr: _Rate = 1e-3
    """Learning rate of the first update."""
    lr_range_test_step_size: Positive = 2000
    """Steps in which it grows by step_rate x the minimum."""
    lr_range_test_step_rate: Float = Field(default=1.0, ge=0)
    """Growth of one step size, as a multiple of the minimum."""
    lr_range_test_staircase: Bool = False
    """Whether it grows only at the end of each step size."""


class OneCycleConfig(Section):
    """See OneCycleParams."""

    type: Literal["OneCycle"] = "OneCycle"
    params: OneCycleParams


class LRRangeTestConfig(Section):
    """See LRRangeTestParams."""

    type: Literal["LRRangeTest"] = "LRRangeTest"
    params: LRRangeTestParams = LRRangeTestParams()
