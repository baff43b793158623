"""Muon: momentum whose matrices are orthogonalised; AdamW for everything else. Source: Keller Jordan, 2024.

kellerjordan.github.io/posts/muon, and the code of github.com/KellerJordan/Muon, whose coefficients these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from ..configs.section import Bool, Float, Positive
from .adam import ADAMW
from .optimizer import Beta, Optimizer, OptimizerParams, Options, State, StateDtype, WholeTensorRule

if TYPE_CHECKING:
    from torch import Tensor


class MuonParams(OptimizerParams):
    """Keyword arguments of Muon, for matrices, and of the AdamW beside it. Source: github.com/KellerJordan/Muon."""

    lr: Float = Field(default=0.02, ge=0)
    """Learning rate of matrices: about the spectral norm of a step."""
    momentum: Beta = 0.95
    """Decay of the running mean of the gradient."""
    nesterov: Bool = True
    """Whether the gradient is mixed into the mean once more."""
    ns_steps: Positive = 5
    """Newton-Schulz iterations of an orthogonalisation."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """Decay of the parameters per step, times the learning rate."""
    adam_lr: Float | None = Field(default=None, ge=0)
    """Learning rate of what AdamW updates: embeddings, heads, vectors. null: `lr`."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Of AdamW: decay of the running mean of the gradient and of its square."""
    eps: Float = Field(default=1e-10, ge=0)
    """Of AdamW: added to the denominator."""
    state_dtype: StateDtype = "fp32"
    """The type in which momentum and moments are kept."""


def _direction(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    """m = momentum m + (1 - momentum) g;  w = m, or mixed with g once more."""
    momentum = options["momentum"]
    states[0].lerp_(gradient, 1 - momentum)
    weight.copy_(gradient.lerp(states[0], momentum) if options["nesterov"] else states[0])


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """(rows, columns) -> the same singular vectors, with singular values of about 0.7 to 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.T if is_tall else x
    return result


def _matrix(direction: Tensor, step: int, options: Options, factors: Mapping[str, Tensor]) -> Tensor:
    rows, columns = direction.shape
    scale: float = max(1.0, rows / max(columns, 1)) ** 0.5  # a matrix may be empty
    return orthogonalised(direction, options["ns_steps"]) * scale


def _finish(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    lr = float(options["lr"])
    weight.mul_(1 - lr * options["weight_decay"]).add_(gradient, alpha=-lr)


MUON = Optimizer(
    title="Muon",
    params=MuonParams,
    states=(
        State("momentum_buffer", needed_option="is_matrix"),
        State("exp_avg", needed_option="is_other"),
        State("exp_avg_sq", needed_option="is_other", is_mean_of_squares=True),
    ),
    apply=_direction,
    whole=WholeTensorRule(finish=_finish, matrix=_matrix, beside=ADAMW),
    keeps_step=False,
)
