"""The order of a step's collectives and computing: the units' own, run on groups that have no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch

from ...comm import Pending, Progress
from ...zero.gradient import GroupGradient
from ...zero.group import Residence, ShardedGroup
from ...zero.plan import GroupPlan, Role
from ...zero.sequence import UnitSequence
from ...zero.unit import Unit
from ..blueprint import Blueprint
from .exchange import Exchange, Message
from .timeline import Span, Timeline

START, END = "(start)", "(end)"
"""What a model computes before its first unit and behind its last one: a small embedding or head, and the loss."""


class Work(Protocol):
    """Seconds that the parts of a microbatch compute: a unit's name, START or END."""

    def forward(self, name: str) -> float: ...

    def backward(self, name: str) -> float: ...


@dataclass(frozen=True)
class Moment:
    """While a part computes: what there is beside the parameters at rest, activations and finished gradients."""

    part: str
    is_backward: bool
    gathered_bytes: int
    staged_bytes: int  # gradients on their way, of routes whose messages are the allocator's
    arrived: frozenset[str]  # names of groups whose gradient this backward has made, or makes
    is_first: bool  # microbatch of a step
    is_last: bool


@dataclass
class StepOrder:
    """Runs the microbatches of a step without a pipeline; collects time, bytes on links and moments.

    bytes_of: a group, beside what of it is at rest; None: nothing is ever released.
    """

    blueprint: Blueprint
    exchange: Exchange
    bytes_of: Callable[[GroupPlan], int] | None
    timeline: Timeline = field(default_factory=Timeline)
    sent: dict[str, int] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    gathered_bytes: int = 0
    most_gathered_bytes: int = 0  # since the last moment
    staged_bytes: int = 0

    def __post_init__(self) -> None:
        self._arrived: set[str] = set()
        units = []
        for plan_of_unit, groups in self.blueprint.places[0].units:
            members = [_Group(self, group) for group in groups]
            trained = [_Gradient(self, one) for one in members if one.plan.role is not Role.FROZEN]
            units.append(
                Unit(
                    plan_of_unit.name,
                    plan_of_unit.module,
                    cast(list[ShardedGroup], members),
                    cast(list[GroupGradient], trained),
                )
            )
        self._sequence = UnitSequence(units, self.blueprint.prefetch_numel, Progress())

    @torch.enable_grad()
    def microbatch(self, work: Work, is_last: bool) -> None:
        """Forward and backward of a model that uses each unit once, in order. is_last: of a step."""
        sequence, timeline = self._sequence, self.timeline
        self._is_first, self._is_last = not self.moments, is_last
        timeline.phase = "forward"
        sequence.begin_forward()
        uses = []
        self._compute(START, work.forward(START), is_backward=False)
        for unit in sequence.blocks:
            uses.append(sequence.enter(unit))
            self._compute(unit.name, work.forward(unit.name), is_backward=False)
            sequence.leave(unit)
        self._compute(END, work.forward(END), is_backward=False)
        sequence.end_forward(keeps_graph=True)
        timeline.phase = "backward"
        sequence.begin_backward(boundary=is_last, on_final=None)
        self._compute(END, work.backward(END), is_backward=True)
        for unit, use in zip(reversed(sequence.blocks), reversed(uses), strict=True):
            assert use is not None
            sequence.enter_backward(use)
            self._compute(unit.name, work.backward(unit.name), is_backward=True, unit=unit)
            for gradient in unit.gradients:
                for param in gradient.group.params:
                    sequence.gradient_arrived(unit, param, unit.name)
        self._compute(START, work.backward(START), is_backward=True, unit=sequence.rest)
        timeline.phase = "end"
        sequence.end_backward()
        self._arrived.clear()

    def update(self, seconds: float) -> None:
        """After the last microbatch: the shards are updated, and go where parameters are at rest."""
        self.timeline.phase = "end"
        self.timeline.compute("update", seconds)
        updated = self.blueprint.places[0].updated
        messages = ((group, self.exchange.refresh(group)) for group in updated)
        spans = [self._send("gather", group, message) for group, message in messages if message.seconds]
        for span in spans:
            self.timeline.wait(span)

    def _compute(self, name: str, seconds: float, is_backward: bool, unit: Unit | None = None) -> None:
        arriving = [cast(_Gradient, gradient).plan for gradient in unit.gradients] if unit else []
        self._arrived |= {one.name for one in arriving}
        staged = self.staged_bytes
        if arriving and self._reduces and self.stages_apart:
            staged += max(one.slot_bytes for one in arriving)
        arrived = frozenset(self._arrived)
        self.moments.append(
            Moment(name, is_backward, self.most_gathered_bytes, staged, arrived, self._is_first, self._is_last)
        )
        self.most_gathered_bytes = self.gathered_bytes
        self.timeline.compute(name, seconds)

    @property
    def _reduces(self) -> bool:
        """Whether gradients go to other ranks after this microbatch."""
        return self._is_last or self.blueprint.policy.reduces_every_backward

    @property
    def stages_apart(self) -> bool:
        """Whether messages are made for each gradient, and not once."""
        return self.blueprint.route == "native"

    def _send(self, kind: str, group: GroupPlan, message: Message) -> Span:
        for link in ("intra", "inter"):
            self.sent[link] = self.sent.get(link, 0) + getattr(message, link)
        return self.timeline.start("gather" if kind == "gather" else "reduce", group.name, message.seconds)

    def _add(self, nbytes: int) -> None:
        self.gathered_bytes += nbytes
        self.most_gathered_bytes = max(self.most_gathered_bytes, self.gathered_bytes)


