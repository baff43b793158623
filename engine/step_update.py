"""When the shards of a step are updated."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial

from ..comm import Mesh, Pending
from ..zero.optimizer import ShardedOptimizer
from ..zero.sequence import UnitSequence
from ..zero.shard_state import ShardState


class Timing(Enum):
    """Which gradients are held at once, and what is known when a shard is updated."""

    AFTER_NORM = "after norm"  # all gradients; the norm is known, so the update can be clipped or left out
    IN_BACKWARD = "in backward"  # those of a unit, final; nothing can be clipped
    SPECULATIVE = "speculative"  # all gradients, and old values; taken back where the norm asks for it


class StepUpdate:
    """Updates the shards of each step at the time that the config says, and sends them to the other ranks."""

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        sequence: UnitSequence,
        mesh: Mesh,
        timing: Timing,
        unclipped_factor: Callable[[], float],
    ) -> None:
        """unclipped_factor: by which reduced gradients are multiplied when nothing is clipped."""
        self._optimizer = optimizer
        self._mesh = mesh
        self._unclipped_factor = unclipped_factor
        self.timing = timing
        shards = {id(shard.gradient): shard for shard in optimizer.shards}
        self._order = [shards[id(gradient)] for unit in sequence.reduction_order for gradient in unit.gradients]
        if timing is not Timing.AFTER_NORM:
            for shard in optimizer.shards:
                shard.gradient.on_final = partial(self._update_one, shard)

    def begin_backward(self) -> None:
        """The backward begins that makes the gradients of the step final."""
        if self.timing is not Timing.AFTER_NORM:
            self._optimizer.begin_step(self._order, speculates=self.timing is Timing.SPECULATIVE)

    def take_back(self) -> None:
        """What was updated in this step has not been. Does nothing but where updates are speculative."""
        self._optimizer.roll_back()

    def finish(self, factor: float, what: str) -> None:
        """The step counts: updates what has not been updated yet, and brings all to the other ranks. A collective."""
        for shard in self._optimizer.shards:
            if shard.group.frees_memory:  # a forward since the backward has left some full, of values that now change
                shard.group.release()
        pending: list[Pending] = []
        if self.timing is Timing.IN_BACKWARD or self._optimizer.speculation.is_open:
            self._optimizer.accept()
            pending.extend(_send(shard) for shard in self._optimizer.shards)
        else:
            self._optimizer.step(gradient_scale=factor, on_updated=lambda shard: pending.append(_send(shard)))
        for one in pending:
            one.wait()
        self._mesh.fence(what)

    def _update_one(self, shard: ShardState) -> None:
        if shard.gradient.non_finite is None:
            self._optimizer.update(shard, self._unclipped_factor())
        else:
            self._optimizer.skip(shard)
        if self.timing is Timing.IN_BACKWARD:
            shard.gradient.drop_shard()


def _send(shard: ShardState) -> Pending:
    """Starts to bring an updated shard into the full parameters of all ranks, where those are kept."""
    return Pending() if shard.group.frees_memory else shard.group.refresh()
