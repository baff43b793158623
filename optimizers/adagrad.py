"""Adagrad: gradients over the root of the sum of all their squares. Source: Duchi et al., JMLR 12, 2011."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from ..configs.section import Float
from .optimizer import Optimizer, OptimizerParams, Options, State, StateDtype

if TYPE_CHECKING:
    from torch import Tensor


class AdagradParams(OptimizerParams):
    """Keyword arguments of Adagrad. Source: torch.optim.Adagrad."""

    lr: Float = Field(default=1e-2, ge=0)
    """Learning rate."""
    lr_decay: Float = Field(default=0.0, ge=0)
    """Decay of the learning rate with the step."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient."""
    initial_accumulator_value: Float = Field(default=0.0, ge=0)
    """Start value of the sum of squares."""
    eps: Float = Field(default=1e-10, ge=0)
    """Added to the denominator."""
    state_dtype: StateDtype = "fp32"
    """The type in which the sum of squares is kept."""


def _apply(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    import torch

    torch._fused_adagrad_(
        [weight],
        [gradient],
        [states[0]],
        [step],
        lr=options["lr"],
        lr_decay=options["lr_decay"],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=False,
    )


def _coefficients(options: Options, step: int) -> tuple[float, ...]:
    """decay, step size, eps."""
    step_size = float(options["lr"]) / (1 + (step - 1) * options["lr_decay"])
    return (options["weight_decay"], step_size, options["eps"])


ADAGRAD = Optimizer(
    title="Adagrad",
    params=AdagradParams,
    states=(State("sum", is_mean_of_squares=True, start_option="initial_accumulator_value"),),
    apply=_apply,
    coefficients=_coefficients,
    idle=(0.0, 0.0, 1.0),
    torch_class="Adagrad",
    deepspeed_names=("cpuadagrad", "deepspeedcpuadagrad"),
)
