"""SGD, with or without momentum, as torch has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from ..configs.section import Bool, Float
from .optimizer import Optimizer, OptimizerParams, Options, State, StateDtype

if TYPE_CHECKING:
    from torch import Tensor


class SGDParams(OptimizerParams):
    """Keyword arguments of SGD. Source: torch.optim.SGD."""

    lr: Float = Field(default=1e-3, ge=0)
    """Learning rate."""
    momentum: Float = Field(default=0.0, ge=0)
    """Momentum factor."""
    dampening: Float = 0.0
    """Dampening of the momentum."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient."""
    nesterov: Bool = False
    """Nesterov momentum. Needs momentum above 0 and dampening 0."""
    state_dtype: StateDtype = "fp32"
    """The type in which the momentum is kept."""

    def conflicts(self) -> list[tuple[str, str]]:
        if not self.nesterov or (self.momentum != 0 and self.dampening == 0):
            return []
        found = f"found momentum {self.momentum} and dampening {self.dampening}"
        return [("nesterov", f"needs momentum above 0 and dampening 0, {found}")]


def _apply(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    import torch

    torch._fused_sgd_(
        [weight],
        [gradient],
        list(states) if options["momentum"] else [],
        weight_decay=options["weight_decay"],
        momentum=options["momentum"],
        lr=options["lr"],
        dampening=options["dampening"],
        nesterov=options["nesterov"],
        maximize=False,
        is_first_step=int(step) == 1,
    )


def _coefficients(options: Options, step: int) -> tuple[float, ...]:
    """decay, -lr, and where there is a buffer momentum, 1 - dampening, share of the gradient, share of the buffer.

    As torch: the first gradient starts the buffer as it is.
    """
    momentum = options["momentum"]
    if not momentum:
        of_buffer, shares = (0.0, 1.0), (1.0, 0.0)
    else:
        of_buffer = (0.0, 1.0) if step == 1 else (momentum, 1 - options["dampening"])
        shares = (1.0, momentum) if options["nesterov"] else (0.0, 1.0)
    return (options["weight_decay"], -float(options["lr"]), *of_buffer, *shares)


SGD = Optimizer(
    title="SGD",
    params=SGDParams,
    states=(State("momentum_buffer", needed_option="momentum"),),
    apply=_apply,
    coefficients=_coefficients,
    idle=(0.0, 0.0, 1.0, 0.0, 0.0, 0.0),
    keeps_step=False,
    torch_class="SGD",
)
