"""Simulate a schedule: find deadlocks, times and memory without tensors (`simulate`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .costs import Costs
from .rules import check_rules, excerpt
from .schedule import COMPUTE_OPS, Action, Op, Schedule, ScheduleError

_OTHER_ENDS = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}
_Point = tuple[int, int]
"""(rank, count): the moment at which the rank has done so many actions of its list."""
_Needs = Callable[[Action], tuple[Sequence[_Point], float]]
"""Return the points that an action waits for, beside the earlier actions of its list, and the time behind them."""


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
    timeline = _timeline(schedule, _durations(schedule, costs), _needs_of(schedule, costs.send, blocking))
    peaks = tuple(peaks_of_rank(schedule, costs, rank) for rank in range(schedule.num_ranks))
    return Simulation(schedule, costs, tuple(map(tuple, timeline)), peaks)


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


def _timeline(schedule: Schedule, durations: Sequence[Sequence[float]], needs: _Needs) -> list[list[TimeSlot]]:
    """Do each rank's actions until it must wait. A point makes the ranks ready that wait for it."""
    slots: list[list[TimeSlot]] = [[] for _ in schedule.actions]

    def time_of(rank: int, count: int) -> float:
        return slots[rank][count - 1].end if count else 0.0

    waiting: dict[_Point, list[int]] = {}  # point -> ranks
    ready = list(reversed(range(schedule.num_ranks)))
    order = 0
    while ready:
        rank = ready.pop()
        for action in schedule.actions[rank][len(slots[rank]) :]:
            points, delay = needs(action)
            missing = next((point for point in points if len(slots[point[0]]) < point[1]), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done = len(slots[rank])
            start = max([time_of(rank, done), *(time_of(*point) + delay for point in points)])
            slots[rank].append(TimeSlot(action, start, start + durations[rank][done], order))
            order += 1
            ready += waiting.pop((rank, done + 1), [])
    stuck = {rank: len(done) for rank, done in enumerate(slots) if len(done) < len(schedule.actions[rank])}
    if stuck:
        _refuse_deadlock(schedule, stuck)
    return slots


def _durations(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """Return the time of each action, with reductions before its output is sent, as `Executor` does them."""
    num_left = Counter(action.stage for row in schedule.actions for action in row if action.op in (Op.B, Op.W))
    halves = set[int]()  # stages with gradients of an I whose W has not come
    found: list[list[float]] = []
    for row in schedule.actions:
        found.append([])
        for action in row:
            op, stage, seconds = action.op, action.stage, 0.0
            if op in (Op.B, Op.I) and costs.collect_half and stage in halves:
                seconds += costs.collect_half[stage]
            if op is Op.I:
                halves.add(stage)
            if op in (Op.B, Op.W):
                halves.discard(stage)
                num_left[stage] -= 1
                seconds += costs.collect[stage] if costs.collect and num_left[stage] else 0.0
            found[-1].append(costs.time(action) + seconds)
    return found


def _needs_of(schedule: Schedule, send: float, blocking: bool) -> _Needs:
    """Return the function that tells what an action waits for. blocking: see `simulate`."""
    places = {action: (rank, index) for rank, row in enumerate(schedule.actions) for index, action in enumerate(row)}

    def end_of(*actions: Action) -> list[_Point]:
        """Return the ends of those of the actions that the schedule has."""
        return [(places[action][0], places[action][1] + 1) for action in actions if action in places]

    def needs(action: Action) -> tuple[Sequence[_Point], float]:
        op, stage, microbatch = action.op, action.stage, action.microbatch
        if op in _OTHER_ENDS:
            # A point is the end of the action before: each rank comes to its end of the message then.
            return ([places[action], places[_other_end(action)]], send) if blocking else ([], 0.0)
        source = stage - 1 if op is Op.F else stage + 1
        if op not in (Op.F, Op.B, Op.I) or not 0 <= source < schedule.num_stages:
            return [], 0.0
        crosses = schedule.rank_of_stage[source] != schedule.rank_of_stage[stage]
        if crosses and schedule.has_messages:
            receive = Action(Op.RECV_F if op is Op.F else Op.RECV_B, stage, microbatch)
            ends = end_of(receive) if blocking else end_of(receive, _other_end(receive))
            return ends, 0.0 if blocking else send
        made = (Op.F,) if op is Op.F else (Op.B, Op.I)
        return end_of(*(Action(kind, source, microbatch) for kind in made)), send if crosses else 0.0

    return needs


def _refuse_deadlock(schedule: Schedule, cells: Mapping[int, int]) -> None:
    """Raise an error that shows where each rank waits. cells: stuck rank -> index of its next action."""
    lines = []
    for rank, index in cells.items():
        action = schedule.actions[rank][index]
        cause = _counterpart(action)
        owner = schedule.rank_of_stage[cause.stage]
        # The schedule splits this backward.
        if cause.op is Op.B and cause not in schedule.actions[owner]:
            cause = Action(Op.I, cause.stage, cause.microbatch)
        lines.append(f"  rank {rank} waits in {action} for {cause} of rank {owner}")
    count = f"{len(cells)} of {schedule.num_ranks} ranks wait forever"
    picture = excerpt(schedule, cells)
    raise ScheduleError("\n".join((f"schedule {schedule.name}: deadlock, {count}", *lines, picture)))


def _other_end(action: Action) -> Action:
    return Action(_OTHER_ENDS[action.op], action.peer_stage, action.microbatch)


def _counterpart(action: Action) -> Action:
    """Return the action that `action` waits for: the same op on a neighbour stage, or the remote end of a message."""
    if action.op in _OTHER_ENDS:
        return _other_end(action)
    if action.op is Op.F:
        return Action(Op.F, action.stage - 1, action.microbatch)
    return Action(Op.B, action.stage + 1, action.microbatch)
