"""NAdam: Adam with Nesterov momentum. Source: Dozat, ICLR 2016 workshop, as torch has it."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from functools import lru_cache
from typing import TYPE_CHECKING

from pydantic import Field

from ..configs.section import Bool, Float
from .optimizer import Beta, Optimizer, OptimizerParams, Options, State, StateDtype

if TYPE_CHECKING:
    from torch import Tensor


class NAdamParams(OptimizerParams):
    """Keyword arguments of NAdam. Source: torch.optim.NAdam."""

    lr: Float = Field(default=2e-3, ge=0)
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running mean of the gradient and of its square."""
    eps: Float = Field(default=1e-8, ge=0)
    """Added to the denominator."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient."""
    momentum_decay: Float = Field(default=4e-3, ge=0)
    """Decay of the momentum with the step."""
    decoupled_weight_decay: Bool = False
    """Whether the decay is apart from the gradient, as in AdamW."""
    state_dtype: StateDtype = "fp32"
    """The type in which both moments are kept."""


def _momentum(beta1: float, decay: float, step: int) -> float:
    """mu_t = beta1 x (1 - 0.96^(t x decay) / 2)."""
    return float(beta1 * (1.0 - 0.5 * 0.96 ** (step * decay)))


@lru_cache(maxsize=8)
def _momentum_product(beta1: float, decay: float, step: int) -> float:
    """mu_1 x ... x mu_t, in float32 as torch keeps it as a state."""
    product = 1.0
    for earlier in range(1, step + 1):
        product = c_float(product * c_float(_momentum(beta1, decay, earlier)).value).value
        if product == 0.0:
            break
    return product


def _apply(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    (beta1, beta2), decay, at = options["betas"], options["momentum_decay"], int(step)
    mean, squares = states
    if options["decoupled_weight_decay"]:
        weight.mul_(1 - options["lr"] * options["weight_decay"])
    else:
        gradient = gradient.add(weight, alpha=options["weight_decay"])
    mean.lerp_(gradient, 1 - beta1)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = squares.div(1 - beta2**at).sqrt_().add_(options["eps"])
    now, then = _momentum(beta1, decay, at), _momentum(beta1, decay, at + 1)
    product = _momentum_product(beta1, decay, at)
    weight.addcdiv_(gradient, root, value=-options["lr"] * (1 - now) / (1 - product))
    weight.addcdiv_(mean, root, value=-options["lr"] * then / (1 - product * then))


NADAM = Optimizer(
    title="NAdam",
    params=NAdamParams,
    states=(State("exp_avg"), State("exp_avg_sq", is_mean_of_squares=True)),
    apply=_apply,
)
