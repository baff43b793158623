"""Memory and time of a step with a pipeline, by the schedule's simulator with the model's costs.

`ScheduleRun` simulates a schedule. `_Place` counts bytes, messages and waits of the ranks of a place in the pipeline.
`PipelineParts` makes an estimate of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...pipe.schedules.costs import Costs
from ...pipe.schedules.fast_simulation import FastSimulation
from ...pipe.schedules.passes import merge_backward
from ...pipe.schedules.schedule import Op, Schedule
from ...zero.plan import GroupPlan
from ..blueprint.blueprint import Blueprint
from ..blueprint.footprint import Footprint
from ..blueprint.pipeline_plan import PipelinePlan
from ..config.config import Config
from .estimate import Estimate, MachineWork, Resting, update_seconds
from .exchange import CollectiveCost, CollectiveCosts, gradient_seconds, host_seconds, sent_by_link
from .machine import Machine
from .profile import Profile
from .stages import Stages

_SIMULATED_PER_RANK = 2  # microbatches; after them a schedule repeats itself


def simulated_microbatches(schedule: str, num_ranks: int, num_microbatches: int) -> int:
    """Return the number of simulated microbatches. Each further one adds the busiest rank's time."""
    if schedule == "gpipe":  # each further one takes memory too
        return num_microbatches
    round_size = num_ranks
    if schedule == "interleaved" or (schedule == "zb-h1" and 2 * (num_microbatches % num_ranks) < num_ranks):
        # The first of even rounds is the largest, and decides the memory: see `_even_rounds` in generators.py.
        round_size = -(-num_microbatches // max(1, num_microbatches // num_ranks))
    return min(num_microbatches, max(_SIMULATED_PER_RANK * num_ranks, 2 * round_size - 1))


def fast_simulation_of(schedule: Schedule) -> FastSimulation:
    """Prepare the simulation of a schedule as its ranks run it, with I and W merged if nothing runs between them."""
    if schedule.has_any(Op.I):
        costs = Costs.uniform(schedule.num_stages)
        starts = FastSimulation(schedule).starts(costs)
        actions = [action for row in schedule.actions for action in row]
        schedule = merge_backward(schedule, costs, dict(zip(actions, starts, strict=True)))
    return FastSimulation(schedule)


@dataclass(frozen=True)
class ScheduleRun:
    """A simulated schedule of `num_microbatches`, of which the first ones are simulated."""

    simulation: FastSimulation
    costs: Costs
    makespan: float  # of the simulated microbatches
    busy: tuple[float, ...]  # compute time of each rank in them
    num_microbatches: int

    @classmethod
    def of(cls, simulation: FastSimulation, costs: Costs, num_microbatches: int) -> ScheduleRun:
        return cls(simulation, costs, *simulation.outcome(costs), num_microbatches)

    @property
    def work_seconds(self) -> float:
        """Seconds that the busiest rank computes."""
        # busy / s is the work of a microbatch; m of them.
        return max(self.busy) / self.simulation.num_microbatches * self.num_microbatches

    def exchanging(self, stages: Stages) -> float:
        """Return seconds of `work_seconds` in which the rank waits for those that share its layers or sequences."""
        busiest = max(range(len(self.busy)), key=self.busy.__getitem__)
        return self.num_microbatches * sum(map(stages.exchanging, self.simulation.stages[busiest]))

    def collecting(self, collect: Sequence[float], half: Sequence[float]) -> float:
        """Return the seconds that reductions after each backward but the last add to a step.

        collect: seconds by stage. half: of them, the part before a backward whose stage has an I before it, and no W
        since.
        """
        if not any(collect):
            return 0.0
        makespan, _ = self.simulation.outcome(replace(self.costs, collect=tuple(collect), collect_half=tuple(half)))
        simulated = self.simulation.num_microbatches
        each = [busy / simulated for busy in self.busy]
        longer = [
            busy + sum(collect[stage] for stage in stages)
            for busy, stages in zip(each, self.simulation.stages, strict=True)
        ]
        num_more = self.num_microbatches - simulated
        return makespan - self.makespan + num_more * (max(longer) - max(each))

    def ends(self, place: int) -> list[int]:
        """Return the stages whose outputs and gradients this place exchanges with another place."""
        stages, crosses = self.simulation.stages[place], self.simulation.crosses
        before = [stage - 1 for stage in stages if stage and crosses[stage - 1]]
        return [stage for stage in stages if crosses[stage]] + before

    @property
    def seconds(self) -> float:
        simulated = self.simulation.num_microbatches
        # seconds = makespan of s microbatches + (m - s) / m of the work: in the steady state no rank waits for more.
        return self.makespan + self.work_seconds * (1 - simulated / self.num_microbatches)


class _Place:
    """The ranks of a place: memory at rest and in a schedule, collectives, outputs of stages, sums of tied weights."""

    def __init__(self, blueprint: Blueprint, machine: Machine, place: int) -> None:
        assert blueprint.pipeline is not None
        rank, plan = blueprint.first_rank_of(place), blueprint.places[place]
        footprint = Footprint(blueprint, rank)
        of_stages = _users(blueprint.pipeline.at(blueprint.stage_place_of(place)), plan.trained)
        by_stage = [[group for group, first in of_stage if first] for of_stage in of_stages]
        self.rests, self._by_stage = Resting.of(blueprint, footprint, place), by_stage
        # Without a budget all stages of a rank are gathered at the same time, from first to last use.
        self._gathered = sum(map(footprint.gathered, plan.groups)) if footprint.frees_memory else 0
        is_native = blueprint.transport == "native"
        self._staged = 2 * max((group.slot_bytes for group in plan.trained), default=0) if is_native else 0
        flat = any(group.is_added_up_flat for group in plan.trained)
        self._takes_each = blueprint.policy.reduces_every_backward or flat
        self._adds_in_place = all(footprint.adds_in_place(group) for group in plan.trained)
        exchange = CollectiveCosts(blueprint, machine)
        self._blueprint, self._machine, self._num_units = blueprint, machine, len(plan.units)
        kinds = ((True, False), (False, True), (False, False))  # of microbatches: the first, the last, one between
        self._adding = [gradient_seconds(blueprint, machine, place, *kind, False) for kind in kinds]
        gathers = [exchange.gather(group) for group in plan.groups] if footprint.frees_memory else []
        reduces = [exchange.reduce(group) for group in plan.trained]
        sums = [*reduces, *(exchange.all_reduce(group, rank) for group in plan.trained)]
        refreshes = [exchange.refresh(group).and_then(exchange.matrices(group, rank)) for group in plan.updated]
        self.seconds = {
            "gather exposed": _seconds(gathers) / len(by_stage),  # of the first stage; the rest overlaps
            "reduce exposed": _seconds(sums) / len(by_stage),
            "update": update_seconds(blueprint, machine, place),
            "refresh exposed": _seconds(refreshes),
        }
        again = reduces if blueprint.policy.reduces_every_backward else []  # after each microbatch
        taken = {group.name: message for group, message in zip(plan.trained, again, strict=False)}
        messages = [[(group, taken[group.name]) for group, _ in of_stage if taken] for of_stage in of_stages]
        self.reducing = [_seconds(message for _, message in of_stage) for of_stage in messages]
        halves = [[message for group, message in of_stage if group.is_added_up_flat] for of_stage in messages]
        self.shares_of_halves = [  # fraction of `reducing` that follows an I before its W
            _seconds(of_half) / (whole or 1.0) for of_half, whole in zip(halves, self.reducing, strict=True)
        ]
        self._sent_of_halves = list(map(sent_by_link, halves))
        once = {group.name: message for of_stage in messages for group, message in of_stage}.values()
        self._sent_by_stages = sent_by_link([message for of_stage in messages for _, message in of_stage])
        self._sent_once, self._seconds_once = sent_by_link(list(once)), _seconds(once)
        self._tied_bytes = sum(  # each place with a copy sends its gradient to each other place with a copy
            (len(copies.places) - 1) * group.layout.shard_numel * group.accumulation_dtype.itemsize
            for group in plan.trained
            for copies in group.sharding.tied
            if copies.are_added
        )
        self._sending, self._sent = _seconds([*gathers, *sums]), sent_by_link([*gathers, *sums, *refreshes])

    def memory(self, stages: Stages, run: ScheduleRun, place: int) -> tuple[Mapping[str, int], int]:
        """Return (peak of each kind, peak of the total)."""
        computed, held = self._computed(stages, run, place)
        loss = stages.profile.loss_bytes if len(stages.parts) - 1 in run.simulation.stages[place] else 0
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
        """Return (peak of activations and gradients together, peak of activations) while a stage computes."""
        of_place, at = list(run.simulation.stages[place]), run.simulation.computing[place]
        whole, put_off = (np.array(sizes)[of_place] for sizes in (stages.kept_bytes, stages.put_off_bytes))
        # Microbatches before their I keep all of a stage, those between I and W only the inputs and gradients for W.
        held = at.held @ whole + (at.kept - at.held) @ put_off
        before, between, final = self._gradients.T
        # Sum over stages: before + begun (between - before) + ended (final - between), at each moment.
        gradients = before.sum() + at.begun @ (between - before) + at.ended @ (final - between)
        # Gradients are added in place and freed at once, unless each backward's gradients are reduced separately.
        plain, holding = (
            np.array([stages.working_bytes(stage, holds) for stage in of_place]) for holds in (False, True)
        )
        is_begun = np.take_along_axis(at.begun, at.places[:, None], axis=1)[:, 0] > 0
        # The first backward of a stage has nothing to add to: its gradients become the accumulated ones.
        holds = (not self._adds_in_place) & (self._takes_each | ~is_begun)
        working = np.where(holds, holding[at.places, at.codes], plain[at.places, at.codes])
        passing = self._passing_bytes(stages, run, place)
        activations = held + plain[at.places, at.codes]
        return passing + int((held + working + gradients).max()), passing + int(activations.max())

    @staticmethod
    def _passing_bytes(stages: Stages, run: ScheduleRun, place: int) -> int:
        """Return bytes of cast inputs and messages: one at each end of a stage, and one ahead for each stage."""
        of_place = run.simulation.stages[place]
        sizes = [max(stages.input_bytes(stage), stages.output_bytes(stage)) for stage in of_place]
        messages = sum(stages.output_bytes(stage) for stage in run.ends(place)) + sum(sizes)
        # Inputs of all microbatches are cast when the batch is split, before the first forward.
        return messages + run.num_microbatches * stages.profile.cast_bytes

    @cached_property
    def _gradients(self) -> NDArray[np.int64]:
        """(stages of this place, 3) gradients before the first backward ended, until the last, and after it."""
        sizes = ([self.rests.by_group[group.name] for group in groups] for groups in self._by_stage)
        return np.array([np.sum(of_stage or [(0, 0, 0)], axis=0) for of_stage in sizes])

    def host_seconds(self, num_microbatches: int) -> float:
        """Return host time of the engine in a step, and time to accumulate gradients."""
        first, last, between = self._adding
        added = first + last + between * max(0, num_microbatches - 2)
        return added + host_seconds(self._blueprint, self._machine, self._num_units, num_microbatches)

    def sending_seconds(self, num_microbatches: int) -> float:
        """Return seconds of gathers and reductions in a step, exposed or not.

        A group that several stages use is reduced after each of their backwards; `_sending` has it once.
        """
        return self._sending + num_microbatches * sum(self.reducing) - self._seconds_once

    def sent(self, stages: Stages, run: ScheduleRun, place: int) -> dict[str, int]:
        """Return sent bytes by link, including outputs of stages, their gradients, and sums of tied weights."""
        messages = run.num_microbatches * sum(map(stages.output_bytes, run.ends(place)))
        more = {link: run.num_microbatches * nbytes for link, nbytes in self._sent_by_stages.items()}
        sent = {link: nbytes + more[link] - self._sent_once[link] for link, nbytes in self._sent.items()}
        for stage, of_half in zip(run.simulation.stages[place], self._sent_of_halves, strict=True):
            for link, nbytes in stages.exchanged[stage].items():
                sent[link] += run.num_microbatches * nbytes
            for link, nbytes in of_half.items():
                sent[link] += int(run.simulation.halves[place, stage]) * nbytes
        return {**sent, "pipe": messages + self._tied_bytes}


def _seconds(messages: Iterable[CollectiveCost]) -> float:
    return sum(message.seconds for message in messages)


def _users(pipeline: PipelinePlan, groups: Sequence[GroupPlan]) -> list[list[tuple[GroupPlan, bool]]]:
    """Return for each stage of a place the groups that it uses, and whether no earlier stage of the place does.

    A group that no stage uses goes to the first.
    """
    stages = [set(pipeline.split.parameters[stage]) for stage in pipeline.stages]
    found: list[list[tuple[GroupPlan, bool]]] = [[] for _ in stages]
    for group in groups:
        names = {name for name, _ in group.params}
        users = [number for number, of_stage in enumerate(stages) if names & of_stage] or [0]
        for number in users:
            found[number].append((group, number == users[0]))
    return found


class PipelineParts:
    """The costs of a step with a pipeline that do not depend on the microbatch, for many profiles."""

    def __init__(self, blueprint: Blueprint, machine: Machine) -> None:
        """blueprint: with any number of microbatches that the schedule takes."""
        assert blueprint.pipeline is not None
        self.split = blueprint.pipeline.split
        # Places often share a plan, which is computed once.
        known: dict[int, _Place] = {}
        self._all: list[tuple[int, _Place]] = []
        self._overlaps = machine.overlaps
        self._places: list[tuple[int, _Place]] = []  # with the place in the pipeline
        for place, plan in enumerate(blueprint.places):
            if id(plan) not in known:
                known[id(plan)] = _Place(blueprint, machine, place)
            entry = (blueprint.stage_place_of(place), known[id(plan)])
            self._all.append(entry)
            # The planner's places of a stage share a plan (`AlikePlaces`) and are counted once. An engine's places have
            # a plan each, so `memory_by_place` has an entry for every place.
            if [entry] != self._places[-1:]:
                self._places.append(entry)
        self._kinds = list(known.values())

    def estimate(self, config: Config, stages: Stages, run: ScheduleRun) -> Estimate:
        """Estimate a step: the fullest place gives the bytes, the slowest the time. config: with its microbatches."""
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
            host_bytes=max(place.rests.host_bytes for place in self._kinds),
            nvme_bytes=max(place.rests.file_bytes for place in self._kinds),
            sent=max(self.sent(stages, run), key=lambda sent: sum(sent.values())),
            step_seconds=sum(seconds.values()),
            seconds=seconds,
            hidden={"collectives": max(0.0, slowest.sending_seconds(run.num_microbatches) - waited)},
            num_samples=samples,
            num_tokens=samples * profile.tokens // profile.rows,
        )

    def collecting(self, run: ScheduleRun) -> tuple[list[float], list[float]]:
        """Return by stage the seconds in which its rank waits for reductions after each backward but the last.

        Overlapped reductions are waited for when the next reductions begin. The second list has the part before a W,
        for gradients that autograd would round when it accumulates them.
        """
        found, halves = [0.0] * len(run.costs.forward), [0.0] * len(run.costs.forward)
        for number, place in self._all:
            of_place, each = run.simulation.stages[number], place.reducing
            if self._overlaps:
                # A reduction has the time of a microbatch to end. Only the time beyond it is waited for.
                computing = run.busy[number] / run.simulation.num_microbatches
                each = [max(0.0, sum(each) - computing) / len(of_place)] * len(of_place)
            for stage, seconds, share in zip(of_place, each, place.shares_of_halves, strict=True):
                found[stage] = max(found[stage], seconds)
                halves[stage] = max(halves[stage], share * seconds)
        return found, halves

    def sent(self, stages: Stages, run: ScheduleRun) -> list[dict[str, int]]:
        """Return bytes that a rank sends in a step, by link, for each place that differs from the place before it."""
        return [place.sent(stages, run, number) for number, place in self._places]

    def memory(self, stages: Stages, run: ScheduleRun) -> list[tuple[Mapping[str, int], int]]:
        """Return (peak of each kind, peak of the total) for each place that differs from the place before it."""
        return [place.memory(stages, run, number) for number, place in self._places]


def memory_by_place(blueprint: Blueprint, machine: Machine, profile: Profile) -> list[tuple[Mapping[str, int], int]]:
    """Return (peak of each kind, peak of the total) of the ranks of each place of a pipeline."""
    assert blueprint.pipeline is not None
    schedule = blueprint.pipeline.schedule
    stages = Stages(blueprint.pipeline.split, profile, MachineWork(profile, machine, blueprint.transport))
    # Bytes do not depend on times, so messages may take 0 seconds: [Note: recurrence] in fast_simulation.py.
    run = ScheduleRun.of(fast_simulation_of(schedule), stages.costs(0.0), schedule.num_microbatches)
    return PipelineParts(blueprint, machine).memory(stages, run)
