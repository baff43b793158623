"""A step's schedule with its costs, by the schedule's own recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...pipe.schedules.costs import Costs
from ...pipe.schedules.passes import merge_backward
from ...pipe.schedules.recurrence import Recurrence, ScheduleOutcome
from ...pipe.schedules.schedule import Op, Schedule
from .stages import Stages

_SIMULATED_PER_RANK = 2  # microbatches; from then on a schedule repeats itself


def simulated_microbatches(num_ranks: int, num_microbatches: int) -> int:
    """How many are simulated: the others take the time of the busiest rank each."""
    return min(num_microbatches, _SIMULATED_PER_RANK * num_ranks)


def recurrence_of(schedule: Schedule) -> Recurrence:
    """As its ranks run it: halves of backwards that need not be apart are one."""
    if schedule.has_any(Op.I):
        costs = Costs.uniform(schedule.num_stages)
        starts = Recurrence(schedule).starts(costs)
        actions = [action for row in schedule.actions for action in row]
        schedule = merge_backward(schedule, costs, dict(zip(actions, starts, strict=True)))
    return Recurrence(schedule)


@dataclass(frozen=True)
class ScheduleRun:
    """A schedule with its costs: of so many microbatches, of which some are simulated."""

    recurrence: Recurrence
    costs: Costs
    outcome: ScheduleOutcome
    num_microbatches: int

    @classmethod
    def of(cls, recurrence: Recurrence, costs: Costs, num_microbatches: int) -> ScheduleRun:
        return cls(recurrence, costs, recurrence.outcome(costs), num_microbatches)

    @property
    def work_seconds(self) -> float:
        """That the busiest rank computes."""
        return max(self.outcome.busy) / self.recurrence.num_microbatches * self.num_microbatches

    def exchanging(self, stages: Stages) -> float:
        """Seconds of `work_seconds` in which that rank waits for those that share its layers or sequences."""
        busiest = max(range(len(self.outcome.busy)), key=self.outcome.busy.__getitem__)
        return self.num_microbatches * sum(map(stages.exchanging, self.recurrence.stages[busiest]))

    def collecting(self, collect: Sequence[float], half: Sequence[float]) -> float:
        """By how many seconds a step is longer where so many, by stage, follow each backward but the last.

        half: those in front of a backward whose stage has an I before it, and no W since.
        """
        if not any(collect):
            return 0.0
        outcome = self.recurrence.outcome(replace(self.costs, collect=tuple(collect), collect_half=tuple(half)))
        simulated = self.recurrence.num_microbatches
        each = [busy / simulated for busy in self.outcome.busy]
        longer = [
            busy + sum(collect[stage] for stage in own) for busy, own in zip(each, self.recurrence.stages, strict=True)
        ]
        others = self.num_microbatches - simulated
        return outcome.makespan - self.outcome.makespan + others * (max(longer) - max(each))

    def ends(self, place: int) -> list[int]:
        """Stages whose output, and its gradient, this place exchanges with another one."""
        own, crosses = self.recurrence.stages[place], self.recurrence.crosses
        return [stage for stage in own if crosses[stage]] + [stage - 1 for stage in own if stage and crosses[stage - 1]]

    @property
    def seconds(self) -> float:
        simulated = self.recurrence.num_microbatches
        return self.outcome.makespan + self.work_seconds * (1 - simulated / self.num_microbatches)
