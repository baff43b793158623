"""The section `scheduler`: parameters for each type. `engine/step/lr_schedule.py` has the formulas.

torch's schedulers are those whose rate depends only on the number of updates, with torch's names and defaults.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationInfo, field_validator

from ...configs.section import Bool, Float, Int, Key, Natural, NonNegative, Positive, Section, section_of
from .errors import ConfigSection, Fault, did_you_mean, quoted, type_in


class WarmupLRParams(Section):
    """DeepSpeed's WarmupLR: from the minimum to the maximum, then constant."""

    warmup_min_lr: Float = Field(default=0.0, ge=0)
    """Learning rate at the start of warm-up."""
    warmup_max_lr: NonNegative | None = None
    """Learning rate at the end of warm-up. null: the optimizer's."""
    warmup_num_steps: Int = Field(default=1000, ge=1)
    """Steps of warm-up; 1 counts as 2."""
    warmup_type: Literal["log", "linear"] = "log"
    """Curve of warm-up: "log" or "linear"."""


class WarmupDecayLRParams(WarmupLRParams):
    """DeepSpeed's WarmupDecayLR: warm-up, then linear decay to 0."""

    total_num_steps: Int = Field(ge=1)
    """Steps of the whole training."""


class WarmupCosineLRParams(Section):
    """DeepSpeed's WarmupCosineLR: warm-up, then half a cosine, as ratios of the optimizer's learning rate."""

    total_num_steps: Int = Field(ge=1)
    """Steps of the whole training."""
    warmup_min_ratio: Float = Field(default=0.0, ge=0)
    """Learning rate at the start of warm-up, as a ratio of the optimizer's."""
    warmup_num_steps: Int = Field(default=1000, ge=1)
    """Steps of warm-up; 1 counts as 2."""
    cos_min_ratio: Float = Field(default=1e-4, ge=0)
    """Learning rate at the end, as a ratio of the optimizer's."""
    warmup_type: Literal["log", "linear"] = "log"
    """Curve of warm-up: "log" or "linear"."""


class ConstantParams(Section):
    """Linear warm-up from 0, then the optimizer's learning rate."""

    warmup_num_steps: Int = Field(default=0, ge=0)
    """Steps of warm-up."""


class DecayParams(ConstantParams):
    """Linear warm-up from 0, then decay to `min_ratio` of the optimizer's learning rate."""

    total_num_steps: Int = Field(ge=1)
    """Steps of the whole training."""
    min_ratio: Float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a ratio of the optimizer's."""


def _one_value(value: Any) -> Any:
    """Unwrap DeepSpeed's list with a value for each parameter group, if it has a single value."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


_Rate = Annotated[NonNegative, BeforeValidator(_one_value)]
_Momentum = Annotated[Float, BeforeValidator(_one_value), Field(ge=0, lt=1)]


class OneCycleParams(Section):
    """DeepSpeed's OneCycle: from the minimum to the maximum and back, then decay. The first beta moves in the opposite
    direction.
    """

    cycle_min_lr: _Rate
    """Learning rate at the start and end of the cycle."""
    cycle_max_lr: _Rate
    """Learning rate in the middle of the cycle."""
    decay_lr_rate: NonNegative = 0.0
    """After the cycle: minimum / (1 + this x decay steps). 0: the minimum."""
    cycle_first_step_size: Positive = 2000
    """Steps of the first half."""
    cycle_second_step_size: Natural | None = None
    """Steps of the second half. null: as the first."""
    cycle_first_stair_count: Natural = 0
    """Stairs of the first half. 0: smooth."""
    cycle_second_stair_count: Natural | None = None
    """Stairs of the second half. null: as the first."""
    decay_step_size: Natural = 0
    """Steps of a decay step. 0: no decay."""
    cycle_momentum: Bool = True
    """Also move the first of `betas`; the second is then 0.99, as in DeepSpeed."""
    cycle_min_mom: _Momentum = 0.8
    """First beta in the middle of the cycle, and in the first update."""
    cycle_max_mom: _Momentum = 0.9
    """First beta at the end of the cycle."""
    decay_mom_rate: NonNegative = 0.0
    """After the cycle: maximum x (1 + this x decay steps)."""


class LRRangeTestParams(Section):
    """DeepSpeed's LRRangeTest: a growing rate, to find the largest one that trains."""

    lr_range_test_min_lr: _Rate = 1e-3
    """Learning rate of the first update."""
    lr_range_test_step_size: Positive = 2000
    """Steps of an interval."""
    lr_range_test_step_rate: Float = Field(default=1.0, ge=0)
    """Growth per interval, as a multiple of the minimum."""
    lr_range_test_staircase: Bool = False
    """Grow only at the end of each interval."""


