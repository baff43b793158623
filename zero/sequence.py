"""The canonical order of collectives, and where a pass through the model stands in it.

[Note: canonical order]
Every rank starts the same collectives in the same order, whatever its own forward does. Gathers come in rounds:

    forward round:   root, block 0, block 1, ..., block n-1
    backward round:  reduce n-1, gather n-2, reduce n-2, gather n-3, ..., reduce 0, reduce root
                     (block n-1 is still there; with prefetch a gather stands further to the left, on every rank)

A rank that comes to block k first passes all that stands before it. A block that it skips is gathered and released
again, and reduced with zeros; so ranks that skip different blocks never wait for each other in vain. A rank that needs
a block which the round does not have any more (it is called again, or out of order) needs another round.

Before each round the ranks tell each other what they need next (`Proposal`), in one small sum on the host. Usually all
need the same. Else the highest `Round` comes first, and a rank that needs something else takes part without keeping
anything: a rank that has called its blocks once makes the second round of a rank that calls them twice, before its own
backward. A round has the units that any rank lacks. A rank that has one of them sends its shard all the same.

The round of a backward follows the uses of units in the forwards, which are in the proposals. `gates` says how many
gathers come before the reduction of a unit: as many as a rank needs until its last gradient of that unit is there, on
the rank that needs most. A rank whose autograd does something else (a checkpoint recomputes several blocks together)
reduces what has come by then, keeps the unit, and proposes another reduction at the end (`Round.FLUSH`); its next
backward waits for as many gathers more (`lag`).

[Note: what is done in backward]
Autograd runs the node with the highest sequence number among those that are ready, and a node's users always have
higher numbers. So when the gradient of what unit j returned is asked for, every unit whose first use came after that
call has all the gradients that it will ever get, and its reduction need not wait for parameters that were not used:
of all forwards whose graphs may be part of this backward. What was read outside of its unit's forward comes later
still; autograd is asked for it before a unit is taken for complete.

A trained parameter has its gradient when the last node that reads it has run, so it can be released with the unit's
reduction. A frozen one beside it (the weights that adapters are put on) is still read on the way to the unit's inputs:
it is released when autograd has come to an earlier unit.

Where gathers need no other rank (memory shared on a host, or nothing is freed) there are no rounds, and a unit is
gathered and released when it is used and at no other time.

[Note: what autograd runs]
A backward begins when the engine says so, or with the first thing of the model that autograd comes to, in a
`loss.backward()`, and then autograd says when it has ended. A run that adds to no gradient of ours (of
`torch.autograd.grad`, or through a model whose parameters are frozen) only needs parameters: they are gathered as in a
backward, and nothing is reduced. If it can itself be differentiated (create_graph), what it has made reads parameters
at a time that no hook tells, so they stay full until the step ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn

from ..comm import CollectiveError, Progress
from ..watch.log import logger
from .autograd import GraphTask, current_graph_task, will_run
from .gather_ring import GatherRing, Meet, Proposal, Round
from .group import Residence
from .reductions import OnFinal, ReductionTurns, gates
from .unit import Forward, OpenForwards, Unit, Use


class StateError(RuntimeError):
    """A call came at a time when it cannot be right."""


class Phase(Enum):
    """What the model is doing."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"  # recomputed forwards included


class BackwardListener(Protocol):
    """Is told of what happens without the engine having been asked for it: backwards that autograd runs, and uses."""

    def before_use(self) -> None:
        """Outside of a backward a forward of the model begins, or of a unit that is called by itself."""

    def begin(self, arrived: nn.Parameter | None) -> None:
        """One begins: has `begin_backward` called. arrived: whose gradient autograd has added to `grad` already."""

    def end(self) -> None:
        """It has come to its end: has `end_backward` called."""

    def abort(self) -> None:
        """An error has ended it before: has `abort` called."""


