"""The scheduler section: one closed set of parameters for each type. The formulas are in lr_schedule.py."""

from typing import Literal

from pydantic import Field

from ...configs.section import Float, Int, NonNegative, Section
from .cycles import LRRangeTestConfig, LRRangeTestParams, OneCycleConfig, OneCycleParams
from .errors import Fault, did_you_mean, shown
from .torch_schedulers import NOT_BY_STEPS, TORCH_SCHEDULERS, TorchScheduler


class WarmupLRParams(Section):
    """DeepSpeed's WarmupLR: from the minimum to the maximum, then constant."""

    warmup_min_lr: Float = Field(default=0.0, ge=0)
    """Learning rate at the start of the warm-up."""
    warmup_max_lr: NonNegative | None = None
    """Learning rate at the end of the warm-up. null: the optimizer's."""
    warmup_num_steps: Int = Field(default=1000, ge=1)
    """Steps of the warm-up; 1 is taken as 2."""
    warmup_type: Literal["log", "linear"] = "log"
    """The curve of the warm-up."""


class WarmupDecayLRParams(WarmupLRParams):
    """DeepSpeed's WarmupDecayLR: warm-up, then linear decay to 0."""

    total_num_steps: Int = Field(ge=1)
    """Steps of the whole training. Must be given."""


class WarmupCosineLRParams(Section):
    """DeepSpeed's WarmupCosineLR: warm-up, then half a cosine, as ratios of the optimizer's learning rate."""

    total_num_steps: Int = Field(ge=1)
    """Steps of the whole training. Must be given."""
    warmup_min_ratio: Float = Field(default=0.0, ge=0)
    """Ratio at the start of the warm-up."""
    warmup_num_steps: Int = Field(default=1000, ge=1)
    """Steps of the warm-up; 1 is taken as 2."""
    cos_min_ratio: Float = Field(default=1e-4, ge=0)
    """Ratio at the end."""
    warmup_type: Literal["log", "linear"] = "log"
    """The curve of the warm-up."""


class ConstantParams(Section):
    """Linear warm-up from 0, then the optimizer's learning rate."""

    warmup_num_steps: Int = Field(default=0, ge=0)
    """Steps of the warm-up."""


class DecayParams(ConstantParams):
    """Linear warm-up from 0, then decay to `min_ratio` of the optimizer's learning rate."""

    total_num_steps: Int = Field(ge=1)
    """Steps of the whole training. Must be given."""
    min_ratio: Float = Field(default=0.0, ge=0, le=1)
    """The ratio of the optimizer's learning rate that is reached at the end."""


class WarmupLRConfig(Section):
    """See WarmupLRParams."""

    type: Literal["WarmupLR"] = "WarmupLR"
    params: WarmupLRParams = WarmupLRParams()


class WarmupDecayLRConfig(Section):
    """See WarmupDecayLRParams."""

    type: Literal["WarmupDecayLR"] = "WarmupDecayLR"
    params: WarmupDecayLRParams


class WarmupCosineLRConfig(Section):
    """See WarmupCosineLRParams."""

    type: Literal["WarmupCosineLR"] = "WarmupCosineLR"
    params: WarmupCosineLRParams


class Constant(Section):
    """See ConstantParams."""

    type: Literal["constant"] = "constant"
    params: ConstantParams = ConstantParams()


class Linear(Section):
    """See DecayParams; the decay is a straight line."""

    type: Literal["linear"] = "linear"
    params: DecayParams


class Cosine(Section):
    """See DecayParams; the decay is half a cosine."""

    type: Literal["cosine"] = "cosine"
    params: DecayParams


SchedulerConfig = (
    WarmupLRConfig
    | WarmupDecayLRConfig
    | WarmupCosineLRConfig
    | OneCycleConfig
    | LRRangeTestConfig
    | Constant
    | Linear
    | Cosine
    | TorchScheduler
)
SCHEDULER_PARAMS: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
    "constant": ConstantParams,
    "linear": DecayParams,
    "cosine": DecayParams,
    **TORCH_SCHEDULERS,
}
SCHEDULERS = tuple(SCHEDULER_PARAMS)


def canonical_scheduler(section: dict[str, object]) -> tuple[dict[str, object] | None, list[Fault]]:
    """The section with the type's one spelling, or its faults (then there is no section)."""
    written = section.get("type")
    if not isinstance(written, str):
        kind: Literal["type", "missing"] = "type" if "type" in section else "missing"
        found = f", found {shown(written)}" if "type" in section else ""
        return None, [Fault("scheduler.type", kind, f"expected one of {', '.join(SCHEDULERS)}{found}")]
    names = {name.lower(): name for name in SCHEDULERS}
    if written.lower() not in names:
        reason = {name.lower(): why for name, why in NOT_BY_STEPS.items()}.get(written.lower())
        what = (
            f"{shown(written)} is not supported yet: {reason}"
            if reason is not None
            else f"unknown scheduler {shown(written)}{did_you_mean(written, SCHEDULERS)}"
        )
        fix = f"there is {', '.join(SCHEDULERS)}; or pass your own lr_scheduler to initialize"
        return None, [Fault("scheduler.type", "value" if reason is None else "unsupported", f"{what}; {fix}")]
    return {"params": {}, **section, "type": names[written.lower()]}, []
