"""Collectives that were started and not yet waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


class Pending:
    """A started collective. `wait` returns when its result may be used; waiting twice is harmless."""

    __slots__ = ("_finish", "_poll")

    def __init__(self, finish: Callable[[], None] | None = None, poll: Callable[[], bool] | None = None) -> None:
        """poll: says whether `finish` would return at once; None: that is not known before it has."""
        self._finish = finish
        self._poll = poll

    @property
    def is_done(self) -> bool:
        """True where it is known that `wait` would not wait."""
        return self._finish is None or (self._poll is not None and self._poll())

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Terms(NamedTuple):
    """A started sum over the ranks of an axis: what this rank has to add up.

        arrived.wait()  ->  out[region] = read()[0] + read()[1] + ...  ->  pending = summed()  ->  pending.wait()

    The caller adds, so he may look at the terms, and have his own elsewhere than in his slot.
    """

    arrived: Pending
    region: slice  # of the result: what this rank sums
    read: Callable[[], list[Tensor]]
    """One term for each rank, in their order, of the size of the region; or a single one, where the backend has summed
    (`Route.sums_here` is False). They are there from `arrived` on until `summed`."""
    summed: Callable[[], Pending | None]
    """To be called when the region has its sum, which goes to the other ranks then; None: they do not need it."""


Numels = Sequence[Sequence[int]]
"""Of a swap: numels[i][j] elements that the i-th rank of an axis has for the j-th, alike on all of them."""

REGION_ALIGNMENT_NUMEL = 1024


def regions_of(numel: int, size: int) -> list[slice]:
    """The region of an all-reduce that each of `size` ranks sums: whole blocks, the last ones shorter or empty."""
    part = -(-numel // (size * REGION_ALIGNMENT_NUMEL)) * REGION_ALIGNMENT_NUMEL
    return [slice(min(rank * part, numel), min((rank + 1) * part, numel)) for rank in range(size)]
