"""What an update on the device is told there: by how much gradients are multiplied, and whether it is left out.

    norm = rest * sqrt(sum of squares);  factor = rest * min(1, limit / (norm + 1e-6)), where norm > limit, else rest
    skip = any of two flags, or another number where one is expected

A dozen operators on a few numbers, and one launch. The sum comes as limbs (`exact_sum.py`): every rank has the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .dispatch import Backend, uses_triton
from .exact_sum import NUM_LIMBS, value_of

EPSILON = 1e-6


def clip_factor(
    sums: Tensor,
    flags: int,
    known: tuple[int, int],
    rest: float,
    limit: float,
    *,
    clips_below: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """factor, (1,) float64, and skip, (1,) int64: not 0 where nothing is to be updated.

    sums: (m,) int64, the limbs of the sum of squares first. flags: where in it two numbers stand that are 0 if the step
    counts; known: where another one stands, and what that is then. clips_below: also a norm that is not above the
    limit, but within 1e-6 of it.
    """
    clips_below &= limit != math.inf
    if uses_triton(backend, "clip_factor", sums):
        return _triton_form()(sums, flags, known, rest, limit, clips_below, EPSILON)
    norm = value_of(sums[:NUM_LIMBS]).sqrt() * rest
    factor = (torch.full_like(norm, limit) / (norm + EPSILON)).clamp(max=1.0)  # limit / norm: a rounded reciprocal
    if not clips_below:
        factor = torch.where(norm > limit, factor, 1.0)
    place, expected = known
    skip = sums[flags : flags + 2].sum(dim=0, keepdim=True) + (sums[place : place + 1] != expected)
    return (factor * rest).view(1), skip


@cache
def _triton_form() -> Callable[..., tuple[Tensor, Tensor]]:
    """Looked up once: a step would pay for each `import` that it comes to."""
    from .triton.clip_factor import clip_factor as by_triton

    return by_triton
