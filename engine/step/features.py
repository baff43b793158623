"""Optional parts of a step, which exist only if the config or a call asks for them.

[Note: moments of a step]
    forward     before_call, before_forward | around_forward ( the model )
    backward    before_call, before_backward | autograd; gradients are reduced as they arrive | after_abort on an error
    step        before_step, before_call, before_update | sum over ranks, update | after_update, after_step,
                before_next_step

An engine has the features that are on, in the order of a table (`engine/features.py`). For each moment it holds the
methods that these features define. A feature that is off, or does not define a moment, is not called there.
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
    """The result of an optimizer step."""

    loss: Tensor | Any
    """(), mean over the microbatches of all ranks; float64 if the model's loss is, else float32. None if the caller ran
    `loss.backward()` with a loss that the engine does not know: see `Engine.scale`. `train_step` never returns None, so
    the type does not say it."""
    grad_norm: Tensor  # (), L2 norm over all ranks, before clipping; NaN or inf if the step was skipped
    lr: float  # the learning rate of this step
    loss_scale: float  # the factor of the loss
    skipped: bool  # float16 gradients overflowed: nothing was updated


_NOTHING = nullcontext()


class Access(Enum):
    """How a call uses the parameters."""

    NOTHING = "nothing"  # gradients alone
    LOOKS = "looks"  # reads them without the speculative update of an unfinished step: a forward, too
    READS = "reads"  # reads them with the updates of all steps, also of background updates
    CHANGES = "changes"  # as READS, and writes them: a backward and an update, too
    REPLACES = "replaces"  # as CHANGES, states too; so an earlier failed update does not matter
    CLOSES = "closes"  # closes the engine


class StepFeature:
    """A feature defines the moments that it needs. If a moment raises, the engine's call ends with that error."""

    is_on = True
    """Whether it is on from the first step. Else a call turns it on."""

    @classmethod
    def of(cls, parts: Any) -> Self | None:
        """Make the feature when an engine is made, if the config asks for it; else return None. May be a collective.

        parts: the `Parts` of the engine.
        """
        return None

    def before_call(self, what: str, access: Access) -> None:
        """Check a call (what): forward, backward, update, between steps. Raise StateError if it is not allowed now."""

    def before_forward(self, batches: Sequence[Any], output: Callable[[], Any] | None) -> None:
        """Run before a forward. batches: the caller's; over stages, all microbatches of a step together.

        output: makes a forward with the first batch, for a check, without side effects; None: not possible here.
        """

    def around_forward(self) -> AbstractContextManager[object]:
        """Return a context around a forward of the whole model."""
        return _NOTHING

    def before_evaluation(self, batch: Any) -> None:
        """Run before the forwards of `eval_step`."""

    def before_backward(self) -> None:
        """Run before a backward, when it is not known yet if it completes the step."""

    def after_abort(self) -> None:
        """Run when an error has ended a backward, and the gradients of its step are forgotten."""

    def between_steps(self, what: str) -> None:
        """Raise StateError if a call (what) that needs the time between two steps comes in the middle of a step."""

    def before_step(self) -> None:
        """Run when the caller asks for the update. Gradients are final."""

    def before_update(self) -> None:
        """Run on all ranks before their sum, to record a doubt (`AccumulationState.note_inconsistency`) for it."""

    def events(self) -> Sequence[bool]:
        """Return events of this rank, the same number on all ranks. The sum counts them over all ranks.

        A feature that defines it defines `on_events` too.
        """
        return ()

    def on_events(self, counts: Sequence[int]) -> None:
        """Receive, after the update, the number of ranks on which each event of `events` has happened."""

    def explain_inconsistency(self) -> None:
        """Raise on all ranks, if the doubt of a rank comes from this feature. All ranks call it."""

    def after_update(self, skipped: bool) -> None:
        """Run on all ranks after the update of the shards, or after float16 skipped it."""

    def after_step(self, step: int, result: StepResult) -> None:
        """Run when `step` steps are done. If it raises SystemExit, the engine is closed."""

    def before_next_step(self, step: int) -> None:
        """Run after all `after_step`, and before the first step: begin the recording of the next step."""

    def after_change(self) -> None:
        """Run after a call has changed parameters through the engine."""

    def after_refresh(self) -> None:
        """Run after inexact copies of shards on other ranks were made exact."""

    def after_new_groups(self) -> None:
        """Run when the optimizer and units have another group of parameters, also for a feature that is off."""

    def forbids_files(self, what: str) -> bool:
        """Return True if an export or a checkpoint (what) must not be written."""
        return False

    def before_save(self) -> None:
        """Run before a checkpoint is written."""

    def after_load(self, step: int) -> None:
        """Run when a checkpoint was loaded. step: the number of steps that the training continues from."""

    def close(self) -> None:
        """Free what the feature has: the engine is closed. Also called for a feature that is off.

        Features are closed in reverse order, and an error in a feature does not keep the rest from it.
        """


F = TypeVar("F", bound=StepFeature)


class StepFeatures:
    """The features of an engine; by moment, the methods of those that are on."""

    before_call: tuple[Callable[[str, Access], None], ...]
    before_forward: tuple[Callable[[Sequence[Any], Callable[[], Any] | None], None], ...]
    around_forward: tuple[Callable[[], AbstractContextManager[object]], ...]
    before_evaluation: tuple[Callable[[Any], None], ...]
    before_backward: tuple[Callable[[], None], ...]
    after_abort: tuple[Callable[[], None], ...]
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
        """Make the features. A collective."""
        self._made = [one for kind in self._order if (one := kind.of(parts)) is not None]
        self._collect()

    def find(self, kind: type[F]) -> F | None:
        """Return the engine's feature of a class, on or off; None if the engine has none of this class."""
        return next((one for one in self._made if isinstance(one, kind)), None)

    def get(self, kind: type[F]) -> F:
        """Return the feature of a class that every engine has."""
        found = self.find(kind)
        assert found is not None, kind
        return found

    def turn_on(self, feature: StepFeature) -> None:
        """Turn a feature on, in the place of an earlier feature of its class."""
        feature.is_on = True
        self._made = [one for one in self._made if type(one) is not type(feature)] + [feature]
        self._made.sort(key=lambda one: self._order.index(type(one)))
        self._collect()

    def turn_off(self, feature: StepFeature) -> None:
        feature.is_on = False
        self._collect()

    def around(self) -> AbstractContextManager[object]:
        """Enter all of `around_forward`."""
        if not self.around_forward:
            return _NOTHING
        with ExitStack() as stack:  # if entering a context fails, the contexts before it are left
            for enter in self.around_forward:
                stack.enter_context(enter())
            # The caller leaves the contexts: without `pop_all` they would end here.
            return stack.pop_all()

    def close(self) -> None:
        with ExitStack() as closing:
            for one in self._made:
                closing.callback(one.close)

    def _collect(self) -> None:
        # The annotations of this class are the table of moments.
        for moment in StepFeatures.__annotations__:
            defined = [one for one in self._made if getattr(type(one), moment) is not getattr(StepFeature, moment)]
            # `after_new_groups` also reaches features that are off: turned on later, they must know the present
            # parameters.
            asked = [one for one in defined if one.is_on or moment == "after_new_groups"]
            setattr(self, moment, tuple(getattr(one, moment) for one in asked))
