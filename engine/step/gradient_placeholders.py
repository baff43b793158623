"""What a caller sees in `param.grad` between the backwards of a step, and what he has cleared of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Self

from torch import Tensor, nn

from ...zero.gradient import GroupGradient
from ...zero.reduced_gradient import Cleared, ReducedGradients
from ...zero.sequence import StateError
from .features import StepFeature
from .parts import Parts


class GradientPlaceholders(StepFeature):
    """Stand-ins of gradients that are reduced, or were taken out of `param.grad` to be.

    What is cleared must be the same on all ranks, each of which has a part of the sum: notes of it (`Steps.cleared`)
    are compared at the end of the step.
    """

    def __init__(self, parts: Parts) -> None:
        self._steps = parts.steps
        self.after_new_groups()

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return cls(parts)

    def after_new_groups(self) -> None:
        gradients = self._steps.gradients
        self._final = _placeholders(gradients)
        self._taken = _placeholders(gradient for gradient in gradients if gradient.takes_each)
        self._names = {id(param): name for gradient in gradients for name, param in gradient.group.plan.params}

    def put(self) -> None:
        """A loop that calls backward itself may look at `param.grad` now: gradients that are not there say so."""
        (self._final if self._steps.accumulated.is_complete else self._taken).put()

    def are_all(self, gradients: Sequence[Tensor]) -> bool:
        """Of a whole step; see `ReducedGradients.are_all`."""
        return self._final.are_all(gradients)

    def set_aside(self, arrived: nn.Parameter | None) -> AbstractContextManager[None]:
        """See `ReducedGradients.set_aside`."""
        return self._final.set_aside(arrived)

    def before_backward(self) -> None:
        if self._final.are_there:
            cleared = self._final.take_out()
            if self._are_all(cleared):
                self._note(cleared)
                self._steps.forget(ends_graphs=False)  # as zero_grad() before another backward does in torch
            elif cleared:
                self._clear(cleared)
        if self._taken.are_there:
            self.take_cleared_so_far("backward")

    def before_step(self) -> None:
        """Final gradients that the caller has cleared are none from now on, and no stand-ins are in `param.grad`."""
        if self._final.are_there and (cleared := self._final.take_out()):
            self._steps.update.refuse_more("zero_grad()")  # what is tried is taken back when all ranks know of it
            self._clear(cleared)

    def take_cleared(self) -> None:
        """As `before_step`; what is left is shown again."""
        if self._final.are_there:
            self.before_step()
            self.put()

    def take_cleared_so_far(self, what: str) -> None:
        """As `take_cleared`, between the backwards of a step. Raises StateError where some were cleared, not all."""
        cleared = self._taken.take_out()
        if 0 < len(cleared) < self._taken.num_params:
            raise StateError(
                f"{what}: found the gradients of some parameters cleared after an earlier backward of the step, not "
                "of others: clear all of them (engine.zero_grad()), or some after the last backward of a step; in the "
                "middle they are in sums"
            )
        if cleared:
            self._note(cleared)
            self._steps.forget_gradients()  # in the middle of a step, whose backwards are counted all the same

    def show_cleared_so_far(self, what: str) -> None:
        """As `take_cleared_so_far`; what is left is shown again."""
        if self._taken.are_there:
            self.take_cleared_so_far(what)
            self.put()

    def between_steps(self, what: str) -> None:
        """A step is none any more where the caller has cleared all of its final gradients."""
        if not self._final.are_there:
            return
        cleared = self._final.take_out()
        if cleared:
            self._steps.refuse_more(what)
        if self._are_all(cleared):
            self._steps.forget(ends_graphs=False)
            return
        if cleared:
            self._clear(cleared)
        self._final.put()

    def _are_all(self, cleared: Cleared) -> bool:
        return bool(cleared) and len(cleared) == self._final.num_params  # some ranks may have no parameters

    def _clear(self, cleared: Cleared) -> None:
        self._steps.join.check_outside("zero_grad() after the last backward of a step")
        self._note(cleared)
        for gradient in self._steps.gradients:
            gradient.clear(cleared)

    def _note(self, cleared: Cleared) -> None:
        found = (f"{self._names[key]}{'' if is_none else ' (to zero)'}" for key, is_none in cleared.items())
        self._steps.cleared.append(f"after backward {self._steps.accumulated.num_begun}: {', '.join(found)}")


def _placeholders(gradients: Iterable[GroupGradient]) -> ReducedGradients:
    return ReducedGradients([pair for gradient in gradients for pair in gradient.group.plan.params])
