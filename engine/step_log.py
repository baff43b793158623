"""What an engine says of its steps."""

from __future__ import annotations

import time

from ..watch.log import logger
from .step_result import StepResult


class StepLog:
    """A line every few steps, through the logger `lowtide`."""

    def __init__(self, every: int) -> None:
        """every: steps between two lines; 0 for none."""
        self._every = every
        self._since = time.monotonic()

    def after_step(self, step: int, result: StepResult, samples: int) -> None:
        """Called after each step; samples: rows of a global batch."""
        if not self._every or step % self._every:
            return
        now = time.monotonic()
        rate = samples * self._every / max(now - self._since, 1e-9)
        self._since = now
        logger.info(
            "step %d: loss %.4f, gradient norm %.3f, learning rate %.3g, %s%.1f samples/s",
            step,
            result.loss.item(),
            result.grad_norm.item(),
            result.lr,
            f"loss scale {result.loss_scale:g}, " if result.loss_scale != 1 else "",
            rate,
        )
