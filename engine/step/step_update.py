"""When and how the shards of a step are updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...comm import Mesh, Pending
from ...offload import OffloadError
from ...zero.gradient import GroupGradient
from ...zero.group import ShardedState
from ...zero.layout import ParamShard
from ...zero.optimizer import ShardedOptimizer
from ...zero.reductions import OnFinal
from ...zero.sequence import StateError
from ...zero.shard_state import ShardState
from ...zero.unit import Unit
from ..blueprint.blueprint import Timing
from .step_sums import Uses

_IN_PART = (
    "zero_optimization.update_in_backward: this backward had updated some parameters before the error, others not; "
    "continue from a checkpoint (engine.load_checkpoint), or start again"
)
_CUT_SHORT = (
    "engine.step(): an error interrupted this update, so some parameters may be updated and others not; continue from "
    "a checkpoint (engine.load_checkpoint), or start again"
)
_LOADED_IN_PART = (
    "engine.load_checkpoint(): an error interrupted the load, so some values may be those of the checkpoint and others "
    "not; load a checkpoint, or start again"
)


class StepUpdate:
    """Updates the shards of each step at the time of the config (`Timing`), and sends them to the other ranks.

    With DELAYED the first `delay_after_steps` updates run as AFTER_NORM. After that a step publishes the update that
    the previous step started in the background, and starts the next.
    """

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        reduction_order: Sequence[Unit],
        mesh: Mesh,
        timing: Timing,
        unclipped_factor: Callable[[], float],
        delay_after_steps: int,
    ) -> None:
        """reduction_order: units in the order in which their gradients become final.

        unclipped_factor: returns the number by which the update multiplies reduced gradients, without clipping.
        delay_after_steps: for DELAYED, the number of updates in the foreground before the first in the background.
        """
        self._optimizer = optimizer
        self.update_all = optimizer.update_all
        """Updates all shards after the norm; a runner may replay it."""
        self._mesh = mesh
        self._is_waited_for = _is_waited_for(mesh.world.device)
        self._unclipped_factor = unclipped_factor
        self._delay_after_steps = delay_after_steps
        gradients = [gradient for unit in reduction_order for gradient in unit.gradients]
        self.uses = Uses(optimizer.param_groups, gradients, mesh.world.size)
        self.low_rank = [gradient.low_rank for gradient in gradients if gradient.low_rank is not None]
        for one in self.low_rank:
            one.step, one.unit = lambda: optimizer.counts.num_steps, unclipped_factor
        self._failure = ""  # of a background update on any rank: its states are partly updated
        self._postponed: list[tuple[ShardState, list[tuple[ParamShard, Tensor]]]] = []
        self._is_partial = False  # some parameters were updated in the backward of a step that has not ended
        self.fault = ""
        """Why parameters must not be used until a checkpoint is loaded: an error has left them updated in part."""
        self.timing = timing
        self._refreshes = any(shard.group.axes.are_refreshed for shard in optimizer.shards)
        """Whether other ranks have copies of updated parameters."""
        self._shards = {id(shard.gradient): shard for shard in optimizer.shards}
        self._order = [self._shards[id(gradient)] for gradient in gradients if id(gradient) in self._shards]

    def begin_backward(self, boundary: bool) -> OnFinal | None:
        """Return a function for each final gradient, if the update does not wait for the norm; else None.

        boundary: this backward makes the gradients of the step final. Raises OffloadError if the last update has failed
        on the host, and StateError after a `fault`.
        """
        if self.fault:
            raise StateError(self.fault)
        if self._optimizer.are_under_way:
            self._optimizer.wait_for_updates()
        if not boundary or self.timing not in (Timing.IN_BACKWARD, Timing.SPECULATIVE):
            return None
        self._postponed, self._is_partial = [], False
        self._optimizer.begin_step(self._order, speculates=self.timing is Timing.SPECULATIVE)
        return self._update_one

    def refuse_more(self, what: str) -> None:
        """Raise StateError if the backward has already updated parameters. what: the call of the user."""
        if self.timing is Timing.IN_BACKWARD:
            raise StateError(
                "zero_optimization.update_in_backward: expected engine.step() after the last backward of a step, found "
                f"{what} after the backward has updated the parameters; put the earlier backwards of a step under "
                "`with engine.no_sync():`, backwards of further models under `with engine.frozen():`, or leave "
                "update_in_backward out"
            )

    def roll_back(self) -> bool:
        """Roll back the speculative update of this step. Return whether an update was open."""
        return self._optimizer.roll_back()

    def forget_step(self, error: BaseException | None = None) -> bool:
        """Roll back the update of a step that does not end, if it is speculative. Return whether it was.

        error: that has interrupted the backward. It gets a note if some parameters keep their new values: see `fault`.
        """
        if self.timing is Timing.IN_BACKWARD and self._optimizer.counts.is_in_step:
            # Such a step is counted when its last backward begins.
            self._optimizer.uncount()
            if self._is_partial and error is not None:
                self.fault = _IN_PART
                error.add_note(_IN_PART)
        return self.roll_back() if self._optimizer.speculation.is_open else False

    @property
    def can_be_skipped(self) -> bool:
        """Return whether `end_step` takes a `skip`."""
        return self.timing is Timing.AFTER_NORM and self._is_waited_for and self._optimizer.can_be_skipped

    def end_step(self, factor: float | Tensor, unused: frozenset[int], what: str, skip: Tensor | None = None) -> None:
        """Finish the update of the step, and send new values to the other ranks. A collective.

        unused: ids of the parameters that stay as they are. skip: (1,) on the device, if the host does not know yet
        whether the step counts; then call `end_skipped` later. An error leaves a `fault`, except before any change.
        """
        counts = self._optimizer.counts
        before = counts.num_steps - counts.is_in_step  # completed steps
        try:
            self._release_what_changes()
            counts.unused = unused
            pending: list[Pending] = []
            if self.timing is Timing.DELAYED and self._optimizer.num_steps >= self._delay_after_steps:
                pending.extend(self._take_over())
                # The thread gets a number: a delayed step is never started before the host has read the norm
                # (`can_be_skipped`).
                assert not isinstance(factor, Tensor)
                self._optimizer.start_delayed(factor)
            elif self.timing is Timing.IN_BACKWARD or self._optimizer.speculation.is_open:
                # SPECULATIVE after a roll-back comes to the last branch, as AFTER_NORM.
                # Sent now, not in the backward: only here postponed parameters have their values, and a speculative
                # step is certain.
                self._update_postponed(unused)
                self._optimizer.accept()
                pending.extend(shard.group.refresh(is_update=True) for shard in self._optimizer.shards)
            else:

                def send(shard: ShardState) -> None:
                    pending.append(shard.group.refresh(is_update=True))

                self.update_all(factor, send if self._refreshes else None, skip)
            for one in pending:
                one.wait()
            # Ranks that share the parameters read them next, and another rank may still write its shard.
            self._mesh.fence(what)
        except BaseException as error:
            self._note_cut(error, before)
            raise

    def _note_cut(self, error: BaseException, before: int) -> None:
        """Set a `fault` if an error has interrupted `end_step` after a change. before: steps completed before it."""
        # `begin_step` counts after its refusals. A failure on the host is raised at each call until a load.
        if self._optimizer.num_steps > before and not self._optimizer.has_failed:
            if self._optimizer.counts.is_in_step:
                self._optimizer.uncount()
            self.fault = _CUT_SHORT
            error.add_note(_CUT_SHORT)

    def end_skipped(self, counts: bool, unused: frozenset[int]) -> None:
        """After `end_step(skip=...)`, when the host knows the outcome: count the step, or take back its count.

        unused: ids, over all ranks.
        """
        self._optimizer.counts.unused = unused
        self._optimizer.count() if counts else self._optimizer.uncount()

    @property
    def outcome_without_step(self) -> str:
        """Describe the parameters after a step that does not count, for error texts."""
        if self.timing is Timing.IN_BACKWARD:
            return "The parameters whose gradients are finite were updated already (update_in_backward)."
        return "No parameter was updated."

    # -- updates in the background --------------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        """Return True if a background update has not reached the parameters yet."""
        return self._optimizer.thread.is_pending and not self._optimizer.are_under_way

    def has_failed(self) -> bool:
        """Wait for this rank's background update (DELAYED). Return True if it has failed."""
        return bool(self._failure) or self._optimizer.thread.wait() is not None

    def flush(self) -> None:
        """Bring the updates of all past steps into the parameters of all ranks, and roll back speculation.

        A collective after a background update. Raises OffloadError on every rank if it failed on any.
        """
        self.roll_back()
        if self._failure:
            # No rank waits here: `_failure` was set on all ranks together, so all of them raise without a collective.
            self.raise_failure()
        if self._optimizer.are_under_way:
            self._optimizer.wait_for_updates()
        if not self._optimizer.thread.is_pending:
            return
        # All ranks have a pending update here, or none has one. They raise together if it has failed on any.
        what = "the end of a delayed update"
        if self._mesh.sum_small(torch.tensor([int(self.has_failed())], device=self._mesh.world.device), what).item():
            self.raise_failure()
        self._release_what_changes()
        for one in self._take_over():
            one.wait()
        self._mesh.fence(what)

    def raise_failure(self) -> None:
        """Raise OffloadError, naming the ranks and causes of failed background updates. A collective."""
        error = self._optimizer.thread.wait()
        if not self._failure:
            texts = self._mesh.world.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
            causes = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)
            self._failure = (
                f'offload_optimizer.overlap "delayed": update {self._optimizer.num_steps} failed on {causes}. Master '
                "weights and states are partly updated: continue from a checkpoint (engine.load_checkpoint)"
            )
            self._optimizer.thread.end()
        raise OffloadError(self._failure) from error

    def begin_load(self) -> None:
        """Set a `fault` that stays if the load of a checkpoint does not reach its end, and `forget_failure`."""
        self.fault = _LOADED_IN_PART

    def forget_failure(self) -> None:
        """Forget a failure or fault, since all that an update writes was loaded again."""
        self._failure = self.fault = ""
        self._optimizer.forget_started()

    def close(self) -> None:
        """Do `flush`, but do not repeat a failure that was raised before."""
        if not self._failure and not self._optimizer.has_failed:
            self.flush()

    def _take_over(self) -> list[Pending]:
        """Bring the values of the last background update, if any, into the parameters."""
        if not self._optimizer.thread.is_pending:
            return []
        # It also lets the training's stream wait for the stream of the thread, which wrote the values that are copied
        # here.
        self._optimizer.thread.end()
        pending = []
        for shard in self._optimizer.shards:
            shard.versions.put(shard.versions.ahead)
            pending.append(shard.group.refresh(is_update=True))
        return pending

    def _release_what_changes(self) -> None:
        """Release full parameters of a forward since the backward: the update changes their values."""
        for shard in self._optimizer.shards:
            group = shard.group
            if group.frees_memory and (group.keeper is not None or group.sharded_state is not ShardedState.SHARDED):
                group.release_kept()

    def _update_one(self, gradient: GroupGradient) -> None:
        shard = self._shards.get(id(gradient))
        if self.timing is Timing.SPECULATIVE and (self._is_waited_for or gradient.leaves_device):
            # The norm says later if all gradients are finite: the update can be rolled back.
            if shard is not None:
                self._optimizer.update(shard, self._unclipped_factor())
            return
        # If the host updates, the copy of the shard may still be on its way to it.
        gradient.arrive()
        skip = None
        if self._is_waited_for and self._optimizer.can_be_skipped:  # the device checks if it is finite
            gradient.remember()
            skip, counts = gradient.stats.is_bad(), True  # the host does not know if it is finite
        else:
            counts = gradient.check()
        # SPECULATIVE needs no postponing: `Steps` rolls it back if it has left out other parameters.
        if shard is not None and counts and self.timing is Timing.IN_BACKWARD:
            self._postpone(shard)
            counts = bool(shard.gradient.used)  # else all parameters of the shard are postponed
            self._is_partial |= counts
        if shard is not None and counts:  # None: the parameter is in no group of the optimizer
            self._optimizer.update(shard, self._unclipped_factor(), skip=skip)
        elif shard is not None:
            self._optimizer.skip(shard)
        if self.timing is Timing.IN_BACKWARD:
            # A speculative step keeps its shards: after a roll-back it updates with them again.
            gradient.drop_shard()

    # -- parameters that other ranks may have used ----------------------------------------------------------

    def _postpone(self, shard: ShardState) -> None:
        """Leave out the parameters that this rank has not used, and keep their part of the gradient.

        The end of the step says if another rank has used them.
        """
        used, gradient = shard.gradient.used, shard.gradient.shard
        self._optimizer.counts.unused = frozenset(id(p) for i, p in enumerate(shard.group.params) if i not in used)
        param_shards = [param_shard for param_shard in shard.group.param_shards if param_shard.index not in used]
        if not param_shards or gradient is None:
            return
        kept = []
        for param_shard in param_shards:
            part = gradient[param_shard.in_shard]
            kept.append((param_shard, part.clone()))
            part.zero_()
        self._postponed.append((shard, kept))

    def _update_postponed(self, unused: frozenset[int]) -> None:
        """Update the postponed parameters that another rank has used."""
        postponed, self._postponed = self._postponed, []
        for shard, kept in postponed:
            used = {id(shard.group.params[param_shard.index]) for param_shard, _ in kept} - unused
            if not used:
                continue
            gradient = torch.zeros(shard.group.layout.shard_numel, dtype=kept[0][1].dtype, device=kept[0][1].device)
            for param_shard, values in kept:
                gradient[param_shard.in_shard] = values
            # A second pass over the shard. It must not touch the parameters that the pass in the backward has updated.
            self._optimizer.counts.unused = shard.runs.param_ids - used
            self._optimizer.update(shard, self._unclipped_factor(), gradient)
        self._optimizer.counts.unused = unused


def _is_waited_for(device: torch.device) -> bool:
    """Whether the device runs behind the host, so that reading a value from it waits."""
    return device.type != "cpu"
