"""Adadelta: steps as large as those before them. Source: arXiv 1212.5701."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from ..configs.section import Float
from .optimizer import Optimizer, OptimizerParams, Options, State, StateDtype

if TYPE_CHECKING:
    from torch import Tensor


class AdadeltaParams(OptimizerParams):
    """Keyword arguments of Adadelta. Source: torch.optim.Adadelta."""

    lr: Float = Field(default=1.0, ge=0)
    """Factor of each step."""
    rho: Float = Field(default=0.9, ge=0, le=1)
    """Decay of both running means of squares."""
    eps: Float = Field(default=1e-6, ge=0)
    """Added to both before their roots are taken."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient."""
    state_dtype: StateDtype = "fp32"
    """The type in which both are kept."""


def _apply(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    squares, steps = states
    keep, eps = options["rho"], options["eps"]
    gradient = gradient.add(weight, alpha=options["weight_decay"])
    squares.mul_(keep).addcmul_(gradient, gradient, value=1 - keep)
    change = steps.add(eps).sqrt_().div_(squares.add(eps).sqrt_()).mul_(gradient)
    steps.mul_(keep).addcmul_(change, change, value=1 - keep)
    weight.add_(change, alpha=-options["lr"])


ADADELTA = Optimizer(
    title="Adadelta",
    params=AdadeltaParams,
    states=(State("square_avg", is_mean_of_squares=True), State("acc_delta", is_mean_of_squares=True)),
    apply=_apply,
)
