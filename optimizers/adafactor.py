"""Adafactor: second moments of matrices as row and column means. Source: arXiv 1804.04235, in torch.optim's words.

The formulas are those of torch.optim.Adafactor, which differ from the paper in two places: the largest relative step is
`lr` in the place of 0.01, and the first eps is a bound of what is divided by, and not added to squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ..configs.section import Bool, Float
from .optimizer import Optimizer, OptimizerParams, Options, State, StateDtype, WholeTensorRule

if TYPE_CHECKING:
    from torch import Tensor

NonNegative = Annotated[Float, Field(ge=0)]
_EPS = 2.0**-23  # of float32


class AdafactorParams(OptimizerParams):
    """Keyword arguments of torch.optim.Adafactor, and what Hugging Face's can leave out."""

    lr: Float = Field(default=1e-2, ge=0)
    """The largest relative step."""
    beta2_decay: Float = Field(default=-0.8, le=0)
    """Second moments weigh a step t with t to this power; with -0.8 the last of 1,000 with 0.004."""
    eps: tuple[NonNegative | None, NonNegative] = (None, 1e-3)
    """The least root of a second moment, null for float32's epsilon; and the least size of a parameter."""
    d: Float = Field(default=1.0, ge=1)
    """The most that the root of the mean square of a step may be, before it is scaled. Hugging Face: clip_threshold."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """Decay of the parameters per step, times the learning rate."""
    scale_parameter: Bool = True
    """Whether steps are as large as the parameter: times the root of its mean square."""
    relative_step: Bool = True
    """Whether the step is at most 1 / sqrt(t)."""
    state_dtype: StateDtype = "fp32"
    """The type in which second moments of vectors are kept. Those of rows and columns are float32."""


def _least(options: Options) -> float:
    first = options["eps"][0]
    return _EPS if first is None else float(first)


def _root(mean_of_squares: Tensor, options: Options) -> Tensor:
    return mean_of_squares.clamp(min=_least(options) ** 2).sqrt()


def _direction(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    """w = g / sqrt(v), v = (1 - t^decay) v + t^decay g^2; of a matrix w = g, whose factors come later."""
    if options["is_matrix"]:
        weight.copy_(gradient)
        return
    states[0].lerp_(gradient.square(), float(step) ** options["beta2_decay"])
    weight.copy_(gradient / _root(states[0], options))


def _factors(shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    *batch, rows, columns = shape
    return {"row_var": (*batch, rows, 1), "col_var": (*batch, 1, columns)}


def _matrix(gradient: Tensor, step: int, options: Options, factors: Mapping[str, Tensor]) -> Tensor:
    """g / sqrt(R C / mean(R)), clipped: R and C are the means of squares over rows and columns."""
    if not gradient.numel():
        return gradient
    weight, squares = step ** options["beta2_decay"], gradient.square()
    rows, columns = factors["row_var"], factors["col_var"]
    rows.lerp_(squares.mean(-1, keepdim=True), weight)
    columns.lerp_(squares.mean(-2, keepdim=True), weight)
    moments = rows @ columns / rows.mean(-2, keepdim=True).clamp(min=_least(options))
    direction = gradient / _root(moments, options)
    size = max(1.0, float(direction.norm()) / math.sqrt(direction.numel()) / float(options["d"]))
    return direction / size


def _ratio(options: Options, step: int, numel: int, weight_norm: float, direction_norm: float) -> float:
    """What the direction is scaled by. That of a matrix is clipped already."""
    size = 1.0 if options["is_matrix"] else max(1.0, direction_norm / math.sqrt(max(numel, 1)) / options["d"])
    lr = float(options["lr"])
    step_size = min(lr, step**-0.5) if options["relative_step"] else lr
    if options["scale_parameter"]:
        step_size *= max(options["eps"][1], weight_norm / math.sqrt(max(numel, 1)))
    return step_size / size


def _finish(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    weight.mul_(1 - float(options["lr"]) * options["weight_decay"]).add_(gradient, alpha=-options["ratio"])


ADAFACTOR = Optimizer(
    title="Adafactor",
    params=AdafactorParams,
    states=(State("variance", needed_option="is_other", is_mean_of_squares=True),),
    apply=_direction,
    whole=WholeTensorRule(finish=_finish, ratio=_ratio, matrix=_matrix, factors=_factors, takes_all=True),
    keeps_step=False,
)
