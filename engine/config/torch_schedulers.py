"""Scheduler types of torch, which DeepSpeed takes by their names too. See lr_schedule.py.

Those whose rate follows from the number of updates alone. Source of names and defaults: torch.optim.lr_scheduler.
"""

from typing import Literal

from pydantic import Field

from ...configs.section import Float, Natural, NonNegative, Positive, Section


class StepLRParams(Section):
    """torch's StepLR: times gamma every few steps."""

    step_size: Positive
    """Steps between two decays. Must be given."""
    gamma: NonNegative = 0.1
    """Factor of a decay."""


class MultiStepLRParams(Section):
    """torch's MultiStepLR: times gamma at each milestone."""

    milestones: tuple[Natural, ...]
    """Steps from which on it is smaller. Must be given."""
    gamma: NonNegative = 0.1
    """Factor of a decay."""


class ExponentialLRParams(Section):
    """torch's ExponentialLR: times gamma each step."""

    gamma: NonNegative
    """Factor of a step. Must be given."""


class CosineAnnealingLRParams(Section):
    """torch's CosineAnnealingLR: half a cosine down, and up again."""

    T_max: Positive
    """Steps of half a cosine. Must be given."""
    eta_min: NonNegative = 0.0
    """The smallest learning rate."""


class CosineAnnealingWarmRestartsParams(Section):
    """torch's CosineAnnealingWarmRestarts: half a cosine down, then from the top again."""

    T_0: Positive
    """Steps to the first restart. Must be given."""
    T_mult: Positive = 1
    """Each period has so many times the steps of the one before."""
    eta_min: NonNegative = 0.0
    """The smallest learning rate."""


class LinearLRParams(Section):
    """torch's LinearLR: a straight line between two factors."""

    start_factor: Float = Field(default=1.0 / 3, gt=0, le=1)
    """Factor of the first update."""
    end_factor: Float = Field(default=1.0, ge=0, le=1)
    """Factor from step total_iters on."""
    total_iters: Positive = 5
    """Steps of the line."""


class ConstantLRParams(Section):
    """torch's ConstantLR: a factor for the first steps."""

    factor: Float = Field(default=1.0 / 3, ge=0, le=1)
    """Factor of the first steps."""
    total_iters: Natural = 5
    """How many these are."""


class PolynomialLRParams(Section):
    """torch's PolynomialLR: (1 - t / total_iters) to a power."""

    total_iters: Positive = 5
    """Steps until it is 0."""
    power: NonNegative = 1.0
    """The power."""


class StepLR(Section):
    """See StepLRParams."""

    type: Literal["StepLR"] = "StepLR"
    params: StepLRParams


class MultiStepLR(Section):
    """See MultiStepLRParams."""

    type: Literal["MultiStepLR"] = "MultiStepLR"
    params: MultiStepLRParams


class ExponentialLR(Section):
    """See ExponentialLRParams."""

    type: Literal["ExponentialLR"] = "ExponentialLR"
    params: ExponentialLRParams


class CosineAnnealingLR(Section):
    """See CosineAnnealingLRParams."""

    type: Literal["CosineAnnealingLR"] = "CosineAnnealingLR"
    params: CosineAnnealingLRParams


class CosineAnnealingWarmRestarts(Section):
    """See CosineAnnealingWarmRestartsParams."""

    type: Literal["CosineAnnealingWarmRestarts"] = "CosineAnnealingWarmRestarts"
    params: CosineAnnealingWarmRestartsParams


class LinearLR(Section):
    """See LinearLRParams."""

    type: Literal["LinearLR"] = "LinearLR"
    params: LinearLRParams = LinearLRParams()


class ConstantLR(Section):
    """See ConstantLRParams."""

    type: Literal["ConstantLR"] = "ConstantLR"
    params: ConstantLRParams = ConstantLRParams()


class PolynomialLR(Section):
    """See PolynomialLRParams."""

    type: Literal["PolynomialLR"] = "PolynomialLR"
    params: PolynomialLRParams = PolynomialLRParams()


TorchScheduler = (
    StepLR
    | MultiStepLR
    | ExponentialLR
    | CosineAnnealingLR
    | CosineAnnealingWarmRestarts
    | LinearLR
    | ConstantLR
    | PolynomialLR
)
TORCH_SCHEDULERS: dict[str, type[Section]] = {  # type: its params
    "StepLR": StepLRParams,
    "MultiStepLR": MultiStepLRParams,
    "ExponentialLR": ExponentialLRParams,
    "CosineAnnealingLR": CosineAnnealingLRParams,
    "CosineAnnealingWarmRestarts": CosineAnnealingWarmRestartsParams,
    "LinearLR": LinearLRParams,
    "ConstantLR": ConstantLRParams,
    "PolynomialLR": PolynomialLRParams,
}
NOT_BY_STEPS = {  # why it is not among these
    "ReduceLROnPlateau": "it needs a metric",
    "LambdaLR": "it needs a function",
    "MultiplicativeLR": "it needs a function",
    "OneCycleLR": "there is OneCycle",
    "CyclicLR": "there is OneCycle",
    "SequentialLR": "it needs schedulers",
    "ChainedScheduler": "it needs schedulers",
}
