"""What a rank of a pipeline takes, and how long its step is: the schedule's own simulator, with costs of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...pipe.schedules.costs import Costs
from ...pipe.schedules.schedule import Schedule
from ...pipe.schedules.simulator import Simulation, simulate
from ..blueprint import Blueprint
from ..footprint import Footprint
from ..pipeline_plan import PIPE, PipelinePlan
from .estimate import Estimate, Resting, Work, update_seconds
from .exchange import Exchange, Message
from .machine import Machine
from .profile import Part, Profile

_SIMULATED_PER_RANK = 4  # microbatches; from then on a schedule repeats itself


def simulated_microbatches(num_ranks: int, num_microbatches: int) -> int:
    """How many are simulated: the others take the time of the busiest rank each."""
    return min(num_microbatches, _SIMULATED_PER_RANK * num_ranks)


@dataclass(frozen=True)
class Stages:
    """A profile divided over the stages of a pipeline."""

    pipeline: PipelinePlan
    profile: Profile
    work: Work

    @cached_property
    def parts(self) -> tuple[tuple[tuple[str, Part], ...], ...]:
        """By stage. What comes before the blocks is of the first stage, what comes behind them of the last."""
        found: list[list[tuple[str, Part]]] = [[] for _ in range(self.pipeline.split.num_stages)]
        place_of = {name: place for place, name in enumerate(self.pipeline.split.blocks)}
        stage = 0
        last_block = max((number for number, name in enumerate(self.profile.parts) if name in place_of), default=0)
        for number, (name, part) in enumerate(self.profile.parts.items()):
            if name in place_of:
                stage = self.pipeline.split.stage_of_block(place_of[name])
            elif number > last_block:
                stage = len(found) - 1
            found[stage].append((name, part))
        return tuple(map(tuple, found))

    def costs(self, send_seconds: float) -> Costs:
        """Seconds and bytes. A backward in two halves computes half of it in each."""
        forward = tuple(sum(self.work.forward(name) for name, _ in parts) for parts in self.parts)
        backward = tuple(sum(self.work.backward(name) for name, _ in parts) for parts in self.parts)
        halves = tuple(seconds / 2 for seconds in backward)
        kept = tuple(float(sum(part.kept_bytes for _, part in parts)) for parts in self.parts)
        nothing = (0.0,) * len(forward)
        return Costs(forward, backward, halves, halves, kept, kept, nothing, send_seconds)

    def passing_bytes(self, stage: int) -> int:
        """The most that a stage takes beside what it keeps, while it computes."""
        base, most = 0, 0
        for _, part in self.parts[stage]:
            most = max(most, base + max(part.forward_peak_bytes, part.backward_peak_bytes))
            base += part.kept_bytes
        return max(0, most - base)

    def output_bytes(self, stage: int) -> int:
        """What it sends to the next one for each microbatch, and gets the gradient of."""
        return self.parts[stage][-1][1].output_bytes if self.parts[stage] else 0


@dataclass(frozen=True)
class Run:
    """A schedule with its costs in time: of so many microbatches, of which some are simulated."""

    simulation: Simulation
    num_microbatches: int

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs, num_microbatches: int) -> Run:
        return cls(simulate(schedule, costs), num_microbatches)

    @property
    def work_seconds(self) -> float:
        """That the busiest rank computes."""
        return max(self.simulation.busy) / self.simulation.schedule.num_microbatches * self.num_microbatches

    @property
    def seconds(self) -> float:
        simulated = self.simulation.schedule.num_microbatches
        each = max(self.simulation.busy) / simulated
        return self.simulation.makespan + each * (self.num_microbatches - simulated)


def estimate_pipelined(
    blueprint: Blueprint, machine: Machine, profile: Profile, num_microbatches: int, run: Run | None = None
) -> Estimate:
    """Of a blueprint with a pipeline, of `simulated_microbatches` of so many microbatches.

    run: of an equal split, schedule and profile, where one was made. The fullest place gives the bytes, the slowest the
    time.
    """
    assert blueprint.pipeline is not None
    stages = Stages(blueprint.pipeline, profile, Work(profile, machine))
    run = run or run_of(blueprint, machine, profile, num_microbatches)
    exchange = Exchange(blueprint, machine)
    places = [_Place(blueprint, machine, stages, run, exchange, place) for place in range(len(blueprint.places))]
    fullest = max(places, key=lambda place: place.peak_bytes)
    slowest = max(places, key=lambda place: sum(place.seconds.values()))
    seconds = {"compute": run.work_seconds, "bubble": run.seconds - run.work_seconds, **slowest.seconds}
    samples = (blueprint.config.train_batch_size or 0) // (blueprint.config.gradient_accumulation_steps or 1)
    samples *= num_microbatches
    busiest = max(places, key=lambda place: sum(place.sent.values()))
    return Estimate(
        bytes=fullest.bytes,
        peak_bytes=fullest.peak_bytes,
        host_bytes=max(place.rests.host_bytes for place in places),
        nvme_bytes=max(place.rests.file_bytes for place in places),
        sent=busiest.sent,
        step_seconds=sum(seconds.values()),
        seconds=seconds,
        num_samples=samples,
        num_tokens=samples * profile.tokens // profile.rows,
    )


def run_of(blueprint: Blueprint, machine: Machine, profile: Profile, num_microbatches: int) -> Run:
    """What the schedule takes; it depends on neither stage nor offload."""
    assert blueprint.pipeline is not None
    stages = Stages(blueprint.pipeline, profile, Work(profile, machine))
    on_host = machine.ranks_on_host(blueprint.arrangement, (PIPE,))
    speed, latency = (
        (machine.intra, machine.intra_latency)
        if on_host >= blueprint.arrangement.size((PIPE,))
        else (machine.inter, machine.inter_latency)
    )
    largest = max(stages.output_bytes(stage) for stage in range(len(stages.parts)))
    costs = stages.costs(latency + largest / speed)
    return Run.of(blueprint.pipeline.schedule, costs, num_microbatches)


class _Place:
    """What the ranks of one place of a pipeline take."""

    def __init__(
        self, blueprint: Blueprint, machine: Machine, stages: Stages, run: Run, exchange: Exchange, place: int
    ) -> None:
        rank = blueprint.arrangement.num_ranks // len(blueprint.places) * place
        footprint = Footprint(blueprint, rank)
        self.rests = Resting.of(blueprint, footprint, place)
        groups = blueprint.places[place].groups
        own = run.simulation.schedule.stages_of_rank(place)
        gathered = sum(map(footprint.gathered, groups)) if footprint.frees_memory else 0
        staged = 2 * max((one.slot_bytes for one in blueprint.places[place].trained), default=0)
        passing = max(stages.passing_bytes(stage) for stage in own)
        kept = round(run.simulation.peaks[place].activation_bytes)
        loss = stages.profile.loss_bytes if len(stages.parts) - 1 in own else 0
        self.bytes: Mapping[str, int] = {
            **self.rests.kinds,
            "gathered_bytes": gathered,
            "activation_bytes": max(0, kept + passing - loss),
            "loss_bytes": loss,
            "buffer_bytes": self.rests.kinds["buffer_bytes"] + (staged if blueprint.route == "native" else 0),
        }
        beside = gathered + kept + passing + (staged if blueprint.route == "native" else 0)
        gradients = max(sum(sizes[moment] for sizes in self.rests.by_group.values()) for moment in (1, 2))
        self.peak_bytes = max(self.rests.after_backward, self.rests.bytes + gradients + beside)
        self._exchange = exchange
        trained, updated = blueprint.places[place].trained, blueprint.places[place].updated
        gathers = [exchange.gather(group) for group in groups] if footprint.frees_memory else []
        sums = [one for group in trained for one in (exchange.reduce(group), exchange.all_reduce(group))]
        refreshes = [exchange.refresh(group) for group in updated]
        self.seconds = {
            "gather exposed": sum(one.seconds for one in gathers) / len(own),  # of the first stage; others beside it
            "reduce exposed": sum(one.seconds for one in sums) / len(own),
            "update": update_seconds(blueprint, machine, place),
            "refresh exposed": sum(one.seconds for one in refreshes),
        }
        self.sent = _sum([*gathers, *sums, *refreshes])
        crossing = [stage for stage in own if run.simulation.schedule.crosses(stage)]
        before = [stage for stage in own if stage and run.simulation.schedule.crosses(stage - 1)]
        outputs = sum(map(stages.output_bytes, crossing)) + sum(stages.output_bytes(stage - 1) for stage in before)
        self.sent["pipe"] = outputs * run.num_microbatches


def _sum(messages: list[Message]) -> dict[str, int]:
    return {"intra": sum(one.intra for one in messages), "inter": sum(one.inter for one in messages)}
