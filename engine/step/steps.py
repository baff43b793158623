"""Run the steps of training: backwards of microbatches, then an update of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn, Protocol, TypeVar
from zlib import crc32

import torch
from torch import Tensor

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
from .features import Access, StepFeature, StepFeatures, StepResult
from .gradient_scale import GradientScale
from .join import Call, Join, weighted
from .step_sums import Clipping, StepSums, SummedStep, cleared_error, non_finite_error, sum_step
from .step_update import StepUpdate

R = TypeVar("R")
NO_BACKWARD = (
    "engine.step(): expected a backward since the last step, found none; call engine.backward(loss) with a loss of the "
    "output of engine(...), and do not call engine.zero_grad() between backward and step"
)
NO_GRADIENT = (
    "engine.step(): expected gradients of the model, found a backward that gave no parameter a gradient on any rank; "
    "was the output of the model detached, or the loss computed under torch.no_grad()?"
)


class UnitPasses(Protocol):
    """Takes the units of this rank through a backward.

        begin_backward ... enter a unit, collect its gradients, leave it ... end_backward, or abort

    Hooks on the model or a pipeline schedule report the uses of units in between.
    """

    @property
    def units(self) -> Sequence[Unit]:
        """Return the root unit, then the blocks."""

    @property
    def reduction_order(self) -> Sequence[Unit]:
        """Return the units in the order in which their gradients are reduced."""

    def begin_backward(self, boundary: bool, on_final: OnFinal | None) -> None:
        """Begin a backward. boundary: it has the last microbatch of an optimizer step.

        on_final: called with each gradient of that backward when the gradient is final.
        """

    def end_backward(self) -> None:
        """Wait until all gradients of this backward are reduced."""

    def abort(self, error: BaseException, completes: bool) -> None:
        """End a backward that `error` has interrupted. completes: begin the remaining collectives, if possible."""

    def await_others(self) -> None:
        """Wait until all ranks have reached the end of the step. A collective."""

    def release_all(self) -> None:
        """Release all parameters. Called between steps."""


class AccumulationState:
    """Counts the microbatches of a step, and collects their losses and doubts until the update."""

    def __init__(self, config: Config) -> None:
        self.accumulation = config.gradient_accumulation_steps or 1  # microbatches of a step; see `count_by`
        is_layered = config.zero_optimization.layered_gradient_accumulation
        self._holds_whole_steps = (
            "zero_optimization.layered_gradient_accumulation" if is_layered else "parallel.pipeline"
        )
        self.losses: list[Tensor] = []  # () of each microbatch
        self.lacks_loss = False  # the caller ran the backward of an unknown loss
        self.num_microbatches = 0  # whose backward has ended
        self.num_begun = 0  # with the microbatches of the running backward
        self.num_lost = 0
        """Microbatches of this step whose gradients an error has dropped, though the caller counts them."""
        self.is_complete = False
        """Whether the last backward completed the step, so that gradients are final."""
        self.clipping_by_hand: Clipping | None = None  # by `engine.clip_grad_norm_`
        self.inconsistencies: dict[StepFeature, Tensor] = {}  # see `note_inconsistency`
        self.is_void = False  # the batches differ between stages, so nothing is computed
        self.clipping = Clipping(config.gradient_clipping or math.inf)
        """Of the config, in steps without `clipping_by_hand`."""
        self._is_last: bool | None = None  # the caller's word; None: count
        self._counted_by: Callable[[], bool] | None = None  # see `count_by`
        self._by_hand = False  # the caller has given his word in this step

    @property
    def done(self) -> str:
        """Say how many microbatches are done, for error texts."""
        if self._by_hand:
            last = "the last of the step" if self.is_complete else "and none was the last of the step"
            return (
                f"{self.num_microbatches} microbatches done, {last} (engine.accumulate, no_sync and "
                "require_backward_grad_sync say which is)"
            )
        return f"{self.num_microbatches} of {self.accumulation} microbatches done (gradient_accumulation_steps)"

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Say by hand if the backwards inside the context complete the step, whatever their number.

        From then on the caller counts for the rest of this step.
        """
        before, self._is_last, self._by_hand = self._is_last, last, True
        try:
            yield
        finally:
            self._is_last = before

    @property
    def may_be_last(self) -> bool:
        """Return False if the caller has said that the next backward does not complete the step."""
        return self._is_last is not False

    def say(self, last: bool) -> None:
        """Say by hand if the next backwards complete the step.

        False holds until the next call. True holds until the step has ended.
        """
        # True is not stored: `_by_hand` alone makes the next backward the last. `forget` clears it, so that the next
        # step is counted by the config again.
        self._is_last, self._by_hand = None if last else False, True

    def count_by(self, is_last: Callable[[], bool], accumulation: int) -> None:
        """See `Engine.count_by`."""
        self._counted_by, self.accumulation = is_last, accumulation

    def note_loss(self, loss: Tensor | None) -> None:
        """Add the loss of a microbatch, (). None: the engine does not know it."""
        if loss is None:
            self.lacks_loss = True
        else:
            self.losses.append(loss)

    def note_inconsistency(self, feature: StepFeature, found: Tensor) -> None:
        """Record a doubt of a feature. found: a tensor that is not 0 if this rank doubts the step.

        If any rank doubts, no rank updates, and all ranks call `StepFeature.explain_inconsistency`.
        """
        self.inconsistencies[feature] = found

    def would_complete(self, num_microbatches: int) -> bool:
        """Return True if a backward of `num_microbatches` microbatches would complete the step."""
        if self._is_last is not None:
            self._by_hand = True  # again, if a step was forgotten inside of `accumulate`
            return self._is_last
        if self._counted_by is not None:
            return self._counted_by()
        # As in DDP: after backwards inside `no_sync`, the first backward outside of it completes the step.
        return self._by_hand or (self.num_microbatches + num_microbatches) % self.accumulation == 0

    def forget(self) -> None:
        """Begin a new step."""
        self.losses.clear()
        self.num_microbatches = self.num_begun = self.num_lost = 0
        self.is_complete = self.lacks_loss = self._by_hand = self.is_void = False
        self.clipping_by_hand = None
        self.inconsistencies.clear()

    def refuse_lost(self, what: str) -> NoReturn:
        """Raise StateError: the caller would complete a step without the microbatches that were dropped."""
        raise StateError(
            f"{what}: expected all microbatches of the step, found {self.num_lost} lost: an error in a backward has "
            "dropped the gradients of this step so far. Call engine.zero_grad(), and begin the step again with its "
            "first microbatch"
        )

    def check_between(self, what: str) -> None:
        """Raise StateError in the middle of a step, or inside `no_sync` or `accumulate`."""
        if self.num_microbatches:
            raise StateError(
                f"{what}: expected a call between steps, found {self.num_microbatches} microbatches of a step done; "
                "call engine.step() or engine.zero_grad() first"
            )
        if self._is_last is not None:
            raise StateError(
                f"{what}: expected a call between steps, found it inside of engine.no_sync() or engine.accumulate(); "
                "leave the context first"
            )

    def check_whole(self, num_microbatches: int) -> None:
        """Raise ValueError if `num_microbatches` microbatches do not complete the step.

        A schedule runs all microbatches of a step together.
        """
        if not self.would_complete(num_microbatches):
            key = self._holds_whole_steps
            raise ValueError(
                f"engine.accumulate(last=False): expected a config without {key}, found it: its train_step runs all "
                "microbatches of a step; set gradient_accumulation_steps"
            )

    @property
    def is_counted_by_caller(self) -> bool:
        """Return whether the caller says when a backward completes this step. Else the config counts."""
        return self._by_hand or self._is_last is not None or self._counted_by is not None

    def check_caller_counts(self) -> None:
        """Raise StateError if the config counts: after a complete step another backward would begin a sum without end.

        Called before a backward that comes between a complete step and its update.
        """
        if not self.is_counted_by_caller:
            raise StateError(
                f"backward: expected engine.step() after the {self.accumulation} microbatches of a step "
                "(gradient_accumulation_steps), found another backward; call engine.step() after every backward (it "
                "acts when the step is complete). A loop that counts itself sets gradient_accumulation_steps to 1 and "
                "says engine.accumulate(last=...)"
            )

    def refuse_backward(self) -> NoReturn:
        """Raise StateError: the gradients of this step are clipped already."""
        raise StateError(
            "backward: expected engine.step() after engine.clip_grad_norm_(), found another backward, whose gradients "
            "would not be clipped; call clip_grad_norm_ after the last backward"
        )


