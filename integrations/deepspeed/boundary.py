"""Which microbatches are the last of their step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import UsageError


class Boundary:
    """By their number, or as the caller says; none inside of `no_sync`.

    Where the caller alone says when a step ends (`managed_gradient_accumulation` false, `coalesced`), each backward may
    be the last, so each is reduced; the step adds them up.
    """

    def __init__(self, is_managed: bool = True) -> None:
        """is_managed: whether microbatches are counted; else each `step` updates."""
        self.is_managed = is_managed
        self.is_in_step = False
        self.is_coalescing = False
        self.said: bool | None = None  # by the caller, of each from now on; None: by their number
        self.is_in_no_sync = False

    def is_at(self, number: int, accumulation: int) -> bool:
        """Whether the microbatch of that number is one, which no_sync is not asked for. They count from 0."""
        if not self.is_managed:
            return self.is_in_step
        return (number + 1) % accumulation == 0 if self.said is None else self.said

    def may_end_at(self, number: int, accumulation: int) -> bool:
        """Whether a step may end with the backward of that microbatch."""
        if self.is_coalescing:
            return True
        return not self.is_in_no_sync and (not self.is_managed or self.is_at(number, accumulation))

    def check_managed(self, call: str) -> None:
        """Raises UsageError where the caller alone says when a step ends."""
        if not self.is_managed:
            raise UsageError(
                f"{call}: expected managed_gradient_accumulation true, found false, where each engine.step() ends a "
                "step; call step after the last microbatch"
            )

    @contextmanager
    def coalesced(self, stage: int) -> Iterator[None]:
        """See `DeepSpeedEngine.coalesce_grad_reduction`."""
        self.check_managed("engine.coalesce_grad_reduction()")
        if stage == 0:
            raise NotImplementedError(
                "engine.coalesce_grad_reduction(): expected stage 1, 2 or 3, found stage 0; use engine.no_sync()"
            )
        if self.is_in_no_sync:
            raise UsageError("engine.coalesce_grad_reduction(): expected it outside of no_sync and of itself")
        self.is_coalescing = self.is_in_no_sync = True
        try:
            yield
        finally:
            self.is_coalescing = self.is_in_no_sync = False

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
