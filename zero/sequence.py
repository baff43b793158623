"""The canonical order of collectives, and the position of a pass through the model in it.

[Note: canonical order] Every rank starts the same collectives in the same order, even if the ranks' forwards differ.
Gathers come in rounds:

    forward round:   root, block 0, block 1, ..., block n-1
    backward round:  reduce n-1, gather n-2, reduce n-2, gather n-3, ..., reduce 0, reduce root
                     (block n-1 is still full; with prefetch a gather moves further to the left, on every rank)

A rank that reaches block k first passes all blocks before it. A skipped block is gathered, released, and reduced with
zeros, so ranks that skip different blocks never hang. If a rank needs a block that the round has already passed (a
second call, or a call out of order), it needs another round.

Before each round the ranks exchange what they need next (`Proposal`), in a small sum on the host. Usually all need the
same. Else the highest `Round` comes first, and a rank with a different need takes part but keeps nothing: a rank that
has called its blocks once joins the second round of a rank that calls them twice, before its backward. A round has the
units that any rank lacks. A rank that already has a unit still sends its shard.

The round of a backward follows the uses of units in the forwards, which the proposals contain. `gates` says how many
gathers precede the reduction of a unit: as many as the slowest rank needs until its last gradient of the unit arrives.
If a rank's autograd runs in a different order (a checkpoint recomputes several blocks together), the rank reduces the
gradients that have arrived, keeps the unit, and proposes another reduction at the end (`Round.FLUSH`). Its next
backward waits for as many gathers more (`lag`).

[Note: what is done in backward] Autograd runs the ready node with the highest sequence number, and a node's users
always have higher numbers. So when autograd asks for the gradient of unit j's output, every unit whose first use came
after that call already has all its gradients, and its reduction need not wait for unused parameters. This holds over
all forwards whose graphs may be part of this backward. Parameters that are read outside of their unit's forward get
gradients later, so autograd's engine is asked about them before a unit counts as complete.

A trained parameter gets its gradient when the last node that reads it has run, so it is released with the unit's
reduction. A frozen parameter (the base weights below adapters) is still read on the way to the unit's inputs. It is
released when autograd reaches an earlier unit.

If gathers need no other rank (memory shared on a host, or nothing is freed), rounds are not used: a unit is gathered
and released at its uses only.

[Note: what autograd runs] A backward begins with a call of the engine, or in a `loss.backward()` with the first node of
the model that autograd reaches; then an autograd callback reports the end. A run that adds to no gradient of ours
(`torch.autograd.grad`, or a backward through a frozen model) only needs parameters: they are gathered as in a backward,
and nothing is reduced. If that run can itself be differentiated (create_graph), its graph reads parameters at a time
that no hook reports, so they stay full until the step ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor, nn

from ..comm import CollectiveError, Progress
from ..watch.log import logger
from .autograd import GraphTask, current_graph_task, will_run
from .gather_ring import GatherProposals, GatherRing, Proposal, Round
from .group import ShardedState
from .reductions import OnFinal, ReductionTurns, gates
from .unit import Forward, OpenForwards, Unit, Use


class StateError(RuntimeError):
    """A call that cannot be right in the current state."""


class Phase(Enum):
    """The phase of the model."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"  # recomputed forwards included


