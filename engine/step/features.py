"""Parts of a step that are there only where a config, or a call, asks for them.

[Note: moments of a step]
    forward     before_call, before_forward | around_forward ( the model )
    backward    before_call, before_backward | autograd; gradients are reduced as they come
    step        before_step, before_call, before_update | the sum over ranks, the update | after_update, after_step,
                before_next_step

An engine has the features that are on, in the order of a table (`engine/features.py`). For each moment it holds the
methods that they define: a feature that is off, or that does not define a moment, is not called there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self, TypeVar

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: Tensor | Any
    """(), mean over the microbatches of all ranks; float32, or float64 where the model's loss is. None where a backward
    was `loss.backward()` of a loss that neither the engine nor `engine.scale` has returned: the type leaves that out,
    for it is none of `train_step`."""
    grad_norm: Tensor  # (), L2 norm over all ranks, before clipping; NaN or inf where the step was skipped
    lr: float  # the learning rate that was used
    loss_scale: float  # by which the loss had been multiplied
    skipped: bool  # float16 gradients overflowed: nothing was updated


_NOTHING = nullcontext()


class Access(Enum):
    """What a call does with the parameters."""

    NOTHING = "nothing"  # it has to do with gradients alone
    LOOKS = "looks"  # it shows them as they are, without what is not a step yet: a forward, too
    READS = "reads"  # all that the steps so far have updated is in them
    CHANGES = "changes"  # as READS, and what it leaves is taken for right: a backward and an update, too
    REPLACES = "replaces"  # as CHANGES, states too; an update that has failed before is of no matter then
    CLOSES = "closes"  # the engine is closed


class StepFeature:
    """A feature defines the moments that it needs. An exception ends the call of the engine that the moment is in."""

    is_on = True
    """From the first step on; else a call turns it on."""

    @classmethod
    def of(cls, parts: Any) -> Self | None:
        """The feature that the config asks for, when an engine is made; None: it is off. A collective, if need be.

        parts: the `Parts` of the engine.
        """
        return None

    def before_call(self, what: str, access: Access) -> None:
        """Before a forward, backward, update, or call between steps (what): raises StateError where it may not be."""

    def before_forward(self, batches: Sequence[Any], output: Callable[[], Any] | None) -> None:
        """Before a forward, with what the caller gives it; with stages, of all microbatches of a step together.

        output: makes a forward with the first of them, for a check, which leaves nothing behind; None: it cannot.
        """

    def around_forward(self) -> AbstractContextManager[object]:
        """Entered around a forward of the whole model."""
        return _NOTHING

    def before_evaluation(self, batch: Any) -> None:
        """Before the forwards of `eval_step`."""

    def before_backward(self) -> None:
        """Before a backward, and before it is known whether it is the last of its step."""

    def between_steps(self, what: str) -> None:
        """A call (what) needs the time between two steps: raises StateError where it is none."""

    def before_step(self) -> None:
        """The caller asks for the update, whose gradients are final."""

    def before_update(self) -> None:
        """Before the sum over ranks, which tells all of a doubt (`AccumulationState.note_inconsistency`). All ranks are
        there."""

    def events(self) -> Sequence[bool]:
        """Events that this rank knows of, as many on all ranks: the sum tells all ranks. With `on_events` beside it."""
        return ()

    def on_events(self, counts: Sequence[int]) -> None:
        """On how many ranks each of these events was, after the update."""

    def explain_inconsistency(self) -> None:
        """A rank has a doubt. Raises why, on all ranks, if the doubt is of this feature; all ranks call it."""

    def after_update(self, skipped: bool) -> None:
        """The shards are updated, or skipped in float16. All ranks are there."""

    def after_step(self, step: int, result: StepResult) -> None:
        """So many steps are done. Where it raises SystemExit, the engine is closed."""

    def before_next_step(self, step: int) -> None:
        """After all of `after_step`, and before the first step: what is to be there during the next one begins."""

    def after_change(self) -> None:
        """A call has changed parameters, which are taken for right."""

    def after_refresh(self) -> None:
        """Copies of shards that other ranks have were made exact."""

    def after_new_groups(self) -> None:
        """The optimizer, and units, have another group of parameters. Also of a feature that is off."""

    def forbids_files(self, what: str) -> bool:
        """Whether an export or a checkpoint (what) is not to be written."""
        return False

    def before_save(self) -> None:
        """Before a checkpoint is written."""

    def after_load(self, step: int) -> None:
        """A checkpoint was loaded: the training goes on after so many steps."""

    def close(self) -> None:
        """The engine is closed. Those that are on, the last one first, each whatever becomes of the others."""


F = TypeVar("F", bound=StepFeature)


class StepFeatures:
    """The features of an engine; by moment, the methods of those that are on."""

    before_call: tuple[Callable[[str, Access], None], ...]
    before_forward: tuple[Callable[[Sequence[Any], Callable[[], Any] | None], None], ...]
    around_forward: tuple[Callable[[], AbstractContextManager[object]], ...]
    before_evaluation: tuple[Callable[[Any], None], ...]
    before_backward: tuple[Callable[[], None], ...]
    between_steps: tuple[Callable[[str], None], ...]
    before_step: tuple[Callable[[], None], ...]
    before_update: tuple[Callable[[], None], ...]
    events: tuple[Callable[[], Sequence[bool]], ...]
    on_events: tuple[Callable[[Sequence[int]], None], ...]
    explain_inconsistency: tuple[Callable[[], None], ...]
    after_update: tuple[Callable[[bool], None], ...]
    after_change: tuple[Callable[[], None], ...]
    after_refresh: tuple[Callable[[], None], ...]
    after_new_groups: tuple[Callable[[], None], ...]
    after_step: tuple[Callable[[int, StepResult], None], ...]
    before_next_step: tuple[Callable[[int], None], ...]
    forbids_files: tuple[Callable[[str], bool], ...]
    before_save: tuple[Callable[[], None], ...]
    after_load: tuple[Callable[[int], None], ...]

    def __init__(self, order: Sequence[type[StepFeature]]) -> None:
        self._order = order
        self._made: list[StepFeature] = []
        self._collect()

    def begin(self, parts: Any) -> None:
        """A collective."""
        self._made = [one for kind in self._order if (one := kind.of(parts)) is not None]
        self._collect()

    def find(self, kind: type[F]) -> F | None:
        """The feature of that class that the engine has, on or off."""
        return next((one for one in self._made if isinstance(one, kind)), None)

    def get(self, kind: type[F]) -> F:
        """As `find`, of a class of which each engine has a feature."""
        found = self.find(kind)
        assert found is not None, kind
        return found

    def turn_on(self, feature: StepFeature) -> None:
        """The engine has it from now on; of its class no other."""
        feature.is_on = True
        self._made = [one for one in self._made if type(one) is not type(feature)] + [feature]
        self._made.sort(key=lambda one: self._order.index(type(one)))
        self._collect()

    def turn_off(self, feature: StepFeature) -> None:
        feature.is_on = False
        self._collect()

    def around(self) -> AbstractContextManager[object]:
        """All of `around_forward`."""
        if not self.around_forward:
            return _NOTHING
        with ExitStack() as stack:  # where one cannot be entered, those before it are left
            for enter in self.around_forward:
                stack.enter_context(enter())
            return stack.pop_all()

    def close(self) -> None:
        with ExitStack() as closing:
            for one in self._made:
                closing.callback(one.close)

    def _collect(self) -> None:
        for moment in StepFeatures.__annotations__:
            defined = [one for one in self._made if getattr(type(one), moment) is not getattr(StepFeature, moment)]
            asked = [one for one in defined if one.is_on or moment == "after_new_groups"]
            setattr(self, moment, tuple(getattr(one, moment) for one in asked))
