"""Let ranks run out of data at different times: a rank without data takes part in the steps of the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum

import torch
from torch import Tensor

from ...comm import Mesh
from ...zero.sequence import Phase, StateError


class Call(Enum):
    """A call that all ranks make together. The value is its name for users."""

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

# The open join of this process. It is global, since it concerns all engines: ranks without data come only to the calls
# of the engine whose join is open, and any other engine of the process would wait for them in vain.
_OPEN: list[Join] = []

OTHERS = "the join of another engine, whose calls ranks without data would not make"
NO_JOIN = (
    "engine.join(): expected a config without parallel.pipeline, tensor and sequence, found it: these ranks take the "
    "same batches and compare them, so none of them can run out of data alone. Let the loader end with the shortest "
    "share"
)

NO_JOIN_BY_LAYERS = (
    "engine.join(): expected a config without zero_optimization.layered_gradient_accumulation, found it: the "
    "microbatches of a step go through each block together, so a step cannot have fewer of them. Let the loader end "
    "with the shortest share"
)

NO_JOIN_OF_EXPERTS = (
    "engine.join(): expected a config without parallel.expert, found it: a rank without data would not take part in "
    "the exchange of tokens in the forwards of other ranks. Let the loader end with the shortest share"
)


class Join:
    """Tells ranks without data the next collectives of the ranks with data.

        rank 0, with data    F B step   F B step   F B step   F B step   leaves
        rank 1               F B step   F B step   leaves
                                                   f b step   f b step   all have left

    Before each call there is a small sum: how many ranks make it with data. A rank that has left the loop makes the
    call without data (f, b): it gathers, and its gradients are zero. Forwards are among these calls only if they
    gather from other ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.num_missing = 0
        """Microbatches of this step that are missing on ranks without data."""
        self._mesh = mesh
        self._has_data = True
        self._is_together = False  # inside of `together`

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the join. Raise StateError if a join is open, of this engine or another engine."""
        if _OPEN:
            raise StateError(
                "engine.join(): expected a single join at a time, found it inside of "
                f"{'another' if self.is_open else OTHERS}; remove either"
            )
        self._has_data = True
        _OPEN.append(self)
        try:
            yield
        finally:
            _OPEN.remove(self)

    @property
    def is_open(self) -> bool:
        """Return True inside of this engine's join."""
        return self in _OPEN

    def calls_without_data(self) -> Iterator[Call]:
        """Yield the calls of the ranks with data, until no rank has data. Called when this rank has no more data."""
        self._has_data = False
        while (met := self._agree(None)) is not None:
            yield met[0]

    def before(self, call: Call) -> int:
        """Return on how many ranks this call has data. Called before the collectives of the call."""
        size = self._mesh.world.size
        if not _OPEN:
            return size
        if not self.is_open:
            self.check_outside(f"{call.value} of another engine")
        # Inside of `together` the ranks have agreed, and a rank without data repeats a call on which they have agreed.
        if not self.is_open or not self._has_data or self._is_together:
            return size
        met = self._agree(call)
        assert met is not None  # this rank has data
        return met[1]

    def before_pass(self, phase: Phase, boundary: bool) -> None:
        """Do `before` for a forward or a backward. boundary: the last backward of a step."""
        if not _OPEN:
            return
        if phase is Phase.BACKWARD:
            self.before(Call.LAST_BACKWARD if boundary else Call.BACKWARD)
        elif phase is Phase.IDLE:
            self.check_outside("torch.autograd.grad, or a weight read beside the model, gathered from other ranks")
        else:
            self.before(Call.FORWARD if torch.is_grad_enabled() else Call.FORWARD_WITHOUT_GRADIENTS)

    def together(self, call: Call) -> AbstractContextManager[int]:
        """Wrap a call that ranks without data make as well. Yields on how many ranks it has data."""
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
        """Raise StateError if ranks without data would not come to this collective."""
        if self._is_together or not _OPEN:
            return
        if self.is_open or self._mesh.world.size > 1:
            raise StateError(
                f"{what}: expected a call outside of `with engine.join():`, found it inside: ranks that have run out "
                "of data do not make it; call it before or after the join, or let the config do it "
                "(checkpoint.every_steps)"
            )

    def _agree(self, call: Call | None) -> tuple[Call, int] | None:
        """Return the next call of the ranks with data, and their number; None if no rank has data. A collective."""
        # A count for each kind of call: ranks without data add nothing, and two kinds show ranks that disagree.
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
        # On every rank, with data or without: the weight of the step's losses follows from it.
        if met in (Call.BACKWARD, Call.LAST_BACKWARD):
            self.num_missing += self._mesh.world.size - count
        return met, count


def weighted(losses: list[Tensor], weight: float) -> list[Tensor]:
    """Return a single loss for all losses; its mean over ranks is the mean over all microbatches."""
    return [torch.stack(losses).mean() * weight] if losses else []