class UnitSequence:
    """Carries a model's units through forward and backward in the canonical order.

    units: the root unit first, then the blocks in the order of registration.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        prefetch_numel: int,
        progress: Progress,
        before_pass: Callable[[Phase, bool], None] = lambda phase, boundary: None,
        gather_proposals: GatherProposals = lambda proposal: [proposal],
    ) -> None:
        """before_pass: called with (phase, boundary) before the collectives of a forward (if it has any) or a backward;
        boundary: the last backward of a step. IDLE: before gathers of an autograd run that reduces nothing, or of a
        read outside of the model. gather_proposals: used if units are gathered from other ranks.
        """
        self.units = units
        self._before_pass = before_pass
        self._progress = progress
        self.root = units[0]
        self.phase = Phase.IDLE
        self._needs_ring = any(group.frees_memory for unit in units for group in unit.groups)
        self._ring = GatherRing(units, prefetch_numel, gather_proposals)
        self._reach = self._ring.reach if self._needs_ring else _gather_alone
        """Gathers a unit: in the order of a round, if that needs other ranks."""
        self._turns = ReductionTurns(units, self._ring if self._needs_ring else None)
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._lag = 0
        self._parked: Unit | None = None  # its use has ended, and the next use may be of the same unit
        self.forwards = OpenForwards()
        """The forwards of which a backward may run."""
        self._turns.is_nested = lambda: current_graph_task() != self._graph_task
        self._graph_task: int | None = None  # autograd's number of the outer backward
        self._on_use: Callable[[], None] = lambda: None  # of `set_listeners`, as the next three
        self._on_begin: Callable[[nn.Parameter | None], None] = lambda arrived: None
        self._on_end: Callable[[], None] = lambda: None
        self._on_abort: Callable[[], None] = lambda: None
        self._implicit_task: weakref.ref[GraphTask] | None = None  # the run of autograd that the engine did not start
        self._unreduced: list[Unit] = []  # gathered for a run of autograd in which nothing is reduced
        self._kept = set[Unit]()  # stay full until the step ends

    @property
    def blocks(self) -> Sequence[Unit]:
        """All units but the root unit."""
        return self.units[1:]

    @property
    def reduction_order(self) -> Sequence[Unit]:
        """The units in the order of their reductions."""
        return self._turns.order

    def set_listeners(
        self,
        before_use: Callable[[], None],
        begin: Callable[[nn.Parameter | None], None],
        end: Callable[[], None],
        abort: Callable[[], None],
    ) -> None:
        """Set the callbacks for events that the engine does not start, before the first forward.

        before_use(): a forward of the model or of a single unit begins outside of a backward. begin(arrived): autograd
        begins a backward; must call `begin_backward`. arrived: the parameter whose `grad` autograd has already added
        to. end(): that backward has ended; must call `end_backward`. abort(): an error has ended it; must call `abort`.
        """
        self._on_use = before_use
        self._on_begin, self._on_end, self._on_abort = begin, end, abort

    # -- forward --------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Enter the root module: gather the root unit until the forward ends."""
        # A checkpoint around the whole model recomputes it in the backward.
        if self.phase is Phase.BACKWARD and not self._ends_lost_backward():
            return
        if self.phase is Phase.FORWARD:  # the last forward raised
            self.end_forward(keeps_graph=False)
        if self._needs_ring:
            self._ring.end_round()  # of a forward that raised
        self._on_use()
        if self._needs_ring:
            self._before_pass(Phase.FORWARD, False)
        self.phase = Phase.FORWARD
        self.forwards.begin(torch.is_grad_enabled())
        self.enter(self.root)

    def end_forward(self, keeps_graph: bool) -> None:
        """Leave the root module. keeps_graph: a backward may follow, beginning with the last block and the root."""
        if self.phase is not Phase.FORWARD:
            return
        if keeps_graph and not self.units[-1].is_full:  # a head, perhaps, that only a loss outside of the model reads
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
        """Free the gathered units if the forward inside raises. The next pass ends the round.

        It waits for no rank: the other ranks may have no error.
        """
        try:
            yield
        except BaseException:
            if self.phase is Phase.FORWARD:
                self._release_parked()
                for unit in self.units:
                    # A unit that the round has not passed may be in flight: to release it would wait for other ranks.
                    if not self._ring.has_left(unit):
                        unit.release()
                # Else `awaits_backward` stays True, and a read on this rank alone would start a gather.
                self.forwards.begin(expects_backward=False)
                self.phase = Phase.IDLE
            raise

    def enter(self, unit: Unit) -> Use | None:
        """Gather a unit at the start of its forward. Returns its use; None if the forward is recomputed in backward."""
        if self._progress.is_on:
            self._progress.at_unit("" if unit is self.root else unit.name)
        if self.phase is Phase.BACKWARD and not self._ends_lost_backward():
            if self._turns.read_on:
                self._come_to(unit)
            self._reach(unit, Round.GATHER)
            return None
        if self.phase is Phase.IDLE:
            self._on_use()
        if self._parked is unit:
            # Its memory still has the values: no collective, so the round does not see this use.
            self._parked = None
            unit.gather()
        else:
            if self._parked is not None:
                self._release_parked()
            self._reach(unit, Round.FORWARD)
        return Use(unit, self.forwards)

    @property
    def awaits_backward(self) -> bool:
        """Whether the last forward has ended and its backward may follow."""
        return self.phase is Phase.IDLE and self.forwards.expects_backward and bool(self.forwards.last.num_uses)

    def read(self, unit: Unit) -> None:
        """Gather a unit that is read outside of its forward, and keep it full until the step ends.

        No hook reports when autograd needs the tensors that it saves here.
        """
        if unit not in self._kept and unit is not self.root:
            logger.info(
                "unit '%s' is read outside of its forward, so it stays gathered until the step ends. If that takes "
                "too much memory, name a common parent of the unit and its reader in zero_optimization.units",
                unit.name,
            )
        if self.phase is Phase.IDLE and self._needs_ring and not unit.is_kept:
            self._before_pass(Phase.IDLE, False)
            self._on_use()
            if not unit.is_full:
                # A round of this unit alone: `enter` would propose all units that this rank lacks.
                self._release_parked()
                self._ring.begin(Proposal(Round.GATHER, (self._numbers[unit],)))
                self._ring.reach(unit, Round.GATHER)
            self._keep(unit)
        self.enter(unit)
        self._keep(unit)

    def leave(self, unit: Unit) -> None:
        """Free a unit at the end of its forward, except the last unit if a backward begins with it."""
        if self.phase is Phase.BACKWARD:  # a recomputed forward: the unit's reduction releases it
            return
        if self._progress.is_on:
            self._progress.at_unit("")
        if self.forwards.expects_backward and unit is self.units[-1]:
            return
        # The next use often follows at once, and gathering again would cost a round.
        if unit.repeats and self._needs_ring and self.phase is Phase.FORWARD and unit.park():
            self._parked = unit
        else:
            unit.release()

    # -- backward -------------------------------------------------------------------------------------------------

    def on_backward_start(self, arrived: nn.Parameter | None = None) -> None:
        """Begin a backward that the engine did not start: autograd has reached a part of the model.

        arrived: the parameter whose `grad` autograd has already added to. See [Note: what autograd runs].
        """
        if self._implicit_task is not None:
            if self._implicit_task() is not None:  # this run has begun already
                return
            # The run is gone and `_end_implicit` was not called: an error has ended it.
            if self.phase is Phase.BACKWARD:
                self._on_abort()
        if self.phase is Phase.BACKWARD:  # begun by the engine
            if self._graph_task is None:
                self._graph_task = current_graph_task()
            return
        # Only autograd's queued callback holds the task, so the reference dies with the run, also after an error.
        self._implicit_task = weakref.ref(GraphTask(self._end_implicit))
        if any(will_run(unit.accumulators.values()) for unit in self.units):
            self._begin_implicit(arrived)
        else:
            self._begin_unreduced()

    def has_lost_backward(self) -> bool:
        """Whether an error has ended a backward that autograd had begun, without a callback."""
        return self.phase is Phase.BACKWARD and self._implicit_task is not None and self._implicit_task() is None

    def begin_backward(self, boundary: bool, on_final: OnFinal | None) -> None:
        """Begin a backward. boundary: the last of an optimizer step. on_final: called with each complete gradient."""
        self._before_pass(Phase.BACKWARD, boundary)
        self.phase = Phase.BACKWARD
        # The engine's run of autograd has not begun, so it has no number: `on_backward_start` sets it.
        self._graph_task = None
        if self._implicit_task is not None and self._implicit_task() is None:
            self._implicit_task = None
        self._gather_root()
        forwards = self.forwards.count(self.units)
        self._turns.begin(boundary, on_final, self._begin_round(forwards) if self._needs_ring else ())

    def enter_forward(self, forward: Forward) -> None:
        """Autograd has reached the gradient of a forward's output."""
        if forward not in self.forwards.of_backward:
            self.forwards.come_to(forward, self.units)
        self.on_backward_start()

    def enter_backward(self, use: Use) -> None:
        """Autograd has reached the gradient of a use's output: gather its unit, and reduce later units."""
        # Before `on_backward_start`: a backward that begins here follows these uses.
        if use.forward not in self.forwards.of_backward:
            self.forwards.come_to(use.forward, self.units)
        task = self._implicit_task
        # The engine's backward has no number yet, or no run of autograd is known that is still going on.
        if self._graph_task is None if task is None else task() is None:
            self.on_backward_start()
        if self.phase is Phase.BACKWARD:
            if self._turns.read_on:
                self._turns.leave_behind(use.number)
            self._turns.collect_ready(use.number)
        if self._progress.is_on:
            self._progress.at_unit(use.unit.name)
        if self.phase is Phase.BACKWARD:
            self._reach(use.unit, Round.GATHER)
        else:
            self._gather_unreduced(use)

    def gradient_arrived(self, number: int, name: str, param: nn.Parameter) -> None:
        """Autograd has added to `param.grad` of the unit with this number."""
        unit = self.units[number]
        task = self._implicit_task
        # The condition of `enter_backward`. It skips a call that does nothing, for each parameter.
        if self._graph_task is None if task is None else task() is None:
            self.on_backward_start(param if param.requires_grad else None)
        if self.phase is not Phase.BACKWARD:  # as a nested run of a checkpoint seems to add to no gradient
            if not param.requires_grad:  # frozen since its forward: the hook runs, nothing is added
                return
            self._end_unreduced()
            self._begin_implicit(param)
        if unit.is_collected and not unit.is_left_over:
            raise StateError(
                f"parameter '{name}' got a gradient after its unit '{unit.name}' had been reduced in the same "
                "backward. This happens if reentrant activation checkpointing recomputes a read outside of the unit's "
                "forward: use use_reentrant=False, or leave the unit out of zero_optimization.units."
            )
        # Inlined `is_full`, as a call per parameter costs time. Without the error the gradient is silently wrong.
        for group in unit.groups if self._needs_ring else ():
            if group.sharded_state is not ShardedState.UNSHARDED:
                raise StateError(
                    f"the backward of unit '{unit.name}' ran while its parameters were released, so the gradient of "
                    f"'{name}' would be wrong: expected a backward that begins with a tensor that '{unit.name}' "
                    "returned, found a tensor that left it differently, such as a loss kept in an attribute. Return "
                    "it too, or leave the unit out of zero_optimization.units"
                )
        unit.waiting.discard(id(param))
        # The gradient stays in `param.grad`: `has_left_over` finds it at the end, and `flush` reduces it.
        if unit.is_left_over:
            return
        turns = self._turns
        if turns.read_on:
            self._come_to(unit)
        if unit.stages_early and turns.reductions.in_flight:
            turns.reductions.poll()
        # If a unit is used twice, only the outer backward says that the last gradient has arrived.
        # Reentrant checkpointing runs a separate backward for each use of a unit.
        is_last = not unit.waiting and (unit.num_uses < 2 or current_graph_task() == self._graph_task)
        if is_last and unit is not self.root:
            unit.is_ready = True
            turns.collect_ready()
        # Only at the cursor: the next slot belongs to the next reduction, so a second unit would overwrite it.
        elif unit.stages_early and unit is turns.order[turns.cursor] and id(param) in unit.places:
            unit.gradients[0].take_early(unit.places[id(param)], turns.boundary)

    def place_for_gradient(self, param: nn.Parameter) -> Tensor | None:
        """Return memory to compute the gradient of a parameter in, if its unit is the next to be reduced."""
        turns = self._turns
        if self.phase is not Phase.BACKWARD or turns.cursor == len(turns.order):
            return None
        if current_graph_task() != self._graph_task:  # a user's autograd.grad inside of it keeps its result
            return None
        unit = turns.order[turns.cursor]
        if id(param) not in unit.trained:
            return None
        turns.reductions.poll()
        place = unit.places.get(id(param))  # in the group that is reduced first
        return None if place is None else unit.gradients[0].place_for(place, turns.boundary)

    def end_backward(self) -> None:
        """Reduce the remaining units: those that this rank did not use, and the root unit."""
        # Before the round ends: `end_round` comes to gates, where a unit that is not marked as ready is left over.
        self._turns.end()
        if self._needs_ring:
            self._end_round()
        self._end_pass()

    def abort(self, error: BaseException, completes: bool) -> None:
        """End a backward that `error` has ended.

        completes: begin the remaining collectives too, unless ranks are lost. If all ranks have an error, each at
        another unit, they then are at the same place again.
        """
        are_lost = isinstance(error, CollectiveError)
        try:
            if completes and not are_lost:
                self._turns.stop_updates()
                self._turns.end()
                if self._needs_ring:
                    self._end_round()
        except Exception as other:  # such as full memory, again
            raise CollectiveError(
                f"{type(error).__name__} in a backward, whose remaining collectives this rank cannot end: {other}. "
                "Restart all ranks from the last checkpoint"
            ) from other
        finally:
            self.phase = Phase.IDLE
            self._implicit_task = self._graph_task = None
            self._ring.forget()
            self._turns.abort()
        if not are_lost:
            self._end_pass()

    def await_others(self) -> None:
        """End a step: take part in the rounds that other ranks need before they end theirs. A collective."""
        if self._needs_ring:
            self._release_parked()
            self._ring.begin(Proposal(Round.END))

    def release_all(self) -> None:
        """Release the units that were kept full until the end of the step."""
        while self._kept:
            self._kept.pop().release_kept()

    # -- what autograd runs ---------------------------------------------------------------------------------------

    def _ends_lost_backward(self) -> bool:
        """Abort a lost backward. Returns False if no backward is lost."""
        if not self.has_lost_backward():
            return False
        self._on_abort()
        return True

    def _begin_implicit(self, arrived: nn.Parameter | None) -> None:
        """Begin a backward that the engine did not start."""
        if self.phase is Phase.FORWARD:  # a forward that raised
            self.end_forward(keeps_graph=False)
        self._on_begin(arrived)
        # After `_on_begin`, since `begin_backward` clears the number.
        task = self._implicit_task() if self._implicit_task is not None else None
        assert task is not None
        self._graph_task = task.number

    def _end_implicit(self) -> None:
        if self.phase is Phase.BACKWARD:
            self._on_end()
        else:
            self._end_unreduced()
        self._implicit_task = None

    def _begin_unreduced(self) -> None:
        """Begin an autograd run in which nothing is reduced."""
        if self._needs_ring:
            self._before_pass(Phase.IDLE, False)
        # A root unit that was full before this run stays full after it.
        if not self.root.is_full:
            self._unreduced.append(self.root)
        self._gather_root()
        self.forwards.count(self.units)
        if torch.is_grad_enabled():
            self._keep(self.root)

    def _gather_unreduced(self, use: Use) -> None:
        """Gather the unit of a use, and release the units after it."""
        for unit in [unit for unit in self._unreduced if unit.first_use is not None and unit.first_use > use.number]:
            self._unreduced.remove(unit)
            unit.release()
        if not use.unit.is_full:
            self._reach(use.unit, Round.GATHER)
            self._unreduced.append(use.unit)
        if torch.is_grad_enabled():
            self._keep(use.unit)

    def _end_unreduced(self) -> None:
        if self._needs_ring:
            self._ring.end_round()
        units, self._unreduced = self._unreduced, []
        for unit in units:
            # `torch.autograd.grad` inside a forward: the forward still reads the root unit.
            if not (unit is self.root and self.phase is Phase.FORWARD):
                unit.release()
        self.forwards.of_backward.clear()  # another backward of these forwards may follow

    # -- helpers --------------------------------------------------------------------------------------------------

    def _gather_root(self) -> None:
        """Gather the root unit, in a separate round, if a forward without gradients has released it."""
        if self._needs_ring and not self.root.is_full:
            self._release_parked()
            self._ring.begin(Proposal(Round.GATHER, (0,)))
            self._ring.reach(self.root, Round.GATHER)
        elif not self._needs_ring:
            self.root.gather()

    def _begin_round(self, forwards: Sequence[Forward]) -> Sequence[int]:
        """Begin the round of a backward of these forwards. Returns the gates of its reductions. A collective."""
        self._release_parked()
        uses = tuple([self._numbers[unit] for forward in forwards for unit in forward.order])
        used = set(uses)
        # Not the root unit, which `_gather_root` has gathered.
        wanted = tuple([n for n, unit in enumerate(self.units) if n in used and n and not unit.is_full])
        proposals = self._ring.begin(Proposal(Round.BACKWARD, wanted, uses, self._lag))
        order = [self._numbers[unit] for unit in self._ring.order]
        # All ranks take the largest lag, as a gate is a position in the order of collectives.
        self._lag = max(proposal.lag for proposal in proposals)
        made = gates(order, proposals, len(self.units), self._lag)
        # The first gather of the round overlaps with the backward of the last block.
        self._ring.prefetch()
        return made

    def _end_round(self) -> None:
        """End the backward's round, and join the rounds that other ranks still need."""
        while True:
            self._ring.end_round()
            # Learned for the next backward: see [Note: canonical order].
            self._lag = max(self._lag, self._turns.lag)
            kind = Round.FLUSH if self._turns.has_left_over else Round.END
            # `begin` returns when all ranks propose END, or when a rank must flush: then all flush.
            if max(proposal.round for proposal in self._ring.begin(Proposal(kind))) is Round.END:
                return
            self._turns.flush()

    def _release_parked(self) -> None:
        # Called before a round: `start_gather` skips a parked group (UNSHARDING), and the other ranks would wait.
        if self._parked is not None:
            self._parked.release()
            self._parked = None

    def _end_pass(self) -> None:
        for unit in self.units:
            unit.release()
        self.forwards.end_backward()
        self._graph_task = None
        self.phase = Phase.IDLE

    def _keep(self, unit: Unit) -> None:
        unit.keep()
        self._kept.add(unit)

    def _come_to(self, unit: Unit) -> None:
        """Autograd has reached a read of a unit that is in its forward."""
        if unit.first_use is not None and unit is not self.root and unit not in self._kept:
            self._turns.leave_behind(unit.first_use)


def _gather_alone(unit: Unit, kind: Round) -> None:
    """Gather without a round: no other rank is needed."""
    unit.gather()
