"""The canonical order of collectives, and where a pass through the model stands in it.

[Note: canonical order]
Every rank issues the same collectives in the same order, whatever its own forward does:

    forward gathers:    rest, block 0, block 1, ..., block n-1
    backward gathers:         block n-2, ..., block 1, block 0          (block n-1 is still there)
    reductions:         block n-1, ..., block 1, block 0, rest
    both in backward:   reduce n-1, gather n-2, reduce n-2, gather n-3, ..., reduce 0, reduce rest
                        (with prefetch a gather stands further to the left, at the same place on every rank)

A rank that comes to block k first issues all that stands before it. A block that it skipped is gathered and released
again, and reduced with zeros; so ranks that skip different blocks never wait for each other in vain. The order is a
ring: a block that is used again, or out of order, is reached by going round.

[Note: what is done in backward]
Autograd runs the node with the highest sequence number among those that are ready, and a node's users always have
higher numbers. So when the gradient of what unit j returned is asked for, every unit whose first use came after that
call has all the gradients that it will ever get, and its reduction need not wait for parameters that were not used.

Where gathers need no other rank (memory shared on a host, or nothing is freed) the ring is not needed, and a unit is
gathered and released when it is used and at no other time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from ..comm import CollectiveError, Progress
from .gradient import GroupGradient
from .group import Residence, ShardedGroup
from .reductions import OnFinal, Reductions


class StateError(RuntimeError):
    """A call came at a time when it cannot be right."""


class Phase(Enum):
    """What the model is doing."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"  # recomputed forwards included


class Unit:
    """What is gathered, released and reduced together."""

    def __init__(
        self, name: str, module: nn.Module, groups: Sequence[ShardedGroup], gradients: Sequence[GroupGradient]
    ) -> None:
        self.name = name
        self.module = module
        self.groups = groups
        self.gradients = gradients
        self.trained = frozenset(id(p) for gradient in gradients for p in gradient.group.params)
        self._places = {id(p): i for gradient in gradients[:1] for i, p in enumerate(gradient.group.params)}
        self.waiting: set[int] = set()  # parameters whose gradient has not come yet in this backward
        self.is_ready = False
        self.is_collected = False
        self.first_use: int | None = None  # position in this rank's own forward

    @property
    def numel(self) -> int:
        return sum(group.layout.padded_numel for group in self.groups)

    @property
    def is_full(self) -> bool:
        return all(group.residence is Residence.FULL for group in self.groups)

    @property
    def is_kept(self) -> bool:
        """Whether it is full whatever is released: on all ranks, each of which may use it without the others."""
        return all(group.keeper is not None and group.keeper() for group in self.groups)

    def start_gather(self) -> None:
        for group in self.groups:
            group.start_gather()

    def continue_gather(self) -> None:
        for group in self.groups:
            group.continue_gather()

    def gather(self) -> None:
        for group in self.groups:
            group.gather()

    def release(self) -> None:
        for group in self.groups:
            group.release()

    def release_reduced(self, is_updated: bool) -> None:
        """As `release`, after the reduction has begun. is_updated: the update comes right after it, in the backward."""
        updated = {id(gradient.group) for gradient in self.gradients if not gradient.leaves_device}
        for group in self.groups:
            group.release(holds_shard=is_updated and id(group) in updated)

    def take_early(self, param: nn.Parameter, boundary: bool) -> None:
        """Stages a gradient before the others of the unit are there, if it is of the group that is reduced first."""
        if id(param) in self._places:
            self.gradients[0].take_early(self._places[id(param)], boundary)

    def place_for(self, param: nn.Parameter, boundary: bool) -> Tensor | None:
        """Memory for a gradient that `take_early` would stage."""
        return self.gradients[0].place_for(self._places[id(param)], boundary) if id(param) in self._places else None


_MAX_PREFETCHED = 2  # more would cost memory and hide nothing further


