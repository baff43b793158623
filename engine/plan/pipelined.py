"""What a rank of a pipeline takes, and how long its step is: the schedule's own simulator, with costs of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...zero.plan import GroupPlan
from ..blueprint.blueprint import Blueprint
from ..blueprint.pipeline_plan import PipelinePlan
from ..config.config import Config
from .estimate import Estimate, MachineWork, update_seconds
from .exchange import CollectiveCosts
from .gradients import gradient_seconds, host_seconds
from .machine import Machine
from .pipeline_run import ScheduleRun, recurrence_of
from .place_memory import PlaceMemory
from .place_traffic import PlaceTraffic
from .profile import Profile
from .stages import Stages


class PipelineParts:
    """What of a step with a pipeline does not depend on what a microbatch computes: made once for many profiles."""

    def __init__(self, blueprint: Blueprint, machine: Machine) -> None:
        """blueprint: of any number of microbatches that the schedule takes."""
        assert blueprint.pipeline is not None
        self.split = blueprint.pipeline.split
        # Those that share one plan are looked at once: a first and a last place, and few between.
        known: dict[int, _Place] = {}
        self._all: list[tuple[int, _Place]] = []
        self._overlaps = machine.overlaps
        self._places: list[tuple[int, _Place]] = []  # with the place in the pipeline
        for place, plan in enumerate(blueprint.places):
            if id(plan) not in known:
                known[id(plan)] = _Place(blueprint, machine, place)
            one = (blueprint.stage_place_of(place), known[id(plan)])
            self._all.append(one)
            if [one] != self._places[-1:]:
                self._places.append(one)
        self._kinds = list(known.values())

    def estimate(self, config: Config, stages: Stages, run: ScheduleRun) -> Estimate:
        """config: with as many microbatches as there are. The fullest place gives the bytes, the slowest the time."""
        profile, samples = stages.profile, config.train_batch_size or 0
        kinds, peak = max(self.memory(stages, run), key=lambda found: found[1])
        slowest = max(self._kinds, key=lambda place: sum(place.seconds.values()))
        exchanging = run.exchanging(stages)
        collecting = run.collecting(*self.collecting(run))
        seconds = {
            "compute": run.work_seconds - exchanging,
            "exchange exposed": exchanging,
            "bubble": run.seconds - run.work_seconds,
            **slowest.seconds,
            "reduce exposed": slowest.seconds["reduce exposed"] + collecting,
            "host": slowest.host_seconds(run.num_microbatches),
        }
        waited = seconds["gather exposed"] + seconds["reduce exposed"]
        return Estimate(
            bytes=kinds,
            peak_bytes=peak,
            host_bytes=max(place.memory.rests.host_bytes for place in self._kinds),
            nvme_bytes=max(place.memory.rests.file_bytes for place in self._kinds),
            sent=max(self.sent(stages, run), key=lambda one: sum(one.values())),
            step_seconds=sum(seconds.values()),
            seconds=seconds,
            hidden={"collectives": max(0.0, slowest.traffic.sending_seconds(run.num_microbatches) - waited)},
            num_samples=samples,
            num_tokens=samples * profile.tokens // profile.rows,
        )

    def collecting(self, run: ScheduleRun) -> tuple[list[float], list[float]]:
        """By stage, seconds in which its rank waits after each backward but the last, for reductions of its gradients.

        What is reduced beside what computes is waited for where the next reductions begin. Then those of what is
        collected before a W: of gradients that autograd would round as it adds them up.
        """
        found, halves = [0.0] * len(run.costs.forward), [0.0] * len(run.costs.forward)
        for number, place in self._all:
            own, each = run.recurrence.stages[number], place.traffic.reducing
            if self._overlaps:
                computing = run.outcome.busy[number] / run.recurrence.num_microbatches
                each = [max(0.0, sum(each) - computing) / len(own)] * len(own)
            for stage, seconds, share in zip(own, each, place.traffic.shares_of_halves, strict=True):
                found[stage] = max(found[stage], seconds)
                halves[stage] = max(halves[stage], share * seconds)
        return found, halves

    def sent(self, stages: Stages, run: ScheduleRun) -> list[dict[str, int]]:
        """By place that differs from the one before it: bytes that a rank sends in a step, by link."""
        return [place.traffic.sent(stages, run, number) for number, place in self._places]

    def memory(self, stages: Stages, run: ScheduleRun) -> list[tuple[Mapping[str, int], int]]:
        """By place that differs from the one before it: the most of each kind, and the most at a moment."""
        return [place.memory.most(stages, run, number) for number, place in self._places]


def memory_by_place(blueprint: Blueprint, machine: Machine, profile: Profile) -> list[tuple[Mapping[str, int], int]]:
    """What ranks of each place of a pipeline take: the most of each kind, and the most at a moment."""
    assert blueprint.pipeline is not None
    schedule = blueprint.pipeline.schedule
    stages = Stages(blueprint.pipeline.split, profile, MachineWork(profile, machine, blueprint.route))
    run = ScheduleRun.of(recurrence_of(schedule), stages.costs(0.0), schedule.num_microbatches)
    return PipelineParts(blueprint, machine).memory(stages, run)


class _Place:
    """The ranks of one place of a pipeline."""

    def __init__(self, blueprint: Blueprint, machine: Machine, place: int) -> None:
        assert blueprint.pipeline is not None
        plan = blueprint.places[place]
        by_stage = _by_stage(blueprint.pipeline.at(blueprint.stage_place_of(place)), plan.trained)
        self.memory = PlaceMemory(blueprint, place, by_stage)
        self.traffic = PlaceTraffic(blueprint, CollectiveCosts(blueprint, machine), place, by_stage)
        self.seconds = {
            "gather exposed": self.traffic.waits_for_gathers,
            "reduce exposed": self.traffic.waits_for_sums,
            "update": update_seconds(blueprint, machine, place),
            "refresh exposed": self.traffic.waits_for_refreshes,
        }
        self._blueprint, self._machine, self._num_units = blueprint, machine, len(plan.units)
        kinds = ((True, False), (False, True), (False, False))  # of microbatches: the first, the last, one between
        self._adding = [gradient_seconds(blueprint, machine, place, *kind, False) for kind in kinds]

    def host_seconds(self, num_microbatches: int) -> float:
        """Of the engine itself in a step, and of adding up gradients."""
        first, last, between = self._adding
        added = first + last + between * max(0, num_microbatches - 2)
        return added + host_seconds(self._blueprint, self._machine, self._num_units, num_microbatches)


def _by_stage(pipeline: PipelinePlan, groups: Sequence[GroupPlan]) -> list[list[GroupPlan]]:
    """By stage of a place; what no stage of it has alone goes to the first."""
    stages = [set(pipeline.split.parameters[stage]) for stage in pipeline.stages]
    found: list[list[GroupPlan]] = [[] for _ in stages]
    for group in groups:
        names = {name for name, _ in group.params}
        found[next((place for place, of_stage in enumerate(stages) if names & of_stage), 0)].append(group)
    return found
