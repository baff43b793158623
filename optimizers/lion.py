"""Lion: steps of one size, in the sign of a mean of gradients. Source: arXiv 2302.06675, program 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from ..configs.section import Float
from .optimizer import Beta, Optimizer, OptimizerParams, Options, State, StateDtype, lerp_coefficients

if TYPE_CHECKING:
    from torch import Tensor


class LionParams(OptimizerParams):
    """Keyword arguments of Lion, with the defaults of the paper (torch has none). Source: arXiv 2302.06675."""

    lr: Float = Field(default=1e-4, ge=0)
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Mixing factor of the update, and decay of the momentum."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """Decay of the parameters per step, times the learning rate."""
    state_dtype: StateDtype = "fp32"
    """The type in which the momentum is kept."""


def _apply(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    """w -= lr * (sign(beta1 m + (1 - beta1) g) + decay w);  m = beta2 m + (1 - beta2) g."""
    beta1, beta2 = options["betas"]
    momentum = states[0]
    weight.mul_(1 - options["lr"] * options["weight_decay"])
    weight.add_(gradient.lerp(momentum, beta1).sign_(), alpha=-options["lr"])
    momentum.lerp_(gradient, 1 - beta2)


def _coefficients(options: Options, step: int) -> tuple[float, ...]:
    """decay, lerp of the direction (2), lerp of m (2), -lr."""
    beta1, beta2 = options["betas"]
    lr = float(options["lr"])
    return (1 - lr * options["weight_decay"], *lerp_coefficients(beta1), *lerp_coefficients(1 - beta2), -lr)


LION = Optimizer(
    title="Lion",
    params=LionParams,
    states=(State("exp_avg"),),
    apply=_apply,
    coefficients=_coefficients,
    idle=(1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    keeps_step=False,
    deepspeed_names=("fusedlion", "cpulion", "deepspeedcpulion"),
    deepspeed_defaults={"lr": 1e-3, "betas": (0.9, 0.999)},
)
