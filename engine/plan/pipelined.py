"""What a rank of a pipeline takes, and how long its step is: the schedule's own simulator, with costs of the model.

`ScheduleRun` is a schedule with its costs, by the schedule's own recurrence; `PlaceMemory` and `_Place` are bytes,
messages and waiting of the ranks of one place; `PipelineParts` makes an estimate of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...pipe.schedules.costs import Costs
from ...pipe.schedules.fast_simulation import FastSimulation, ScheduleOutcome
from ...pipe.schedules.passes import merge_backward
from ...pipe.schedules.schedule import Op, Schedule
from ...zero.plan import GroupPlan
from ..blueprint.blueprint import Blueprint
from ..blueprint.footprint import Footprint
from ..blueprint.pipeline_plan import PipelinePlan
from ..config.config import Config
from .estimate import Estimate, MachineWork, Resting, update_seconds
from .exchange import CollectiveCosts, Message, gradient_seconds, host_seconds
from .machine import Machine
from .profile import Profile
from .stages import Stages

_SIMULATED_PER_RANK = 2  # microbatches; from then on a schedule repeats itself


def simulated_microbatches(num_ranks: int, num_microbatches: int) -> int:
    """How many are simulated: the others take the time of the busiest rank each."""
    return min(num_microbatches, _SIMULATED_PER_RANK * num_ranks)


def recurrence_of(schedule: Schedule) -> FastSimulation:
    """As its ranks run it: halves of backwards that need not be apart are one."""
    if schedule.has_any(Op.I):
        costs = Costs.uniform(schedule.num_stages)
        starts = FastSimulation(schedule).starts(costs)
        actions = [action for row in schedule.actions for action in row]
        schedule = merge_backward(schedule, costs, dict(zip(actions, starts, strict=True)))
    return FastSimulation(schedule)


@dataclass(frozen=True)
class ScheduleRun:
    """A schedule with its costs: of so many microbatches, of which some are simulated."""

    recurrence: FastSimulation
    costs: Costs
    outcome: ScheduleOutcome
    num_microbatches: int

    @classmethod
    def of(cls, recurrence: FastSimulation, costs: Costs, num_microbatches: int) -> ScheduleRun:
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


class PlaceMemory:
    """What rests there, and what a schedule adds to it."""

    def __init__(self, blueprint: Blueprint, place: int, by_stage: Sequence[Sequence[GroupPlan]]) -> None:
        """by_stage: the groups that are trained there, by stage of the place."""
        footprint, plan = Footprint(blueprint, blueprint.first_rank_of(place)), blueprint.places[place]
        self.rests = Resting.of(blueprint, footprint, place)
        self._by_stage = by_stage
        # Without a budget a stage stays gathered from its first use to its last, which lie around those of the others.
        self._gathered = sum(map(footprint.gathered, plan.groups)) if footprint.frees_memory else 0
        is_native = blueprint.route == "native"
        self._staged = 2 * max((one.slot_bytes for one in plan.trained), default=0) if is_native else 0
        flat = any(group.is_added_up_flat for group in plan.trained)
        self._takes_each = blueprint.policy.reduces_every_backward or flat
        self._adds_in_place = all(footprint.adds_in_place(group) for group in plan.trained)

    def most(self, stages: Stages, run: ScheduleRun, place: int) -> tuple[Mapping[str, int], int]:
        """(the most of each kind, the most at a moment)."""
        computed, held = self._computed(stages, run, place)
        loss = stages.profile.loss_bytes if len(stages.parts) - 1 in run.recurrence.stages[place] else 0
        kinds = {
            **self.rests.kinds,
            "gathered_bytes": self._gathered,
            "activation_bytes": max(0, held - loss),
            "loss_bytes": loss,
            "buffer_bytes": self.rests.kinds["buffer_bytes"] + self._staged + stages.profile.slot_bytes,
        }
        beside = self._gathered + self._staged + computed
        return kinds, max(self.rests.after_backward, self.rests.bytes + beside) + stages.profile.slot_bytes

    def _computed(self, stages: Stages, run: ScheduleRun, place: int) -> tuple[int, int]:
        """(the most of activations and gradients together, of activations) while something is computed."""
        own, at = list(run.recurrence.stages[place]), run.recurrence.computing[place]
        whole, put_off = (np.array(sizes)[own] for sizes in (stages.kept_bytes, stages.put_off_bytes))
        held = at.held @ whole + (at.kept - at.held) @ put_off
        before, between, final = self._gradients.T
        gradients = before.sum() + at.begun @ (between - before) + at.ended @ (final - between)
        # What is added to gradients that are there goes at once, unless each backward gives its own away.
        plain, holding = (np.array([stages.working_bytes(stage, holds) for stage in own]) for holds in (False, True))
        is_begun = np.take_along_axis(at.begun, at.places[:, None], axis=1)[:, 0] > 0
        holds = (not self._adds_in_place) & (self._takes_each | ~is_begun)
        working = np.where(holds, holding[at.places, at.codes], plain[at.places, at.codes])
        passing = self._passing_bytes(stages, run, place)
        activations = held + plain[at.places, at.codes]
        return passing + int((held + working + gradients).max()), passing + int(activations.max())

    @staticmethod
    def _passing_bytes(stages: Stages, run: ScheduleRun, place: int) -> int:
        """Of a step's inputs that are cast, and of messages: one at each end of a stage, one ahead for each stage."""
        own = run.recurrence.stages[place]
        sizes = [max(stages.input_bytes(stage), stages.output_bytes(stage)) for stage in own]
        messages = sum(stages.output_bytes(stage) for stage in run.ends(place)) + sum(sizes)
        return messages + run.num_microbatches * stages.profile.cast_bytes

    @cached_property
    def _gradients(self) -> NDArray[np.int64]:
        """(stages of this place, 3) gradients before its first backward has ended, from then on, and after its last."""
        sizes = ([self.rests.by_group[group.name] for group in groups] for groups in self._by_stage)
        return np.array([np.sum(own or [(0, 0, 0)], axis=0) for own in sizes])


