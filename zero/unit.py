"""What is gathered, reduced and released together; and which forwards have used it, in which order."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.autograd.graph import Node

from ..comm import Pending
from .accumulation import stages_early
from .autograd import accumulators_of
from .gradient import GroupGradient
from .group import Residence, ShardedGroup


class Unit:
    """What is gathered, released and reduced together."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: Sequence[ShardedGroup],
        gradients: Sequence[GroupGradient],
        is_end: bool = False,
    ) -> None:
        """is_end: a large embedding or head, which a loss beside the model may read."""
        self.name = name
        self.is_end = is_end
        self.module = module
        self.accumulators: dict[int, Node] = {}
        self.take_up(groups, gradients)
        self.waiting: set[int] = set()  # parameters whose gradient has not come yet in this backward
        self.is_ready = False
        self.is_collected = False
        self.is_left_over = False  # it was reduced before all its gradients were there
        self.first_use: int | None = None  # in the forwards that the backward may be of
        self.num_uses = 0  # in these
        self.repeats = False
        """Whether a forward has used it twice, one use behind the other."""

    def take_up(self, groups: Sequence[ShardedGroup], gradients: Sequence[GroupGradient]) -> None:
        """Its parameters are in these groups from now on."""
        self.groups = groups
        self.gradients = gradients
        self.numel = sum(group.layout.padded_numel for group in groups)
        self.stages_early = any(stages_early(gradient.group.full.device) for gradient in gradients)
        """Whether gradients are staged as they come, in the backward of a unit whose turn to be reduced is next."""
        self.trained = frozenset(id(p) for gradient in gradients for p in gradient.group.params)
        self.places = {id(p): i for gradient in gradients[:1] for i, p in enumerate(gradient.group.params)}
        """Identities of the parameters whose group is reduced first -> their indices in it."""

    def find_accumulators(self) -> None:
        """Asks autograd for them, once parameters are where they stay."""
        self.accumulators = accumulators_of(param for gradient in self.gradients for param in gradient.group.params)

    @property
    def is_full(self) -> bool:
        for group in self.groups:  # noqa: SIM110  (a step asks several times a unit, and `all` costs two calls more)
            if group.residence is not Residence.FULL:
                return False
        return True

    def params(self) -> Iterator[nn.Parameter]:
        """Those with gradients."""
        return (param for gradient in self.gradients for param in gradient.group.params)

    def keep(self) -> None:
        """`release` has no effect until `release_kept`."""
        for group in self.groups:
            group.keep()

    def release_kept(self) -> None:
        for group in self.groups:
            group.release_kept()

    @property
    def is_kept(self) -> bool:
        """Whether it is full whatever is released: on all ranks, each of which may use it without the others."""
        for group in self.groups:  # noqa: SIM110  (as above)
            if group.keeper is None or not group.keeper():
                return False
        return True

    def start_gather(self) -> None:
        for group in self.groups:
            if group.residence is Residence.SHARDED:
                group.start_gather()

    def continue_gather(self) -> None:
        for group in self.groups:
            if group.residence is Residence.LOADING:
                group.continue_gather()

    def gather(self) -> None:
        for group in self.groups:
            if group.residence is not Residence.FULL:
                group.gather()

    def join_gather(self, is_loaded: bool = False) -> list[Pending]:
        """Takes part in the gather of a unit that is full here and that other ranks lack; what is to be waited for.

        is_loaded: of the groups whose shards come from a store, whose gather starts with `continue_gather`.
        """
        joined = [group for group in self.groups if group.frees_memory and group.is_loaded == is_loaded]
        return [group.join_gather() for group in joined]

    def park(self) -> bool:
        """Hides the parameters and keeps their memory, for a use that may come at once. Whether that could be."""
        if not all(group.frees_memory and group.keeper is None for group in self.groups) or not self.is_full:
            return False
        for group in self.groups:
            group.park()
        return True

    def release(self) -> None:
        for group in self.groups:
            if group.residence is not Residence.SHARDED:
                group.release()

    def release_reduced(self, is_updated: bool) -> bool:
        """Releases what is trained, after the reduction has begun; whether that was all, for now.

        is_updated: the update comes right after it, in the backward.
        """
        for gradient in self.gradients:
            gradient.group.release(holds_shard=is_updated and not gradient.leaves_device)
        return len(self.gradients) == len(self.groups)


BEFORE_ALL_USES = 1  # a number of a use, to which autograd has come when it is done; 0 says nothing


class Forward:
    """The uses of units in one forward. Held by the graph that it has made, so it is gone when that is."""

    def __init__(self) -> None:
        self.first_use: dict[Unit, int] = {}
        self.num_uses: dict[Unit, int] = {}
        self.order: list[Unit] = []  # of the uses; uses of a unit that follow each other stand once
        self.is_done = False
        """Whether a backward has been through it. Another one may come where its graph is retained."""


class OpenForwards:
    """Those of which a backward may come."""

    def __init__(self) -> None:
        self.num_uses = BEFORE_ALL_USES  # of all
        self.last = Forward()  # or what is used between two
        self.expects_backward = False
        """Whether one may come of the last that has begun."""
        self.known: list[weakref.ref[Forward]] = []  # in the order of their first uses
        self.of_backward = set[Forward]()  # those that the backward has come to

    def begin(self, expects_backward: bool) -> None:
        """Uses from now on are of a new one."""
        self.last = Forward()
        self.expects_backward = expects_backward

    def come_to(self, forward: Forward, units: Sequence[Unit]) -> None:
        """A backward has. Uses of units are counted anew where its graph was kept after an earlier one."""
        self.of_backward.add(forward)
        if forward.is_done or weakref.ref(forward) not in self.known:
            self.count(units)

    def expected(self) -> list[Forward]:
        """Those that the next backward may be of: all that had none, or else all whose graphs are there."""
        alive = [forward for one in self.known if (forward := one()) is not None]
        return [one for one in alive if not one.is_done or one in self.of_backward] or alive

    def count(self, units: Sequence[Unit]) -> None:
        """Tells each unit of its uses in the forwards that are expected."""
        for unit in units:
            unit.first_use, unit.num_uses = None, 0
        for forward in self.expected():
            for unit, first in forward.first_use.items():
                unit.first_use = first if unit.first_use is None else unit.first_use
                unit.num_uses += forward.num_uses[unit]

    def end_backward(self) -> None:
        """Those that it has come to are not expected to have another."""
        for forward in self.of_backward:
            forward.is_done = True
        self.known = [one for one in self.known if one() is not None]
        self.of_backward.clear()
        self.last = Forward()


class Use:
    """The next use of a unit, in the last forward. number: later ones have higher numbers, in all forwards."""

    __slots__ = ("forward", "number", "unit")

    def __init__(self, unit: Unit, forwards: OpenForwards) -> None:
        forwards.num_uses += 1
        self.unit, self.forward, self.number = unit, forwards.last, forwards.num_uses
        of_units = self.forward.num_uses
        if not of_units and (forwards.expects_backward or torch.is_grad_enabled()):
            forwards.known.append(weakref.ref(self.forward))
        self.forward.first_use.setdefault(unit, self.number)
        of_units[unit] = of_units.get(unit, 0) + 1
        order = self.forward.order
        if not order or order[-1] is not unit:
            order.append(unit)
        else:
            unit.repeats = True