class GatherRing:
    """Gathers units in a fixed order, round and round; see [Note: canonical order]."""

    def __init__(self, order: Sequence[Unit], prefetch_numel: int) -> None:
        self._order = order
        self._prefetch_numel = prefetch_numel
        self._cursor = 0
        self._issued: deque[tuple[Unit, bool]] = deque()  # (unit, was it full before)
        self._passed: set[int] = set()  # identities of the units that the ring has come to

    def reach(self, unit: Unit) -> None:
        """Gathers `unit`, and before it all that the order puts there and that was not used.

        What is issued when does not depend on which units are used, only on how far the ring has come.
        """
        if unit.groups and unit.groups[0].keeper is not None and unit.is_kept:  # the first alone costs no call
            return
        assert unit in self._order
        while not self._pass_next(unit):
            pass

    def leave_behind(self, unit: Unit) -> None:
        """Goes on to `unit`, if the order has it and the ring has not come to it yet."""
        if id(unit) not in self._passed and unit in self._order:
            self.reach(unit)

    def _pass_next(self, wanted: Unit) -> bool:
        if not self._issued:
            self._issue()
        found = self._issued[0][0]
        self._passed.add(id(found))
        if found is wanted:
            self._issued.popleft()
            found.gather()
        else:
            self._drop()
        if self._issued:  # was loaded while the last unit was used, and is gathered while this one is
            self._issued[0][0].continue_gather()
        self._prefetch()
        return found is wanted

    def end_round(self) -> None:
        """Issues what is left of the round, so that every rank ends it at the same place."""
        if all(unit.is_kept for unit in self._order):
            return
        while self._cursor:
            self._issue()
        while self._issued:
            self._drop()

    def _issue(self) -> None:
        unit = self._order[self._cursor]
        self._cursor = (self._cursor + 1) % len(self._order)
        self._issued.append((unit, unit.is_full))
        unit.start_gather()

    def _drop(self) -> None:
        unit, was_full = self._issued.popleft()
        if not was_full:
            unit.release()

    def _prefetch(self) -> None:
        budget = self._prefetch_numel - sum(unit.numel for unit, _ in self._issued)
        while self._cursor and len(self._issued) < _MAX_PREFETCHED and self._order[self._cursor].numel <= budget:
            budget -= self._order[self._cursor].numel
            self._issue()


