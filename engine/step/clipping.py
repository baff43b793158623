"""By how much the gradients of a step are made smaller, so that their norm is not above a limit."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Clipping:
    """factor = limit / (norm + 1e-6), and at most 1."""

    limit: float = math.inf  # of the L2 norm of the step's gradients
    is_by_hand: bool = False  # as torch's clip_grad_norm_: below the limit too, which is within the 1e-6
    fixed: float | None = None  # the factor, where it is of another norm

    def factor(self, norm: float) -> float:
        if self.fixed is not None:
            return self.fixed
        return min(1.0, self.limit / (norm + 1e-6)) if self.is_by_hand or norm > self.limit else 1.0