class Steps:
    """Runs backwards, then updates the shards. All ranks call its methods in the same order.

    backward   a call for each microbatch, or for all microbatches; gradients are reduced as they arrive
    end        exact global norm, clip factor, update of the shards, new parameters for the next forward
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
        """The result of the last step."""
        self.join = join
        self.features = features
        self._config = config
        self._mesh = mesh
        self._passes = passes
        self._optimizer = optimizer
        self.cleared: list[str] = []
        """Notes on gradients that the caller has cleared in this step. They must be the same on all ranks."""
        self.num_changes = 0
        """Grows with each change of parameters by the engine itself."""
        self._is_apart = False  # after an error: other ranks may still run the interrupted update
        # Frozen parameters too. Added parameter groups only divide these units anew, so the set stays complete.
        own = (param for unit in passes.units for group in unit.groups for param in group.params)
        self.scale = GradientScale(config, mesh.data_size, loss_scaler, own)
        self.register_groups()

    def register_groups(self) -> None:
        """Read the groups of the units and of the optimizer again, after a group was added."""
        optimizer, passes, mesh = self._optimizer, self._passes, self._mesh
        self.gradients = [gradient for unit in passes.units for gradient in unit.gradients]
        timing = Timing.of(self._config)
        delay_after_steps = self._config.zero_optimization.offload_optimizer.delay_after_steps
        order = passes.reduction_order
        # A function, as the factor changes: float16 rescales losses, and `join` weighs a step with missing
        # microbatches.
        self.update = StepUpdate(optimizer, order, mesh, timing, lambda: self.grad_scale, delay_after_steps)
        for feature in self.features.after_new_groups:
            feature()

    def check_between(self, what: str) -> None:
        """Raise StateError in the middle of a step, or inside `no_sync` or `accumulate`."""
        for feature in self.features.between_steps:
            feature(what)
        self.accumulated.check_between(what)

    # -- microbatches ---------------------------------------------------------------------------------------------

    def backward(self, run: Callable[[], R], num_microbatches: int = 1) -> R:
        """Return run(), the backward of `num_microbatches` microbatches.

        An error in it ends the step.
        """
        self.begin_backward(num_microbatches)
        try:
            result = run()
        # Ctrl-C too: it leaves partial sums, and reductions in flight that other ranks wait for.
        except BaseException as error:
            self.abort_backward(error)
            raise
        self.end_backward(num_microbatches)
        return result

    def begin_forward(self, batches: Sequence[Any], output: Callable[[], Any] | None) -> None:
        """Call the features before a forward. See `StepFeature.before_forward`."""
        self.begin_use()  # first: the features must not see the values of a speculative update
        for feature in self.features.before_forward:
            feature(batches, output)

    def begin_use(self) -> None:
        """Prepare for a use of parameters outside of a backward.

        A speculative update is rolled back first: its values may still be rejected. Then this is a collective. Raises
        StateError if parameters are updated in part: by an error, or before the end of a step (`update_in_backward`).
        """
        if self.update.fault:
            raise StateError(self.update.fault)
        for feature in self.features.before_call:
            feature("a forward", Access.LOOKS)
        if self.accumulated.is_complete:  # it may still be rejected: a forward must see the values of the last step
            self.refuse_more("a forward")
        if self._is_apart:
            self._is_apart = False
            # Not in `forget`: a rank may fail alone, and the other ranks would not come to a fence there.
            self._mesh.fence("the end of what an error has interrupted")

    def begin_backward(self, num_microbatches: int = 1) -> None:
        """Begin a backward. `end_backward` or `abort_backward` ends it."""
        for feature in self.features.before_call:
            feature("backward", Access.CHANGES)
        if self.accumulated.is_complete:
            self.refuse_more("another backward")  # the last backward completed the step, and more gradients come
        # Before the check of `num_lost`: here placeholders notice torch's zero_grad(), which begins the step anew.
        for begin in self.features.before_backward:
            begin()
        if self.accumulated.num_lost:
            self.accumulated.refuse_lost("backward")
        if self.accumulated.clipping_by_hand is not None:
            self.accumulated.refuse_backward()
        boundary = self.accumulated.would_complete(num_microbatches)
        if self.accumulated.is_complete and not boundary:
            self.accumulated.check_caller_counts()
        # This call raises if the last update has failed. The counts of the step must not have changed by then.
        on_final = self.update.begin_backward(boundary)
        if on_final is not None:  # parameters change in this backward
            self.num_changes += 1
        self.accumulated.is_complete = boundary
        self.accumulated.num_begun = self.accumulated.num_microbatches + num_microbatches
        try:
            self._passes.begin_backward(boundary, on_final)
        except BaseException as error:  # as a refusal inside of another engine's join
            self.abort_backward(error, has_begun=False)
            raise

    def end_backward(self, num_microbatches: int = 1) -> None:
        """End a backward, and count its microbatches."""
        try:
            self._passes.end_backward()
        except BaseException as error:
            self.abort_backward(error)
            raise
        self.accumulated.num_microbatches += num_microbatches

    def abort_backward(self, error: BaseException, has_begun: bool = True) -> None:
        """Forget the step of a backward that `error` has interrupted.

        If the caller counts the microbatches, the step is not complete without those that are forgotten here.
        """
        accumulated = self.accumulated
        if accumulated.num_microbatches and not accumulated.is_counted_by_caller:
            logger.warning(
                "an error in a backward has dropped the gradients of the earlier backwards of the step (%d): begin the "
                "step again with its first microbatch",
                accumulated.num_microbatches,
            )
        # `forget` below sets both counts to 0, and a second error adds to the microbatches that the first has dropped.
        num_lost = accumulated.num_lost + (accumulated.num_microbatches if accumulated.is_counted_by_caller else 0)
        # Other ranks keep the sums of earlier microbatches, which this rank forgets: a repeated backward does not fit.
        is_kept = accumulated.num_microbatches and any(gradient.takes_each for gradient in self.gradients)
        # If all ranks have an error, some have it before their first collective, but complete the backward as the rest.
        sums = accumulated.is_complete or any(gradient.reduces_every_backward for gradient in self.gradients)
        # First: ranks that wait for this rank learn why it does not come.
        is_announced = self._mesh.error_broadcast.broadcast(error, not (is_kept or (has_begun and sums)))
        try:
            self._passes.abort(error, completes=has_begun and is_announced)
        finally:
            self.forget(error=error)
            accumulated.num_lost = num_lost
        for react in self.features.after_abort:
            react()

    def refuse_more(self, what: str) -> None:
        """Roll back a speculative update. Raise StateError if the update is final already (`update_in_backward`)."""
        if self.accumulated.is_complete:
            self.update.refuse_more(what)
            self.roll_back()

    def roll_back(self) -> None:
        """Roll back a speculative update on all ranks. A collective, if an update was open."""
        if self.update.roll_back():
            # The fence needs ranks without data too. They have made the same update, and roll it back in
            # `Engine._take_part`.
            self.join.before(Call.TAKING_BACK)
            self._mesh.fence("the end of what was tried in the backward")

    def forget(self, ends_graphs: bool = True, error: BaseException | None = None) -> None:
        """Forget all microbatches of this step: the next microbatch is the first of a step.

        ends_graphs: no earlier graph is differentiated after this call, so parameters are released. error: why.
        """
        if self.update.forget_step(error):
            self._is_apart = True
        self.forget_gradients()
        if ends_graphs:
            self._passes.release_all()
            # A zero_grad() keeps the notes: at the end of the step all ranks must have cleared the same gradients.
            self.cleared.clear()
        self.accumulated.forget()
        self.join.num_missing = 0

    def forget_gradients(self) -> None:
        """Reset the gradients of the backwards so far."""
        with torch._C.DisableTorchFunctionSubclass():  # else each released parameter costs a Python call
            for gradient in self.gradients:
                gradient.reset()
                for param in gradient.group.params:
                    param.grad = None

    # -- the update -----------------------------------------------------------------------------------------------

    def end(self, number: int, by_hand: bool) -> None:
        """Update the parameters. A collective. number: of steps before this step.

        by_hand: the caller ran the backwards. Then raise StateError if no parameter got a gradient on any rank.
        """
        for feature in self.features.before_call:
            feature("engine.step()", Access.CHANGES)
        try:
            self._end(number, by_hand)
        except BaseException as error:
            # Also after an error of the update itself, such as full memory: else the next step would add to this one.
            self.forget(error=error)
            raise

    def _end(self, number: int, by_hand: bool) -> None:
        self._mesh.world.progress.enter(Activity.UPDATE)
        # A rank that still needs a round of gathers would wait in vain for ranks that wait in the sum.
        self._passes.await_others()
        self.num_changes += 1
        for begin in self.features.before_update:
            begin()
        events_by_feature = [events() for events in self.features.events]
        # `has_failed` waits for this rank's background update, so that all ranks learn of a failure by the same sum.
        has_failed = self.update.timing is Timing.DELAYED and self.update.has_failed()
        events = (has_failed, self.accumulated.lacks_loss, by_hand, *chain(*events_by_feature))
        losses, what = self.accumulated.losses, "the norm of the step"
        if self.join.num_missing:  # the mean over ranks of the weighted mean is the mean of all losses
            losses = weighted(losses, self._weight * len(losses) / self.accumulated.num_microbatches)
        doubts = [found.any() for found in self.accumulated.inconsistencies.values()]
        inconsistency = torch.stack(doubts).any() if doubts else None
        # 1 + digest, since 0 says that nothing was cleared. The sum of 33-bit numbers over the ranks fits into an
        # int64.
        cleared = 1 + crc32(str(self.cleared).encode()) if self.cleared else 0
        summed = sum_step(self._mesh, self.gradients, losses, events, what, self.update.uses, inconsistency, cleared)
        grad_scale = self.grad_scale
        clipping = self.accumulated.clipping_by_hand or self.accumulated.clipping
        # Only a rank without any gradient waits here, before it has launched the update: see [Note: one wait].
        has_nothing = not any(summed.used) and summed.read().is_without_gradients and summed.read().events[2] > 0
        # Start the update on a device before the host knows if gradients are finite: the device reads the factor and
        # the skip flag. Updates on the host are never started here.
        is_started = not has_nothing and self.update.can_be_skipped
        if is_started:
            self._start_update(summed, clipping, grad_scale)
        interrupt: KeyboardInterrupt | None = None
        try:
            sums = summed.read()
        except KeyboardInterrupt as error:
            # Ctrl-C mostly comes here, where the host waits for the device, which updates all the same.
            sums, interrupt = summed.read(), error
        clearings_differ = sums.cleared != cleared * self._mesh.world.size
        if is_started:
            # The device has skipped the update for the same reasons: `SummedStep.factor_and_skip`.
            is_wrong = sums.num_bad or sums.num_changed or clearings_differ
            self.update.end_skipped(not is_wrong, sums.unused)
        if interrupt is not None:
            raise interrupt
        update_failed, num_lacking, _, *counts = sums.events
        if sums.num_changed or clearings_differ or update_failed or has_nothing:
            self._refuse(sums, clearings_differ)
        norm = math.sqrt(sums.square_norm) * grad_scale * self.norm_factor if not sums.num_bad else math.nan
        result = StepResult(
            None if num_lacking else torch.scalar_tensor(sums.loss, dtype=sums.loss_dtype),
            torch.scalar_tensor(norm, dtype=sums.loss_dtype),
            self._optimizer.lr,
            self.scale.loss_scaler.scale,
            skipped=bool(sums.num_bad),
        )
        # All ranks have read the same sums, so from here on they raise, skip or update alike.
        if not is_started or sums.num_bad:
            self._update_or_skip(sums, clipping.factor(norm) * grad_scale, number, grad_scale)
        if not result.skipped:
            # Only now: the residuals of a step that does not count are dropped in `PowerSGDReducer.reset`.
            for low_rank in self.update.low_rank:
                low_rank.accept(grad_scale)
        for end in self.features.after_update:
            end(result.skipped)
        self.forget()
        self.last = result
        for own, on_events in zip(events_by_feature, self.features.on_events, strict=True):
            on_events(counts[: len(own)])
            del counts[: len(own)]

    def _start_update(self, summed: SummedStep, clipping: Clipping, grad_scale: float) -> None:
        """Start the update on a device, which reads the clip factor and the skip flag itself."""
        # If this rank lacks a gradient, the host first waits for the sum, which says if another rank used that
        # parameter. Then it starts the same update: the other ranks have started theirs.
        unused = frozenset[int]() if summed.used == self.update.uses.all else summed.read().unused
        factor, skip = summed.factor_and_skip(clipping, grad_scale)
        self.update.end_step(factor, unused, "the update of the step", skip)

    def _refuse(self, sums: StepSums, clearings_differ: bool) -> NoReturn:
        """Forget the step, and raise why no rank may take it. All ranks have the same sums, so all of them raise."""
        notes = "; ".join(self.cleared)
        self.forget()  # before the collectives that collect the text of an error
        if sums.num_changed:
            for explain in self.features.explain_inconsistency:
                explain()
            raise AssertionError("expected a feature that explains the doubt of a rank, found none")
        if clearings_differ:
            raise cleared_error(self._mesh, notes)
        if sums.events[0]:
            self.update.raise_failure()
        raise StateError(NO_GRADIENT)

    @property
    def grad_scale(self) -> float:
        """Return the factor that the update applies to the summed gradients of the step.

        With it they are the mean over the microbatches of all ranks.
        """
        factor = 1.0 / (self.scale.num_summed * self.scale.seed)
        return factor * self._weight if self.join.num_missing else factor

    @property
    def _weight(self) -> float:
        """Return microbatches of a full step / microbatches of this step: 1 outside of `engine.join`."""
        # Not `num_microbatches`: an update in the backward asks before that backward is counted.
        full = self._mesh.data_size * self.accumulated.num_begun
        return full / (full - self.join.num_missing)

    @property
    def norm_factor(self) -> float:
        """Return the factor of the root of all counted squares.

        If gradients are not summed over ranks, the norm is the root mean square of the norms of the ranks.
        """
        return 1.0 if self._optimizer.sums_gradients else math.sqrt(self._mesh.data_size)

    def _update_or_skip(self, sums: StepSums, factor: float, number: int, grad_scale: float) -> None:
        """Update by the sum that the host has read. If a gradient is not finite, skip in float16, else raise.

        factor: `grad_scale` with the clipping of the step.
        """
        # A speculative update has assumed the opposite of each of these, and that the same parameters are unused.
        # `end_step` then updates again.
        is_other = sums.num_bad or sums.cleared or factor != grad_scale
        if is_other or self._optimizer.counts.unused != sums.unused:
            self.roll_back()
        if not sums.num_bad:
            self.update.end_step(factor, sums.unused, "the update of the step")
        elif self._config.fp16.enabled:
            # A skipped step still publishes the delayed update of the step before, as `end_step` would.
            self.update.flush()
        else:
            try:
                # The text is made before `forget`, which drops the gradients and the bad values that it names.
                raise non_finite_error(self._mesh, self.gradients, number, self.update.outcome_without_step)
            finally:
                self.forget()

    # -- between steps --------------------------------------------------------------------------------------------

    def await_others(self) -> None:
        """Take part in the gathers that other ranks need before they make the same call. A collective."""
        self._passes.await_others()

    @contextmanager
    def apart(self, activity: Activity, access: Access, alone: bool = False) -> Iterator[None]:
        """Wrap a call that is not part of a step. A collective, except for `Access.NOTHING`.

        alone: a rank may make the call without the others, unless updates run in the background.
        Raises OffloadError on every rank if a background update has failed on any rank. Raises StateError inside of
        `engine.join`, since ranks without data would not make the call, and for changes and saves of parameters that an
        error has left updated in part.
        """
        if self.update.fault and (access is Access.CHANGES or activity is Activity.SAVING):
            raise StateError(self.update.fault)
        gradients = "engine.gradient(), set_gradient() or clip_grad_value_()"
        self.join.check_outside(gradients if access is Access.NOTHING else activity.value)
        changes = access in (Access.CHANGES, Access.REPLACES)
        for feature in self.features.before_call:
            feature("a change of the weights" if changes else activity.value, access)
        with self._mesh.world.progress.during(activity), self._mesh.error_broadcast.between_steps():
            if not alone and access is not Access.NOTHING:
                self._passes.await_others()
            try:
                if access is Access.LOOKS:
                    self.update.roll_back()
                elif access is not Access.NOTHING:
                    # The flush writes parameters, so values that `engine.gathered` still shows are old from here on.
                    if self.update.is_under_way:
                        self.num_changes += 1
                    self.update.flush()
            except OffloadError as error:
                # A load of a checkpoint writes all that the failed update has left half done.
                if access is not Access.REPLACES:
                    raise
                logger.warning("%s", error)
            try:
                yield
            # Also after an error, which leaves other versions of parameters behind.
            finally:
                if changes:
                    self.num_changes += 1
                    for end in self.features.after_change:
                        end()
            if access is Access.REPLACES:
                # After the body: if the load fails, masters and states are still half updated.
                self.update.forget_failure()
