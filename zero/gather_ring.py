"""Gathers of units in rounds that all ranks make together: see [Note: canonical order] in `sequence.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ..comm import Pending
from .unit import Unit

MAX_PREFETCHED = 2  # more would cost memory and hide nothing further
NO_GATE = 1 << 62  # a position that no round has


class Round(IntEnum):
    """What a rank needs next of all ranks. If ranks need different rounds, the highest comes first."""

    END = 0  # nothing more in this backward
    FLUSH = 1  # another reduction of gradients, at the end of a backward
    BACKWARD = 2  # the gathers and reductions of a backward
    GATHER = 3  # units that a rank needs beyond those of its backward's round, or in a run that reduces nothing
    FORWARD = 4


@dataclass(frozen=True)
class Proposal:
    """What a rank needs next. Units have their numbers in `UnitSequence.units`."""

    round: Round
    wanted: tuple[int, ...] = ()  # units that this rank does not have
    uses: tuple[int, ...] = ()  # of units in the forwards that a backward may be of, in their order
    lag: int = 0  # gathers that come earlier than the uses say, as the last backwards have shown


Meet = Callable[[Proposal], Sequence[Proposal]]
"""The different proposals of all ranks, of which each rank makes one. A collective."""


class GatherRing:
    """Gathers units in an order on which the ranks agree, round after round.

    A rank that needs a unit that the round does not have any more ends that round and proposes another one. A rank that
    needs something else next takes part: it gathers what it lacks, sends its shard of what it has, and keeps nothing.
    """

    def __init__(self, units: Sequence[Unit], prefetch_numel: int, meet: Meet) -> None:
        self._units = units
        self._prefetch_numel = prefetch_numel
        self._meet = meet
        self.order: Sequence[Unit] = ()
        """The units of the round."""
        self._left: set[Unit] = set()  # of the round
        self._lacked: set[Unit] = set()  # that this rank has proposed, and that a round alone gathers
        self._next = 0  # to be issued
        self._issued: deque[tuple[Unit, bool, list[Pending]]] = deque()  # (unit, was it full before, what others get)
        self._issued_numel = 0
        self.position = 0
        """How many gathers of the round this rank has passed."""
        self.gate = NO_GATE
        """`at_gate` is called before the round passes the gather at this position, or a later one."""
        self.at_gate: Callable[[int], None] = lambda position: None
        self.keeps: Callable[[Unit], bool] = lambda unit: False
        """Whether a unit that this rank passes is needed later in the round."""

    def begin(self, proposal: Proposal) -> Sequence[Proposal]:
        """Begins the round that this rank needs, behind all that other ranks need before it.

        Returns the proposals of the ranks. A collective.
        """
        self.end_round()
        self._lacked = {self._units[number] for number in proposal.wanted}
        while True:
            proposals = self._meet(proposal)
            top = max([one.round for one in proposals])
            self._start(top, [one for one in proposals if one.round is top])
            if top is proposal.round:
                return proposals
            if top is Round.FLUSH:  # this rank has nothing left
                return proposals
            self.end_round()

    def reach(self, unit: Unit, kind: Round) -> None:
        """Gathers `unit`, and before it all that the round puts there and that was not used.

        What is issued when does not depend on which units are used, only on how far the round has come.
        """
        if unit not in self._left:
            if unit.is_full:
                return
            if self.gate <= len(self.order):
                self.at_gate(len(self.order))
            self.begin(Proposal(kind, self.lacking(kind)))
        while unit in self._left:
            self._pass_next(unit)

    def lacking(self, kind: Round) -> tuple[int, ...]:
        """The units that this rank does not have; of a round that is no forward's, those behind the first."""
        first = 0 if kind is Round.FORWARD else 1
        return tuple([number for number, unit in enumerate(self._units) if number >= first and not unit.is_full])

    def advance(self, position: int) -> None:
        """Passes the gathers before a position."""
        while self.position < position and self._left:
            self._pass_next(None)

    def go_ahead(self) -> None:
        """Issues now what may be gathered ahead of the first unit."""
        if self._next < len(self.order) and self.order[self._next].numel <= self._prefetch_numel:
            self._issue()
            self._prefetch()

    def end_round(self) -> None:
        """Passes what is left of the round, so that every rank ends it at the same place."""
        while self._left:
            self._pass_next(None)

    def has_left(self, unit: Unit) -> bool:
        """Whether its gather in the round has not been passed."""
        return unit in self._left

    def forget(self) -> None:
        """An error has ended the round."""
        self.order, self._next, self._issued_numel, self.position = (), 0, 0, 0
        self._left.clear()
        self._issued.clear()

    def _start(self, kind: Round, proposals: Sequence[Proposal]) -> None:
        wanted = set[int]().union(*[one.wanted for one in proposals])
        numbers = sorted(wanted, reverse=kind is not Round.FORWARD)
        if kind is Round.BACKWARD and len(set(proposals)) == 1:
            behind = dict.fromkeys(reversed(proposals[0].uses))
            numbers = [number for number in behind if number in wanted]
        self.order = [self._units[number] for number in numbers]
        self._left = set(self.order)
        self._next = self._issued_numel = self.position = 0

    def _pass_next(self, wanted: Unit | None) -> None:
        if self.gate <= self.position:
            self.at_gate(self.position)
        if not self._issued:
            self._issue()
        self.position += 1
        found, was_full, given = self._issued.popleft()
        self._issued_numel -= found.numel
        self._left.discard(found)
        if was_full:
            for pending in given + found.join_gather(is_loaded=True):
                pending.wait()
        if found is wanted:
            found.gather()
        elif not was_full:
            if self.keeps(found):
                found.gather()
            else:
                found.release()
        if self._issued:  # was loaded while the last unit was used, and is gathered while this one is
            unit, is_full, pending_of_others = self._issued[0]
            unit.continue_gather()
            if is_full:
                pending_of_others += unit.join_gather(is_loaded=True)
        self._prefetch()

    def _issue(self) -> None:
        unit = self.order[self._next]
        self._next += 1
        self._issued_numel += unit.numel
        was_full = unit not in self._lacked and unit.is_full
        self._issued.append((unit, was_full, unit.join_gather() if was_full else []))
        unit.start_gather()

    def _prefetch(self) -> None:
        """Issues the next of the round, as long as there is room for one more."""
        while self._next < len(self.order) and len(self._issued) < MAX_PREFETCHED:
            if self._issued_numel + self.order[self._next].numel > self._prefetch_numel:
                return
            self._issue()