class _Place:
    """The ranks of one place of a pipeline: collectives of their groups, outputs of stages, sums of tied weights."""

    def __init__(self, blueprint: Blueprint, machine: Machine, place: int) -> None:
        assert blueprint.pipeline is not None
        plan, footprint = blueprint.places[place], Footprint(blueprint, blueprint.first_rank_of(place))
        by_stage = _by_stage(blueprint.pipeline.at(blueprint.stage_place_of(place)), plan.trained)
        self.memory, exchange = PlaceMemory(blueprint, place, by_stage), CollectiveCosts(blueprint, machine)
        self._blueprint, self._machine, self._num_units = blueprint, machine, len(plan.units)
        kinds = ((True, False), (False, True), (False, False))  # of microbatches: the first, the last, one between
        self._adding = [gradient_seconds(blueprint, machine, place, *kind, False) for kind in kinds]
        gathers = [exchange.gather(group) for group in plan.groups] if footprint.frees_memory else []
        reduces = [exchange.reduce(group) for group in plan.trained]
        sums = [*reduces, *(exchange.all_reduce(group, blueprint.first_rank_of(place)) for group in plan.trained)]
        refreshes = [exchange.refresh(group) for group in plan.updated]
        self.seconds = {
            "gather exposed": _seconds(gathers) / len(by_stage),  # of the first; others come beside it
            "reduce exposed": _seconds(sums) / len(by_stage),
            "update": update_seconds(blueprint, machine, place),
            "refresh exposed": _seconds(refreshes),
        }
        again = reduces if blueprint.policy.reduces_every_backward else []  # after each microbatch
        taken = {group.name: message for group, message in zip(plan.trained, again, strict=False)}
        messages = [[(group, taken[group.name]) for group in groups if taken] for groups in by_stage]
        self.reducing = [_seconds(one for _, one in some) for some in messages]
        halves = [[one for group, one in some if group.is_added_up_flat] for some in messages]
        self.shares_of_halves = [  # of `reducing`, what is collected of an I before its W
            _seconds(some) / (whole or 1.0) for some, whole in zip(halves, self.reducing, strict=True)
        ]
        self._sent_of_halves = list(map(_sent, halves))
        self._tied_bytes = sum(  # sums over the places that have a copy: each sends its own to each of the others
            (len(copies.places) - 1) * group.layout.shard_numel * group.accumulation_dtype.itemsize
            for group in plan.trained
            for copies in group.sharding.tied
            if copies.are_added
        )
        self._sending, self._sending_again = _seconds([*gathers, *sums]), _seconds(again)
        self._sent, self._sent_again = _sent([*gathers, *sums, *refreshes]), _sent(again)

    def host_seconds(self, num_microbatches: int) -> float:
        """Of the engine itself in a step, and of adding up gradients."""
        first, last, between = self._adding
        added = first + last + between * max(0, num_microbatches - 2)
        return added + host_seconds(self._blueprint, self._machine, self._num_units, num_microbatches)

    def sending_seconds(self, num_microbatches: int) -> float:
        """Of gathers and reductions in a step, waited for or not."""
        return self._sending + (num_microbatches - 1) * self._sending_again

    def sent(self, stages: Stages, run: ScheduleRun, place: int) -> dict[str, int]:
        """By link, with outputs of stages, their gradients, and sums of tied weights."""
        messages = run.num_microbatches * sum(map(stages.output_bytes, run.ends(place)))
        earlier = run.num_microbatches - 1
        sent = {link: nbytes + earlier * self._sent_again[link] for link, nbytes in self._sent.items()}
        for stage, of_half in zip(run.recurrence.stages[place], self._sent_of_halves, strict=True):
            for link, nbytes in stages.exchanged[stage].items():
                sent[link] += run.num_microbatches * nbytes
            for link, nbytes in of_half.items():
                sent[link] += int(run.recurrence.halves[place, stage]) * nbytes
        return {**sent, "pipe": messages + self._tied_bytes}


