"""RMSprop: gradients over the root of a running mean of their squares, as torch has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from ..configs.section import Bool, Float
from .optimizer import Optimizer, OptimizerParams, Options, State, StateDtype

if TYPE_CHECKING:
    from torch import Tensor


class RMSpropParams(OptimizerParams):
    """Keyword arguments of RMSprop. Source: torch.optim.RMSprop."""

    lr: Float = Field(default=1e-2, ge=0)
    """Learning rate."""
    alpha: Float = Field(default=0.99, ge=0, lt=1)
    """Decay of the running mean of squares."""
    eps: Float = Field(default=1e-8, ge=0)
    """Added to the denominator."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient."""
    momentum: Float = Field(default=0.0, ge=0)
    """Momentum factor."""
    centered: Bool = False
    """Whether the squares are those of the distance from a running mean of the gradient."""
    state_dtype: StateDtype = "fp32"
    """The type in which the running means are kept."""


def _apply(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    by_name = dict(zip((state.name for state in RMSPROP.states_for(options)), states, strict=True))
    keep = options["alpha"]
    gradient = gradient.add(weight, alpha=options["weight_decay"])
    squares = by_name["square_avg"].mul_(keep).addcmul_(gradient, gradient, value=1 - keep)
    if options["centered"]:
        mean = by_name["grad_avg"].lerp_(gradient, 1 - keep)
        squares = squares.addcmul(mean, mean, value=-1)
    root = squares.sqrt().add_(options["eps"])
    if options["momentum"]:
        buffer = by_name["momentum_buffer"].mul_(options["momentum"]).addcdiv_(gradient, root)
        weight.add_(buffer, alpha=-options["lr"])
    else:
        weight.addcdiv_(gradient, root, value=-options["lr"])


RMSPROP = Optimizer(
    title="RMSprop",
    params=RMSpropParams,
    states=(
        State("square_avg", is_mean_of_squares=True),
        State("momentum_buffer", needed_option="momentum"),
        State("grad_avg", needed_option="centered"),
    ),
    apply=_apply,
)
