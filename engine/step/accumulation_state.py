"""What the microbatches of a step have left since its first one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from ...zero.sequence import StateError
from ..config.config import Config
from .features import StepFeature


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


class AccumulationState:
    """From one update to the next."""

    def __init__(self, config: Config) -> None:
        self.accumulation = config.gradient_accumulation_steps or 1  # microbatches of a step, if nobody says otherwise
        is_layered = config.zero_optimization.layered_gradient_accumulation
        self._holds_whole_steps = (
            "zero_optimization.layered_gradient_accumulation" if is_layered else "parallel.pipeline"
        )
        self.losses: list[Tensor] = []  # () of each microbatch
        self.lacks_loss = False  # of a microbatch whose backward the caller has run himself
        self.num_microbatches = 0  # that are done
        self.num_begun = 0  # with those of the backward that runs
        self.is_complete = False
        """Whether the last of them was the last of its step."""
        self.clipping_by_hand: Clipping | None = None  # of its gradients, by the caller
        self.inconsistencies: dict[StepFeature, Tensor] = {}  # see `note_inconsistency`
        self.is_void = False  # of its microbatches nothing can be computed, as is known already
        self._own_clipping = Clipping(config.gradient_clipping or math.inf)
        self._is_last: bool | None = None  # as the caller says; None: by their number
        self._counted_by: Callable[[], bool] | None = None  # see `count_by`
        self._by_hand = False  # he has said so in this step

    @property
    def done(self) -> str:
        """In words."""
        return f"{self.num_microbatches} of {self.accumulation} microbatches done (gradient_accumulation_steps)"

    @property
    def clipping(self) -> Clipping:
        """Of its gradients: the caller's, or what the config says."""
        return self.clipping_by_hand or self._own_clipping

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Backwards inside are the last of their step, or not, whatever their number is. Then the caller counts."""
        before, self._is_last, self._by_hand = self._is_last, last, True
        try:
            yield
        finally:
            self._is_last = before

    @property
    def may_be_last(self) -> bool:
        """Whether the caller has not said that his backwards are not the last of their step."""
        return self._is_last is not False

    def say(self, last: bool) -> None:
        """Whether backwards from now on are the last of their step: not, until it is said again; or in this step."""
        self._is_last, self._by_hand = None if last else False, True

    def count_by(self, is_last: Callable[[], bool], accumulation: int) -> None:
        """See `Engine.count_by`."""
        self._counted_by, self.accumulation = is_last, accumulation

    def note_loss(self, loss: Tensor | None) -> None:
        """() of a microbatch; None: not known."""
        if loss is None:
            self.lacks_loss = True
        else:
            self.losses.append(loss)

    def note_inconsistency(self, feature: StepFeature, found: Tensor) -> None:
        """found: not 0 where this rank has one. If any has, nothing is updated after the norm, and all ranks ask the
        features why (`StepFeature.explain_inconsistency`)."""
        self.inconsistencies[feature] = found

    def would_complete(self, num_microbatches: int) -> bool:
        """Whether so many more end the step."""
        if self._is_last is not None:
            return self._is_last
        if self._counted_by is not None:
            return self._counted_by()
        return self._by_hand or (self.num_microbatches + num_microbatches) % self.accumulation == 0

    def begin(self, num_microbatches: int, completes: bool) -> None:
        """A backward of so many."""
        self.is_complete = completes
        self.num_begun = self.num_microbatches + num_microbatches

    def forget(self) -> None:
        """The next microbatch is the first of its step."""
        self.losses.clear()
        self.num_microbatches = self.num_begun = 0
        self.is_complete = self.lacks_loss = self._by_hand = self.is_void = False
        self.clipping_by_hand = None
        self.inconsistencies.clear()

    def check_between(self, what: str) -> None:
        """Raises StateError in the middle of a step, and where the caller says which backwards count."""
        if self.num_microbatches:
            raise StateError(
                f"{what}: expected it between steps, found {self.num_microbatches} microbatches of one done; call it "
                "after engine.step() has acted, or engine.zero_grad() before it"
            )
        if self._is_last is not None:
            raise StateError(
                f"{what}: expected it between steps, found it inside of engine.no_sync() or engine.accumulate(); call "
                "it outside"
            )

    def check_whole(self, num_microbatches: int) -> None:
        """Raises ValueError where so many microbatches do not end a step, though a schedule has all of it."""
        if not self.would_complete(num_microbatches):
            key = self._holds_whole_steps
            raise ValueError(
                f"engine.accumulate(last=False): expected an engine without {key}, found one with it, whose train_step "
                "has all microbatches of a step; set gradient_accumulation_steps"
            )

    def refuse_backward(self) -> NoReturn:
        """Raises StateError: its gradients were clipped already."""
        raise StateError(
            "backward: expected engine.step() after engine.clip_grad_norm_(), found another backward, whose gradients "
            "would not be clipped; call clip_grad_norm_ after the last one"
        )
