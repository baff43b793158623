"""LAMB: Adam whose step is as large as the parameter. Source: arXiv 1904.00962, algorithm 2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from ..configs.section import Bool, Float
from .optimizer import Beta, Optimizer, OptimizerParams, Options, State, StateDtype, WholeTensorRule

if TYPE_CHECKING:
    from torch import Tensor


class LambParams(OptimizerParams):
    """Keyword arguments of LAMB. Source: arXiv 1904.00962; the bounds are DeepSpeed's."""

    lr: Float = Field(default=1e-3, ge=0)
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running mean of the gradient and of its square."""
    eps: Float = Field(default=1e-8, ge=0)
    """Added to the denominator."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """Decay of the parameters, a part of the step before it is scaled."""
    bias_correction: Bool = True
    """Whether both moments are divided by what they lack in the first steps, as in the paper."""
    max_coeff: Float = Field(default=10.0, ge=0)
    """The most that a step is scaled by: the norm of the parameter over that of the step."""
    min_coeff: Float = Field(default=0.01, ge=0)
    """The least that a step is scaled by."""
    state_dtype: StateDtype = "fp32"
    """The type in which both moments are kept."""

    def conflicts(self) -> list[tuple[str, str]]:
        if self.min_coeff <= self.max_coeff:
            return []
        return [("min_coeff", f"expected at most max_coeff ({self.max_coeff:g}), found {self.min_coeff:g}")]


def _direction(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    """w = m / c1 / (sqrt(v / c2) + eps) + decay w, with c1 = 1 - beta1^t and c2 = 1 - beta2^t."""
    (beta1, beta2), at = options["betas"], int(step)
    mean, squares = states
    mean.lerp_(gradient, 1 - beta1)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    first, second = (1 - beta1**at, 1 - beta2**at) if options["bias_correction"] else (1.0, 1.0)
    root = squares.sqrt().div_(math.sqrt(second)).add_(options["eps"])
    weight.mul_(options["weight_decay"]).addcdiv_(mean, root, value=1 / first)


def _ratio(options: Options, step: int, numel: int, weight_norm: float, direction_norm: float) -> float:
    if not weight_norm or not direction_norm:
        return 1.0
    return float(min(max(weight_norm / direction_norm, options["min_coeff"]), options["max_coeff"]))


def _finish(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    weight.add_(gradient, alpha=-float(options["lr"]) * options["ratio"])


LAMB = Optimizer(
    title="Lamb",
    params=LambParams,
    states=(State("exp_avg"), State("exp_avg_sq", is_mean_of_squares=True)),
    apply=_direction,
    whole=WholeTensorRule(finish=_finish, ratio=_ratio),
    keeps_step=False,
    deepspeed_names=("fusedlamb",),
)
