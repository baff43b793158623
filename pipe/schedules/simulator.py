"""Simulate a schedule: find deadlocks, times and memory without tensors (`simulate`)."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from .costs import Costs
from .rules import check_rules, excerpt
from .schedule import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op, Schedule, ScheduleError

# An event that an action waits for, at (stage, microbatch). "forward": F has ended. "backward": B or I has ended.
# "arrival of forward", "arrival of backward": the tensors of the previous or next stage are on this stage's rank.
# "send of forward", "receive of forward" and so on: a rank has reached this end of the message.
_Event = tuple[str, int, int]

_OTHER_ENDS = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}


class TimeSlot(NamedTuple):
    """An action with its times."""

    action: Action
    start: float
    end: float
    order: int  # index in a total order of all ranks' actions, in which each comes after the events that it waits for


@dataclass(frozen=True)
class Peaks:
    """Peaks of a rank, in the unit of `Costs`."""

    activation_bytes: float
    parameter_bytes: float  # all stages of the rank, or the gathered stages
    total_bytes: float  # the two may peak at different times, so this is at most their sum
    in_flight: int  # microbatches between F and B or I, over all stages of the rank


@dataclass(frozen=True)
class Simulation:
    """Times and memory of a schedule, in the units of its `Costs`; tuples are by rank.

    Papers measure idle time as a share of the total time (`bubble`), or of the compute time (`overhead`).
    """

    schedule: Schedule
    costs: Costs
    timeline: tuple[tuple[TimeSlot, ...], ...]  # in the order of the rank's list
    peaks: tuple[Peaks, ...]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end, over all ranks."""
        return max(slot.end for slots in self.timeline for slot in slots)

    @property
    def busy(self) -> tuple[float, ...]:
        """Compute time of each rank."""
        return tuple(sum(slot.end - slot.start for slot in slots) for slots in self.timeline)

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time, 0 to 1: (p - 1) / (m + p - 1) for 1F1B."""
        total = self.makespan * len(self.timeline)
        return 1 - sum(self.busy) / total if total else 0.0

    @property
    def overhead(self) -> float:
        """Makespan beyond the busiest rank's work, as a share of that work: (p - 1) / m for 1F1B."""
        work = max(self.busy)
        return self.makespan / work - 1 if work else 0.0

    @property
    def waits(self) -> tuple[float, ...]:
        """Idle time of each rank between its first and last compute action.

        Only this part of the bubble would remain if ranks did not wait for each other between steps.
        """
        waits = []
        for slots, busy in zip(self.timeline, self.busy, strict=True):
            compute = [slot for slot in slots if slot.action.op in COMPUTE_OPS]
            waits.append(compute[-1].end - compute[0].start - busy)
        return tuple(waits)


def simulate(schedule: Schedule, costs: Costs | None = None, *, blocking: bool = False) -> Simulation:
    """Simulate `schedule`: every rank starts each action of its list as soon as it can.

    costs: default: F, I and W take a unit of time each, B two, and an activation a unit of memory.
    A stage's output reaches the next rank `costs.send` after its end, or, if the lists have messages, after both SEND
    and RECV are reached. SEND and RECV do not keep a rank busy, except with `blocking`: both ranks then wait in them
    until the tensors arrive, as in the worst network. Links have no bandwidth limit.
    Raises ScheduleError if a rule is broken (`check_rules`), or if ranks wait for each other forever.
    """
    if costs is None:
        costs = Costs.uniform(schedule.num_stages)
    if costs.num_stages != schedule.num_stages:
        raise ValueError(f"expected costs for {schedule.num_stages} stages of the schedule, found {costs.num_stages}")
    check_rules(schedule)
    run = _Run(schedule, costs, blocking)
    run.to_the_end()
    return Simulation(
        schedule=schedule,
        costs=costs,
        timeline=tuple(map(tuple, run.timeline)),
        peaks=tuple(peaks_of_rank(schedule, costs, rank) for rank in range(schedule.num_ranks)),
    )


