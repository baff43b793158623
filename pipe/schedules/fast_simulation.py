"""A schedule's times as numbers alone: judged again with other costs, at a hundredth of what `simulate` takes.

[Note: recurrence] An action ends at max(end of the one before it on its rank, arrival of what it needs) + its own time.
In an order in which each comes after both, that is one pass over a list. Order and needs do not depend on the costs, so
they are made once. Bytes do not depend on times: what a rank holds is so many activations of each of its stages, and
there are few combinations of them. `simulate` says the same, action by action (tests/pipe/test_recurrence.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .costs import Costs
from .schedule import COMPUTE_OPS, Action, Op, Schedule
from .simulator import simulate

_CODES = {Op.F: 0, Op.B: 1, Op.I: 2, Op.W: 3}
_NOTHING = -1

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class ScheduleOutcome:
    """What a schedule costs, in the units of its `Costs`; tuples are by rank."""

    makespan: float
    busy: tuple[float, ...]  # time that a rank computes
    activation_bytes: tuple[float, ...]  # the most at a moment


@dataclass(frozen=True)
class ComputePhases:
    """The moments of a rank at which it computes, each combination once. Rows are moments, columns its own stages.

    held, kept: of other microbatches, those between F and B or I, and between F and B or W.
    """

    codes: _Numbers  # (moments,) 0 F, 1 B, 2 I, 3 W
    places: _Numbers  # (moments,) of the stage among the rank's own
    held: _Numbers
    kept: _Numbers
    begun: _Numbers  # 1 where a whole backward of the stage has ended
    ended: _Numbers  # 1 where that of its last microbatch has


class FastSimulation:
    """A schedule of F, B, I and W. See [Note: recurrence]."""

    def __init__(self, schedule: Schedule) -> None:
        """Raises ScheduleError, as `simulate`, where ranks would wait for each other for ever."""
        assert not schedule.has_any(*set(Op).difference(COMPUTE_OPS)) and not schedule.is_forward_only, schedule.name
        self.num_microbatches = schedule.num_microbatches
        self.stages = tuple(map(schedule.stages_of_rank, range(schedule.num_ranks)))
        self.crosses = tuple(map(schedule.crosses, range(schedule.num_stages)))
        table = _Table(schedule)
        order = np.array(_order(table.first.tolist(), table.needs.tolist()), dtype=np.int64)
        if len(order) < len(table.needs):
            simulate(schedule)  # says who waits for whom
        self._order = order.astype(np.int32)
        self._before = table.before[order].astype(np.int32)
        self._needs = table.needs[order].astype(np.int32)
        self._is_sent = table.is_sent[order]
        self._table, self._num_stages = table, schedule.num_stages

    @cached_property
    def computing(self) -> list[ComputePhases]:
        """By rank."""
        return [_computing(self._table, rank, stages) for rank, stages in enumerate(self.stages)]

    @cached_property
    def _counts(self) -> _Numbers:
        return _counts(self._table, self._num_stages)

    @cached_property
    def _collections(self) -> _Numbers:
        """(num_ranks, num_stages) how often a rank collects gradients of each stage."""
        return self._by_rank(self._table.is_collected)

    @cached_property
    def halves(self) -> _Numbers:
        """(num_ranks, num_stages) how often those of an I are collected before its W: not more with more batches."""
        return self._by_rank(self._table.is_behind_half)

    def _by_rank(self, is_counted: NDArray[np.bool_]) -> _Numbers:
        table = self._table
        rows = [slice(low, high) for low, high in zip(table.first, table.first[1:], strict=False)]
        own = [table.stage[row][is_counted[row]] for row in rows]
        return np.array([np.bincount(stages, minlength=self._num_stages) for stages in own])

    @cached_property
    def _held(self) -> list[_Numbers]:
        return [_most_held(self._table, rank, stages) for rank, stages in enumerate(self.stages)]

    def outcome(self, costs: Costs) -> ScheduleOutcome:
        """With these costs. Parameters are not counted."""
        ends = self._ends(costs)
        whole, kept = np.array(costs.activation_bytes), np.array(costs.kept_bytes)
        most = []
        for stages, counts in zip(self.stages, self._held, strict=True):
            own = list(stages)
            most.append(float((counts @ np.concatenate([whole[own] - kept[own], kept[own]])).max()))
        collect, half = (np.array(some or (0.0,) * self._num_stages) for some in (costs.collect, costs.collect_half))
        busy = self._counts @ _by_kind(costs) + self._collections @ collect + self.halves @ half
        return ScheduleOutcome(max(ends), tuple(busy.tolist()), tuple(most))

    def starts(self, costs: Costs) -> list[float]:
        """When each action starts, one rank's actions behind those of the one before it."""
        found: list[float] = (np.array(self._ends(costs)[:-1]) - self._times(costs)).tolist()
        return found

    def _times(self, costs: Costs) -> NDArray[np.float64]:
        """(actions,) in which each keeps its rank busy."""
        table = self._table
        beside = np.zeros(len(table.kinds))
        for collect, is_collected in ((costs.collect_half, table.is_behind_half), (costs.collect, table.is_collected)):
            if collect:
                beside += is_collected * np.array(collect)[table.stage]
        found: NDArray[np.float64] = _by_kind(costs)[table.kinds] + beside
        return found

    def _ends(self, costs: Costs) -> list[float]:
        """As `starts`, and 0 for what is there from the start."""
        times, delays = self._times(costs)[self._order].tolist(), (self._is_sent * costs.send).tolist()
        ends = [0.0] * (len(times) + 1)  # the last one stands for what is there from the start: _NOTHING
        lists = (self._order.tolist(), self._before.tolist(), self._needs.tolist(), times, delays)
        for place, before, need, time, delay in zip(*lists, strict=True):
            start, arrival = ends[before], ends[need] + delay
            ends[place] = (arrival if arrival > start else start) + time
        return ends


