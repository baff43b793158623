"""When the shards of a step are updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from ...comm import Mesh, Pending
from ...offload import OffloadError
from ...zero.gradient import GroupGradient
from ...zero.group import ShardedState
from ...zero.host_update import MAX_LEAVING
from ...zero.layout import ParamShard
from ...zero.optimizer import ShardedOptimizer
from ...zero.reductions import OnFinal
from ...zero.sequence import StateError
from ...zero.shard_state import ShardState
from ...zero.unit import Unit
from ..blueprint.blueprint import Timing
from .step_sums import Uses


class StepUpdate:
    """Updates the shards of each step at the time that the config says, and sends them to the other ranks.

    DELAYED is AFTER_NORM for the first updates. After those, each step ends with the values that the update before its
    own has made in the background, and starts its own.
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
        """reduction_order: of the units, in which their gradients become final.

        unclipped_factor: by which reduced gradients are multiplied when nothing is clipped.
        delay_after_steps: of DELAYED, the number of updates that are waited for before one is not.
        """
        self._optimizer = optimizer
        self._mesh = mesh
        self._is_waited_for = _is_waited_for(mesh.world.device)
        self._unclipped_factor = unclipped_factor
        self._delay_after_steps = delay_after_steps
        gradients = [gradient for unit in reduction_order for gradient in unit.gradients]
        self.uses = Uses(optimizer.param_groups, gradients, mesh.world.size)
        self.thin = [gradient.low_rank for gradient in gradients if gradient.low_rank is not None]
        for one in self.thin:
            one.step, one.unit = lambda: optimizer.counts.num_steps, unclipped_factor
        self._failure = ""  # of an update in the background, on any rank: states are in part those after it
        self._postponed: list[tuple[ShardState, list[tuple[ParamShard, Tensor]]]] = []
        self.arriving: deque[GroupGradient] = deque()
        """Final gradients that a speculative update has still to be made with; none when a backward has ended."""
        self.timing = timing
        self._shards = {id(shard.gradient): shard for shard in optimizer.shards}
        self._order = [self._shards[id(gradient)] for gradient in gradients if id(gradient) in self._shards]

    def begin_backward(self, boundary: bool) -> OnFinal | None:
        """boundary: the backward that begins makes the gradients of the step final.

        Returns what is to be called with each of them, where the update does not wait for all.
        """
        if not boundary or self.timing not in (Timing.IN_BACKWARD, Timing.SPECULATIVE):
            return None
        self._postponed = []
        self._optimizer.begin_step(self._order, speculates=self.timing is Timing.SPECULATIVE)
        return self._update_one

    def end_backward(self) -> None:
        """Updates with what was still on its way, where the update does not wait for all."""
        self._update_arrived(0)

    def refuse_more(self, what: str) -> None:
        """Raises StateError where shards of this step are updated already, for good. what: the user has asked for."""
        if self.timing is Timing.IN_BACKWARD:
            raise StateError(
                "zero_optimization.update_in_backward: expected engine.step() after a backward at the accumulation "
                f"boundary, which has updated the parameters, found {what}; put all but the last backward of a step "
                "under `with engine.no_sync():`, those of other models under `with engine.frozen():`, or leave "
                "update_in_backward out"
            )

    def has_missed(self, unused: Collection[int]) -> bool:
        """Whether a speculative update took other parameters for unused: those of the step before."""
        return self._optimizer.speculation.is_open and self._optimizer.counts.unused != unused

    def roll_back(self) -> bool:
        """What was updated in this step has not been: says whether there was any; only speculative updates are."""
        self.arriving.clear()
        return self._optimizer.roll_back()

    @property
    def can_be_skipped(self) -> bool:
        """Whether `end_step` takes a `skip`."""
        return self.timing is Timing.AFTER_NORM and self._is_waited_for and self._optimizer.can_be_skipped

    def end_step(self, factor: float | Tensor, unused: frozenset[int], what: str, skip: Tensor | None = None) -> None:
        """The step counts: updates what has not been updated yet, and brings all to the other ranks. A collective.

        unused: identities of the parameters that stay as they are. skip: (1,) on the device, where the host does not
        know yet whether it counts; `end_skipped` has to follow.
        """
        self._release_what_changes()
        self._optimizer.counts.unused = unused
        pending: list[Pending] = []
        if self.timing is Timing.DELAYED and self._optimizer.num_steps >= self._delay_after_steps:
            pending.extend(self._take_over())
            assert not isinstance(factor, Tensor)
            self._optimizer.start_delayed(factor)
        elif self.timing is Timing.IN_BACKWARD or self._optimizer.speculation.is_open:
            self._update_postponed(unused)
            self._optimizer.accept()
            pending.extend(shard.group.refresh(is_update=True) for shard in self._optimizer.shards)
        else:

            def send(shard: ShardState) -> None:
                if shard.group.axes.are_refreshed:
                    pending.append(shard.group.refresh(is_update=True))

            self._optimizer.update_all(factor, send, skip)
        for one in pending:
            one.wait()
        self._mesh.fence(what)

    def end_skipped(self, counts: bool, unused: frozenset[int]) -> None:
        """After an `end_step` with `skip`: what that was, and which parameters of all ranks nobody used."""
        self._optimizer.counts.unused = unused
        self._optimizer.count() if counts else self._optimizer.uncount()

    @property
    def outcome_without_step(self) -> str:
        """What has become of the parameters in a step that does not count, as users read it."""
        if self.timing is Timing.IN_BACKWARD:
            return "The parameters whose gradients are finite were updated already (update_in_backward)."
        return "No parameter was updated."

    # -- updates in the background --------------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        """Whether there is one, of which the parameters do not know yet."""
        return self._optimizer.delayed.is_pending

    def has_failed(self) -> bool:
        """Waits for an update in the background, on this rank alone. True where it could not be made."""
        return bool(self._failure) or self._optimizer.delayed.wait() is not None

    def flush(self) -> None:
        """What the steps so far have updated is in the parameters of all ranks, and what is not a step yet is not.

        A collective where an update was in the background. Raises OffloadError on every rank where any has failed.
        """
        self.roll_back()
        if self._failure:
            self.raise_failure()
        if not self._optimizer.delayed.is_pending:
            return
        what = f"the end of update {self._optimizer.num_steps}"
        if self._mesh.sum_small(torch.tensor([int(self.has_failed())], device=self._mesh.world.device), what).item():
            self.raise_failure()
        self._release_what_changes()
        for one in self._take_over():
            one.wait()
        self._mesh.fence(what)

    def raise_failure(self) -> None:
        """Raises OffloadError, with what has failed in the background on which rank. A collective."""
        error = self._optimizer.delayed.wait()
        if not self._failure:
            texts = self._mesh.world.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
            causes = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)
            self._failure = (
                f'offload_optimizer.overlap "delayed": update {self._optimizer.num_steps} could not be made on '
                f"{causes}. Master weights and states are in part those after it: training can go on only from a "
                "checkpoint (engine.load_checkpoint)"
            )
            self._optimizer.delayed.end()
        raise OffloadError(self._failure) from error

    def forget_failure(self) -> None:
        """All that an update writes was loaded anew."""
        self._failure = ""

    def close(self) -> None:
        """As `flush`, but says nothing of a failure that was told before."""
        if not self._failure:
            self.flush()

    def _take_over(self) -> list[Pending]:
        """Brings what the last update in the background has made, if any, into the parameters."""
        if not self._optimizer.delayed.is_pending:
            return []
        self._optimizer.delayed.end()
        pending = []
        for shard in self._optimizer.shards:
            shard.versions.put(shard.versions.ahead)
            pending.append(shard.group.refresh(is_update=True))
        return pending

    def _release_what_changes(self) -> None:
        """A forward since the backward has left some full parameters, of values that now change."""
        for shard in self._optimizer.shards:
            group = shard.group
            if group.frees_memory and (group.keeper is not None or group.sharded_state is not ShardedState.SHARDED):
                group.release_kept()

    def _update_one(self, gradient: GroupGradient) -> None:
        if self.timing is Timing.SPECULATIVE and self._is_waited_for:
            self.arriving.append(gradient)
            self._update_arrived(MAX_LEAVING)
            return
        gradient.flush()
        shard = self._shards.get(id(gradient))
        skip = None
        if self._is_waited_for and self._optimizer.can_be_skipped:  # it is left to the device whether it is finite
            gradient.remember()
            skip, is_finite = gradient.stats.is_bad(), True  # as far as the host knows
        else:
            is_finite = gradient.check()
        if shard is not None and is_finite:  # None: no group of the optimizer has it
            if self.timing is Timing.IN_BACKWARD:
                self._postpone(shard)
            self._optimizer.update(shard, self._unclipped_factor(), skip=skip)
        elif shard is not None:
            self._optimizer.skip(shard)
        if self.timing is Timing.IN_BACKWARD:
            gradient.drop_shard()

    def _update_arrived(self, num_left: int) -> None:
        """Updates with the gradients of a device, but for the newest, which are still on their way to the host.

        Meanwhile the device has the backward of these to do. Whether all are finite says the norm: what was updated can
        be taken back.
        """
        while len(self.arriving) > num_left:
            gradient = self.arriving.popleft()
            gradient.flush()
            if id(gradient) in self._shards:
                self._optimizer.update(self._shards[id(gradient)], self._unclipped_factor())

    # -- what is not yet known to be used, in the backward ----------------------------------------------------------

    def _postpone(self, shard: ShardState) -> None:
        """Leaves out the parameters that this rank has not used: whether another has, the end of the step says.

        Their part of the gradient is kept until then.
        """
        used, gradient = shard.gradient.used, shard.gradient.shard
        self._optimizer.counts.unused = frozenset(id(p) for i, p in enumerate(shard.group.params) if i not in used)
        param_shards = [param_shard for param_shard in shard.group.param_shards if param_shard.index not in used]
        if not param_shards or gradient is None:
            return
        kept = []
        for param_shard in param_shards:
            part = gradient[param_shard.offset_in_shard : param_shard.offset_in_shard + param_shard.numel]
            kept.append((param_shard, part.clone()))
            part.zero_()
        self._postponed.append((shard, kept))

    def _update_postponed(self, unused: frozenset[int]) -> None:
        """Updates what another rank has used."""
        postponed, self._postponed = self._postponed, []
        for shard, kept in postponed:
            used = {id(shard.group.params[param_shard.index]) for param_shard, _ in kept} - unused
            if not used:
                continue
            gradient = torch.zeros(shard.group.layout.shard_numel, dtype=kept[0][1].dtype, device=kept[0][1].device)
            for param_shard, values in kept:
                gradient[param_shard.offset_in_shard : param_shard.offset_in_shard + param_shard.numel] = values
            self._optimizer.counts.unused = shard.runs.param_ids - used
            self._optimizer.update(shard, self._unclipped_factor(), gradient)
        self._optimizer.counts.unused = unused


def _is_waited_for(device: torch.device) -> bool:
    """Whether the host waits for what it asks of the device."""
    return device.type != "cpu"
