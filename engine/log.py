"""What an engine says while it trains."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import StepResult

logger = logging.getLogger("lowtide")


def configure() -> None:
    """Lets the lines of `lowtide` be seen, on standard error, unless the program has set up logging itself."""
    if not logger.handlers and not logging.getLogger().handlers and logger.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("lowtide: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)  # one that came later shows the line too
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


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
