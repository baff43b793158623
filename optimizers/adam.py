"""Adam, with its decay apart from the gradient (AdamW) or in it. Sources: arXiv 1412.6980 and 1711.05101."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from ..configs.section import Bool, Float
from .optimizer import Apply, Beta, Optimizer, OptimizerParams, Options, State, StateDtype, lerp_coefficients

if TYPE_CHECKING:
    from torch import Tensor


class AdamWParams(OptimizerParams):
    """Keyword arguments of AdamW (decay apart from the gradient). Source: torch.optim.AdamW."""

    lr: Float = Field(default=1e-3, ge=0)
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running mean of the gradient and of its square."""
    eps: Float = Field(default=1e-8, ge=0)
    """Added to the denominator."""
    weight_decay: Float = Field(default=1e-2, ge=0)
    """Decay of the parameters per step, times the learning rate."""
    bias_correction: Bool = True
    """Whether both moments are divided by what they lack in the first steps, as in the paper."""
    state_dtype: StateDtype = "fp32"
    """The type in which both moments are kept."""


class AdamParams(AdamWParams):
    """Keyword arguments of Adam (decay added to the gradient). Source: torch.optim.Adam."""

    weight_decay: Float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient."""


def _apply(decoupled: bool) -> Apply:
    def apply(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
        import torch

        fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        beta1, beta2 = options["betas"]
        if not options.get("bias_correction", True):
            step = torch.full_like(step, math.inf)  # after which there is nothing left to correct
        fused(
            [weight],
            [gradient],
            [states[0]],
            [states[1]],
            [],
            [step],
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            amsgrad=False,
            maximize=False,
        )

    return apply


def _coefficients(options: Options, step: int, decay: float) -> tuple[float, ...]:
    """decay, lerp of m (2), beta2, 1 - beta2, sqrt(correction2), eps, -step size."""
    beta1, beta2 = options["betas"]
    is_corrected = options.get("bias_correction", True)
    step_size = float(options["lr"]) / (1 - beta1**step if is_corrected else 1.0)
    correction = math.sqrt(1 - beta2**step) if is_corrected else 1.0
    return (decay, *lerp_coefficients(1 - beta1), beta2, 1 - beta2, correction, options["eps"], -step_size)


def _adamw_coefficients(options: Options, step: int) -> tuple[float, ...]:
    return _coefficients(options, step, 1 - float(options["lr"]) * options["weight_decay"])


def _adam_coefficients(options: Options, step: int) -> tuple[float, ...]:
    return _coefficients(options, step, options["weight_decay"])


_IDLE_MOMENTS = (0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)
_MOMENTS = (State("exp_avg"), State("exp_avg_sq", is_mean_of_squares=True))

ADAMW = Optimizer(
    title="AdamW",
    params=AdamWParams,
    states=_MOMENTS,
    apply=_apply(decoupled=True),
    coefficients=_adamw_coefficients,
    idle=(1.0, *_IDLE_MOMENTS),
    torch_class="AdamW",
    torch_options={"decoupled_weight_decay": True},
    deepspeed_names=("fusedadamw", "cpuadamw"),
    deepspeed_defaults={"weight_decay": 0.0},
)
ADAM = Optimizer(
    title="Adam",
    params=AdamParams,
    states=_MOMENTS,
    apply=_apply(decoupled=False),
    coefficients=_adam_coefficients,
    idle=(0.0, *_IDLE_MOMENTS),
    torch_class="Adam",
    torch_options={"decoupled_weight_decay": False},
    deepspeed_names=("fusedadam", "cpuadam", "deepspeedcpuadam"),
)