def peaks_of_rank(schedule: Schedule, costs: Costs, rank: int) -> Peaks:
    """Compute the peak memory of a rank's list. It depends on the order of actions, not on times.

    F adds the activations of its stage, B frees them, I frees them except the tensors for W, and W frees these. In a
    schedule without backward, F frees its activations at its end. Buffers of messages are not counted.
    """
    forward_only = schedule.is_forward_only
    gathers = schedule.has_any(Op.GATHER)
    activation = in_flight = 0.0
    parameter = 0.0 if gathers else sum(costs.parameter_bytes[stage] for stage in schedule.stages_of_rank(rank))
    peaks = [0.0, parameter, parameter, 0.0]
    for action in schedule.actions[rank]:
        op, stage = action.op, action.stage
        if op is Op.F:
            activation += costs.activation_bytes[stage]
            in_flight += 1
        elif op is Op.GATHER:
            parameter += costs.parameter_bytes[stage]
        # Before the frees below: a forward without backward holds its activations until its end.
        if op in (Op.F, Op.GATHER):
            now = (activation, parameter, activation + parameter, in_flight)
            peaks = [max(pair) for pair in zip(peaks, now, strict=True)]
        if op is Op.B or (op is Op.F and forward_only):
            activation -= costs.activation_bytes[stage]
            in_flight -= 1
        elif op is Op.I:
            activation -= costs.activation_bytes[stage] - costs.kept_bytes[stage]
            in_flight -= 1
        elif op is Op.W:
            activation -= costs.kept_bytes[stage]
        elif op is Op.RELEASE:
            parameter -= costs.parameter_bytes[stage]
    return Peaks(peaks[0], peaks[1], peaks[2], int(peaks[3]))


