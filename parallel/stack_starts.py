"""What forwards of a stack of blocks were begun with, for the blocks that are computed again in a backward.

A block that is recomputed has no state of its forward but the number of the node that autograd is at, which says in
which forward it was: what each was begun with is kept with the number of the first node of its stack.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch

_MOST = 4096


@dataclass(frozen=True)
class StackStart:
    """One. number: of the node of autograd that is made next. seed: of what all ranks draw alike."""

    number: int
    length: int
    seed: int


class StackStarts:
    """The last ones."""

    def __init__(self) -> None:
        self._kept: list[StackStart] = []  # those that differ from the one before

    def note(self, length: int, seed: int) -> None:
        """A forward of a stack begins."""
        if not self._kept or (self._kept[-1].length, self._kept[-1].seed) != (length, seed):
            self._kept.append(StackStart(torch._C._autograd._get_sequence_nr(), length, seed))
            del self._kept[:-_MOST]

    def of_recomputed(self) -> StackStart:
        """Of the forward that has the node at which autograd is."""
        number = torch._C._current_autograd_node()._sequence_nr()
        at = bisect_right(self._kept, number, key=lambda start: start.number)
        return self._kept[max(at - 1, 0)]