_GAMMA: Key = (NonNegative, 0.1, "Factor of the learning rate at each decay.")
_ETA_MIN: Key = (NonNegative, 0.0, "Smallest learning rate.")
_Steps = tuple[Natural, ...]
_Factor = Annotated[Float, Field(gt=0, le=1)]
_Share = Annotated[NonNegative, Field(le=1)]
_TORCHS: dict[str, tuple[str, dict[str, Key]]] = {
    "StepLR": (
        "times gamma every `step_size` steps",
        {"step_size": (Positive, ..., "Steps between decays."), "gamma": _GAMMA},
    ),
    "MultiStepLR": (
        "times gamma at each milestone",
        {"milestones": (_Steps, ..., "Steps of the decays."), "gamma": _GAMMA},
    ),
    "ExponentialLR": (
        "times gamma each step",
        {"gamma": (NonNegative, ..., "Factor of the learning rate at each decay.")},
    ),
    "CosineAnnealingLR": (
        "half a cosine down, and up again",
        {"T_max": (Positive, ..., "Steps of half a cosine."), "eta_min": _ETA_MIN},
    ),
    "CosineAnnealingWarmRestarts": (
        "half a cosine down, then from the top again",
        {
            "T_0": (Positive, ..., "Steps to the first restart."),
            "T_mult": (Positive, 1, "Growth factor of the periods."),
            "eta_min": _ETA_MIN,
        },
    ),
    "LinearLR": (
        "a straight line between two factors",
        {
            "start_factor": (_Factor, 1.0 / 3, "Factor of the first update."),
            "end_factor": (_Share, 1.0, "Factor from total_iters on."),
            "total_iters": (Positive, 5, "Number of steps with a factor."),
        },
    ),
    "ConstantLR": (
        "a factor for the first steps",
        {
            "factor": (_Share, 1.0 / 3, "Factor of the first steps."),
            "total_iters": (Natural, 5, "Number of steps with a factor."),
        },
    ),
    "PolynomialLR": (
        "(1 - t / total_iters) to a power",
        {
            "total_iters": (Positive, 5, "Steps until the rate is 0."),
            "power": (NonNegative, 1.0, "Power of 1 - t / total_iters."),
        },
    ),
}

SCHEDULER_PARAMS: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
    "constant": ConstantParams,
    "linear": DecayParams,
    "cosine": DecayParams,
    **{name: section_of(f"{name}Params", f"torch's {name}: {text}.", keys) for name, (text, keys) in _TORCHS.items()},
}
SCHEDULERS = tuple(SCHEDULER_PARAMS)
NOT_BY_STEPS = {  # name -> why it is not among these
    "ReduceLROnPlateau": "it needs a metric",
    "LambdaLR": "it needs a function",
    "MultiplicativeLR": "it needs a function",
    "OneCycleLR": "there is OneCycle",
    "CyclicLR": "there is OneCycle",
    "SequentialLR": "it needs schedulers",
    "ChainedScheduler": "it needs schedulers",
}


class SchedulerConfig(ConfigSection):
    """The scheduler and its parameters."""

    # Before `params`: its validator reads the type.
    type: str
    params: SerializeAsAny[Section]

    @field_validator("params", mode="before")
    @classmethod
    def _of_its_type(cls, value: object, info: ValidationInfo) -> object:
        # The type is known: `canonical_scheduler` refuses unknown types before a Config is made.
        return SCHEDULER_PARAMS[info.data["type"]].model_validate(value)


def canonical_scheduler(section: dict[str, object]) -> tuple[dict[str, object] | None, list[str], list[Fault]]:
    """Return the section with our spelling of the type, no notes, and faults (then without a section)."""
    written = type_in(section, "scheduler", SCHEDULERS)
    if isinstance(written, Fault):
        return None, [], [written]
    names = {name.lower(): name for name in SCHEDULERS}
    if written.lower() not in names:
        expected = f"expected {', '.join(SCHEDULERS)}, or an lr_scheduler passed to initialize"
        reason = {name.lower(): why for name, why in NOT_BY_STEPS.items()}.get(written.lower())
        if reason is not None:
            text = f"{quoted(written)} is not supported yet: {reason}; {expected}"
            return None, [], [Fault("scheduler.type", "unsupported", text)]
        text = f"unknown scheduler {quoted(written)}; {expected}{did_you_mean(written, SCHEDULERS)}"
        return None, [], [Fault("scheduler.type", "value", text)]
    return {"params": {}, **section, "type": names[written.lower()]}, [], []
