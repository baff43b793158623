"""Whose turn it is to be reduced in a backward, and reductions that have started and not ended.

[Note: early phases]
`start` takes every reduction one phase on, the oldest first, and waits for other ranks where it must. `poll` does what
would not wait, so ranks come to differ in how far they are. That is harmless as long as

- each route sees the same order everywhere: a reduction is not taken into a phase before the older ones have left it;
- `poll` waits for nothing: what it waited for might come from this very rank, from an older reduction that is not due.
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
"""Called when the sum of a gradient over microbatches and ranks is complete; may use it up.

Of one that goes to the host `settle` has to be called first."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A reduction on its way."""

    steps: Iterator[Pending]
    pending: Pending
    num_phases: int = 0  # that it has behind it

    def advance(self) -> bool:
        """Takes it one phase on; says whether it is still on its way."""
        pending = next(self.steps, None)
        if pending is None:
            return False
        self.pending = pending
        self.num_phases += 1
        return True


class Reductions:
    """Takes each reduction one phase on when the next one starts: the time between the two covers its waiting."""

    def __init__(self) -> None:
        self.in_flight: list[_Flight] = []
        """Oldest first."""

    def start(self, gradient: GroupGradient, boundary: bool, on_final: OnFinal | None = None) -> None:
        """Stages a group's gradient and starts to reduce it, after the others were taken on."""
        if self.in_flight:
            self._advance_all()
        steps = gradient.collect(boundary) if on_final is None else _with_end(gradient, boundary, on_final)
        pending = next(steps, None)
        if pending is not None:
            self.in_flight.append(_Flight(steps, pending))

    def poll(self) -> None:
        """Takes those on that would not wait: their memory is free the sooner, here and on other ranks.

        See [Note: early phases].
        """
        if not self.in_flight:
            return
        older = None
        for flight in list(self.in_flight):
            is_behind = older is None or older.num_phases > flight.num_phases
            if is_behind and flight.pending.is_done and not flight.advance():
                self.in_flight.remove(flight)
            else:
                older = flight

    def finish(self) -> None:
        """Waits for all."""
        while self.in_flight:
            self._advance_all()

    def abandon(self) -> None:
        """Leaves them as they are: other ranks will not answer."""
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
        self.lag = 0
        """How many gathers this rank was ahead of a reduction whose gradients had not all come, in this backward."""
        self._on_final: OnFinal | None = None
        self._gates: Sequence[int] = ()
        self.updates = False
        """Whether what is reduced is used up at once."""
        self.is_nested: Callable[[], bool] = lambda: False
        """Whether autograd is in a run inside of the backward, which does not tell what the backward comes to."""
        self._use = 0
        self._ring = ring
        if ring is not None:
            self.cursor = len(self.order)
            ring.at_gate = self._at_gate
            ring.keeps = lambda unit: (
                self.cursor < len(self.order) and unit.first_use is not None and not unit.is_collected
            )

    def begin(self, boundary: bool, on_final: OnFinal | None, gates: Sequence[int]) -> None:
        """No unit has had its turn. boundary, on_final: as of `Reductions.start`. gates: how many gathers come before
        the reduction of each unit, by its turn; without a ring: none."""
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
        """Starts the reductions whose turn has come, and takes the earlier ones one step on.

        use: that autograd has come to; 0: it says nothing. position: of the gather before which they stand.
        """
        self._use = use or self._use
        ring, gates = self._ring, self._gates
        while self.cursor < len(self.order) and gates[self.cursor] <= position:
            unit = self.order[self.cursor]
            if not unit.is_ready and not (use and self._is_behind(unit, use)):
                return
            gate, self.cursor = gates[self.cursor], self.cursor + 1
            unit.is_collected = True
            if ring is not None:
                ring.gate = gates[self.cursor] if self.cursor < len(gates) else NO_GATE
                if ring.position < gate:
                    ring.advance(gate)
            for gradient in unit.gradients:
                self.reductions.start(gradient, self.boundary, self._on_final)
            if unit is self.order[-1] or unit.is_left_over:
                continue
            if not unit.release_reduced(self.updates):
                self.read_on.append(unit)
                self.leave_behind(use)

    @property
    def has_left_over(self) -> bool:
        """Whether gradients came after the reduction of their unit."""
        return any(param.grad is not None for unit in self.order if unit.is_left_over for param in unit.params())

    def flush(self) -> None:
        """Reduces what came after the reduction of its unit, on any rank. A collective."""
        for unit in self.order:
            for gradient in unit.gradients:
                self.reductions.start(gradient, self.boundary)
        self.reductions.finish()

    def abort(self) -> None:
        """No more turns."""
        self.cursor = len(self.order)
        if self._ring is not None:
            self._ring.gate = NO_GATE

    def _at_gate(self, position: int) -> None:
        """Other ranks make all reductions before a gather of the round."""
        while self._ring is not None and self._ring.gate <= position:
            unit = self.order[self.cursor]
            if not unit.is_ready and (self.is_nested() or not self._is_behind(unit, self._use)):
                self._leave_over(unit, position)
            unit.is_ready = True
            self.collect_ready(0, position)

    def _leave_over(self, unit: Unit, position: int) -> None:
        if self.updates:
            raise RuntimeError(
                f"unit '{unit.name}': expected all its gradients before the backward gathers the next unit, since it "
                "is updated in the backward; found a backward that needs several units together, as a checkpoint of "
                "several blocks does. Name a common parent of them in zero_optimization.units, or switch "
                "update_in_backward or offload_optimizer.overlap off"
            )
        unit.is_left_over = True
        if unit.first_use is not None:
            self.lag = max(self.lag, position + 1 - self._gates[self.cursor])

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
        is_behind = self._ring is not None if unit.first_use is None else unit.first_use > use > 0
        is_rest = unit is self.order[-1]
        return is_behind and not is_rest and not will_run([unit.accumulators[key] for key in unit.waiting])


def gates(order: Sequence[int], proposals: Sequence[Proposal], num_units: int, lag: int) -> list[int]:
    """How many of the gathers in `order` come before the reduction of each unit, by its turn: the last unit first.

    As many as a rank needs before it has come to the first use of that unit, and `lag` more. The rest comes last.
    """
    places = {number: place for place, number in enumerate(order)}
    needed = [0] * num_units
    for uses in {one.uses for one in proposals}:
        count = 0
        until = dict[int, int]()
        for number in reversed(uses):
            count = max(count, places.get(number, -1) + 1)
            until[number] = count
        for number, most in until.items():
            needed[number] = max(needed[number], most)
    made, most = list[int](), 0
    for number in reversed(range(num_units)):
        most = max(most, needed[number])
        made.append(min(most + lag, len(order)) if number else len(order))
    return made
