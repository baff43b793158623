"""Judges a schedule without running it: whether it can run, how long it takes, what memory it needs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from .costs import Costs
from .rules import check_rules, excerpt
from .schedule import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op, Schedule, ScheduleError

# What an action waits for, at (stage, microbatch). "forward": F has ended; "backward": B or I has; "arrival of forward"
# and "arrival of backward": what the stage before or after made is on this stage's rank; "send of forward" and the
# like: that end of the message is reached.
_Event = tuple[str, int, int]

_OTHER_ENDS = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}


class TimeSlot(NamedTuple):
    """One action in time."""

    action: Action
    start: float
    end: float
    order: int  # position in one order of all ranks' actions in which each comes after what it waits for


@dataclass(frozen=True)
class Peaks:
    """The most of everything that one rank holds at one moment, in the unit of `Costs`."""

    activation_bytes: float
    parameter_bytes: float  # all stages of the rank, or those gathered at a time
    total_bytes: float  # of both together: at most their sum
    in_flight: int  # microbatches of a stage whose backward is to come, over all stages of the rank


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs. Times and bytes in the units of its `Costs`; tuples are by rank.

    Two measures of the same idle time are usual in papers: of the total, and of the time without any.
    """

    schedule: Schedule
    costs: Costs
    timeline: tuple[tuple[TimeSlot, ...], ...]  # in the order of the rank's list
    peaks: tuple[Peaks, ...]

    @property
    def makespan(self) -> float:
        """Time from the start of the first action to the end of the last one, of all ranks."""
        return max(slot.end for slots in self.timeline for slot in slots)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(sum(slot.end - slot.start for slot in slots) for slots in self.timeline)

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time, 0 to 1: (p - 1) / (m + p - 1) for 1F1B."""
        total = self.makespan * len(self.timeline)
        return 1 - sum(self.busy) / total if total else 0.0

    @property
    def overhead(self) -> float:
        """Time on top of the busiest rank's work, as a share of that work: (p - 1) / m for 1F1B."""
        work = max(self.busy)
        return self.makespan / work - 1 if work else 0.0

    @property
    def waits(self) -> tuple[float, ...]:
        """Idle time of each rank between its first and its last compute action.

        It is what would remain of the bubble if ranks did not wait for each other between steps.
        """
        waits = []
        for slots, busy in zip(self.timeline, self.busy, strict=True):
            compute = [slot for slot in slots if slot.action.op in COMPUTE_OPS]
            waits.append(compute[-1].end - compute[0].start - busy)
        return tuple(waits)