class _Run:
    """Advances each rank until it waits for an event. An event makes the ranks ready that wait for it."""

    def __init__(self, schedule: Schedule, costs: Costs, blocking: bool) -> None:
        self._schedule = schedule
        self._costs = costs
        self._has_messages = schedule.has_messages
        self._blocking = blocking
        self._happened: dict[_Event, float] = {}  # event -> time
        self._waiting: dict[_Event, list[int]] = defaultdict(list)  # event -> ranks
        self._stuck: set[int] = set()  # all waiting ranks
        self._clock = [0.0] * schedule.num_ranks
        self._order = 0
        whole = (action for row in schedule.actions for action in row if action.op in (Op.B, Op.W))
        self._num_left = Counter(action.stage for action in whole)
        self._halves: set[int] = set()  # stages with gradients of an I whose W has not come
        self.timeline: list[list[TimeSlot]] = [[] for _ in range(schedule.num_ranks)]

    def to_the_end(self) -> None:
        ready = list(reversed(range(self._schedule.num_ranks)))
        while ready:
            self._advance(ready.pop(), ready)
        if self._stuck:
            self._refuse_deadlock()

    def _advance(self, rank: int, ready: list[int]) -> None:
        """Do the rank's actions until it must wait."""
        actions, slots = self._schedule.actions[rank], self.timeline[rank]
        self._stuck.discard(rank)
        while len(slots) < len(actions):
            action = actions[len(slots)]
            if self._blocking:
                # Before the wait: the peer may be waiting for this end of the message.
                self._reach(action, self._clock[rank], ready)
            event = self._needed(action)
            if event is not None and event not in self._happened:
                self._waiting[event].append(rank)
                self._stuck.add(rank)
                return
            start = self._clock[rank]
            if event is not None:
                start = max(start, self._happened[event])
            end = start + (self._costs.time(action) + self._collecting(action))
            self._clock[rank] = end
            slots.append(TimeSlot(action, start, end, self._order))
            self._order += 1
            self._happen_at_end(action, end, ready)

    def _collecting(self, action: Action) -> float:
        """Return the time of reductions around an action, before its output is sent: as `Executor` does them."""
        costs, stage, seconds = self._costs, action.stage, 0.0
        if action.op in (Op.B, Op.I) and costs.collect_half and stage in self._halves:
            seconds += costs.collect_half[stage]
        if action.op is Op.I:
            self._halves.add(stage)
        if action.op in (Op.B, Op.W):
            self._halves.discard(stage)
            self._num_left[stage] -= 1
            seconds += costs.collect[stage] if costs.collect and self._num_left[stage] else 0.0
        return seconds

    def _needed(self, action: Action) -> _Event | None:
        """Return the event that `action` waits for, beside the earlier actions of its list."""
        op, stage, microbatch = action.op, action.stage, action.microbatch
        if microbatch is None or op is Op.W:
            return None
        if op is Op.F:
            return self._from(stage - 1, "forward", stage, microbatch) if stage > 0 else None
        if op in (Op.B, Op.I):
            last = self._schedule.num_stages - 1
            return self._from(stage + 1, "backward", stage, microbatch) if stage < last else None
        if self._blocking:
            return ("arrival of " + _direction(op), _target(action), microbatch)
        return None

    def _from(self, source: int, direction: str, stage: int, microbatch: int) -> _Event:
        """Return the event by which the output of stage `source` is on the rank of `stage`."""
        if self._schedule.rank_of_stage[source] == self._schedule.rank_of_stage[stage]:
            return (direction, source, microbatch)
        return ("arrival of " + direction, stage, microbatch)

    def _happen_at_end(self, action: Action, end: float, ready: list[int]) -> None:
        """Record the events at the end of `action`."""
        op, stage, microbatch = action.op, action.stage, action.microbatch
        if microbatch is None or op is Op.W:
            return
        if op is Op.F:
            self._happen(("forward", stage, microbatch), end, ready)
            self._deliver(stage, stage + 1, "forward", microbatch, end, ready)
        elif op in (Op.B, Op.I):
            self._happen(("backward", stage, microbatch), end, ready)
            self._deliver(stage, stage - 1, "backward", microbatch, end, ready)
        elif not self._blocking:
            self._reach(action, end, ready)

    def _deliver(self, stage: int, target: int, direction: str, microbatch: int, end: float, ready: list[int]) -> None:
        """Without messages in the lists, record the arrival of a stage's output on the next rank."""
        if self._has_messages or not 0 <= target < self._schedule.num_stages:
            return
        if self._schedule.rank_of_stage[stage] != self._schedule.rank_of_stage[target]:
            self._happen(("arrival of " + direction, target, microbatch), end + self._costs.send, ready)

    def _reach(self, action: Action, time: float, ready: list[int]) -> None:
        """Record that a rank comes to a send or receive at `time`. If both ends are reached, the message is sent."""
        if action.microbatch is None or action.op in COMPUTE_OPS:
            return
        side, other = ("send", "receive") if action.op in SEND_OPS else ("receive", "send")
        direction, target = _direction(action.op), _target(action)
        here = (f"{side} of {direction}", target, action.microbatch)
        # A blocking rank comes here again when it is woken.
        if here in self._happened:
            return
        self._happened[here] = time
        there = self._happened.get((f"{other} of {direction}", target, action.microbatch))
        if there is not None:
            event = ("arrival of " + direction, target, action.microbatch)
            self._happen(event, max(time, there) + self._costs.send, ready)

    def _happen(self, event: _Event, time: float, ready: list[int]) -> None:
        self._happened[event] = time
        ready += self._waiting.pop(event, [])

    def _refuse_deadlock(self) -> None:
        """Raise an error that shows where each rank waits."""
        cells = {rank: len(self.timeline[rank]) for rank in sorted(self._stuck)}
        lines = []
        for rank, index in cells.items():
            action = self._schedule.actions[rank][index]
            cause = _counterpart(action)
            owner = self._schedule.rank_of_stage[cause.stage]
            # The schedule splits this backward.
            if cause.op is Op.B and cause not in self._schedule.actions[owner]:
                cause = Action(Op.I, cause.stage, cause.microbatch)
            lines.append(f"  rank {rank} waits in {action} for {cause} of rank {owner}")
        count = f"{len(cells)} of {self._schedule.num_ranks} ranks wait forever"
        picture = excerpt(self._schedule, cells)
        raise ScheduleError("\n".join((f"schedule {self._schedule.name}: deadlock, {count}", *lines, picture)))


def _direction(op: Op) -> str:
    return "forward" if op in (Op.SEND_F, Op.RECV_F) else "backward"


def _target(action: Action) -> int:
    """Return the receiving stage of a message."""
    return action.stage if action.op in RECV_OPS else action.peer_stage


def _counterpart(action: Action) -> Action:
    """Return the action that `action` waits for: the same op on a neighbour stage, or the remote end of a message."""
    if action.op in _OTHER_ENDS:
        return Action(_OTHER_ENDS[action.op], action.peer_stage, action.microbatch)
    if action.op is Op.F:
        return Action(Op.F, action.stage - 1, action.microbatch)
    return Action(Op.B, action.stage + 1, action.microbatch)
