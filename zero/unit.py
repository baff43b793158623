"""Units, which are gathered, reduced and released as a whole, and the record of their uses in forwards.

From the record a backward knows in which order to gather units, and when all gradients of a unit have arrived.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import Node

from ..comm import Pending
from .accumulation import stages_early
from .autograd import accumulators_of
from .gradient import GroupGradient
from .group import ShardedGroup, ShardedState


class Unit:
    """A module whose parameters are gathered, released and reduced together."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: Sequence[ShardedGroup],
        gradients: Sequence[GroupGradient],
        is_end: bool = False,
    ) -> None:
        """is_end: a large embedding or head, which a loss outside of the model may read."""
        self.name = name
        self.is_end = is_end
        self._module = weakref.ref(module)  # [Note: forgotten] in `hooks`
        self.accumulators: dict[int, Node] = {}
        self.register_groups(groups, gradients)
        self.waiting: set[int] = set()  # ids of parameters that have no gradient yet in this backward
        self.is_ready = False
        self.is_collected = False
        self.is_left_over = False  # it was reduced before all its gradients had arrived
        self.first_use: int | None = None  # in the forwards that a backward may still run through
        self.num_uses = 0  # in these forwards
        self.repeats = False
        """Whether a forward has used it twice in a row."""

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, self.name
        return module

    def register_groups(self, groups: Sequence[ShardedGroup], gradients: Sequence[GroupGradient]) -> None:
        """Replace its groups and gradients."""
        self.groups = groups
        self.gradients = gradients
        self.numel = sum(group.layout.padded_numel for group in groups)
        self.stages_early = any(stages_early(gradient.group.full.device) for gradient in gradients)
        """Whether each gradient is staged as it arrives, if this unit is the next to be reduced."""
        self.trained = frozenset(id(p) for gradient in gradients for p in gradient.group.params)
        self.places = {id(p): i for gradient in gradients[:1] for i, p in enumerate(gradient.group.params)}
        """Ids of the parameters in the group that is reduced first -> their indices in it."""

    def find_accumulators(self) -> None:
        """Look up the autograd nodes that accumulate gradients, once the parameters have their final memory."""
        self.accumulators = accumulators_of(param for gradient in self.gradients for param in gradient.group.params)

    @property
    def is_full(self) -> bool:
        for group in self.groups:  # noqa: SIM110  (called several times per unit and step; `all` costs two more calls)
            if group.sharded_state is not ShardedState.UNSHARDED:
                return False
        return True

    def params(self) -> Iterator[nn.Parameter]:
        """Yield the parameters with gradients."""
        return (param for gradient in self.gradients for param in gradient.group.params)

    def keep(self) -> None:
        """Make `release` do nothing until `release_kept`."""
        for group in self.groups:
            group.keep()

    def release_kept(self) -> None:
        for group in self.groups:
            group.release_kept()

    @property
    def is_kept(self) -> bool:
        """Whether `release` does nothing on all ranks, so that each may use the unit without the other ranks."""
        for group in self.groups:  # noqa: SIM110  (as above)
            if group.keeper is None or not group.keeper():
                return False
        return True

    def start_gather(self, full: Sequence[ShardedGroup] = ()) -> list[Pending]:
        """Start the gathers of the groups, in their order. Returns the pending sends.

        full: groups that are full on this rank, and are sent to the ranks that lack them.
        """
        sends = []
        for group in self.groups:
            if group.sharded_state is ShardedState.SHARDED:
                group.start_gather()
            elif group in full and not group.is_loaded:
                sends.append(group.join_gather())
        return sends

    def continue_gather(self, full: Sequence[ShardedGroup] = ()) -> list[Pending]:
        """Start the collectives of the offloaded groups, whose shards are loaded. Otherwise like `start_gather`."""
        sends = []
        for group in self.groups:
            if group.sharded_state is ShardedState.LOADING:
                group.continue_gather()
            elif group in full and group.is_loaded:
                sends.append(group.join_gather())
        return sends

    def gather(self) -> None:
        for group in self.groups:
            if group.sharded_state is not ShardedState.UNSHARDED:
                group.gather()

    def park(self) -> bool:
        """Mark the parameters as released but keep their memory for a second use. Returns False if impossible."""
        if not all(group.frees_memory and group.keeper is None for group in self.groups) or not self.is_full:
            return False
        for group in self.groups:
            group.park()
        return True

    def release(self) -> None:
        for group in self.groups:
            if group.sharded_state is not ShardedState.SHARDED:
                group.release()

    def release_reduced(self, is_updated: bool) -> bool:
        """Release the trained groups after their reduction has started. Returns False if frozen groups stay.

        is_updated: the update follows at once, in the backward.
        """
        for gradient in self.gradients:
            # A host update loads the shard into a host buffer, so the group's memory need not hold it.
            gradient.group.release(holds_shard=is_updated and not gradient.leaves_device)
        return len(self.gradients) == len(self.groups)