def simulate(schedule: Schedule, costs: Costs | None = None, *, blocking: bool = False) -> Simulation:
    """Runs `schedule` on paper: every rank goes through its list and starts each action as soon as it can.

    `costs` default to one unit of time for each of F, I and W (B: two) and of memory for each activation. Without
    sends and receives in the lists, what a stage makes is on the next rank `costs.send` later. With them it is
    under way when both SEND and RECV are reached, and neither keeps its rank busy; if `blocking`, both ranks wait
    in them until it is there, as the worst of networks would have it. Links are never full.

    Raises ScheduleError if a rule is broken (`check_rules`) or if ranks wait for each other for ever.
    """
    if costs is None:
        costs = Costs.uniform(schedule.num_stages)
    if costs.num_stages != schedule.num_stages:
        raise ValueError(f"costs are for {costs.num_stages} stages, the schedule has {schedule.num_stages}")
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
    """How much memory a rank's list needs at most. An action's own counts while it runs.

    It follows from the order alone, not from the times. F adds the activations of its stage; B frees them; I frees them
    but for what W needs; W frees that. In a schedule that only goes forward, F frees its activations when it ends.
    Buffers of messages are not counted.
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
    """Each rank goes on until it waits for an event; an event wakes the ranks that wait for it."""

    def __init__(self, schedule: Schedule, costs: Costs, blocking: bool) -> None:
        self._schedule = schedule
        self._costs = costs
        self._has_messages = schedule.has_messages
        self._blocking = blocking
        self._happened: dict[_Event, float] = {}  # when
        self._waiting: dict[_Event, list[int]] = defaultdict(list)  # ranks
        self._stuck: set[int] = set()  # ranks that wait
        self._clock = [0.0] * schedule.num_ranks
        self._order = 0
        whole = (action for row in schedule.actions for action in row if action.op in (Op.B, Op.W))
        self._num_left = Counter(action.stage for action in whole)
        self._halves: set[int] = set()  # stages of which an I has gradients that no W has completed
        self.timeline: list[list[TimeSlot]] = [[] for _ in range(schedule.num_ranks)]

    def to_the_end(self) -> None:
        ready = list(reversed(range(self._schedule.num_ranks)))
        while ready:
            self._advance(ready.pop(), ready)
        if self._stuck:
            self._refuse_deadlock()

    def _advance(self, rank: int, ready: list[int]) -> None:
        """Does as much of the rank's list as can be done now."""
        actions, slots = self._schedule.actions[rank], self.timeline[rank]
        self._stuck.discard(rank)
        while len(slots) < len(actions):
            action = actions[len(slots)]
            if self._blocking:
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
        """Before its rank sends on what it made: see `Executor`."""
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
        """The event that `action` cannot come before; what must stand before it in the same list is there."""
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
        """Where another rank has `source`: its message, or its arrival."""
        if self._schedule.rank_of_stage[source] == self._schedule.rank_of_stage[stage]:
            return (direction, source, microbatch)
        return ("arrival of " + direction, stage, microbatch)

    def _happen_at_end(self, action: Action, end: float, ready: list[int]) -> None:
        """Makes the events that the end of `action` brings."""
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
        """Without messages in the lists, what was made arrives by itself."""
        if self._has_messages or not 0 <= target < self._schedule.num_stages:
            return
        if self._schedule.rank_of_stage[stage] != self._schedule.rank_of_stage[target]:
            self._happen(("arrival of " + direction, target, microbatch), end + self._costs.send, ready)

    def _reach(self, action: Action, time: float, ready: list[int]) -> None:
        """A rank comes to a send or receive at `time`; when both have, it arrives."""
        if action.microbatch is None or action.op in COMPUTE_OPS:
            return
        side, other = ("send", "receive") if action.op in SEND_OPS else ("receive", "send")
        direction, target = _direction(action.op), _target(action)
        here = (f"{side} of {direction}", target, action.microbatch)
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
        """Raises the error that shows where every rank waits."""
        cells = {rank: len(self.timeline[rank]) for rank in sorted(self._stuck)}
        lines = []
        for rank, index in cells.items():
            action = self._schedule.actions[rank][index]
            cause = _counterpart(action)
            owner = self._schedule.rank_of_stage[cause.stage]
            if cause.op is Op.B and cause not in self._schedule.actions[owner]:
                cause = Action(Op.I, cause.stage, cause.microbatch)
            lines.append(f"  rank {rank} waits in {action} for {cause} of rank {owner}")
        count = f"{len(cells)} of {self._schedule.num_ranks} ranks wait for ever"
        picture = excerpt(self._schedule, cells)
        raise ScheduleError("\n".join((f"schedule {self._schedule.name}: deadlock, {count}", *lines, picture)))


def _direction(op: Op) -> str:
    return "forward" if op in (Op.SEND_F, Op.RECV_F) else "backward"


def _target(action: Action) -> int:
    """The stage that a message goes to."""
    return action.stage if action.op in RECV_OPS else action.peer_stage


def _counterpart(action: Action) -> Action:
    """What `action` waits for: the same op on the stage before or after, or the other end of a message."""
    if action.op in _OTHER_ENDS:
        return Action(_OTHER_ENDS[action.op], action.peer_stage, action.microbatch)
    if action.op is Op.F:
        return Action(Op.F, action.stage - 1, action.microbatch)
    return Action(Op.B, action.stage + 1, action.microbatch)
