"""The `param.grad` that a caller sees between the backwards of a step, and the gradients that he has cleared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch

from ...zero.gradient import GroupGradient
from ...zero.reduced_gradient import Cleared, ReducedGradients
from ...zero.sequence import StateError
from .features import StepFeature
from .parts import Parts


class GradientPlaceholders(StepFeature):
    """Puts placeholders into `param.grad` for gradients that are reduced, or wait for their reduction.

    All ranks must clear the same gradients, since each rank has a part of the sum. `Steps.cleared` is compared at the
    end of the step. The feature is off until the first placeholder is shown: `train_step` shows none.
    """

    is_on = False

    def __init__(self, parts: Parts) -> None:
        self._steps = parts.steps
        self.after_new_groups()

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return cls(parts)

    def after_new_groups(self) -> None:
        gradients = self._steps.gradients
        self.final = _placeholders(gradients)
        """For a whole step."""
        self._taken = _placeholders(gradient for gradient in gradients if gradient.takes_each)
        self._names = {id(param): name for gradient in gradients for name, param in gradient.group.plan.params}

    def put(self) -> None:
        """Show placeholders, for a loop that calls backward itself and may look at `param.grad`."""
        if not self.is_on:
            self._steps.features.turn_on(self)
        (self.final if self._steps.accumulated.is_complete else self._taken).put()

    def before_backward(self) -> None:
        if self.final.are_there:
            is_lost = self._steps.accumulated.num_lost > 0
            cleared = self.final.take_out()
            if self._are_all(cleared):
                if not is_lost:
                    self._note(cleared)
                self._steps.forget(ends_graphs=False)  # torch's zero_grad() before another backward does the same
            elif is_lost:
                self.final.put()  # this backward is refused
            elif cleared:
                self._clear(cleared)
        if self._taken.are_there:
            self.take_cleared_so_far("backward")

    def after_abort(self) -> None:
        """Show placeholders if the step must be begun again: then torch's zero_grad() does what the engine's does."""
        if self._steps.accumulated.num_lost:
            self.final.put()

    def close(self) -> None:
        """Leave no gradients of a step that has begun: a further engine would add to them, and torch cannot."""
        with torch._C.DisableTorchFunctionSubclass():
            for gradient in self._steps.gradients:
                for param in gradient.group.params:
                    param.grad = None

    def before_step(self) -> None:
        """Remove the placeholders, and clear the final gradients of those that the caller has cleared."""
        if self.final.are_there and (cleared := self.final.take_out()):
            # Only refuses: a speculative update is rolled back later, on all ranks together.
            self._steps.update.refuse_more("zero_grad()")
            self._clear(cleared)

    def take_cleared(self) -> None:
        """Do `before_step`, and show the remaining placeholders again."""
        if self.final.are_there:
            self.before_step()
            self.put()

    def take_cleared_so_far(self, what: str) -> None:
        """Clear gradients between the backwards of a step. Raise StateError if only some of them were cleared."""
        cleared = self._taken.take_out()
        if 0 < len(cleared) < self._taken.num_params:
            raise StateError(
                f"{what}: expected all gradients or none cleared after an earlier backward of the step, found some: "
                "these are part of sums already. Clear all of them (engine.zero_grad()), or some after the last "
                "backward of a step"
            )
        if cleared:
            self._note(cleared)
            self._steps.forget_gradients()  # the backwards of the step still count

    def show_cleared_so_far(self, what: str) -> None:
        """Do `take_cleared_so_far`, and show the remaining placeholders again."""
        if self._taken.are_there:
            self.take_cleared_so_far(what)
            self.put()

    def between_steps(self, what: str) -> None:
        """Forget the step if the caller has cleared all final gradients. Then the call (what) comes between steps."""
        if not self.final.are_there:
            return
        cleared = self.final.take_out()
        if cleared:
            self._steps.refuse_more(what)
        if self._are_all(cleared):
            self._steps.forget(ends_graphs=False)
            return
        if cleared:
            self._clear(cleared)
        self.final.put()

    def _are_all(self, cleared: Cleared) -> bool:
        return bool(cleared) and len(cleared) == self.final.num_params  # a rank may have no parameters

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
