"""Adam and LAMB whose ranks send one bit for each element: 1-bit Adam, 0/1 Adam, 1-bit LAMB.

Sources: arXiv 2102.02888, 2202.06009 and 2104.06069; defaults, and what is kept out of the formulas (corrections of
the moments' first steps), as in DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ..configs.section import Float, Natural, Positive
from .optimizer import Beta, Optimizer, OptimizerParams, Options, Signs, State

if TYPE_CHECKING:
    from torch import Tensor


class _SignParams(OptimizerParams):
    lr: Float = Field(default=1e-3, ge=0)
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running mean of the gradient and of its square."""
    eps: Float = Field(default=1e-8, ge=0)
    """Added to the denominator."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """Decay of the parameters per step, times the learning rate."""
    state_dtype: Literal["fp32"] = "fp32"
    """The type in which both moments are kept."""


class OneBitAdamParams(_SignParams):
    """Keyword arguments of 1-bit Adam. Source: arXiv 2102.02888."""

    freeze_step: Natural = 100_000
    """Steps of the warm-up, which is Adam: after it the second moment stays, and ranks send signs of momenta."""


class ZeroOneAdamParams(_SignParams):
    """Keyword arguments of 0/1 Adam. Source: arXiv 2202.06009."""

    var_freeze_step: Natural = 100_000
    """The step after which the second moment stays. Until then ranks send signs of momenta in each step, but in those
    that update it, which sum gradients."""
    var_update_scaler: Positive = 16
    """After so many updates of the second moment the distance to the next one doubles."""
    local_step_scaler: Positive = 32_678
    """After so many steps with a second moment that stays, the distance between two meetings of the ranks doubles."""
    local_step_clipper: Positive = 16
    """The largest distance between two meetings."""


class OneBitLambParams(_SignParams):
    """Keyword arguments of 1-bit LAMB. Source: arXiv 2104.06069."""

    freeze_step: Natural = 100_000
    """Steps of the warm-up, which is LAMB: after it the second moment stays, and ranks send signs of momenta."""
    max_coeff: Float = Field(default=10.0, ge=0)
    """The most that a step of the warm-up is scaled by: the norm of the parameter over that of the step."""
    min_coeff: Float = Field(default=0.01, ge=0)
    """The least that it is scaled by."""
    coeff_beta: Beta = 0.9
    """Decay of the running mean of that scale, which is the scale of later steps."""
    factor_max: Float = Field(default=4.0, ge=0)
    """The most that a later step's scale is of the mean."""
    factor_min: Float = Field(default=0.5, ge=0)
    """The least."""
    factor_threshold: Float = Field(default=0.1, ge=0)
    """By how much of itself that may change from step to step."""

    def conflicts(self) -> list[tuple[str, str]]:
        pairs = [("min_coeff", "max_coeff"), ("factor_min", "factor_max")]
        return [
            (low, f"expected at most {high} ({getattr(self, high):g}), found {getattr(self, low):g}")
            for low, high in pairs
            if getattr(self, low) > getattr(self, high)
        ]


def _is_warm(options: Options, step: int) -> bool:
    return step <= int(options["freeze_step"])


@lru_cache(maxsize=64)
def _distance(step: int, per_doubling: int) -> int:
    """Between updates at `step`: they are in the steps that it divides, and after so many of them it doubles."""
    distance, before = 1, 0
    while True:
        first = (before // distance + 1) * distance
        last = first + (per_doubling - 1) * distance
        if step <= last:
            return distance
        distance, before = 2 * distance, last


def updates_variance(options: Options, step: int) -> bool:
    """Whether 0/1 Adam updates the second moment, by a sum of gradients."""
    if step > int(options["var_freeze_step"]):
        return False
    return step % _distance(step, int(options["var_update_scaler"])) == 0


def _meets(options: Options, step: int) -> bool:
    """Whether ranks of 0/1 Adam meet."""
    since = step - int(options["var_freeze_step"]) - 1
    if since < 0:
        return True
    doublings = min(since // int(options["local_step_scaler"]), 62)
    distance: int = min(2**doublings, int(options["local_step_clipper"]))
    return step % distance == 0


def _by_norm(values: Tensor) -> Tensor:
    """So that signs have the norm of the values."""
    scale: Tensor = values.norm() / math.sqrt(values.numel())
    return scale


def _by_mean(values: Tensor) -> Tensor:
    return values.abs().mean()


def direction(weight: Tensor, mean: Tensor, squares: Tensor, options: Options, decays: bool = True) -> Tensor:
    """m / (sqrt(v) + eps) + decay w. What has no second moment has not been seen in the warm-up, and has no step."""
    found = (mean / squares.sqrt().add_(options["eps"])).masked_fill_(squares == 0, 0.0)
    return found.add_(weight, alpha=options["weight_decay"]) if decays and options["weight_decay"] else found


def _adam(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    """A step that sums gradients."""
    (beta1, beta2), (mean, squares) = options["betas"], states[:2]
    mean.lerp_(gradient, 1 - beta1)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    weight.add_(direction(weight, mean, squares, options), alpha=-float(options["lr"]))


_MOMENTS = (State("exp_avg"), State("exp_avg_sq", is_mean_of_squares=True))

ONEBIT_ADAM = Optimizer(
    title="OneBitAdam",
    params=OneBitAdamParams,
    states=_MOMENTS,
    apply=_adam,
    signs=Signs(_is_warm, _by_norm),
    keeps_step=False,
)
ZERO_ONE_ADAM = Optimizer(
    title="ZeroOneAdam",
    params=ZeroOneAdamParams,
    states=_MOMENTS,
    apply=_adam,
    signs=Signs(updates_variance, _by_mean, _meets, sums_steps=True),
    keeps_step=False,
)
ONEBIT_LAMB = Optimizer(
    title="OneBitLamb",
    params=OneBitLambParams,
    states=(*_MOMENTS, State("exp_avg_sq_fresh", is_mean_of_squares=True)),
    apply=_adam,
    signs=Signs(_is_warm, _by_norm, is_scaled=True),
    keeps_step=False,
)
