"""Adamax: Adam with the largest of the gradients in place of the root. Source: arXiv 1412.6980, section 7."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from ..configs.section import Float
from .optimizer import Beta, Optimizer, OptimizerParams, Options, State, StateDtype

if TYPE_CHECKING:
    from torch import Tensor


class AdamaxParams(OptimizerParams):
    """Keyword arguments of Adamax. Source: torch.optim.Adamax."""

    lr: Float = Field(default=2e-3, ge=0)
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running mean of the gradient and of its largest."""
    eps: Float = Field(default=1e-8, ge=0)
    """Added to the size of a gradient."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient."""
    state_dtype: StateDtype = "fp32"
    """The type in which both are kept."""


def _apply(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    import torch

    beta1, beta2 = options["betas"]
    mean, largest = states
    gradient = gradient.add(weight, alpha=options["weight_decay"])
    mean.lerp_(gradient, 1 - beta1)
    largest.copy_(torch.maximum(largest.mul_(beta2), gradient.abs().add_(options["eps"])))
    weight.addcdiv_(mean, largest, value=-options["lr"] / (1 - beta1 ** int(step)))


ADAMAX = Optimizer(
    title="Adamax",
    params=AdamaxParams,
    states=(State("exp_avg"), State("exp_inf", is_mean_of_squares=True)),
    apply=_apply,
)
