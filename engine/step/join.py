"""Ranks whose data end at different times: who has run out takes part without data until all have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum

import torch
from torch import Tensor

from ...comm import Mesh
from ...zero.sequence import Phase, StateError


class Call(Enum):
    """What all ranks do together; the value is how users read it."""

    FORWARD = "a forward"
    FORWARD_WITHOUT_GRADIENTS = "a forward under torch.no_grad()"
    BACKWARD = "a backward"
    LAST_BACKWARD = "the last backward of a step"
    TAKING_BACK = "a call after the last backward"
    CLIPPING = "engine.clip_grad_norm_()"
    STEP = "engine.step()"
    EVALUATION = "the mean of engine.eval_step()"
    AGREEMENT = "engine.agree()"


_CALLS = tuple(Call)

# The join that is open in this process. As global as what it guards: while one engine's is, ranks without data come to
# the calls of that engine alone, and every other engine of the process waits for them in vain.
_OPEN: list[Join] = []

OTHERS = "that of another engine, whose calls ranks without data would not come to"
NO_JOIN = (
    "engine.join(): expected an engine without parallel.pipeline, tensor and sequence, found one with it: these ranks "
    "take the same batches, and compare them, so there is no part without data. Let the loader end with the shortest "
    "share"
)

NO_JOIN_BY_LAYERS = (
    "engine.join(): expected an engine without zero_optimization.layered_gradient_accumulation, found one with it: the "
    "microbatches of a step go through each block together, so there is no step with fewer of them. Let the loader end "
    "with the shortest share"
)

NO_JOIN_OF_EXPERTS = (
    "engine.join(): expected an engine without parallel.expert, found one with it: a rank that has run out of data "
    "would not come to the exchange of tokens in the forwards of others. Let the loader end with the shortest share"
)


class Join:
    """Tells ranks that have run out of data which collectives those that have some are about to make.

        rank 0, with data    F B step   F B step   F B step   F B step   leaves
        rank 1               F B step   F B step   leaves
                                                   f b step   f b step   all have left

    Before each call there is one small sum: of how many ranks make it. A rank that has left the loop makes it too,
    with no data (f, b): it gathers, and gives gradients of zero. A forward is one of them only where it gathers from
    other ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.num_missing = 0
        """Microbatches of this step that ranks without data have not had."""
        self._mesh = mesh
        self._has_data = True
        self._is_together = False  # a call that ranks without data make too

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Raises StateError where one is open, of this engine or of another."""
        if _OPEN:
            raise StateError(
                f"engine.join(): expected one at a time, found one inside of {'another' if self._is_open else OTHERS}; "
                "leave one out"
            )
        self._has_data = True
        _OPEN.append(self)
        try:
            yield
        finally:
            _OPEN.remove(self)

    @property
    def _is_open(self) -> bool:
        return self in _OPEN

    def calls_without_data(self) -> Iterator[Call]:
        """This rank has run out: the calls that others make, until all ranks have."""
        self._has_data = False
        while (met := self._agree(None)) is not None:
            yield met[0]

    def before(self, call: Call) -> int:
        """To be called before the collectives of a call. On how many ranks it has data."""
        size = self._mesh.world.size
        if not _OPEN:
            return size
        if not self._is_open:
            self.check_outside(f"{call.value} of another engine")
        if not self._is_open or not self._has_data or self._is_together:
            return size
        met = self._agree(call)
        assert met is not None  # this rank has come
        return met[1]

    def before_pass(self, phase: Phase, boundary: bool) -> None:
        """`before`, of a forward or a backward. boundary: the last of a step."""
        if phase is Phase.BACKWARD:
            self.before(Call.LAST_BACKWARD if boundary else Call.BACKWARD)
        elif phase is Phase.IDLE:
            self.check_outside("torch.autograd.grad, or a weight read beside the model, gathered from other ranks")
        else:
            self.before(Call.FORWARD if torch.is_grad_enabled() else Call.FORWARD_WITHOUT_GRADIENTS)

    def together(self, call: Call) -> AbstractContextManager[int]:
        """Around a call that ranks without data make as well. Gives on how many ranks it has data."""
        return self._together(call) if _OPEN else nullcontext(self._mesh.world.size)

    @contextmanager
    def _together(self, call: Call) -> Iterator[int]:
        count = self.before(call)
        self._is_together = True
        try:
            yield count
        finally:
            self._is_together = False

    def check_outside(self, what: str) -> None:
        """Raises StateError where ranks that have run out of data would not come to a collective."""
        if self._is_together or not _OPEN:
            return
        if self._is_open or self._mesh.world.size > 1:
            raise StateError(
                f"{what}: expected it outside of `with engine.join():`, found it inside, where ranks that have run out "
                "of data do not make the call; make it before or after, or let the config do it "
                "(checkpoint.every_steps)"
            )

    def _agree(self, call: Call | None) -> tuple[Call, int] | None:
        """What the ranks with data do next, and how many they are; None where no rank has any. A collective."""
        mine = torch.tensor([call is one for one in _CALLS], dtype=torch.int64, device=self._mesh.world.device)
        counts = self._mesh.sum_small(mine, "the meeting of ranks in engine.join()").tolist()
        found = [(one, count) for one, count in zip(_CALLS, counts, strict=True) if count]
        if not found:
            return None
        if len(found) > 1:
            listed = " and ".join(f"{one.value} on {count}" for one, count in found)
            raise StateError(
                f"engine.join(): expected the same calls of the engine on all ranks that have data, found {listed}"
            )
        met, count = found[0]
        if met in (Call.BACKWARD, Call.LAST_BACKWARD):
            self.num_missing += self._mesh.world.size - count
        return met, count


def weighted(losses: list[Tensor], weight: float) -> list[Tensor]:
    """One loss in the place of all, whose mean over ranks is that of the losses there are."""
    return [torch.stack(losses).mean() * weight] if losses else []
