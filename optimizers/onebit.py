"""Adam whose ranks send one bit for each element: 1-bit Adam.

Source: arXiv 2102.02888; defaults, and what is kept out of the formulas (corrections of the moments' first steps), as
in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ..configs.section import Float, Natural
from .optimizer import Beta, Optimizer, OptimizerParams, Options, State

if TYPE_CHECKING:
    from torch import Tensor


class OneBitAdamParams(OptimizerParams):
    """Keyword arguments of 1-bit Adam. Source: arXiv 2102.02888."""

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
    freeze_step: Natural = 100_000
    """Steps of the warm-up, which is Adam: after it the second moment stays, and ranks send signs of momenta."""


def direction(weight: Tensor, mean: Tensor, squares: Tensor, options: Options) -> Tensor:
    """m / (sqrt(v) + eps) + decay w. What has no second moment has not been seen in the warm-up, and has no step."""
    found = (mean / squares.sqrt().add_(options["eps"])).masked_fill_(squares == 0, 0.0)
    return found.add_(weight, alpha=options["weight_decay"]) if options["weight_decay"] else found


def _adam(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    """A step of the warm-up."""
    (beta1, beta2), (mean, squares) = options["betas"], states
    mean.lerp_(gradient, 1 - beta1)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    weight.add_(direction(weight, mean, squares, options), alpha=-float(options["lr"]))


ONEBIT_ADAM = Optimizer(
    title="OneBitAdam",
    params=OneBitAdamParams,
    states=(State("exp_avg"), State("exp_avg_sq", is_mean_of_squares=True)),
    apply=_adam,
    sends_signs=True,
    keeps_step=False,
)
