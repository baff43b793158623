"""The order in which units are reduced in a backward, and the reductions in flight.

[Note: early phases] `start` advances every reduction by a phase, the oldest first, and waits for other ranks if it
must. `poll` advances only reductions that need not wait, so ranks differ in their progress. That is harmless, because

- each transport sees the same order on all ranks: a reduction enters a phase after the older reductions have left it;
- `poll` never waits: it might wait for a message that this same rank sends from an older reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..comm import Pending
from .autograd import will_run
from .gather_ring import NO_GATE, GatherRing, Proposal
from .gradient import GroupGradient
from .unit import BEFORE_ALL_USES, Unit

OnFinal = Callable[[GroupGradient], None]
"""Called when a gradient's sum over microbatches and ranks is complete; may consume it.

Call `arrive` first if the gradient goes to the host.
"""


@dataclass(slots=True, eq=False)
class _Flight:
    """A reduction in flight."""

    steps: Iterator[Pending]
    pending: Pending
    num_phases: int = 0  # completed

    def advance(self) -> bool:
        """Run the next phase. Returns False if the reduction is complete."""
        pending = next(self.steps, None)
        if pending is None:
            return False
        self.pending = pending
        self.num_phases += 1
        return True


class Reductions:
    """Advances each reduction by a phase when the next reduction starts, so compute hides its waiting."""

    def __init__(self) -> None:
        self.in_flight: list[_Flight] = []
        """Oldest first."""

    def start(self, gradient: GroupGradient, boundary: bool, on_final: OnFinal | None = None) -> None:
        """Advance the reductions in flight, then stage a group's gradient and start to reduce it."""
        if self.in_flight:
            self._advance_all()
        steps = gradient.collect(boundary) if on_final is None else _with_end(gradient, boundary, on_final)
        pending = next(steps, None)
        # None: the gradient stays on this rank until the accumulation boundary.
        if pending is not None:
            self.in_flight.append(_Flight(steps, pending))

    def poll(self) -> None:
        """Advance the reductions that need not wait, to free their memory early. See [Note: early phases]."""
        if not self.in_flight:
            return
        older = None
        for flight in list(self.in_flight):
            # No reduction overtakes an older one: [Note: early phases].
            is_behind = older is None or older.num_phases > flight.num_phases
            if is_behind and flight.pending.is_done and not flight.advance():
                self.in_flight.remove(flight)
            else:
                older = flight

    def finish(self) -> None:
        """Wait for all reductions."""
        while self.in_flight:
            self._advance_all()

    def abandon(self) -> None:
        """Drop all reductions: other ranks will not answer."""
        self.in_flight.clear()

    def _advance_all(self) -> None:
        for flight in list(self.in_flight):
            if not flight.advance():
                self.in_flight.remove(flight)


def _with_end(gradient: GroupGradient, boundary: bool, on_final: OnFinal) -> Iterator[Pending]:
    yield from gradient.collect(boundary)
    if boundary:
        on_final(gradient)


