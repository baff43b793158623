"""Whose turn it is to be reduced in a backward, and what is released with it; see the notes in `sequence.py`."""

from __future__ import annotations

from collections.abc import Sequence

from .gather_ring import GatherRing
from .graph_task import will_run
from .reductions import OnFinal, Reductions
from .unit import Unit
from .uses import BEFORE_ALL_USES


class ReductionTurns:
    """Takes units through their reductions in the canonical order: see [Note: what is done in backward].

    |  gradients come  |  its turn: reduced, what is trained is released  |  what is frozen of it is released
    """

    def __init__(self, units: Sequence[Unit], ring: GatherRing | None) -> None:
        """units: the rest first, then the blocks. ring: of the gathers in backward, where these need other ranks."""
        self.order = [*reversed(units)]
        self.cursor = 0  # of the next
        self.reductions = Reductions()
        self.boundary = True
        """Whether it is the last backward of a step."""
        self.read_on: list[Unit] = []
        """Reduced, while autograd may still read what is frozen in them."""
        self._on_final: OnFinal | None = None
        self._ring = ring

    def begin(self, boundary: bool, on_final: OnFinal | None) -> None:
        """No unit has had its turn. boundary, on_final: as of `Reductions.start`."""
        self.boundary, self._on_final = boundary, on_final
        self.cursor = 0
        self.read_on.clear()
        for unit in self.order:
            unit.waiting = set(unit.trained)
            unit.is_ready = unit.is_collected = False

    def collect_ready(self, use: int = 0) -> None:
        """Starts the reductions whose turn has come, and takes the earlier ones one step on.

        use: that autograd has come to; 0: it says nothing.
        """
        while self.cursor < len(self.order):
            unit = self.order[self.cursor]
            if not unit.is_ready and not (use and self._is_behind(unit, use)):
                return
            self.cursor += 1
            unit.is_collected = True
            if self._ring is not None:
                self._ring.leave_behind(unit)
            for gradient in unit.gradients:
                self.reductions.start(gradient, self.boundary, self._on_final)
            if unit is self.order[-1]:
                continue
            is_updated = self.boundary and self._on_final is not None
            if not unit.release_reduced(is_updated):
                self.read_on.append(unit)
                self.leave_behind(use)

    def leave_behind(self, use: int) -> None:
        """Releases what was still read of the units after a use, which autograd has come to; 0: it says nothing."""
        for unit in [unit for unit in self.read_on if unit.first_use is None or unit.first_use > use > 0]:
            self.read_on.remove(unit)
            unit.release()

    def end(self) -> None:
        """Reduces what is left, and waits for all."""
        for unit in self.order:
            unit.is_ready = True
        if self.read_on:
            self.leave_behind(BEFORE_ALL_USES)
        self.collect_ready(BEFORE_ALL_USES)
        self.reductions.finish()

    def _is_behind(self, unit: Unit, use: int) -> bool:
        """Whether all gradients of a unit are there, when autograd has come to a use.

        A unit that seems unused can be left for the end where no gather waits for it.
        """
        is_behind = self._ring is not None if unit.first_use is None else unit.first_use > use
        is_rest = unit is self.order[-1]
        return is_behind and not is_rest and not will_run([unit.accumulators[key] for key in unit.waiting])
