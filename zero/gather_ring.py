"""Gathers of units in rounds that all ranks make together: see [Note: canonical order] in `sequence.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ..comm import Pending
from .group import ShardedGroup, ShardedState
from .unit import Unit

MAX_PREFETCHED = 2  # more would cost memory and hide no more time
NO_GATE = 1 << 62  # behind the end of any round


class Round(IntEnum):
    """The kind of round that a rank needs next. If ranks need different kinds, the highest comes first."""

    END = 0  # nothing more in this backward
    FLUSH = 1  # a second reduction of gradients, at the end of a backward
    BACKWARD = 2  # the gathers and reductions of a backward
    GATHER = 3  # more units than the backward's round has, or units for a run that reduces nothing
    FORWARD = 4


@dataclass(frozen=True)
class Proposal:
    """The round that a rank needs next. Units are numbered as in `UnitSequence.units`."""

    round: Round
    wanted: tuple[int, ...] = ()  # units that this rank does not have
    uses: tuple[int, ...] = ()  # of units in the forwards of the next backward, in order
    lag: int = 0  # extra gathers before each reduction, learned from earlier backwards


GatherProposals = Callable[[Proposal], Sequence[Proposal]]
"""Returns the distinct proposals of all ranks. A collective."""


@dataclass
class _Issued:
    """A gather that has begun."""

    unit: Unit
    was_full: bool  # before: this rank only sends
    full: list[ShardedGroup]  # before
    sends: list[Pending]
    is_continued: bool = False

    def continue_gather(self) -> None:
        """Start the collective of offloaded groups, once: their shards are loaded."""
        if not self.is_continued:
            self.is_continued = True
            self.sends += self.unit.continue_gather(self.full)


class GatherRing:
    """Gathers units in an order on which the ranks agree, round after round.

    If a rank needs a unit that the round has already passed, it ends that round and proposes another. A rank with a
    different need takes part: it gathers the units that it lacks, sends its shards, and keeps nothing.
    """

    def __init__(self, units: Sequence[Unit], prefetch_numel: int, gather_proposals: GatherProposals) -> None:
        self._units = units
        self._prefetch_numel = prefetch_numel
        self._gather_proposals = gather_proposals
        self.order: Sequence[Unit] = ()
        """The units of the round."""
        self._left: set[Unit] = set()  # units that the round has not passed yet
        self._lacked: set[Unit] = set()  # units that this rank has proposed
        self._next = 0  # index of the next unit to issue
        self._issued: deque[_Issued] = deque()
        self._issued_numel = 0
        self.position = 0
        """How many gathers of the round this rank has passed."""
        self.gate = NO_GATE
        """`at_gate` is called before the round passes the gather at this position or a later position."""
        self.at_gate: Callable[[int], None] = lambda position: None
        self.keeps: Callable[[Unit], bool] = lambda unit: False
        """Whether a unit that this rank passes is needed later in the round."""

    def begin(self, proposal: Proposal) -> Sequence[Proposal]:
        """Begin the round that this rank needs, after all rounds that other ranks need before it.

        Returns the proposals of the ranks. A collective.
        """
        self.end_round()
        self._lacked = {self._units[number] for number in proposal.wanted}
        while True:
            proposals = self._gather_proposals(proposal)
            top = max([other.round for other in proposals])
            # Needs of lower rounds are left out: their ranks propose them again after this round.
            self._start(top, [other for other in proposals if other.round is top])
            if top is proposal.round:
                return proposals
            if top is Round.FLUSH:  # this rank has nothing left to reduce
                return proposals
            # A round that only other ranks need: this rank sends its shards, and proposes the same again.
            self.end_round()

    def reach(self, unit: Unit, kind: Round) -> None:
        """Gather `unit`, after all units before it in the round.

        The order and time of collectives depend on the position in the round alone, not on the units that are used.
        """
        if unit not in self._left:
            if unit.is_full:
                return
            # A rank that needs no further round starts all reductions of this round before it proposes again.
            if self.gate <= len(self.order):
                self.at_gate(len(self.order))
            self.begin(Proposal(kind, self.lacking(kind)))
        while unit in self._left:
            self._pass_next(unit)

    def lacking(self, kind: Round) -> tuple[int, ...]:
        """Return the numbers of the units that this rank lacks. The root unit is in rounds of a forward only."""
        first = 0 if kind is Round.FORWARD else 1
        return tuple([number for number, unit in enumerate(self._units) if number >= first and not unit.is_full])

    def advance(self, position: int) -> None:
        """Pass the gathers before a position."""
        while self.position < position and self._left:
            self._pass_next(None)

    def prefetch(self) -> None:
        """Issue the next units of the round while the prefetch limits allow it."""
        while self._next < len(self.order) and len(self._issued) < MAX_PREFETCHED:
            # A limit of 0 is allowed: `_pass_next` issues the unit that it passes.
            if self._issued_numel + self.order[self._next].numel > self._prefetch_numel:
                return
            self._issue()

    def end_round(self) -> None:
        """Pass the remaining units, so that every rank ends the round at the same position."""
        while self._left:
            self._pass_next(None)

    def has_left(self, unit: Unit) -> bool:
        """Whether the round still has this unit's gather ahead."""
        return unit in self._left

    def forget(self) -> None:
        """Drop a round that an error has ended."""
        self.order, self._next, self._issued_numel, self.position = (), 0, 0, 0
        self._left.clear()
        self._issued.clear()

    def _start(self, kind: Round, proposals: Sequence[Proposal]) -> None:
        wanted = set[int]().union(*[proposal.wanted for proposal in proposals])
        # In the order of registration, which all ranks know; a backward goes from the last unit to the first.
        numbers = sorted(wanted, reverse=kind is not Round.FORWARD)
        if kind is Round.BACKWARD and len(set(proposals)) == 1:
            # All ranks use the units alike: gather them in the order of the backward.
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
        issued = self._issued.popleft()
        found = issued.unit
        self._issued_numel -= found.numel
        self._left.discard(found)
        issued.continue_gather()
        # Its shard may not change before the sends are done.
        for pending in issued.sends:
            pending.wait()
        if found is wanted:
            found.gather()
        elif not issued.was_full:
            if self.keeps(found):
                found.gather()
            else:
                found.release()
        # The next unit's shard was loaded during the last use. Its gather overlaps this use.
        if self._issued:
            self._issued[0].continue_gather()
        self.prefetch()

    def _issue(self) -> None:
        unit = self.order[self._next]
        self._next += 1
        self._issued_numel += unit.numel
        was_full = unit not in self._lacked and unit.is_full
        # Another rank may lack a group that is full here, as the trained one of a unit whose frozen one was read.
        full: list[ShardedGroup] = []
        if was_full or len(unit.groups) > 1:
            full = [g for g in unit.groups if g.frees_memory and g.sharded_state is ShardedState.UNSHARDED]
        self._issued.append(_Issued(unit, was_full, full, unit.start_gather(full)))
