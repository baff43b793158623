"""Collectives that were started and not yet waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


class Reduction:
    """A started sum over the ranks of an axis, taken forward phase by phase.

    A reduction of unit k is advanced when unit k+1 has been staged, so that its waiting time is covered by the
    computation between the two. `advance` runs the next phase and says whether it was the last one.
    """

    __slots__ = ("_phases", "_polls")

    def __init__(self, phases: Sequence[Callable[[], None]], polls: Sequence[Callable[[], bool]] = ()) -> None:
        """polls: for each phase, whether it would not wait; none: that is not known before it has."""
        self._phases = list(phases)
        self._polls = list(polls)

    @property
    def is_ready(self) -> bool:
        """True where it is known that `advance` would not wait."""
        return bool(self._polls) and self._polls[0]()

    def also_needs(self, poll: Callable[[], bool]) -> None:
        """What follows on the last phase, at once, would wait as long as `poll` says no."""
        if self._polls:
            last = self._polls[-1]
            self._polls[-1] = lambda: last() and poll()

    def advance(self) -> bool:
        if self._phases:
            self._phases.pop(0)()
            del self._polls[:1]
        return not self._phases

    def wait(self) -> None:
        while not self.advance():
            pass


Inspect = Callable[[int, Tensor, Sequence[Tensor]], None]
"""`inspect(offset_in_out, total, contributions)`: called with what this rank has summed, while it can still be read
what each rank of the axis, in its order, had sent for it (nothing where the backend does not show it).

For an all-reduce it is called with this rank's region alone: over the ranks of the axis, once for each element. That is
how a norm counts everything once, and how a non-finite value is traced to the rank that produced it.
"""

REGION_ALIGNMENT_NUMEL = 1024


def regions_of(numel: int, size: int) -> list[slice]:
    """The region of an all-reduce that each of `size` ranks sums: whole blocks, the last ones shorter or empty."""
    part = -(-numel // (size * REGION_ALIGNMENT_NUMEL)) * REGION_ALIGNMENT_NUMEL
    return [slice(min(rank * part, numel), min((rank + 1) * part, numel)) for rank in range(size)]