def _by_kind(costs: Costs) -> NDArray[np.float64]:
    """(4 x num_stages,) seconds."""
    return np.array([costs.forward, costs.backward, costs.input_backward, costs.weight_backward]).ravel()


class _Table:
    """All actions of all ranks, one after the other, in columns."""

    def __init__(self, schedule: Schedule) -> None:
        actions: list[Action] = [action for row in schedule.actions for action in row]
        codes = np.fromiter((_CODES[action.op] for action in actions), np.int64, len(actions))
        self.codes, self.stage = codes, np.fromiter((action.stage for action in actions), np.int64, len(actions))
        microbatch = np.fromiter((action.microbatch or 0 for action in actions), np.int64, len(actions))
        self.first = np.cumsum([0, *map(len, schedule.actions)])
        self.kinds = codes * schedule.num_stages + self.stage
        places = np.arange(len(actions))
        self.before = np.where(np.isin(places, self.first), _NOTHING, places - 1)
        whole = (codes == 1) | (codes == 3)
        self.is_collected = whole.copy()  # but the last of a stage
        self.is_behind_half = np.zeros_like(whole)  # a B or I whose stage has an I before it, and no W since
        for stage in range(schedule.num_stages):
            self.is_collected[np.flatnonzero(whole & (self.stage == stage))[-1]] = False
            backwards = np.flatnonzero((codes > 0) & (self.stage == stage))
            kinds = codes[backwards]
            self.is_behind_half[backwards[1:]] = (kinds[1:] != 3) & (kinds[:-1] == 2)
        made = np.full((2, schedule.num_stages + 2, schedule.num_microbatches), _NOTHING)  # a stage on either side
        for direction, some in ((0, codes == 0), (1, (codes == 1) | (codes == 2))):
            made[direction, self.stage[some] + 1, microbatch[some]] = places[some]
        forward, weight = codes == 0, codes == 3
        source = np.where(forward, self.stage - 1, self.stage + 1)
        self.needs = np.where(weight, _NOTHING, made[np.where(forward, 0, 1), source + 1, microbatch])
        rank = np.array([*schedule.rank_of_stage, -1])
        self.is_sent = (self.needs != _NOTHING) & (rank[self.stage] != rank[source])


def _order(first: Sequence[int], needs: Sequence[int]) -> list[int]:
    """One in which each action comes after those before it on its rank, and after what it needs; as far as that goes.

    first: (num_ranks + 1,) where each rank's actions begin. needs: (num_actions,).
    """
    at, done, order = list(first), bytearray(len(needs)), []
    waiting: dict[int, list[int]] = {}
    ready = list(reversed(range(len(first) - 1)))
    while ready:
        rank = ready.pop()
        place = at[rank]
        while place < first[rank + 1]:
            need = needs[place]
            if need != _NOTHING and not done[need]:
                waiting.setdefault(need, []).append(rank)
                break
            done[place] = 1
            order.append(place)
            if place in waiting:
                ready += waiting.pop(place)
            place += 1
        at[rank] = place
    return order


def _counts(table: _Table, num_stages: int) -> _Numbers:
    """(num_ranks, 4 x num_stages) actions of each kind."""
    rows = [table.kinds[low:high] for low, high in zip(table.first, table.first[1:], strict=False)]
    return np.array([np.bincount(row, minlength=len(_CODES) * num_stages) for row in rows])


def _most_held(table: _Table, rank: int, stages: Sequence[int]) -> _Numbers:
    """(moments, 2 x stages) microbatches between F and B or I, and between F and B or W, by stage of the rank."""
    own = slice(table.first[rank], table.first[rank + 1])
    codes, is_stage = table.codes[own, None], table.stage[own, None] == np.array(stages)
    begins = (codes == 0) & is_stage
    until_input, until_weights = ((codes == 1) | (codes == half) for half in (2, 3))
    changes = [begins.astype(np.int64) - (until & is_stage) for until in (until_input, until_weights)]
    held = np.cumsum(np.concatenate(changes, axis=1), axis=0)[codes[:, 0] == 0]
    found: _Numbers = np.unique(held, axis=0)
    return found


def _computing(table: _Table, rank: int, stages: Sequence[int]) -> ComputePhases:
    own, count = slice(table.first[rank], table.first[rank + 1]), len(stages)
    codes, is_stage = table.codes[own, None], table.stage[own, None] == np.array(stages)
    begins = ((codes == 0) & is_stage).astype(np.int64)
    input_ends, ends = (((codes == 1) | (codes == half)) & is_stage for half in (2, 3))
    # Of an action itself, what it makes does not count yet, and what it ends does not count any more.
    held = np.cumsum(begins - input_ends, axis=0) - begins
    kept = np.cumsum(begins - ends, axis=0) - begins - ((codes == 2) & is_stage)
    num_ended = np.cumsum(ends, axis=0) - ends
    begun, ended = ((num_ended >= least).astype(np.int64) for least in (1, ends.sum(axis=0)))
    found = np.unique(np.concatenate([codes, is_stage.argmax(1)[:, None], held, kept, begun, ended], axis=1), axis=0)
    return ComputePhases(found[:, 0], found[:, 1], *np.split(found[:, 2:], [count, 2 * count, 3 * count], axis=1))
