"""The steps of training: backwards of microbatches, and the update that they end with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol, TypeVar
from zlib import crc32

import torch

from ...comm import Activity, Mesh
from ...offload import OffloadError
from ...watch.log import logger
from ...zero.loss_scale import LossScaler
from ...zero.optimizer import ShardedOptimizer
from ...zero.reductions import OnFinal
from ...zero.sequence import StateError
from ...zero.unit import Unit
from ..blueprint.blueprint import Timing
from ..config.config import Config
from .accumulation_state import AccumulationState
from .features import Access, StepFeatures, StepResult
from .gradient_scale import GradientScale
from .join import Call, Join, weighted
from .step_sums import StepSums, SummedStep, cleared_error, non_finite_error, sum_step
from .step_update import StepUpdate

R = TypeVar("R")
NO_BACKWARD = (
    "engine.step(): expected a backward since the last step, found none; call engine.backward(loss) on a loss that was "
    "computed from what engine(...) has returned, with its graph, and engine.zero_grad() not between the two"
)
NO_GRADIENT = (
    "engine.step(): expected a backward through the model, found one that gave no parameter a gradient on any rank; "
    "was an output of the model detached, or used under torch.no_grad(), before the loss was computed from it?"
)


class UnitPasses(Protocol):
    """Takes the units of this rank through a backward.

        begin_backward ... a unit is entered, its gradients come, it is left ... end_backward, or abort

    Hooks on the model, or a schedule, tell it what happens in between.
    """

    @property
    def units(self) -> Sequence[Unit]:
        """The rest first, then the blocks."""

    @property
    def reduction_order(self) -> Sequence[Unit]:
        """The same, in the order in which their gradients are reduced."""

    def begin_backward(self, boundary: bool, on_final: OnFinal | None) -> None:
        """boundary: it has the last microbatch of an optimizer step. on_final: called with each gradient then."""

    def end_backward(self) -> None:
        """Returns when all that is to be reduced has been."""

    def abort(self, error: BaseException) -> None:
        """Ends a backward that `error` has ended."""

    def await_others(self) -> None:
        """Returns when all ranks have come to the end of the step. A collective."""

    def release_all(self) -> None:
        """Between steps: no parameters are needed."""


class Steps:
    """Each step is a number of backwards and one update of the shards.

    backward   x gradient_accumulation_steps, or one of them all together: gradients are reduced as they come
    end        the exact global norm, clip factor, update of the shards, and new parameters for the next forward
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        passes: UnitPasses,
        optimizer: ShardedOptimizer,
        loss_scaler: LossScaler,
        join: Join,
        features: StepFeatures,
    ) -> None:
        self.accumulated = AccumulationState(config)
        self.last = StepResult(torch.zeros(()), torch.zeros(()), optimizer.lr, loss_scaler.scale, False)
        """What the last step has come to."""
        self.join = join
        self.features = features
        self._config = config
        self._mesh = mesh
        self._passes = passes
        self._optimizer = optimizer
        self.cleared: list[str] = []
        """Notes of the gradients that the caller has cleared in this step, alike on all ranks."""
        self.num_changes = 0
        """A number that grows with each change of parameters that the engine itself makes."""
        self._is_apart = False  # other ranks may still have what an error has interrupted
        own = (param for unit in passes.units for group in unit.groups for param in group.params)
        self.scale = GradientScale(config, mesh.data_size, loss_scaler, own)
        self.register_groups()

    def register_groups(self) -> None:
        """The groups of the units, and of the optimizer, are those that there are now; between steps."""
        optimizer, passes, mesh = self._optimizer, self._passes, self._mesh
        self.gradients = [gradient for unit in passes.units for gradient in unit.gradients]
        timing = Timing.of(self._config)
        delay_after_steps = self._config.zero_optimization.offload_optimizer.delay_after_steps
        order = passes.reduction_order
        self.update = StepUpdate(optimizer, order, mesh, timing, lambda: self.grad_scale, delay_after_steps)
        for feature in self.features.after_new_groups:
            feature()

    def check_between(self, what: str) -> None:
        """Raises StateError in the middle of a step, and where the caller says which backwards count."""
        for feature in self.features.between_steps:
            feature(what)
        self.accumulated.check_between(what)

    # -- microbatches ---------------------------------------------------------------------------------------------

    def backward(self, run: Callable[[], R], num_microbatches: int = 1) -> R:
        """What `run` gives, the backward of so many microbatches. An error in it ends the step."""
        self.begin_backward(num_microbatches)
        try:
            result = run()
        except BaseException as error:
            self.abort_backward(error)
            raise
        self.end_backward(num_microbatches)
        return result

    def begin_forward(self, batches: Sequence[Any], output: Callable[[], Any] | None) -> None:
        """See `StepFeature.before_forward`."""
        self.begin_use()  # first: what is only tried may not be taken for right
        for feature in self.features.before_forward:
            feature(batches, output)

    def begin_use(self) -> None:
        """Parameters are used outside of a backward: what is tried in them goes. A collective where something was."""
        for feature in self.features.before_call:
            feature("a forward", Access.LOOKS)
        if self.accumulated.is_complete:
            self.roll_back()
        if self._is_apart:
            self._is_apart = False
            self._mesh.fence("the end of what an error has interrupted")

    def begin_backward(self, num_microbatches: int = 1) -> None:
        """As `backward`, until `end_backward` or `abort_backward`."""
        for feature in self.features.before_call:
            feature("backward", Access.CHANGES)
        self.refuse_more("another backward")  # a sum that was final was not
        for begin in self.features.before_backward:
            begin()
        if self.accumulated.clipping_by_hand is not None:
            self.accumulated.refuse_backward()
        boundary = self.accumulated.would_complete(num_microbatches)
        on_final = self.update.begin_backward(boundary)
        if on_final is not None:
            self.num_changes += 1
        self.accumulated.begin(num_microbatches, boundary)
        self._passes.begin_backward(boundary, on_final)

    def end_backward(self, num_microbatches: int = 1) -> None:
        try:
            self._passes.end_backward()
            if self.update.arriving:
                self.update.end_backward()
        except BaseException as error:
            self.abort_backward(error)
            raise
        self.accumulated.num_microbatches += num_microbatches

    def abort_backward(self, error: BaseException) -> None:
        """Forgets the step of a backward that `error` has ended."""
        self._mesh.error_broadcast.broadcast(error)
        self._passes.abort(error)
        self.forget()

    def refuse_more(self, what: str) -> None:
        """Takes back what was updated before the end of the step. Raises StateError where it is there for good."""
        if self.accumulated.is_complete:
            self.update.refuse_more(what)
            self.roll_back()

    def roll_back(self) -> None:
        """What was updated before the end of the step has not been, on all ranks. Does nothing where nothing was."""
        if self.update.roll_back():
            self.join.before(Call.TAKING_BACK)
            self._mesh.fence("the end of what was tried in the backward")

    def forget(self, ends_graphs: bool = True) -> None:
        """Of the microbatches so far nothing counts: the next one is the first of its step.

        ends_graphs: nothing that was computed before is differentiated after this.
        """
        if self.update.roll_back():  # what an error has interrupted
            self._is_apart = True
        self.forget_gradients()
        if ends_graphs:
            self._passes.release_all()
            self.cleared.clear()
        self.accumulated.forget()
        self.join.num_missing = 0

    def forget_gradients(self) -> None:
        """Of the backwards so far."""
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter would cost a call of Python
            for gradient in self.gradients:
                gradient.reset()
                for param in gradient.group.params:
                    param.grad = None

    # -- the update -----------------------------------------------------------------------------------------------

    def end(self, number: int, by_hand: bool) -> None:
        """Updates the parameters; a collective. number: of steps before this one.

        by_hand: the caller has run the backwards: StateError where they gave no gradient on any rank.
        """
        for feature in self.features.before_call:
            feature("engine.step()", Access.CHANGES)
        self._mesh.world.progress.enter(Activity.UPDATE)
        self._passes.await_others()
        self.num_changes += 1
        for begin in self.features.before_update:
            begin()
        told = [events() for events in self.features.events]
        events = (self.update.has_failed(), self.accumulated.lacks_loss, by_hand, *chain(*told))
        losses, what = self.accumulated.losses, f"the norm of step {number}"
        if self.join.num_missing:  # whose mean, averaged over the ranks, is that of all there were
            losses = weighted(losses, self._weight * len(losses) / self.accumulated.num_microbatches)
        inconsistencies, cleared = (
            self.accumulated.inconsistencies.values(),
            1 + crc32(str(self.cleared).encode()) if self.cleared else 0,
        )
        inconsistency = torch.stack([one.any() for one in inconsistencies]).any() if inconsistencies else None
        summed = sum_step(self._mesh, self.gradients, losses, events, what, self.update.uses, inconsistency, cleared)
        grad_scale = self.grad_scale
        has_nothing = self.update.uses.are_none and summed.read().is_without_gradients and summed.read().events[2] > 0
        is_started = not has_nothing and self._update_if_finite(summed, number, grad_scale)
        sums = summed.read()
        if is_started:
            is_wrong = sums.num_bad or sums.num_changed or sums.cleared != cleared * self._mesh.world.size
            self.update.end_skipped(not is_wrong, sums.unused)
        if sums.num_changed:
            self.forget()
            for explain in self.features.explain_inconsistency:
                explain()
            raise AssertionError("expected a feature that explains the doubt of a rank, found none")
        if sums.cleared != cleared * self._mesh.world.size:
            notes = "; ".join(self.cleared)
            self.forget()
            raise cleared_error(self._mesh, notes)
        update_failed, num_lacking, _, *counts = sums.events
        if update_failed:
            self.forget()
            self.update.raise_failure()
        if has_nothing:
            self.forget()
            raise StateError(NO_GRADIENT)
        norm = math.sqrt(sums.square_norm) * grad_scale * self.norm_factor if not sums.num_bad else math.nan
        result = StepResult(
            None if num_lacking else torch.scalar_tensor(sums.loss, dtype=sums.loss_dtype),
            torch.scalar_tensor(norm, dtype=sums.loss_dtype),
            self._optimizer.lr,
            self.scale.loss_scaler.scale,
            skipped=bool(sums.num_bad),
        )
        if not is_started or sums.num_bad:
            self._update_or_skip(sums, norm, number)
        if not result.skipped:
            for one in self.update.thin:
                one.accept(grad_scale)
        for end in self.features.after_update:
            end(result.skipped)
        self.forget()
        self.scale.loss_scaler.update(result.skipped)
        self.last = result
        for own, on_events in zip(told, self.features.on_events, strict=True):
            on_events(counts[: len(own)])
            del counts[: len(own)]

    @property
    def grad_scale(self) -> float:
        """What the sum of the step's gradients is multiplied by for their mean over the microbatches there were."""
        return self.scale.grad_scale * self._weight if self.join.num_missing else self.scale.grad_scale

    @property
    def _weight(self) -> float:
        """How many microbatches a step has, for each that there was: 1 but under `engine.join`."""
        full = self._mesh.data_size * self.accumulated.num_begun
        return full / (full - self.join.num_missing)

    @property
    def norm_factor(self) -> float:
        """Of the root of all squares that were counted: of gradients that are not summed it makes the root mean square
        of the ranks' norms."""
        return 1.0 if self._optimizer.sums_gradients else math.sqrt(self._mesh.data_size)

    def _update_if_finite(self, summed: SummedStep, number: int, grad_scale: float) -> bool:
        """Starts the update of a device, which finds out there whether all is finite: the host is told meanwhile.

        Where this rank lacks a gradient, of which all ranks have to say whether it was used, the host waits first, and
        then starts the same: others have started it already, with what it sends, and with the factor that is there.
        Not where the host updates anything. Returns whether it was started.
        """
        if not self.update.can_be_skipped:
            return False
        unused = frozenset[int]() if self.update.uses.are_all else summed.read().unused
        factor, skip = summed.factor_and_skip(self.accumulated.clipping, grad_scale)
        self.update.end_step(factor, unused, f"the update of step {number}", skip)
        return True

    def _update_or_skip(self, sums: StepSums, norm: float, number: int) -> None:
        factor = self.accumulated.clipping.factor(norm) * self.grad_scale
        if sums.num_bad or sums.cleared or factor != self.grad_scale or self.update.has_missed(sums.unused):
            self.roll_back()
        if not sums.num_bad:
            self.update.end_step(factor, sums.unused, f"the update of step {number}")
        elif self._config.fp16.enabled:
            self.update.flush()
        else:
            try:
                raise non_finite_error(self._mesh, self.gradients, number, self.update.outcome_without_step)
            finally:
                self.forget()

    # -- between steps --------------------------------------------------------------------------------------------

    @contextmanager
    def apart(self, activity: Activity, access: Access) -> Iterator[None]:
        """Around a call that is not part of a step. A collective, but where it only looks.

        Raises OffloadError on every rank where an update in the background has failed on any, and StateError where not
        all ranks would come.
        """
        gradients = "engine.gradient(), set_gradient() or clip_grad_value_()"
        self.join.check_outside(gradients if access is Access.NOTHING else activity.value)
        changes = access in (Access.CHANGES, Access.REPLACES)
        for feature in self.features.before_call:
            feature("a change of the weights" if changes else activity.value, access)
        with self._mesh.world.progress.during(activity), self._mesh.error_broadcast.between_steps():
            try:
                if access is Access.LOOKS:
                    self.update.roll_back()
                elif access is not Access.NOTHING:
                    if self.update.is_under_way:
                        self.num_changes += 1
                    self.update.flush()
            except OffloadError as error:
                if access is not Access.REPLACES:
                    raise
                logger.warning("%s", error)
            yield
            if access is Access.REPLACES:
                self.update.forget_failure()
            if changes:
                self.num_changes += 1
                for end in self.features.after_change:
                    end()
