"""The order of a step's collectives and computing: zero's `UnitSequence`, run on groups without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

import torch

from ...comm import Pending, Progress
from ...zero.gradient import GroupGradient
from ...zero.group import ShardedGroup, ShardedState
from ...zero.plan import GroupPlan, Role
from ...zero.sequence import UnitSequence
from ...zero.unit import Unit
from ..blueprint.blueprint import Blueprint
from .exchange import CollectiveCost, CollectiveCosts
from .profile import ComputePhase


@dataclass
class SimulatedTimeline:
    """Computing and a queue of collectives, each in order, like a stream and a communicator.

    A collective starts when the queue is free and the computing launched before it is done. The host takes no time.
    Exposed time is computing's wait for a collective. overlaps: False if the computing cores also send, so that every
    collective is waited for at its start.
    """

    exposed: dict[str, float] = field(default_factory=dict)  # seconds by kind
    sent: float = 0.0  # seconds of all collectives
    now: float = 0.0  # end of the computing so far
    overlaps: bool = True
    _free: float = 0.0  # end of the queue so far

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def start(self, kind: str, seconds: float) -> float:
        """Queue a collective and return its end."""
        # It starts after the collective before it and after the computing launched so far, as on a stream.
        self._free = max(self._free, self.now) + seconds
        self.sent += seconds
        if not self.overlaps:
            self.wait(kind, self._free)
        return self._free

    def wait(self, kind: str, end: float) -> None:
        """Make later computing wait for a collective that ends at `end`."""
        self.exposed[kind] = self.exposed.get(kind, 0.0) + max(0.0, end - self.now)
        self.now = max(self.now, end)

    @property
    def computed(self) -> float:
        """Seconds of computing."""
        return self.now - self.exposed_seconds

    @property
    def exposed_seconds(self) -> float:
        return sum(self.exposed.values())

    @property
    def hidden_seconds(self) -> float:
        """Seconds of collectives that overlap with computing."""
        return max(0.0, self.sent - self.exposed_seconds)


START, END = "(start)", "(end)"
"""Names of the parts before the first unit and after the last unit: a small embedding or head, and the loss."""


class StepEvent(NamedTuple):
    """A part computes, a collective of a group is queued, or later computing waits for a collective."""

    what: Literal["forward", "backward", "start", "wait"]
    name: str = ""  # of a part
    kind: Literal["gather", "reduce"] = "gather"
    seconds: float = 0.0  # of a collective
    number: int = 0  # index of the "start" event to wait for


@dataclass
class StepOrder:
    """A microbatch of a step without a pipeline: events in order, bytes by link, and moments.

    bytes_of: a group -> bytes that gathering adds; None: nothing is ever released. is_last: the last microbatch of a
    step. place: index in `blueprint.places`. moments: memory while a part computes, besides parameters at rest,
    activations and finished gradients: (part, phase, gathered bytes, staged bytes, groups whose gradient this backward
    has made). Staged gradients are copied into new messages; 0 bytes if the transport reuses its slots.
    """

    blueprint: Blueprint
    exchange: CollectiveCosts
    bytes_of: Callable[[GroupPlan], int] | None
    is_last: bool
    place: int = 0
    events: list[StepEvent] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=lambda: {"intra": 0, "inter": 0})
    moments: list[tuple[str, ComputePhase, int, int, frozenset[str]]] = field(default_factory=list)
    gathered_bytes: int = 0
    most_gathered_bytes: int = 0  # peak since the last moment
    staged_bytes: int = 0

    def __post_init__(self) -> None:
        self._arrived: set[str] = set()
        self._started: list[StepEvent] = []
        units = []
        for plan_of_unit, groups in self.blueprint.places[self.place].units:
            members = [_Group(self, group) for group in groups]
            trained = [group for group in members if group.plan.role is not Role.FROZEN]
            units.append(
                Unit(
                    plan_of_unit.name,
                    plan_of_unit.module,
                    cast(list[ShardedGroup], members),
                    cast(list[GroupGradient], trained),
                )
            )
        self._run(UnitSequence(units, self.blueprint.prefetch_numel, Progress()))

    # The sequence plans a backward only where autograd records, and a search may run under `no_grad`.
    @torch.enable_grad()
    def _run(self, sequence: UnitSequence) -> None:
        """Run forward and backward of a model that uses each unit once, in order."""
        sequence.begin_forward()
        uses = []
        self._compute(START, is_backward=False)
        for unit in sequence.blocks:
            uses.append(sequence.enter(unit))
            self._compute(unit.name, is_backward=False)
            sequence.leave(unit)
        self._compute(END, is_backward=False)
        sequence.end_forward(keeps_graph=True)
        sequence.begin_backward(boundary=self.is_last, on_final=None)
        self._compute(END, is_backward=True)
        for unit, use in zip(reversed(sequence.blocks), reversed(uses), strict=True):
            assert use is not None
            sequence.enter_backward(use)
            self._compute(unit.name, is_backward=True, unit=unit)
            for gradient in unit.gradients:
                for param in gradient.group.params:
                    sequence.gradient_arrived(sequence.units.index(unit), unit.name, param)
        self._compute(START, is_backward=True, unit=sequence.root)
        sequence.end_backward()

    def timeline(self, forward: Callable[[str], float], backward: Callable[[str], float]) -> SimulatedTimeline:
        """Return the times of the events. forward, backward: seconds of a part (a unit's name, START or END)."""
        line, ends = SimulatedTimeline(overlaps=self.exchange.machine.overlaps), list[float]()
        for event in self.events:
            if event.what == "start":
                ends.append(line.start(event.kind, event.seconds))
            elif event.what == "wait":
                line.wait(event.kind, ends[event.number])
            else:
                line.compute((forward if event.what == "forward" else backward)(event.name))
        return line

    def _compute(self, name: str, is_backward: bool, unit: Unit | None = None) -> None:
        if is_backward:
            plans = [cast(_Group, gradient).plan for gradient in unit.gradients] if unit else []
            self._add_moments_of_backward(name, plans)
        else:
            self._add_moment(name, ComputePhase.FORWARD, self.staged_bytes)
        self.most_gathered_bytes = 0
        self.events.append(StepEvent("backward" if is_backward else "forward", name))

    def _add_moments_of_backward(self, name: str, arriving: Sequence[GroupPlan]) -> None:
        """Add two phases. Gradients take memory with the unit's first, or after its last if they add up apart."""
        is_late = any(map(self._is_added_up_apart, arriving))
        before, after = ComputePhase.BACKWARD_START, ComputePhase.BACKWARD_REST
        self._add_moment(name, ComputePhase.HOLDING if is_late else before, self.staged_bytes)
        self._arrived |= {group.name for group in arriving}
        staged = max((group.slot_bytes for group in arriving), default=0) * self._stages_now
        self._add_moment(name, ComputePhase.COLLECTING if is_late else after, self.staged_bytes + staged)

    def _is_added_up_apart(self, group: GroupPlan) -> bool:
        """Whether gradients accumulate in memory other than `param.grad` and the shard."""
        accumulates = (self.blueprint.config.gradient_accumulation_steps or 1) > 1
        reduces = self.blueprint.policy.reduces_every_backward
        return accumulates and not reduces and group.is_added_up_flat

    def _add_moment(self, name: str, phase: ComputePhase, staged: int) -> None:
        gathered = max(self.most_gathered_bytes, self.gathered_bytes)
        self.moments.append((name, phase, gathered, staged, frozenset(self._arrived)))

    @property
    def _stages_now(self) -> bool:
        """Whether this microbatch's gradients go to other ranks in new messages."""
        return self.stages_apart and (self.is_last or self.blueprint.policy.reduces_every_backward)

    @property
    def stages_apart(self) -> bool:
        """Whether each gradient gets a new message, instead of a reused slot."""
        return self.blueprint.transport == "native"

    def _send(self, kind: Literal["gather", "reduce"], message: CollectiveCost) -> int:
        for link in ("intra", "inter"):
            self.sent[link] += getattr(message, link)
        self._started.append(StepEvent("start", kind=kind, seconds=message.seconds))
        self.events.append(self._started[-1])
        return len(self._started) - 1

    def _wait(self, number: int) -> None:
        self.events.append(StepEvent("wait", kind=self._started[number].kind, number=number))

    def _add(self, nbytes: int) -> None:
        self.gathered_bytes += nbytes
        self.most_gathered_bytes = max(self.most_gathered_bytes, self.gathered_bytes)


class _Group:
    """A `ShardedGroup` and its `GroupGradient` without memory, which record their collectives.

    A gradient is reduced by a reduce-scatter, and in the last microbatch by an all-reduce too.
    """

    keeper = None
    leaves_device = False

    def __init__(self, step: StepOrder, plan: GroupPlan) -> None:
        self.layout, self.params = plan.layout, [param for _, param in plan.params]
        self.plan, self.group = plan, self
        self.full = torch.empty(0, device=step.blueprint.device if step.blueprint.device == "cpu" else "meta")
        self.frees_memory = step.bytes_of is not None
        self.sharded_state = ShardedState.SHARDED if self.frees_memory else ShardedState.UNSHARDED
        self._step = step
        self._nbytes = step.bytes_of(plan) if step.bytes_of else 0
        self._started: int | None = None

    def start_gather(self) -> None:
        if self.sharded_state is ShardedState.SHARDED:
            self._started = self._step._send("gather", self._step.exchange.gather(self.plan))
            self._step._add(self._nbytes)
            self.sharded_state = ShardedState.UNSHARDING

    def gather(self) -> None:
        self.start_gather()
        # A prefetch may have started it long before. Computing waits for that start's end.
        if self._started is not None:
            self._step._wait(self._started)
        self._started = None
        self.sharded_state = ShardedState.UNSHARDED

    def release(self, holds_shard: bool = False) -> None:
        if not self.frees_memory or self.sharded_state is ShardedState.SHARDED:
            return
        self._step._add(-self._nbytes)
        self.sharded_state, self._started = ShardedState.SHARDED, None

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
            number = step._send("reduce", message)
            # Never done early, so the sequence waits at the latest possible place.
            yield Pending(lambda: None, lambda: False)
            step._wait(number)
        step.staged_bytes -= staged