def _seconds(messages: Iterable[Message]) -> float:
    return sum(one.seconds for one in messages)


def _sent(messages: Sequence[Message]) -> dict[str, int]:
    """Bytes by link."""
    return {link: sum(getattr(one, link) for one in messages) for link in ("intra", "inter")}


def _by_stage(pipeline: PipelinePlan, groups: Sequence[GroupPlan]) -> list[list[GroupPlan]]:
    """By stage of a place; what no stage of it has alone goes to the first."""
    stages = [set(pipeline.split.parameters[stage]) for stage in pipeline.stages]
    found: list[list[GroupPlan]] = [[] for _ in stages]
    for group in groups:
        names = {name for name, _ in group.params}
        found[next((place for place, of_stage in enumerate(stages) if names & of_stage), 0)].append(group)
    return found


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
            hidden={"collectives": max(0.0, slowest.sending_seconds(run.num_microbatches) - waited)},
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
            own, each = run.recurrence.stages[number], place.reducing
            if self._overlaps:
                computing = run.outcome.busy[number] / run.recurrence.num_microbatches
                each = [max(0.0, sum(each) - computing) / len(own)] * len(own)
            for stage, seconds, share in zip(own, each, place.shares_of_halves, strict=True):
                found[stage] = max(found[stage], seconds)
                halves[stage] = max(halves[stage], share * seconds)
        return found, halves

    def sent(self, stages: Stages, run: ScheduleRun) -> list[dict[str, int]]:
        """By place that differs from the one before it: bytes that a rank sends in a step, by link."""
        return [place.sent(stages, run, number) for number, place in self._places]

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