class UnitSequence:
    """Carries a model's units through forward and backward in the canonical order.

    units: the rest first, then the blocks in the order of registration.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        prefetch_numel: int,
        progress: Progress,
        before_pass: Callable[[Phase, bool], None] = lambda phase, boundary: None,
        meet: Meet = lambda proposal: [proposal],
    ) -> None:
        """before_pass: told before the collectives of a forward, where there are some, of a backward, and whether that
        is the last of a step; IDLE: of a run of autograd that reduces nothing, or a read beside the model, where
        they gather from other ranks. meet: called where units are gathered from other ranks.
        """
        self.units = units
        self._before_pass = before_pass
        self._progress = progress
        self.rest = units[0]
        self.phase = Phase.IDLE
        self._needs_ring = any(group.frees_memory for unit in units for group in unit.groups)
        self._ring = GatherRing(units, prefetch_numel, meet)
        self._reach = self._ring.reach if self._needs_ring else _gather_alone
        """Makes a unit full: in the order of a round, where that needs other ranks."""
        self._turns = ReductionTurns(units, self._ring if self._needs_ring else None)
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._lag = 0
        self._parked: Unit | None = None  # its last use has ended, and the next one may be of the same unit
        self._forwards = OpenForwards()
        self._turns.is_nested = lambda: current_graph_task() != self._graph_task
        self._graph_task: int | None = None  # autograd's number of the backward that runs, not of one inside of it
        self._listener: BackwardListener | None = None
        self._heard: weakref.ref[GraphTask] | None = None  # what autograd runs, without the engine having been asked
        self._lent: list[Unit] = []  # gathered for a run that reduces nothing
        self._kept = set[Unit]()  # full until the step ends

    @property
    def blocks(self) -> Sequence[Unit]:
        """All but the rest."""
        return self.units[1:]

    @property
    def reduction_order(self) -> Sequence[Unit]:
        """The units in the order in which their gradients are reduced."""
        return self._turns.order

    def listen(self, listener: BackwardListener) -> None:
        """Before the first forward."""
        self._listener = listener

    # -- forward --------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root module is entered: the rest of the parameters is needed until its end."""
        if self.phase is Phase.BACKWARD and not self._ends_lost_backward():
            return
        if self.phase is Phase.FORWARD:  # the last forward ended with an exception
            self.end_forward(keeps_graph=False)
        if self._needs_ring:
            self._ring.end_round()  # of a forward that an error has ended
        if self._listener is not None:
            self._listener.before_use()
        if self._needs_ring:
            self._before_pass(Phase.FORWARD, False)
        self.phase = Phase.FORWARD
        self._forwards.begin(torch.is_grad_enabled())
        self.enter(self.rest)

    def end_forward(self, keeps_graph: bool) -> None:
        """The root module is left. keeps_graph: a backward may follow; it starts with the last block and the rest."""
        if self.phase is not Phase.FORWARD:
            return
        if keeps_graph and not self.units[-1].is_full:  # a head, perhaps, that only a loss beside the model reads
            self._reach(self.units[-1], Round.FORWARD)
        if self._needs_ring:
            self._release_parked()
            self._ring.end_round()
        if not keeps_graph:
            for unit in self.units:
                unit.release()
        self.phase = Phase.IDLE

    @contextmanager
    def failing_forward(self) -> Iterator[None]:
        """Around a forward. If an error ends it, what it has gathered is freed at once; the next pass ends its round.

        No rank waits for others here: they may have met no error.
        """
        try:
            yield
        except BaseException:
            if self.phase is Phase.FORWARD:
                self._release_parked()
                for unit in self.units:
                    if not self._ring.has_left(unit):
                        unit.release()
                self._forwards.begin(expects_backward=False)
                self.phase = Phase.IDLE
            raise

    def enter(self, unit: Unit) -> Use | None:
        """A unit's forward begins, or is recomputed (None): its parameters are made full."""
        if self._progress.is_on:
            self._progress.at_unit("" if unit is self.rest else unit.name)
        if self.phase is Phase.BACKWARD and not self._ends_lost_backward():
            if self._turns.read_on:
                self._come_to(unit)
            self._reach(unit, Round.GATHER)
            return None
        if self.phase is Phase.IDLE and self._listener is not None:
            self._listener.before_use()
        if self._parked is unit:
            self._parked = None
            unit.gather()
        else:
            if self._parked is not None:
                self._release_parked()
            self._reach(unit, Round.FORWARD)
        return Use(unit, self._forwards)

    @property
    def awaits_backward(self) -> bool:
        """Whether the last forward has ended, and its backward may come."""
        return self.phase is Phase.IDLE and self._forwards.expects_backward and bool(self._forwards.last.num_uses)

    def read(self, unit: Unit) -> None:
        """Its parameters are read outside of its forward: they are full from now on, until the step ends.

        What autograd saves of them is needed at a time that no hook tells.
        """
        if unit not in self._kept and unit is not self.rest:
            logger.info(
                "unit '%s' is read outside of its forward, so it stays gathered until the step ends; name a common "
                "parent of it and its reader in zero_optimization.units if that takes too much memory",
                unit.name,
            )
        if self.phase is Phase.IDLE and self._needs_ring and not unit.is_kept:
            self._before_pass(Phase.IDLE, False)
            if self._listener is not None:
                self._listener.before_use()
            if not unit.is_full:  # a round of it alone
                self._release_parked()
                self._ring.begin(Proposal(Round.GATHER, (self._numbers[unit],)))
                self._ring.reach(unit, Round.GATHER)
            self._keep(unit)
        self.enter(unit)
        self._keep(unit)

    def leave(self, unit: Unit) -> None:
        """A unit's forward ends: its parameters are freed, but for those with which the backward will begin."""
        if self.phase is Phase.BACKWARD:
            return
        if self._progress.is_on:
            self._progress.at_unit("")
        if self._forwards.expects_backward and unit is self.units[-1]:
            return
        if unit.repeats and self._needs_ring and self.phase is Phase.FORWARD and unit.park():
            self._parked = unit
        else:
            unit.release()

    # -- backward -------------------------------------------------------------------------------------------------

    def hear(self, arrived: nn.Parameter | None = None) -> None:
        """Autograd has come to something of the model. Begins what nobody has begun; see [Note: what autograd runs].

        arrived: to this parameter, to whose gradient it has added already.
        """
        if self._heard is not None:
            if self._heard() is not None:
                return
            if self.phase is Phase.BACKWARD:
                self._tell_listener().abort()
        if self.phase is Phase.BACKWARD:  # the engine has begun it
            if self._graph_task is None:
                self._graph_task = current_graph_task()
            return
        self._heard = weakref.ref(GraphTask(self._end_heard))
        if any(will_run(unit.accumulators.values()) for unit in self.units):
            self._begin_heard(arrived)
        else:
            self._begin_lending()

    def has_lost_backward(self) -> bool:
        """Whether a backward that autograd has begun was ended by an error, of which nobody was told."""
        return self.phase is Phase.BACKWARD and self._heard is not None and self._heard() is None

    def begin_backward(self, boundary: bool, on_final: OnFinal | None) -> None:
        """boundary: the last microbatch of an optimizer step. on_final: called with each gradient that is complete."""
        self._before_pass(Phase.BACKWARD, boundary)
        self.phase = Phase.BACKWARD
        self._graph_task = None
        if self._heard is not None and self._heard() is None:
            self._heard = None
        self._gather_rest()
        self._forwards.count(self.units)
        self._turns.begin(boundary, on_final, self._begin_round() if self._needs_ring else ())

    @property
    def last_forward(self) -> Forward:
        """The one that runs, or ran last. Whoever holds it tells by that that its graph is there."""
        return self._forwards.last

    def enter_forward(self, forward: Forward) -> None:
        """The gradient of what a forward returned is there."""
        if forward not in self._forwards.of_backward:
            self._forwards.come_to(forward, self.units)
        self.hear()

    def enter_backward(self, use: Use) -> None:
        """The gradient of what a use of a unit returned is there: its own backward begins."""
        if use.forward not in self._forwards.of_backward:  # first: a backward that begins here follows its uses
            self._forwards.come_to(use.forward, self.units)
        heard = self._heard
        if self._graph_task is None if heard is None else heard() is None:
            self.hear()
        if self.phase is Phase.BACKWARD:
            if self._turns.read_on:
                self._turns.leave_behind(use.number)
            self._turns.collect_ready(use.number)
        if self._progress.is_on:
            self._progress.at_unit(use.unit.name)
        if self.phase is Phase.BACKWARD:
            self._reach(use.unit, Round.GATHER)
        else:
            self._lend(use)

    def gradient_arrived(self, number: int, name: str, param: nn.Parameter) -> None:
        """Autograd has put the gradient of a parameter of the unit of this number into `param.grad`."""
        unit = self.units[number]
        heard = self._heard
        if self._graph_task is None if heard is None else heard() is None:  # else it does nothing, often
            self.hear(param if param.requires_grad else None)
        if self.phase is not Phase.BACKWARD:  # in a run that seemed to add to no gradient: checkpointing has its own
            if not param.requires_grad:  # frozen since its forward: autograd tells of it, and adds nothing
                return
            self._end_lending()
            self._begin_heard(param)
        if unit.is_collected and not unit.is_left_over:
            raise StateError(
                f"parameter '{name}' got a gradient after its unit '{unit.name}' had been reduced in the same "
                "backward. A parameter that is read outside of its unit's forward, where reentrant activation "
                "checkpointing recomputes it, does that: use use_reentrant=False, or leave the unit out of "
                "zero_optimization.units."
            )
        for group in unit.groups if self._needs_ring else ():  # as `is_full`, which costs a call for each parameter
            if group.residence is not Residence.FULL:  # else silent: the memory that was read is not its own
                raise StateError(
                    f"the backward of unit '{unit.name}' ran while its parameters were released, so the gradient of "
                    f"'{name}' would be wrong: expected that it begins with a tensor that '{unit.name}' returned, "
                    "found one that came out another way, as a loss that is kept in an attribute does; return it too, "
                    "or leave the unit out of zero_optimization.units"
                )
        unit.waiting.discard(id(param))
        if unit.is_left_over:
            return
        turns = self._turns
        if turns.read_on:
            self._come_to(unit)
        if unit.stages_early and turns.reductions.in_flight:
            turns.reductions.poll()
        # Reentrant checkpointing runs a backward of its own for each use of a unit.
        is_last = not unit.waiting and (unit.num_uses < 2 or current_graph_task() == self._graph_task)
        if is_last and unit is not self.rest:
            unit.is_ready = True
            turns.collect_ready()
        elif unit.stages_early and unit is turns.order[turns.cursor] and id(param) in unit.places:
            unit.gradients[0].take_early(unit.places[id(param)], turns.boundary)

    def place_for_gradient(self, param: nn.Parameter) -> Tensor | None:
        """Memory of its shape that the gradient of a parameter can be written to, if it is the turn of its unit."""
        turns = self._turns
        if self.phase is not Phase.BACKWARD or turns.cursor == len(turns.order):
            return None
        if current_graph_task() != self._graph_task:  # of a user's autograd.grad in it, who keeps the result
            return None
        unit = turns.order[turns.cursor]
        if id(param) not in unit.trained:
            return None
        turns.reductions.poll()
        place = unit.places.get(id(param))  # of the group that is reduced first
        return None if place is None else unit.gradients[0].place_for(place, turns.boundary)

    def end_backward(self) -> None:
        """Reduces what is left: units that this rank did not use, and the rest."""
        self._turns.end()
        if self._needs_ring:
            self._end_round()
        self._end_pass()

    def abort(self, error: BaseException) -> None:
        """Ends a backward that `error` has ended.

        What was started is finished, unless the others are lost: in the canonical order they come to it as well.
        """
        self.phase = Phase.IDLE
        self._heard = self._graph_task = None
        self._ring.forget()
        self._turns.abort()
        if isinstance(error, CollectiveError):
            self._turns.reductions.abandon()
            return
        self._turns.reductions.finish()
        self._end_pass()

    def await_others(self) -> None:
        """This rank ends a step: takes part in the passes that other ranks make before they end it. A collective."""
        if self._needs_ring:
            self._release_parked()
            self._ring.begin(Proposal(Round.END))

    def release_all(self) -> None:
        """The step has ended: nothing that was made before it is differentiated any more."""
        while self._kept:
            self._kept.pop().release_kept()

    # -- what autograd runs ---------------------------------------------------------------------------------------

    def _tell_listener(self) -> BackwardListener:
        assert self._listener is not None
        return self._listener

    def _ends_lost_backward(self) -> bool:
        """Whether there was one."""
        if not self.has_lost_backward():
            return False
        self._tell_listener().abort()
        return True

    def _begin_heard(self, arrived: nn.Parameter | None) -> None:
        """A backward that the engine was not asked for."""
        if self.phase is Phase.FORWARD:  # one that ended with an exception
            self.end_forward(keeps_graph=False)
        self._tell_listener().begin(arrived)
        task = self._heard() if self._heard is not None else None
        assert task is not None
        self._graph_task = task.number

    def _end_heard(self) -> None:
        if self.phase is Phase.BACKWARD:
            self._tell_listener().end()
        else:
            self._end_lending()
        self._heard = None

    def _begin_lending(self) -> None:
        """A run in which nothing is reduced."""
        if self._needs_ring:
            self._before_pass(Phase.IDLE, False)
        if not self.rest.is_full:
            self._lent.append(self.rest)
        self._gather_rest()
        self._forwards.count(self.units)
        if torch.is_grad_enabled():
            self._keep(self.rest)

    def _lend(self, use: Use) -> None:
        """The parameters of a unit are needed now, and those of the units after it no more."""
        for unit in [unit for unit in self._lent if unit.first_use is not None and unit.first_use > use.number]:
            self._lent.remove(unit)
            unit.release()
        if not use.unit.is_full:
            self._reach(use.unit, Round.GATHER)
            self._lent.append(use.unit)
        if torch.is_grad_enabled():
            self._keep(use.unit)

    def _end_lending(self) -> None:
        if self._needs_ring:
            self._ring.end_round()
        lent, self._lent = self._lent, []
        for unit in lent:
            if not (unit is self.rest and self.phase is Phase.FORWARD):
                unit.release()
        self._forwards.of_backward.clear()  # another backward of these may follow

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _gather_rest(self) -> None:
        """What a forward without gradients has released since, in a round of its own."""
        if self._needs_ring and not self.rest.is_full:
            self._release_parked()
            self._ring.begin(Proposal(Round.GATHER, (0,)))
            self._ring.reach(self.rest, Round.GATHER)
        elif not self._needs_ring:
            self.rest.gather()

    def _begin_round(self) -> Sequence[int]:
        """Begins the round of a backward; the gates of its reductions. A collective."""
        self._release_parked()
        uses = tuple([self._numbers[unit] for forward in self._forwards.expected() for unit in forward.order])
        used = set(uses)
        wanted = tuple([n for n, unit in enumerate(self.units) if n in used and n and not unit.is_full])
        proposals = self._ring.begin(Proposal(Round.BACKWARD, wanted, uses, self._lag))
        order = [self._numbers[unit] for unit in self._ring.order]
        self._lag = max(one.lag for one in proposals)
        made = gates(order, proposals, len(self.units), self._lag)
        self._ring.go_ahead()
        return made

    def _end_round(self) -> None:
        """The end of the backward's round; takes part in all that other ranks need before they end theirs."""
        while True:
            self._ring.end_round()
            self._lag = max(self._lag, self._turns.lag)
            kind = Round.FLUSH if self._turns.has_left_over else Round.END
            if max(one.round for one in self._ring.begin(Proposal(kind))) is Round.END:
                return
            self._turns.flush()

    def _release_parked(self) -> None:
        if self._parked is not None:
            self._parked.release()
            self._parked = None

    def _end_pass(self) -> None:
        for unit in self.units:
            unit.release()
        self._forwards.end_backward()
        self._graph_task = None
        self.phase = Phase.IDLE

    def _keep(self, unit: Unit) -> None:
        unit.keep()
        self._kept.add(unit)

    def _come_to(self, unit: Unit) -> None:
        """Autograd has come to a unit alone, and not to what is read of it elsewhere."""
        if unit.first_use is not None and unit is not self.rest and unit not in self._kept:
            self._turns.leave_behind(unit.first_use)


def _gather_alone(unit: Unit, kind: Round) -> None:
    """Where a gather needs no other rank, there are no rounds."""
    unit.gather()