BEFORE_ALL_USES = 1  # below the number of every use: autograd has gone through all of them; 0: unknown how far


class Forward:
    """The uses of units in a forward. The forward's autograd graph holds it, so it is freed with the graph."""

    def __init__(self) -> None:
        self.first_use: dict[Unit, int] = {}
        self.num_uses: dict[Unit, int] = {}
        self.order: list[Unit] = []  # of the uses; a unit used several times in a row is entered once
        self.is_done = False
        """Whether a backward has run through it. Another may follow if its graph is retained."""


class OpenForwards:
    """The forwards that a backward may still run through."""

    def __init__(self) -> None:
        self.num_uses = BEFORE_ALL_USES  # number of the last use in any forward
        self.last = Forward()  # the current forward, or the uses between two forwards
        self.expects_backward = False
        """Whether a backward of the last forward may follow."""
        self.known = WeakValueDictionary[int, Forward]()  # number of the first use -> forward, oldest first
        self.of_backward = set[Forward]()  # forwards that the current backward has reached

    def begin(self, expects_backward: bool) -> None:
        """Begin a new forward for the following uses."""
        self.last = Forward()
        self.expects_backward = expects_backward

    def come_to(self, forward: Forward, units: Sequence[Unit]) -> None:
        """Note that a backward has reached a forward. Recounts uses if an earlier backward retained the graph."""
        self.of_backward.add(forward)
        if forward.is_done or forward not in self.known.values():
            self.count(units)

    def count(self, units: Sequence[Unit]) -> list[Forward]:
        """Return the forwards of the next backward: those without a backward, or else all with a live graph.

        Sets `first_use` and `num_uses` of each unit from them.
        """
        alive = list(self.known.values())
        # If every live graph has had its backward, a retained graph runs again.
        expected = [forward for forward in alive if not forward.is_done or forward in self.of_backward] or alive
        for unit in units:
            unit.first_use, unit.num_uses = None, 0
        for forward in expected:
            for unit, first in forward.first_use.items():
                # The oldest forward comes first, and numbers increase, so this is the smallest.
                unit.first_use = first if unit.first_use is None else unit.first_use
                unit.num_uses += forward.num_uses[unit]
        return expected

    def end_backward(self) -> None:
        """Mark the forwards that the backward has reached as done."""
        for forward in self.of_backward:
            forward.is_done = True
        self.of_backward.clear()
        # Blocks that are called before the next forward of the model get a record of their uses.
        self.last = Forward()


class Use:
    """The next use of a unit in the last forward. number: increases over all forwards."""

    __slots__ = ("forward", "number", "unit")

    def __init__(self, unit: Unit, forwards: OpenForwards) -> None:
        forwards.num_uses += 1
        self.unit, self.forward, self.number = unit, forwards.last, forwards.num_uses
        of_units = self.forward.num_uses
        # A forward without gradients has no backward, so it is not kept.
        if not of_units and (forwards.expects_backward or torch.is_grad_enabled()):
            forwards.known[self.number] = self.forward
        self.forward.first_use.setdefault(unit, self.number)
        of_units[unit] = of_units.get(unit, 0) + 1
        order = self.forward.order
        if not order or order[-1] is not unit:
            order.append(unit)
        else:
            unit.repeats = True  # for good: the next forward parks the unit instead of releasing it