class UnitSequence:
    """Carries a model's units through forward and backward in the canonical order.

    units: the rest first, then the blocks in the order of registration.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        prefetch_numel: int,
        progress: Progress,
        before_pass: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        """before_pass: told before the collectives of a forward, where there are some, and of a backward."""
        self.units = units
        self._before_pass = before_pass
        self._progress = progress
        self.rest, self.blocks = units[0], list(units[1:])
        self.phase = Phase.IDLE
        self._needs_ring = any(group.frees_memory for unit in units for group in unit.groups)
        self._prefetch_numel = prefetch_numel
        self._forward_ring = GatherRing(units, prefetch_numel)
        self._backward_ring = GatherRing((), prefetch_numel)
        self.reduction_order = [*reversed(self.blocks), self.rest]
        self._reduction_cursor = 0
        self._reductions = Reductions()
        self._num_uses = 0
        self._boundary = True
        self._on_final: OnFinal | None = None
        self._graph_task: int | None = None  # autograd's number of the backward that runs, not of one inside of it
        self._expects_backward = False

    # -- forward --------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root module is entered: the rest of the parameters is needed until its end."""
        if self.phase is Phase.BACKWARD:
            return
        if self.phase is Phase.FORWARD:  # the last forward ended with an exception
            self.end_forward(keeps_graph=False)
        if self._needs_ring:
            self._before_pass(Phase.FORWARD)
        self.phase = Phase.FORWARD
        self._expects_backward = torch.is_grad_enabled()
        self.enter(self.rest)

    def end_forward(self, keeps_graph: bool) -> None:
        """The root module is left. keeps_graph: a backward may follow; it starts with the last block and the rest."""
        if self.phase is not Phase.FORWARD:
            return
        if self._needs_ring:
            if keeps_graph and not self.units[-1].is_full:
                self._forward_ring.reach(self.units[-1])
            self._forward_ring.end_round()
        if not keeps_graph:
            for unit in self.units:
                unit.release()
        self.phase = Phase.IDLE

    def enter(self, unit: Unit) -> int:
        """A unit's forward begins, or is recomputed: its parameters are made full. Returns the position of this use."""
        self._progress.at_unit("" if unit is self.rest else unit.name)
        if self.phase is Phase.BACKWARD:
            self._gather_in_backward(unit)
            return -1
        if self._needs_ring:
            self._forward_ring.reach(unit)
        else:
            unit.gather()
        self._num_uses += 1
        if unit.first_use is None:
            unit.first_use = self._num_uses
        return self._num_uses

    def leave(self, unit: Unit) -> None:
        """A unit's forward ends: its parameters are freed, but for those with which the backward will begin."""
        if self.phase is Phase.BACKWARD:
            return
        self._progress.at_unit("")
        if not (self._expects_backward and unit is self.units[-1]):
            unit.release()

    # -- backward -------------------------------------------------------------------------------------------------

    def begin_backward(self, boundary: bool, on_final: OnFinal | None) -> None:
        """boundary: the last microbatch of an optimizer step. on_final: called with each gradient that is complete."""
        self._before_pass(Phase.BACKWARD)
        self.phase = Phase.BACKWARD
        self._boundary, self._on_final = boundary, on_final
        self._graph_task = None
        self._reduction_cursor = 0
        # What a forward without gradients has released since; every rank has run the same forwards.
        self.rest.gather()
        order = [unit for unit in reversed(self.blocks) if not unit.is_full]
        self._backward_ring = GatherRing(order, self._prefetch_numel)
        for unit in self.units:
            unit.waiting = set(unit.trained)
            unit.is_ready = unit.is_collected = False

    def enter_backward(self, unit: Unit, use: int) -> None:
        """The gradient of what use number `use` of a unit returned is there: its own backward begins."""
        if self.phase is not Phase.BACKWARD:
            raise StateError(_OUTSIDE_BACKWARD.format(where=f"the backward of {unit.name}"))
        if self._graph_task is None:
            self._graph_task = torch._C._current_graph_task_id()
        for other in self.blocks:
            # A unit that seems unused may still be read from outside its forward; where no gather waits for it, it can
            # be left for the end.
            is_done = self._needs_ring if other.first_use is None else other.first_use > use
            other.is_ready = other.is_ready or is_done
        self._collect_ready()
        self._progress.at_unit(unit.name)
        self._gather_in_backward(unit)

    def gradient_arrived(self, unit: Unit, param: nn.Parameter, name: str) -> None:
        """Autograd has put the gradient of a parameter into `param.grad`."""
        if self.phase is not Phase.BACKWARD:
            raise StateError(_OUTSIDE_BACKWARD.format(where=f"the gradient of parameter '{name}'"))
        if unit.is_collected:
            raise StateError(
                f"parameter '{name}' got a gradient after its unit '{unit.name}' had been reduced in the same "
                "backward. Reentrant activation checkpointing of a module that is used several times does that: use "
                "use_reentrant=False, or activation_checkpointing in the config. So does a parameter that is read "
                "outside of its unit's forward: leave its unit out of zero_optimization.units."
            )
        if self._needs_ring and not unit.is_full:  # else silent: the memory that this backward has read is not its own
            raise StateError(
                f"the backward of unit '{unit.name}' ran while its parameters were released, so the gradient of "
                f"'{name}' would be wrong: expected that it begins with a tensor that '{unit.name}' returned, found "
                "one that came out another way, as a loss that is kept in an attribute does; return it too, or leave "
                "the unit out of zero_optimization.units"
            )
        unit.waiting.discard(id(param))
        self._reductions.poll()
        if not unit.waiting and unit is not self.rest:
            unit.is_ready = True
            self._collect_ready()
        elif unit is self.reduction_order[self._reduction_cursor]:
            unit.take_early(param, self._boundary)

    def place_for_gradient(self, param: nn.Parameter) -> Tensor | None:
        """Memory of its shape that the gradient of a parameter can be written to, if it is the turn of its unit."""
        if self.phase is not Phase.BACKWARD or self._reduction_cursor == len(self.reduction_order):
            return None
        if (
            torch._C._current_graph_task_id() != self._graph_task
        ):  # of a user's autograd.grad in it, who keeps the result
            return None
        unit = self.reduction_order[self._reduction_cursor]
        if id(param) not in unit.trained:
            return None
        self._reductions.poll()
        return unit.place_for(param, self._boundary)

    def end_backward(self) -> None:
        """Reduces what is left: units that this rank did not use, and the rest."""
        for unit in self.units:
            unit.is_ready = True
        self._collect_ready()
        self._reductions.finish()
        if self._needs_ring:
            self._backward_ring.end_round()
        self._end_pass()

    def abort(self, error: BaseException) -> None:
        """Ends a backward that `error` has ended.

        What was started is finished, unless the others are lost: in the canonical order they come to it as well.
        """
        self.phase = Phase.IDLE
        if isinstance(error, CollectiveError):
            self._reductions.abandon()
            return
        self._reductions.finish()
        self._end_pass()

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _end_pass(self) -> None:
        for unit in self.units:
            unit.release()
            unit.first_use = None
        self._num_uses = 0
        self.phase = Phase.IDLE

    def _gather_in_backward(self, unit: Unit) -> None:
        if unit.is_full:
            return
        if self._needs_ring:
            self._backward_ring.reach(unit)
        else:
            unit.gather()

    def _collect_ready(self) -> None:
        """Starts the reductions whose turn has come, and takes the earlier ones one step on."""
        while self._reduction_cursor < len(self.reduction_order):
            unit = self.reduction_order[self._reduction_cursor]
            if not unit.is_ready:
                return
            self._reduction_cursor += 1
            unit.is_collected = True
            if self._needs_ring:
                self._backward_ring.leave_behind(unit)
            for gradient in unit.gradients:
                self._reductions.start(gradient, self._boundary, self._on_final)
            if unit is not self.rest:
                unit.release_reduced(self._boundary and self._on_final is not None)


_OUTSIDE_BACKWARD = (
    "{where} was computed outside of engine.backward: expected `engine.backward(loss)`, which scales the loss and "
    "reduces gradients over the ranks; found a direct call such as `loss.backward()`"
)
