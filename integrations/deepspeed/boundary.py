"""Which microbatches are the last of their step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import UsageError


class Boundary:
    """By their number, or as the caller says; none inside of `no_sync`."""

    def __init__(self) -> None:
        self.said: bool | None = None  # by the caller, of each from now on; None: by their number
        self.is_in_no_sync = False

    def is_at(self, number: int, accumulation: int) -> bool:
        """Whether the microbatch of that number is one, which no_sync is not asked for. They count from 0."""
        return (number + 1) % accumulation == 0 if self.said is None else self.said

    @contextmanager
    def no_sync(self, stage: int) -> Iterator[None]:
        """See `DeepSpeedEngine.no_sync`."""
        if stage >= 2:
            raise UsageError(
                f"engine.no_sync(): expected stage 0 or 1, found stage {stage}, where gradients are divided over the "
                "ranks as they come; use gradient_accumulation_steps, or set_gradient_accumulation_boundary"
            )
        if self.is_in_no_sync:
            raise UsageError("engine.no_sync(): expected it once, found it inside of itself")
        self.is_in_no_sync = True
        try:
            yield
        finally:
            self.is_in_no_sync = False