class ReductionTurns:
    """Reduces units in the canonical order: see [Note: what is done in backward].

    gradients arrive  |  turn: reduce, release the trained groups  |  release the frozen groups
    """

    def __init__(self, units: Sequence[Unit], ring: GatherRing | None) -> None:
        """units: the root unit first, then the blocks. ring: the gathers of the backward, if they need other ranks."""
        self.order = [*reversed(units)]
        self.cursor = len(self.order)  # index in `order` of the next unit to reduce: in a forward none is due
        self.reductions = Reductions()
        self.boundary = True
        """Whether this is the last backward of a step."""
        self.read_on: list[Unit] = []
        """Reduced units whose frozen parameters autograd may still read."""
        self.lag = 0
        """How many gathers this rank was ahead of a reduction whose gradients had not all arrived, in this backward."""
        self._on_final: OnFinal | None = None
        self._gates: Sequence[int] = ()
        self.updates = False
        """Whether `on_final` consumes the gradients in this backward."""
        self.is_nested: Callable[[], bool] = lambda: False
        """Whether autograd is in a nested run, which does not show how far the backward is."""
        self._use = 0
        self._ring = ring
        if ring is not None:
            ring.at_gate = self._at_gate
            ring.keeps = lambda unit: (
                self.cursor < len(self.order) and unit.first_use is not None and not unit.is_collected
            )

    def begin(self, boundary: bool, on_final: OnFinal | None, gates: Sequence[int]) -> None:
        """Begin a backward. boundary, on_final: see `Reductions.start`.

        gates: the number of gathers before the reduction of each unit in `order`; empty without a ring.
        """
        self.boundary, self._on_final = boundary, on_final
        self.updates = boundary and on_final is not None
        self._gates = gates or [0] * len(self.order)
        self.lag = self._use = 0
        self.cursor = 0
        if self._ring is not None:
            self._ring.gate = self._gates[0]
        self.read_on.clear()
        for unit in self.order:
            unit.waiting = set(unit.trained)
            unit.is_ready = unit.is_collected = unit.is_left_over = False

    def collect_ready(self, use: int = 0, position: int = NO_GATE) -> None:
        """Start the reductions whose turn has come.

        use: the number of the use that autograd has reached; 0: unknown. position: only reductions before this gather.
        """
        self._use = use or self._use
        ring, gates = self._ring, self._gates
        while self.cursor < len(self.order) and gates[self.cursor] <= position:
            unit = self.order[self.cursor]
            # The order is fixed, so a unit whose gradients are missing holds up all units after it.
            if not unit.is_ready and not (use and self._is_behind(unit, use)):
                return
            gate, self.cursor = gates[self.cursor], self.cursor + 1
            unit.is_collected = True
            if ring is not None:
                ring.gate = gates[self.cursor] if self.cursor < len(gates) else NO_GATE
                # All ranks make these gathers before this reduction, so this rank passes them now.
                if ring.position < gate:
                    ring.advance(gate)
            for gradient in unit.gradients:
                self.reductions.start(gradient, self.boundary, self._on_final)
            # The root unit stays until the pass ends. A left-over unit still gets gradients.
            if unit is self.order[-1] or unit.is_left_over:
                continue
            if not unit.release_reduced(self.updates):
                self.read_on.append(unit)
                self.leave_behind(use)

    @property
    def has_left_over(self) -> bool:
        """Whether gradients arrived after the reduction of their unit."""
        return any(param.grad is not None for unit in self.order if unit.is_left_over for param in unit.params())

    def flush(self) -> None:
        """Reduce the gradients that arrived after their unit's reduction, on any rank. A collective."""
        for unit in self.order:
            # All units, since this rank does not know which unit another rank has left over. Without `on_final`:
            # `_leave_over` raises if the backward updates.
            for gradient in unit.gradients:
                self.reductions.start(gradient, self.boundary)
        self.reductions.finish()

    def stop_updates(self) -> None:
        """Only sum the gradients of the remaining units."""
        self._on_final, self.updates = None, False

    def abort(self) -> None:
        """Skip all remaining turns, and drop the reductions that have not ended: other ranks will not answer."""
        self.reductions.abandon()
        self.cursor = len(self.order)
        if self._ring is not None:
            self._ring.gate = NO_GATE

    def _at_gate(self, position: int) -> None:
        """Start the reductions that all other ranks start before a gather of the round."""
        while self._ring is not None and self._ring.gate <= position:
            unit = self.order[self.cursor]
            if not unit.is_ready and (self.is_nested() or not self._is_behind(unit, self._use)):
                self._leave_over(unit, position)
            # Ready or not: the other ranks start this reduction before the gather, and would wait for this rank.
            unit.is_ready = True
            self.collect_ready(0, position)

    def _leave_over(self, unit: Unit, position: int) -> None:
        if self.updates:
            raise RuntimeError(
                f"unit '{unit.name}' is updated in the backward: expected all its gradients before the backward "
                "gathers the next unit, found a backward that needs several units together, such as a checkpoint of "
                "several blocks. Name a common parent of these units in zero_optimization.units, or switch "
                "update_in_backward or offload_optimizer.overlap off"
            )
        unit.is_left_over = True
        if unit.first_use is not None:
            # The next backward reduces this unit after as many more gathers.
            self.lag = max(self.lag, position + 1 - self._gates[self.cursor])

    def leave_behind(self, use: int) -> None:
        """Release the frozen groups of units used after this use, which autograd has reached; 0: unknown."""
        for unit in [unit for unit in self.read_on if unit.first_use is None or unit.first_use > use > 0]:
            self.read_on.remove(unit)
            unit.release()

    def end(self) -> None:
        """Reduce the remaining units, and wait for all."""
        for unit in self.order:
            unit.is_ready = True
        if self.read_on:
            self.leave_behind(BEFORE_ALL_USES)
        self.collect_ready(BEFORE_ALL_USES)
        self.reductions.finish()

    def _is_behind(self, unit: Unit, use: int) -> bool:
        """Whether a unit has all its gradients, now that autograd has reached this use.

        A unit that seems unused is left for the end of the backward, unless a gather waits for it.
        """
        # An unused unit has no gradients to wait for, but only a round needs its turn early.
        is_behind = self._ring is not None if unit.first_use is None else unit.first_use > use > 0
        is_root = unit is self.order[-1]
        return is_behind and not is_root and not will_run([unit.accumulators[key] for key in unit.waiting])


def gates(order: Sequence[int], proposals: Sequence[Proposal], num_units: int, lag: int) -> list[int]:
    """Return how many gathers of `order` come before the reduction of each unit, the last unit first.

    It is the number that any rank needs to reach the first use of the unit, plus `lag`. The root unit comes last.
    """
    places = {number: place for place, number in enumerate(order)}
    needed = [0] * num_units
    for uses in {proposal.uses for proposal in proposals}:
        count = 0
        until = dict[int, int]()
        # A backward goes through the uses in reverse, and needs all gathers up to the furthest unit so far.
        for number in reversed(uses):
            # A unit that is full on every rank is not in the round, and needs no gather.
            count = max(count, places.get(number, -1) + 1)
            # Overwritten until the unit's first use, which autograd reaches last.
            until[number] = count
        for number, most in until.items():
            needed[number] = max(needed[number], most)
    made, most = list[int](), 0
    for number in reversed(range(num_units)):
        # Reductions keep their order, so a gate is never below an earlier gate.
        most = max(most, needed[number])
        made.append(min(most + lag, len(order)) if number else len(order))
    return made
