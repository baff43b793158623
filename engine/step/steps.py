"""The steps of training: backwards of microbatches, and the update that they end with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from ...comm import Activity, Mesh
from ...offload import OffloadError
from ...watch.log import logger
from ...zero.loss_scale import LossScaler
from ...zero.optimizer import ShardedOptimizer
from ...zero.reduced_gradient import Cleared
from ...zero.reductions import OnFinal
from ...zero.sequence import StateError
from ...zero.unit import Unit
from ..blueprint.blueprint import Timing
from ..config.config import Config
from .features import StepFeatures
from .gradient_scale import GradientScale
from .guard import ModelGuard
from .join import Call, Join, weighted
from .lent import KINDS, PARAMETERS, Lent
from .shown_gradients import ShownGradients, refuse_differences
from .step_inputs import StepInputs
from .step_result import StepResult
from .step_so_far import StepSoFar
from .step_sums import StepSums, SummedStep, non_finite_error, sum_step
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


class Access(Enum):
    """What a call between steps does with the parameters."""

    NOTHING = "nothing"  # it has to do with gradients alone
    LOOKS = "looks"  # it shows them as they are, without what is not a step yet
    READS = "reads"  # all that the steps so far have updated is in them
    CHANGES = "changes"  # as READS, and what it leaves is taken for right
    REPLACES = "replaces"  # as CHANGES, states too; an update that has failed before is of no matter then


class Steps:
    """Each step is a number of backwards and one update of the shards.

    backward   x gradient_accumulation_steps, or one of them all together: gradients are reduced as they come
    end        the exact global norm, clip factor, update of the shards, and new parameters for the next forward
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        module: nn.Module,
        passes: UnitPasses,
        optimizer: ShardedOptimizer,
        loss_scaler: LossScaler,
        input_dtype: torch.dtype | None,
        rows_per_microbatch: int | None,
        join: Join,
        features: StepFeatures,
    ) -> None:
        """input_dtype: of the floating-point inputs of a forward; None: as they are. rows_per_microbatch: None: any."""
        self.so_far = StepSoFar(config)
        self.last = StepResult(torch.zeros(()), torch.zeros(()), optimizer.lr, loss_scaler.scale, False)
        """What the last step has come to."""
        self.join = join
        self.features = features
        self._config = config
        self._mesh = mesh
        self._passes = passes
        self._optimizer = optimizer
        self._is_apart = False  # other ranks may still have what an error has interrupted
        own = (param for unit in passes.units for group in unit.groups for param in group.params)
        self.lent = Lent()
        self.scale = GradientScale(config, mesh.data_size, loss_scaler, own)
        self.inputs = StepInputs(mesh.world, self.so_far, self.scale, input_dtype, rows_per_microbatch)
        self.take_up_groups(module)

    def take_up_groups(self, module: nn.Module) -> None:
        """The groups of the units, and of the optimizer, are those that there are now; between steps."""
        optimizer, passes, mesh = self._optimizer, self._passes, self._mesh
        self.gradients = [gradient for unit in passes.units for gradient in unit.gradients]
        self._shown = ShownGradients(self.gradients)
        timing = Timing.of(self._config)
        shares = any(group.axes.copies_are_shared for unit in passes.units for group in unit.groups)
        self.guard = ModelGuard(module, passes.units, shares, only_steps_change=timing is not Timing.DELAYED)
        delay_after_steps = self._config.zero_optimization.offload_optimizer.delay_after_steps
        order = passes.reduction_order
        self.update = StepUpdate(optimizer, order, mesh, timing, lambda: self.rest, delay_after_steps)

    @property
    def device(self) -> torch.device:
        return self._mesh.world.device

    def check_trains(self, call: str) -> None:
        """Raises ValueError in an engine without an optimizer."""
        if not self._optimizer.param_groups:
            raise ValueError(
                f"{call}: expected an engine with an optimizer, found one without; put one into the config, or give it "
                "to lowtide.initialize(..., optimizer=...). This one computes: engine(...), engine.eval_step(batch)"
            )

    def check_between(self, what: str) -> None:
        """Raises StateError in the middle of a step, and where the caller says which backwards count."""
        self.forget_cleared(what)
        self.so_far.check_between(what)

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

    def begin_forward(self) -> None:
        """Raises ValueError where the model was changed behind the engine's back."""
        self.begin_use()  # first: the guard may not take for right what is only tried
        self.guard.check()

    def begin_use(self) -> None:
        """Parameters are used outside of a backward: what is tried in them goes. A collective where something was."""
        self.lent.check("a forward", (PARAMETERS,))
        if self.so_far.is_complete:
            self.take_back()
        if self._is_apart:
            self._is_apart = False
            self._mesh.fence("the end of what an error has interrupted")

    def shows_all(self, gradients: Sequence[Tensor]) -> bool:
        """See `ReducedGradients.are_all`."""
        return self._shown.are_all(gradients)

    def show_reduced(self) -> None:
        """A loop that calls backward itself may look at `param.grad` now: gradients that are not there say so."""
        self._shown.put(self.so_far.is_complete)

    def take_cleared(self) -> bool:
        """Final gradients that the caller has cleared are none from now on, and no stand-ins are in `param.grad`.

        Returns whether there were any left that he might have cleared.
        """
        are_there = self._shown.are_final
        cleared, _ = self._shown.take_final()
        if cleared:
            self.update.refuse_more("zero_grad()")  # what is tried is taken back when all ranks know of it
            self._clear(cleared)
        return are_there

    def take_cleared_so_far(self, what: str) -> bool:
        """As `take_cleared`, between the backwards of a step. Raises StateError where some were cleared, not all."""
        are_there = self._shown.are_taken
        if cleared := self._shown.take_taken(what):
            self._shown.note(cleared, self.so_far.num_begun)
            self._forget_gradients()  # in the middle of a step, whose backwards are counted all the same
        return are_there

    def forget_cleared(self, what: str) -> None:
        """A step is none any more where the caller has cleared all of its final gradients. what: he asks for now."""
        if not self._shown.are_final:
            return
        cleared, are_all = self._shown.take_final()
        if are_all:
            self.refuse_more(what)
            self.forget(ends_graphs=False)
            return
        if cleared:
            self.refuse_more(what)
            self._clear(cleared)
        self._shown.put(are_final=True)

    def _clear(self, cleared: Cleared) -> None:
        self.join.check_outside("zero_grad() after the last backward of a step")
        self._shown.note(cleared, self.so_far.num_begun)
        for gradient in self.gradients:
            gradient.clear(cleared)

    def set_aside(self, arrived: nn.Parameter | None) -> AbstractContextManager[None]:
        """See `ReducedGradients.set_aside`."""
        return self._shown.set_aside(arrived)

    def begin_backward(self, num_microbatches: int = 1) -> None:
        """As `backward`, until `end_backward` or `abort_backward`."""
        self.check_at_hand("backward")
        self.refuse_more("another backward")  # a sum that was final was not
        cleared, are_all = self._shown.take_final()
        if are_all:
            self._shown.note(cleared, self.so_far.num_begun)
            self.forget(ends_graphs=False)  # as zero_grad() before another backward does in torch
        elif cleared:
            self._clear(cleared)
        self.take_cleared_so_far("backward")
        if self.so_far.clipping_by_hand is not None:
            self.so_far.refuse_backward()
        boundary = self.so_far.would_complete(num_microbatches)
        on_final = self.update.begin_backward(boundary)
        if boundary:
            self.guard.values.expect_update()
        self.so_far.begin(num_microbatches, boundary)
        self._passes.begin_backward(boundary, on_final)

    def end_backward(self, num_microbatches: int = 1) -> None:
        try:
            self._passes.end_backward()
            if self.update.arriving:
                self.update.end_backward()
        except BaseException as error:
            self.abort_backward(error)
            raise
        self.so_far.num_microbatches += num_microbatches

    def abort_backward(self, error: BaseException) -> None:
        """Forgets the step of a backward that `error` has ended."""
        self._mesh.raised.tell(error)
        self._passes.abort(error)
        self.forget()

    def refuse_more(self, what: str) -> None:
        """Takes back what was updated before the end of the step. Raises StateError where it is there for good."""
        if self.so_far.is_complete:
            self.update.refuse_more(what)
            self.take_back()

    def take_back(self) -> None:
        """What was updated before the end of the step has not been, on all ranks. Does nothing where nothing was."""
        if self.update.take_back():
            self.join.before(Call.TAKING_BACK)
            self._mesh.fence("the end of what was tried in the backward")

    def forget(self, ends_graphs: bool = True) -> None:
        """Of the microbatches so far nothing counts: the next one is the first of its step.

        ends_graphs: nothing that was computed before is differentiated after this.
        """
        if self.update.take_back():  # what an error has interrupted
            self._is_apart = True
        self._forget_gradients()
        if ends_graphs:
            self._passes.release_all()
            self._shown.forget()
        self.so_far.forget()
        self.join.num_missing = 0

    def _forget_gradients(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter would cost a call of Python
            for gradient in self.gradients:
                gradient.reset()
                for param in gradient.group.params:
                    param.grad = None

    # -- the update -----------------------------------------------------------------------------------------------

    def end(self, number: int, events: Sequence[bool], by_hand: bool) -> Sequence[int]:
        """Updates the parameters; a collective. number: of steps before this one. events: that this rank knows of.

        by_hand: the caller has run the backwards: StateError where they gave no gradient on any rank. Returns on how
        many ranks each of the events has happened.
        """
        self.check_at_hand("engine.step()")
        self._mesh.world.progress.enter(Activity.UPDATE)
        self._passes.await_others()
        self.guard.values.expect_update()
        events = (self.update.has_failed(), self.so_far.lacks_loss, by_hand, *events)
        losses, what = self._losses_by_weight(), f"the norm of step {number}"
        seen, doubt = self.guard.values.take_seen(), self.so_far.doubt
        if doubt is not None:
            seen = doubt[0].any() if seen is None else seen | doubt[0].any()
        cleared = self._shown.mark
        summed = sum_step(self._mesh, self.gradients, losses, events, what, self.update.uses, seen, cleared)
        rest = self.rest
        has_nothing = self.update.uses.are_none and summed.read().is_without_gradients and summed.read().events[2] > 0
        is_started = not has_nothing and self._update_if_finite(summed, number, rest)
        sums = summed.read()
        if is_started:
            is_wrong = sums.num_bad or sums.num_changed or sums.cleared != cleared * self._mesh.world.size
            self.update.settle_skipped(not is_wrong, sums.unused)
        if sums.num_changed:
            self.forget()
            if doubt is not None:
                doubt[1]()
            self.guard.raise_seen(self._mesh)
        if sums.cleared != cleared * self._mesh.world.size:
            notes = self._shown.forget()
            self.forget()
            refuse_differences(self._mesh, notes)
        update_failed, num_lacking, _, *counts = sums.events
        if update_failed:
            self.forget()
            self.update.raise_failure()
        if has_nothing:
            self.forget()
            raise StateError(NO_GRADIENT)
        norm = math.sqrt(sums.square_norm) * rest * self.norm_factor if not sums.num_bad else math.nan
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
            self.guard.mark_updated()
            for one in self.update.thin:
                one.accept(rest)
        self.guard.values.remember()
        if self.guard.shares_values:  # else a rank that is ahead may change what this one remembers
            self._mesh.fence(f"the end of step {number}")
        self.forget()
        self.scale.loss_scaler.update(result.skipped)
        self.last = result
        return counts

    @property
    def rest(self) -> float:
        """What the sum of the step's gradients is multiplied by for their mean over the microbatches there were."""
        return self.scale.rest * self._weight

    @property
    def norm_factor(self) -> float:
        """Of the root of all squares that were counted: of gradients that are not summed it makes the root mean square
        of the ranks' norms."""
        return 1.0 if self._optimizer.sums_gradients else math.sqrt(self._mesh.data_size)

    @property
    def _weight(self) -> float:
        """How many microbatches a step has, for each that there was: 1 but under `engine.join`."""
        full = self._mesh.data_size * self.so_far.num_begun
        return full / (full - self.join.num_missing) if self.join.num_missing else 1.0

    def _losses_by_weight(self) -> list[Tensor]:
        """Losses whose mean, averaged over the ranks, is that of all there were."""
        if not self.join.num_missing:
            return self.so_far.losses
        losses = self.so_far.losses
        return weighted(losses, self._weight * len(losses) / self.so_far.num_microbatches)

    def _update_if_finite(self, summed: SummedStep, number: int, rest: float) -> bool:
        """Starts the update of a device, which finds out there whether all is finite: the host is told meanwhile.

        Where this rank lacks a gradient, of which all ranks have to say whether it was used, the host waits first, and
        then starts the same: others have started it already, with what it sends, and with the factor that is there.
        Not where the host updates anything. Returns whether it was started.
        """
        if not self.update.can_be_skipped:
            return False
        unused = frozenset[int]() if self.update.uses.are_all else summed.read().unused
        factor, skip = summed.factor_and_skip(self.so_far.clipping, rest)
        self.update.end_step(factor, unused, _update_of(number), skip)
        return True

    def _update_or_skip(self, sums: StepSums, norm: float, number: int) -> None:
        factor = self.so_far.clipping.factor(norm) * self.rest
        if sums.num_bad or sums.cleared or factor != self.rest or self.update.has_missed(sums.unused):
            self.take_back()
        if not sums.num_bad:
            self.update.end_step(factor, sums.unused, _update_of(number))
        elif self._config.fp16.enabled:
            self.update.settle()
        else:
            try:
                raise non_finite_error(self._mesh, self.gradients, number, self.update.outcome_without_step)
            finally:
                self.forget()

    # -- between steps --------------------------------------------------------------------------------------------

    def mean_over_ranks(self, losses: list[Tensor], num_ranks: int) -> Tensor:
        """() on the CPU: of the losses of so many ranks; others have none. A collective."""
        sums = sum_step(self._mesh, (), losses, (), "the mean of the loss").read()
        return torch.tensor(sums.loss * (self._mesh.world.size / num_ranks), dtype=sums.loss_dtype)

    @contextmanager
    def apart(self, activity: Activity, access: Access) -> Iterator[None]:
        """Around a call that is not part of a step. A collective, but where it only looks.

        Raises OffloadError on every rank where an update in the background has failed on any, and StateError where not
        all ranks would come.
        """
        gradients = "engine.gradient(), set_gradient() or clip_grad_value_()"
        self.join.check_outside(gradients if access is Access.NOTHING else activity.value)
        if access in (Access.CHANGES, Access.REPLACES):
            self.check_at_hand("a change of the weights")
        elif access is not Access.NOTHING:
            self.lent.check(activity.value, (PARAMETERS,) if access is Access.LOOKS else KINDS)
        with self._mesh.world.progress.during(activity), self._mesh.raised.between_steps():
            try:
                if access is Access.LOOKS:
                    self.update.take_back()
                elif access is not Access.NOTHING:
                    if self.update.is_under_way:
                        self.guard.values.expect_update()
                    self.update.settle()
            except OffloadError as error:
                if access is not Access.REPLACES:
                    raise
                logger.warning("%s", error)
            yield
            if access is Access.REPLACES:
                self.update.forget_failure()
            if access in (Access.CHANGES, Access.REPLACES):
                self.guard.remember()

    def check_at_hand(self, what: str) -> None:
        """Raises StateError where something is in the place of the weights, or states are lent."""
        self.lent.check(what)
        if self._optimizer.averages is not None:
            self._optimizer.averages.check_hidden(what)


def _update_of(number: int) -> str:
    return f"the update of step {number}"
