"""What a step tells its caller."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: Tensor  # (), mean over the microbatches of all ranks; float32, or float64 where the model's loss is
    grad_norm: Tensor  # (), L2 norm over all ranks, before clipping; NaN or inf where the step was skipped
    lr: float  # the learning rate that was used
    loss_scale: float  # by which the loss had been multiplied
    skipped: bool  # float16 gradients overflowed: nothing was updated
