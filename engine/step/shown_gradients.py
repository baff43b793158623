"""What a caller sees in `param.grad` between the backwards of a step, and what he has cleared of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from textwrap import shorten
from typing import NoReturn
from zlib import crc32

from torch import Tensor, nn

from ...comm import Mesh
from ...zero.gradient import GroupGradient
from ...zero.reduced_gradient import Cleared, ReducedGradients
from ...zero.sequence import StateError


class ShownGradients:
    """Stand-ins of gradients that are reduced, or were taken out of `param.grad` to be.

    What is cleared must be the same on all ranks, each of which has a part of the sum: notes of it make a `mark`, which
    the ranks compare at the end of the step.
    """

    def __init__(self, gradients: Sequence[GroupGradient]) -> None:
        self._final = _stand_ins(gradients)
        self._taken = _stand_ins(gradient for gradient in gradients if gradient.takes_each)
        self._names = {id(param): name for gradient in gradients for name, param in gradient.group.plan.params}
        self._notes: list[str] = []  # of this step

    def put(self, are_final: bool) -> None:
        """are_final: of the whole step; else of its backwards so far, in the middle of it."""
        (self._final if are_final else self._taken).put()

    @property
    def are_final(self) -> bool:
        """Whether stand-ins of a whole step are there."""
        return self._final.are_there

    @property
    def are_taken(self) -> bool:
        """The same of those in the middle of a step."""
        return self._taken.are_there

    def are_all(self, gradients: Sequence[Tensor]) -> bool:
        """Of a whole step; see `ReducedGradients.are_all`."""
        return self._final.are_all(gradients)

    def set_aside(self, arrived: nn.Parameter | None) -> AbstractContextManager[None]:
        """See `ReducedGradients.set_aside`."""
        return self._final.set_aside(arrived)

    def take_final(self) -> tuple[Cleared, bool]:
        """What was cleared of a whole step, and whether that is all of it; no stand-ins are there any more."""
        if not self._final.are_there:
            return {}, False
        cleared = self._final.take_out()
        return cleared, bool(cleared) and len(cleared) == self._final.num_params  # some ranks may have no parameters

    def take_taken(self, what: str) -> Cleared:
        """The same in the middle of a step: all or nothing. Raises StateError where it is some. what: he asks for."""
        if not self._taken.are_there:
            return {}
        cleared = self._taken.take_out()
        if 0 < len(cleared) < self._taken.num_params:
            raise StateError(
                f"{what}: found the gradients of some parameters cleared after an earlier backward of the step, not "
                "of others: clear all of them (engine.zero_grad()), or some after the last backward of a step; in the "
                "middle they are in sums"
            )
        return cleared

    def note(self, cleared: Cleared, num_backwards: int) -> None:
        """It was cleared after so many backwards of the step."""
        found = (f"{self._names[key]}{'' if is_none else ' (to zero)'}" for key, is_none in cleared.items())
        self._notes.append(f"after backward {num_backwards}: {', '.join(found)}")

    @property
    def mark(self) -> int:
        """Stands for the notes of this step: 0 where there are none, another number for others."""
        return 1 + crc32(str(self._notes).encode()) if self._notes else 0

    def forget(self) -> str:
        """The next notes are of another step. Returns the last ones."""
        notes, self._notes = "; ".join(self._notes), []
        return notes


def refuse_differences(mesh: Mesh, notes: str) -> NoReturn:
    """Raises StateError on all ranks, whose notes are not the same. A collective."""
    everyone = mesh.world.gather_objects(notes)
    rank = next(rank for rank, found in enumerate(everyone) if found != everyone[0])
    first, other = (shorten(everyone[one], 120, placeholder=" ...") or "none" for one in (0, rank))
    raise StateError(
        "zero_grad(): expected the gradients of the same parameters cleared on all ranks, since each has a part of "
        f"their sum, found {first} on rank 0, {other} on rank {rank}. No parameter was updated"
    )


def _stand_ins(gradients: Iterable[GroupGradient]) -> ReducedGradients:
    return ReducedGradients([pair for gradient in gradients for pair in gradient.group.plan.params])
