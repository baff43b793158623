"""RAdam: Adam that waits until the variance of its step is known. Source: arXiv 1908.03265."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from ..configs.section import Bool, Float
from .optimizer import Beta, Optimizer, OptimizerParams, Options, State, StateDtype

if TYPE_CHECKING:
    from torch import Tensor


class RAdamParams(OptimizerParams):
    """Keyword arguments of RAdam. Source: torch.optim.RAdam."""

    lr: Float = Field(default=1e-3, ge=0)
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running mean of the gradient and of its square."""
    eps: Float = Field(default=1e-8, ge=0)
    """Added to the denominator."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient."""
    decoupled_weight_decay: Bool = False
    """Whether the decay is apart from the gradient, as in AdamW."""
    state_dtype: StateDtype = "fp32"
    """The type in which both moments are kept."""


def _rectification(beta2: float, step: int) -> float | None:
    """The factor of an adaptive step; None where its variance is not known yet."""
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * step * beta2**step / (1 - beta2**step)
    if rho <= 5:
        return None
    return math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))


def _apply(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    (beta1, beta2), at = options["betas"], int(step)
    mean, squares = states
    if options["decoupled_weight_decay"]:
        weight.mul_(1 - options["lr"] * options["weight_decay"])
    else:
        gradient = gradient.add(weight, alpha=options["weight_decay"])
    mean.lerp_(gradient, 1 - beta1)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    step_size = options["lr"] / (1 - beta1**at)
    rectified = _rectification(beta2, at)
    if rectified is None:
        weight.add_(mean, alpha=-step_size)
        return
    root = squares.sqrt().add_(options["eps"])
    weight.addcdiv_(mean, root, value=-step_size * rectified * math.sqrt(1 - beta2**at))


RADAM = Optimizer(
    title="RAdam",
    params=RAdamParams,
    states=(State("exp_avg"), State("exp_avg_sq", is_mean_of_squares=True)),
    apply=_apply,
)
