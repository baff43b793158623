"""What a step tells its caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: Tensor | Any
    """(), mean over the microbatches of all ranks; float32, or float64 where the model's loss is. None where a backward
    was `loss.backward()` of a loss that neither the engine nor `engine.scale` has returned: the type leaves that out,
    for it is none of `train_step`."""
    grad_norm: Tensor  # (), L2 norm over all ranks, before clipping; NaN or inf where the step was skipped
    lr: float  # the learning rate that was used
    loss_scale: float  # by which the loss had been multiplied
    skipped: bool  # float16 gradients overflowed: nothing was updated
