"""What all ranks must know of a step before they update: one small exact sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import Mesh
from ..zero.exact_sum import NUM_LIMBS, from_limbs, to_limbs
from ..zero.gradient import GroupGradient
from .errors import NonFiniteGradientError


@dataclass(frozen=True)
class StepSums:
    """The same on every rank."""

    loss: float  # mean over microbatches and data-parallel ranks; NaN where any rank's is not finite
    loss_dtype: torch.dtype  # float64 where the model's is, else float32
    square_norm: float  # sum of squared gradients as they were reduced
    num_bad: int  # groups with a non-finite gradient
    events: tuple[int, ...]  # on how many ranks each of the events has happened


def sum_step(
    mesh: Mesh, gradients: Sequence[GroupGradient], losses: Sequence[Tensor], events: Sequence[bool], what: str
) -> StepSums:
    """losses: () of each microbatch; none where a rank lacks a pipeline's last stage. A collective, and a barrier."""
    device = mesh.world.device
    found = torch.zeros(NUM_LIMBS + 1, dtype=torch.int64, device=device)
    for gradient in gradients:
        gradient.settle()
        found += gradient.inspection.found
    mean = torch.stack([loss.double() for loss in losses]).mean() if losses else torch.zeros((), dtype=torch.float64)
    is_wide = any(loss.dtype == torch.float64 for loss in losses)
    is_finite = bool(torch.isfinite(mean))
    loss = limbs_of(mean if is_finite else torch.zeros_like(mean))
    counts = torch.tensor([not is_finite, is_wide, *events], dtype=torch.int64)
    total = mesh.sum_small(torch.cat([found, loss.to(device), counts.to(device)]), what).cpu()
    num_bad, num_infinite, num_wide, *counted = total[[NUM_LIMBS, *range(2 * NUM_LIMBS + 1, len(total))]].tolist()
    mean_loss = from_limbs(total[NUM_LIMBS + 1 : 2 * NUM_LIMBS + 1]) / mesh.data_size if not num_infinite else math.nan
    dtype = torch.float64 if num_wide else torch.float32
    return StepSums(mean_loss, dtype, from_limbs(total[:NUM_LIMBS]), num_bad, tuple(counted))


def limbs_of(value: Tensor) -> Tensor:
    """A finite float64 scalar of either sign as limbs."""
    limbs = to_limbs(value.abs().reshape(1))
    return limbs if value >= 0 else -limbs


def non_finite_error(mesh: Mesh, gradients: Sequence[GroupGradient], step: int, outcome: str) -> NonFiniteGradientError:
    """Names the parameter and the rank. A collective."""
    own = [gradient.non_finite for gradient in gradients if gradient.non_finite is not None]
    found = [item for items in mesh.world.gather_objects(own) for item in items]
    first = next((item for item in found if item.rank is not None), found[0])
    producer = f"rank {first.rank}" if first.rank is not None else "the sum over ranks"
    others = sorted({item.parameter for item in found} - {first.parameter})
    return NonFiniteGradientError(
        f"step {step}: expected finite gradients, found {first.what} in the gradient of "
        f"'{first.parameter}' on {producer}"
        + (f" (also in {len(others)} more parameters)" if others else "")
        + f". {outcome} Look at that rank's batch and at the learning rate; "
        "torch.autograd.set_detect_anomaly(True) finds the operation."
    )