class _Group:
    """What `ShardedGroup` does, as calls alone."""

    keeper = None

    def __init__(self, step: StepOrder, plan: GroupPlan) -> None:
        self.layout, self.params = plan.layout, [param for _, param in plan.params]
        self.names = [name for name, _ in plan.params]
        self.plan = plan
        self.frees_memory = step.bytes_of is not None
        self.residence = Residence.SHARDED if self.frees_memory else Residence.FULL
        self._step = step
        self._nbytes = step.bytes_of(plan) if step.bytes_of else 0
        self._span: Span | None = None

    def start_gather(self) -> None:
        if self.residence is Residence.SHARDED:
            self._span = self._step._send("gather", self.plan, self._step.exchange.gather(self.plan))
            self._step._add(self._nbytes)
            self.residence = Residence.COMING

    def continue_gather(self) -> None: ...

    def gather(self) -> None:
        self.start_gather()
        if self._span is not None:
            self._step.timeline.wait(self._span)
        self._span = None
        self.residence = Residence.FULL

    def release(self, holds_shard: bool = False) -> None:
        if not self.frees_memory or self.residence is Residence.SHARDED:
            return
        self._step._add(-self._nbytes)
        self.residence, self._span = Residence.SHARDED, None


class _Gradient:
    """What `GroupGradient` does, as calls alone: a reduce-scatter, and at the end of a step an all-reduce."""

    leaves_device = False

    def __init__(self, step: StepOrder, group: _Group) -> None:
        self.group, self.plan = group, group.plan
        self._step = step

    def take_early(self, index: int, boundary: bool) -> None: ...

    def collect(self, boundary: bool) -> Iterator[Pending]:
        step, plan = self._step, self.plan
        if not boundary and not step.blueprint.policy.reduces_every_backward:
            return
        messages = [step.exchange.reduce(plan)]
        messages += [step.exchange.all_reduce(plan)] if boundary else []
        staged = plan.slot_bytes if step.stages_apart else 0
        step.staged_bytes += staged
        for message in messages:
            span = step._send("reduce", plan, message)
            yield Pending(lambda: None, lambda: False)
            step.timeline.wait(span)
        step.staged_bytes -= staged
