"""Fast simulation of a schedule for many costs (`FastSimulation`), in a hundredth of the time of `simulate`.

[Note: recurrence] An action ends at max(end of its predecessor on the rank, arrival of its input) + its time. In an
order in which every action comes after both, this is a single pass over a list. The order does not depend on costs, so
it is made once. Bytes do not depend on times: a rank holds numbers of activations of each of its stages, and few
combinations of these numbers occur. The results are those of `simulate` (tests/pipe/test_simulator.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .costs import Costs
from .schedule import COMPUTE_OPS, Action, Op, Schedule
from .simulator import simulate

_CODES = {Op.F: 0, Op.B: 1, Op.I: 2, Op.W: 3}
_NOTHING = -1

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class ComputePhases:
    """The states in which a rank computes, each combination once. Columns are the stages of the rank.

    held, kept: numbers of microbatches, without the current, between F and B or I, and between F and B or W.
    """

    codes: _Numbers  # (moments,) 0 F, 1 B, 2 I, 3 W
    places: _Numbers  # (moments,) index of the stage among the stages of the rank
    held: _Numbers  # (moments, stages), as the fields below
    kept: _Numbers
    begun: _Numbers  # 1 if a whole backward of the stage has ended
    ended: _Numbers  # 1 if the backward of its last microbatch has ended


class FastSimulation:
    """A schedule of F, B, I and W, prepared for simulation with many costs. See [Note: recurrence]."""

    def __init__(self, schedule: Schedule) -> None:
        """Order the actions. Raises ScheduleError, as `simulate`, if ranks would wait for each other forever."""
        assert not schedule.has_any(*set(Op).difference(COMPUTE_OPS)) and not schedule.is_forward_only, schedule.name
        self.num_microbatches = schedule.num_microbatches
        self.stages = tuple(map(schedule.stages_of_rank, range(schedule.num_ranks)))
        self.crosses = tuple(map(schedule.crosses, range(schedule.num_stages)))
        # Arrays with an entry for each action, rank after rank.
        actions: list[Action] = [action for row in schedule.actions for action in row]
        codes = np.fromiter((_CODES[action.op] for action in actions), np.int64, len(actions))
        stage = np.fromiter((action.stage for action in actions), np.int64, len(actions))
        microbatch = np.fromiter((action.microbatch or 0 for action in actions), np.int64, len(actions))
        first = np.cumsum([0, *map(len, schedule.actions)])
        places = np.arange(len(actions))
        before = np.where(np.isin(places, first), _NOTHING, places - 1)
        # (direction, stage + 1, microbatch) -> action; an empty stage at both ends stands for a missing neighbour.
        made = np.full((2, schedule.num_stages + 2, schedule.num_microbatches), _NOTHING)
        for direction, chosen in ((0, codes == 0), (1, (codes == 1) | (codes == 2))):
            made[direction, stage[chosen] + 1, microbatch[chosen]] = places[chosen]
        forward, weight = codes == 0, codes == 3
        source = np.where(forward, stage - 1, stage + 1)
        needs = np.where(weight, _NOTHING, made[np.where(forward, 0, 1), source + 1, microbatch])
        # The last entry stands for missing neighbours: numpy's index -1 finds it before stage 0, num_stages behind the
        # last.
        rank = np.array([*schedule.rank_of_stage, -1])
        is_sent = (needs != _NOTHING) & (rank[stage] != rank[source])
        order = np.array(_order(first.tolist(), needs.tolist()), dtype=np.int64)
        if len(order) < len(needs):
            simulate(schedule)  # raises the error that shows where each rank waits
        self._order = order.astype(np.int32)
        self._before = before[order].astype(np.int32)
        self._needs = needs[order].astype(np.int32)
        self._is_sent = is_sent[order]
        self._codes, self._stage, self._num_stages = codes, stage, schedule.num_stages
        self._rows = [slice(low, high) for low, high in pairwise(first)]  # by rank
        self._kinds = codes * schedule.num_stages + stage
        self._find_collections()

    def _find_collections(self) -> None:
        """Find the actions after which gradients are reduced, and those before which an I's gradients are."""
        codes = self._codes
        whole = (codes == 1) | (codes == 3)
        self._is_collected = whole.copy()  # except the last of a stage
        self._is_behind_half = np.zeros_like(whole)  # a B or I of a stage whose previous I has no W yet
        for stage in range(self._num_stages):
            # REDUCE takes the gradients of a stage's last microbatch.
            self._is_collected[np.flatnonzero(whole & (self._stage == stage))[-1]] = False
            backwards = np.flatnonzero((codes > 0) & (self._stage == stage))
            kinds = codes[backwards]
            self._is_behind_half[backwards[1:]] = (kinds[1:] != 3) & (kinds[:-1] == 2)

    @cached_property
    def computing(self) -> list[ComputePhases]:
        """The states in which each rank computes."""
        return [self._computing(row, stages) for row, stages in zip(self._rows, self.stages, strict=True)]

    @cached_property
    def _counts(self) -> _Numbers:
        """(num_ranks, 4 x num_stages): how many actions of each op and stage a rank does."""
        count = len(_CODES) * self._num_stages
        return np.array([np.bincount(self._kinds[row], minlength=count) for row in self._rows])

    @cached_property
    def _collections(self) -> _Numbers:
        """(num_ranks, num_stages): how often a rank reduces gradients of each stage."""
        return self._by_rank(self._is_collected)

    @cached_property
    def halves(self) -> _Numbers:
        """(num_ranks, num_stages): how often gradients of an I are reduced before its W. More batches add none."""
        return self._by_rank(self._is_behind_half)

    def _by_rank(self, is_counted: NDArray[np.bool_]) -> _Numbers:
        counted = [self._stage[row][is_counted[row]] for row in self._rows]
        return np.array([np.bincount(stages, minlength=self._num_stages) for stages in counted])

    def _computing(self, row: slice, stages: Sequence[int]) -> ComputePhases:
        """Return the states of a rank. row: its actions."""
        codes, is_stage = self._codes[row, None], self._stage[row, None] == np.array(stages)
        begins = ((codes == 0) & is_stage).astype(np.int64)
        input_ends, ends = (((codes == 1) | (codes == half)) & is_stage for half in (2, 3))
        # The current microbatch does not count: neither the activations that its F makes, nor those that its backward
        # ends.
        held = np.cumsum(begins - input_ends, axis=0) - begins
        kept = np.cumsum(begins - ends, axis=0) - begins - ((codes == 2) & is_stage)
        num_ended = np.cumsum(ends, axis=0) - ends
        begun, ended = ((num_ended >= least).astype(np.int64) for least in (1, ends.sum(axis=0)))
        columns = [codes, is_stage.argmax(1)[:, None], held, kept, begun, ended]
        found, count = np.unique(np.concatenate(columns, axis=1), axis=0), len(stages)
        return ComputePhases(found[:, 0], found[:, 1], *np.split(found[:, 2:], [count, 2 * count, 3 * count], axis=1))

    def outcome(self, costs: Costs) -> tuple[float, tuple[float, ...]]:
        """Simulate the schedule with these costs. Return (makespan, compute time of each rank), in their unit."""
        none = (0.0,) * self._num_stages
        collect, half = np.array(costs.collect or none), np.array(costs.collect_half or none)
        busy = self._counts @ _by_kind(costs) + self._collections @ collect + self.halves @ half
        return max(self._ends(costs)), tuple(busy.tolist())

    def starts(self, costs: Costs) -> list[float]:
        """Return the start of each action, rank after rank."""
        found: list[float] = (np.array(self._ends(costs)[:-1]) - self._times(costs)).tolist()
        return found

    def _times(self, costs: Costs) -> NDArray[np.float64]:
        """Return the time that each action keeps its rank busy, (actions,)."""
        beside = np.zeros(len(self._kinds))
        for collect, is_collected in ((costs.collect_half, self._is_behind_half), (costs.collect, self._is_collected)):
            if collect:
                beside += is_collected * np.array(collect)[self._stage]
        found: NDArray[np.float64] = _by_kind(costs)[self._kinds] + beside
        return found

    def _ends(self, costs: Costs) -> list[float]:
        """Return the end of each action, rank after rank, and a last 0 at the index _NOTHING."""
        times, delays = self._times(costs)[self._order].tolist(), (self._is_sent * costs.send).tolist()
        ends = [0.0] * (len(times) + 1)  # no predecessor and no input: index _NOTHING = -1, ready at time 0
        lists = (self._order.tolist(), self._before.tolist(), self._needs.tolist(), times, delays)
        for place, before, need, time, delay in zip(*lists, strict=True):
            start, arrival = ends[before], ends[need] + delay
            ends[place] = (arrival if arrival > start else start) + time
        return ends


def _by_kind(costs: Costs) -> NDArray[np.float64]:
    """Return the times of F of all stages, then of B, I and W, (4 x num_stages,)."""
    return np.array([costs.forward, costs.backward, costs.input_backward, costs.weight_backward]).ravel()


def _order(first: Sequence[int], needs: Sequence[int]) -> list[int]:
    """Order the actions so that each comes after its predecessor on the rank and after its input.

    first: (num_ranks + 1,) index of each rank's first action. needs: (num_actions,) index of the input. After a
    deadlock, the order ends early.
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
