"""What a rank of a pipeline takes, and how long its step is: the schedule's own simulator, with costs of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...pipe.schedules.action import Op
from ...pipe.schedules.costs import Costs
from ...pipe.schedules.passes import merge_backward
from ...pipe.schedules.recurrence import Outcome, Recurrence
from ...pipe.schedules.schedule import Schedule
from ...pipe.split.split import SplitPlan
from ...zero.plan import GroupPlan
from ..blueprint import Blueprint
from ..config.config import Config
from ..footprint import Footprint
from ..pipeline_plan import PipelinePlan
from .estimate import Estimate, Resting, Work, update_seconds
from .exchange import Calls, Exchange
from .gradients import gradient_seconds, host_seconds
from .machine import Machine
from .profile import Part, Profile

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
class Stages:
    """A profile divided over the stages of a pipeline."""

    split: SplitPlan
    profile: Profile
    work: Work

    @cached_property
    def parts(self) -> tuple[tuple[tuple[str, Part], ...], ...]:
        """By stage. What comes before the blocks is of the first stage, what comes behind them of the last."""
        found: list[list[tuple[str, Part]]] = [[] for _ in range(self.split.num_stages)]
        place_of = {name: place for place, name in enumerate(self.split.blocks)}
        stage = 0
        last_block = max((number for number, name in enumerate(self.profile.parts) if name in place_of), default=0)
        for number, (name, part) in enumerate(self.profile.parts.items()):
            if name in place_of:
                stage = self.split.stage_of_block(place_of[name])
            elif number > last_block:
                stage = len(found) - 1
            found[stage].append((name, part))
        return tuple(map(tuple, found))

    @cached_property
    def exchanged(self) -> tuple[Mapping[str, int], ...]:
        """By stage, bytes that a rank sends in a microbatch to those that share its layers or sequences, by link."""
        calls = Calls.of(self.profile, self.work.machine, self.work.route)
        different = {id(part): part for part in self.profile.parts.values()}
        known = {key: calls.sent(part.exchanges) for key, part in different.items()}
        return tuple(
            {link: sum(known[id(part)][link] for _, part in parts) for link in ("intra", "inter")}
            for parts in self.parts
        )

    def costs(self, send_seconds: float) -> Costs:
        """Seconds and bytes. A backward in two halves computes half of it in each."""
        forward = tuple(sum(self.work.forward(name) for name, _ in parts) for parts in self.parts)
        backward = tuple(sum(self.work.backward(name) for name, _ in parts) for parts in self.parts)
        halves = tuple(seconds / 2 for seconds in backward)
        kept = tuple(map(float, self.kept_bytes))
        put_off = tuple(map(min, kept, map(float, self.put_off_bytes)))
        nothing = (0.0,) * len(forward)
        return Costs(forward, backward, halves, halves, kept, put_off, nothing, send_seconds)

    @cached_property
    def kept_bytes(self) -> tuple[int, ...]:
        """By stage, of a microbatch until its backward: what came in, and what is saved; what goes out is sent."""
        found = []
        for stage, parts in enumerate(self.parts):
            total = self.input_bytes(stage) + sum(part.kept_bytes for _, part in parts)
            found.append(max(0, total - (self.output_bytes(stage) if stage + 1 < len(self.parts) else 0)))
        return tuple(found)

    @cached_property
    def put_off_bytes(self) -> tuple[int, ...]:
        """By stage, of a microbatch from I until W: more than until I, where blocks are computed again."""
        return tuple(sum(part.linear_bytes for _, part in parts) for parts in self.parts)

    def input_bytes(self, stage: int) -> int:
        """What it gets from the one before."""
        return self.output_bytes(stage - 1) if stage else 0

    def working_bytes(self, stage: int, holds: bool) -> tuple[int, int, int, int]:
        """The most while it computes F, B, I or W of a microbatch, of which nothing is counted elsewhere.

        holds: gradients that its backward makes are tensors of their own until it has ended.
        """
        base = self.input_bytes(stage)
        forward = backward = halved = base
        bases = []
        for _, part in self.parts[stage]:
            bases.append(base)
            forward = max(forward, base + part.forward_peak_bytes)
            base += part.kept_bytes
        gradients = put_off = 0
        for base, (_, part) in zip(reversed(bases), reversed(self.parts[stage]), strict=True):
            peak = part.holding_peak_bytes if holds else part.backward_peak_bytes
            backward = max(backward, base + gradients + peak)
            halved = max(halved, base + put_off + part.backward_peak_bytes)
            put_off += part.linear_bytes
            gradients += part.gradient_bytes * holds
        return forward, backward, halved, self.put_off_bytes[stage] + gradients

    def exchanging(self, stage: int) -> float:
        """Seconds of a microbatch in which it waits for ranks that share its layers or sequences."""
        return sum(self.work.exchanging(name) for name, _ in self.parts[stage])

    def output_bytes(self, stage: int) -> int:
        """What it sends to the next one for each microbatch, and gets the gradient of."""
        return self.parts[stage][-1][1].output_bytes if self.parts[stage] else 0


@dataclass(frozen=True)
class Run:
    """A schedule with its costs: of so many microbatches, of which some are simulated."""

    recurrence: Recurrence
    costs: Costs
    outcome: Outcome
    num_microbatches: int

    @classmethod
    def of(cls, recurrence: Recurrence, costs: Costs, num_microbatches: int) -> Run:
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

    @property
    def seconds(self) -> float:
        simulated = self.recurrence.num_microbatches
        return self.outcome.makespan + self.work_seconds * (1 - simulated / self.num_microbatches)


def send_seconds(stages: Stages, machine: Machine) -> float:
    """Of what the stage with the largest output makes of a microbatch, to the next one."""
    largest = max(stages.output_bytes(stage) for stage in range(len(stages.parts)))
    is_inside = machine.num_hosts == 1  # the pipe is the outermost axis: its ranks are as far apart as can be
    speed = machine.intra if is_inside else machine.inter
    latency = machine.intra_latency if is_inside else machine.inter_latency
    return machine.moving("sockets message", largest, latency + largest / speed)


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

    def estimate(self, config: Config, stages: Stages, run: Run) -> Estimate:
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
            host_bytes=max(place.rests.host_bytes for place in self._kinds),
            nvme_bytes=max(place.rests.file_bytes for place in self._kinds),
            sent=max(self.sent(stages, run), key=lambda one: sum(one.values())),
            step_seconds=sum(seconds.values()),
            seconds=seconds,
            hidden={"collectives": max(0.0, slowest.sending_seconds(run.num_microbatches) - waited)},
            num_samples=samples,
            num_tokens=samples * profile.tokens // profile.rows,
        )

    def collecting(self, run: Run) -> tuple[list[float], list[float]]:
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

    def sent(self, stages: Stages, run: Run) -> list[dict[str, int]]:
        """By place that differs from the one before it: bytes that a rank sends in a step, by link."""
        return [place.all_sent(stages, run, number) for number, place in self._places]

    def memory(self, stages: Stages, run: Run) -> list[tuple[Mapping[str, int], int]]:
        """By place that differs from the one before it: the most of each kind, and the most at a moment."""
        return [place.memory(stages, run, number) for number, place in self._places]


def memory_by_place(blueprint: Blueprint, machine: Machine, profile: Profile) -> list[tuple[Mapping[str, int], int]]:
    """What ranks of each place of a pipeline take: the most of each kind, and the most at a moment."""
    assert blueprint.pipeline is not None
    schedule = blueprint.pipeline.schedule
    stages = Stages(blueprint.pipeline.split, profile, Work(profile, machine, blueprint.route))
    run = Run.of(recurrence_of(schedule), stages.costs(0.0), schedule.num_microbatches)
    return PipelineParts(blueprint, machine).memory(stages, run)


class _Place:
    """The ranks of one place of a pipeline."""

    def __init__(self, blueprint: Blueprint, machine: Machine, place: int) -> None:
        footprint = Footprint(blueprint, blueprint.first_rank_of(place))
        exchange, plan = Exchange(blueprint, machine), blueprint.places[place]
        self.rests = Resting.of(blueprint, footprint, place)
        # Without a budget a stage stays gathered from its first use to its last, which lie around those of the others.
        self._gathered = sum(map(footprint.gathered, plan.groups)) if footprint.frees_memory else 0
        is_native = blueprint.route == "native"
        self._staged = 2 * max((one.slot_bytes for one in plan.trained), default=0) if is_native else 0
        gathers = [exchange.gather(group) for group in plan.groups] if footprint.frees_memory else []
        reduces = [exchange.reduce(group) for group in plan.trained]
        sums = [*reduces, *(exchange.all_reduce(group, blueprint.first_rank_of(place)) for group in plan.trained)]
        refreshes = [exchange.refresh(group) for group in plan.updated]
        assert blueprint.pipeline is not None
        num_stages = len(blueprint.pipeline.at(blueprint.stage_place_of(place)).stages)
        self.seconds = {
            "gather exposed": sum(one.seconds for one in gathers) / num_stages,  # of the first; others come beside it
            "reduce exposed": sum(one.seconds for one in sums) / num_stages,
            "update": update_seconds(blueprint, machine, place),
            "refresh exposed": sum(one.seconds for one in refreshes),
        }
        self._members = _members(blueprint.pipeline.at(blueprint.stage_place_of(place)), plan.trained)
        again = reduces if blueprint.policy.reduces_every_backward else []  # after each microbatch
        taken = {group.name: message for group, message in zip(plan.trained, again, strict=False)}
        by_stage = [[(group, taken[group.name]) for group in groups if taken] for groups in self._members]
        self.reducing = [sum(one.seconds for _, one in some) for some in by_stage]
        halves = [[one for group, one in some if group.is_added_up_flat] for some in by_stage]
        self.shares_of_halves = [  # of `reducing`, what is collected of an I before its W
            sum(one.seconds for one in some) / (whole or 1.0) for some, whole in zip(halves, self.reducing, strict=True)
        ]
        self._sent_of_halves = [
            {link: sum(getattr(one, link) for one in some) for link in ("intra", "inter")} for some in halves
        ]
        flat = any(group.is_added_up_flat for group in plan.trained)
        self._takes_each = blueprint.policy.reduces_every_backward or flat
        self._adds_in_place = all(footprint.adds_in_place(group) for group in plan.trained)
        self._blueprint, self._machine, self._num_units = blueprint, machine, len(blueprint.places[place].units)
        ends = [gradient_seconds(blueprint, machine, place, *end, False) for end in ((True, False), (False, True))]
        self._first_gradients, self._last_gradients = ends
        self._added = gradient_seconds(blueprint, machine, place, False, False, False)
        messages = [*gathers, *sums, *refreshes]
        self._tied_bytes = sum(  # sums over the places that have a copy: each sends its own to each of the others
            (len(copies.places) - 1) * group.layout.shard_numel * group.accumulation_dtype.itemsize
            for group in plan.trained
            for copies in group.domain.tied
            if copies.are_added
        )
        self._sending, self._sending_again = (sum(one.seconds for one in some) for some in ([*gathers, *sums], again))
        self._sent, self._sent_again = (
            {link: sum(getattr(one, link) for one in some) for link in ("intra", "inter")} for some in (messages, again)
        )

    def sending_seconds(self, num_microbatches: int) -> float:
        """Of gathers and reductions in a step, waited for or not."""
        return self._sending + (num_microbatches - 1) * self._sending_again

    def host_seconds(self, num_microbatches: int) -> float:
        """Of the engine itself in a step, and of adding up gradients."""
        added = self._first_gradients + self._last_gradients + self._added * max(0, num_microbatches - 2)
        return added + host_seconds(self._blueprint, self._machine, self._num_units, num_microbatches)

    def memory(self, stages: Stages, run: Run, place: int) -> tuple[Mapping[str, int], int]:
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

    def _computed(self, stages: Stages, run: Run, place: int) -> tuple[int, int]:
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
    def _passing_bytes(stages: Stages, run: Run, place: int) -> int:
        """Of a step's inputs that are cast, and of messages: one at each end of a stage, one ahead for each stage."""
        own = run.recurrence.stages[place]
        sizes = [max(stages.input_bytes(stage), stages.output_bytes(stage)) for stage in own]
        messages = sum(stages.output_bytes(stage) for stage in _ends(run, place)) + sum(sizes)
        return messages + run.num_microbatches * stages.profile.cast_bytes

    @cached_property
    def _gradients(self) -> NDArray[np.int64]:
        """(stages of this place, 3) gradients before its first backward has ended, from then on, and after its last."""
        sizes = ([self.rests.by_group[group.name] for group in groups] for groups in self._members)
        return np.array([np.sum(own or [(0, 0, 0)], axis=0) for own in sizes])

    def all_sent(self, stages: Stages, run: Run, place: int) -> dict[str, int]:
        """By link, with outputs of stages, their gradients, and sums of tied weights."""
        messages = run.num_microbatches * sum(map(stages.output_bytes, _ends(run, place)))
        earlier = run.num_microbatches - 1
        sent = {link: nbytes + earlier * self._sent_again[link] for link, nbytes in self._sent.items()}
        for stage, of_half in zip(run.recurrence.stages[place], self._sent_of_halves, strict=True):
            for link, nbytes in stages.exchanged[stage].items():
                sent[link] += run.num_microbatches * nbytes
            for link, nbytes in of_half.items():
                sent[link] += int(run.recurrence.halves[place, stage]) * nbytes
        return {**sent, "pipe": messages + self._tied_bytes}


def _members(pipeline: PipelinePlan, groups: Sequence[GroupPlan]) -> list[list[GroupPlan]]:
    """By stage of a place; what no stage of it has alone goes to the first."""
    stages = [set(pipeline.split.parameters[stage]) for stage in pipeline.stages]
    found: list[list[GroupPlan]] = [[] for _ in stages]
    for group in groups:
        names = {name for name, _ in group.params}
        found[next((place for place, of_stage in enumerate(stages) if names & of_stage), 0)].append(group)
    return found


def _ends(run: Run, place: int) -> list[int]:
    """Stages whose output, and its gradient, this place exchanges with another one."""
    own, crosses = run.recurrence.stages[place], run.recurrence.crosses
    return [stage for stage in own if crosses[stage]] + [stage - 1 for stage in own if stage and crosses[stage - 1]]
