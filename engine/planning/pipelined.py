"""What a rank of a pipeline takes, and how long its step is: the schedule's own simulator, with costs of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...pipe.schedules.costs import Costs
from ...pipe.schedules.registry import make_schedule
from ...pipe.schedules.schedule import Schedule
from ...pipe.schedules.simulator import Simulation, simulate
from ...pipe.split.split import SplitPlan
from ..blueprint import Blueprint
from ..config.config import Config
from ..footprint import Footprint
from .estimate import Estimate, Resting, Work, update_seconds
from .exchange import Exchange
from .machine import Machine
from .profile import Part, Profile

_SIMULATED_PER_RANK = 2  # microbatches; from then on a schedule repeats itself


def simulated_microbatches(num_ranks: int, num_microbatches: int) -> int:
    """How many are simulated: the others take the time of the busiest rank each."""
    return min(num_microbatches, _SIMULATED_PER_RANK * num_ranks)


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
        return self.simulation.makespan + self.work_seconds * (1 - simulated / self.num_microbatches)


def run_of(config: Config, stages: Stages, machine: Machine) -> Run:
    """What the schedule of a config takes; it depends on neither stage nor offload."""
    num_ranks, count = config.parallel.pipeline, config.gradient_accumulation_steps or 1
    fewer = simulated_microbatches(num_ranks, count)
    schedule = make_schedule(config.pipeline.schedule, num_ranks, fewer, config.pipeline.chunks)
    largest = max(stages.output_bytes(stage) for stage in range(len(stages.parts)))
    is_inside = machine.num_hosts == 1  # the pipe is the outermost axis: its ranks are as far apart as can be
    speed = machine.intra if is_inside else machine.inter
    latency = machine.intra_latency if is_inside else machine.inter_latency
    return Run.of(schedule, stages.costs(latency + largest / speed), count)


class PipelineParts:
    """What of a step with a pipeline does not depend on what a microbatch computes: made once for many profiles."""

    def __init__(self, blueprint: Blueprint, machine: Machine) -> None:
        """blueprint: of any number of microbatches that the schedule takes."""
        assert blueprint.pipeline is not None
        self.split = blueprint.pipeline.split
        self._places = [_Place(blueprint, machine, place) for place in range(len(blueprint.places))]

    def estimate(self, config: Config, stages: Stages, run: Run) -> Estimate:
        """config: with as many microbatches as there are. The fullest place gives the bytes, the slowest the time."""
        profile, samples = stages.profile, config.train_batch_size or 0
        memory = [place.memory(stages, run, number) for number, place in enumerate(self._places)]
        kinds, peak = max(memory, key=lambda found: found[1])
        slowest = max(self._places, key=lambda place: sum(place.seconds.values()))
        seconds = {"compute": run.work_seconds, "bubble": run.seconds - run.work_seconds, **slowest.seconds}
        sent = [place.all_sent(stages, run, number) for number, place in enumerate(self._places)]
        return Estimate(
            bytes=kinds,
            peak_bytes=peak,
            host_bytes=max(place.rests.host_bytes for place in self._places),
            nvme_bytes=max(place.rests.file_bytes for place in self._places),
            sent=max(sent, key=lambda one: sum(one.values())),
            step_seconds=sum(seconds.values()),
            seconds=seconds,
            num_samples=samples,
            num_tokens=samples * profile.tokens // profile.rows,
        )


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
        sums = [one for group in plan.trained for one in (exchange.reduce(group), exchange.all_reduce(group))]
        refreshes = [exchange.refresh(group) for group in plan.updated]
        assert blueprint.pipeline is not None
        num_stages = len(blueprint.pipeline.at(place).stages)
        self.seconds = {
            "gather exposed": sum(one.seconds for one in gathers) / num_stages,  # of the first; others come beside it
            "reduce exposed": sum(one.seconds for one in sums) / num_stages,
            "update": update_seconds(blueprint, machine, place),
            "refresh exposed": sum(one.seconds for one in refreshes),
        }
        messages = [*gathers, *sums, *refreshes]
        self._sent = {"intra": sum(one.intra for one in messages), "inter": sum(one.inter for one in messages)}

    def memory(self, stages: Stages, run: Run, place: int) -> tuple[Mapping[str, int], int]:
        """(the most of each kind, the most at a moment)."""
        own = run.simulation.schedule.stages_of_rank(place)
        passing = max(stages.passing_bytes(stage) for stage in own)
        kept = round(run.simulation.peaks[place].activation_bytes)
        loss = stages.profile.loss_bytes if len(stages.parts) - 1 in own else 0
        gradients = max(sum(sizes[moment] for sizes in self.rests.by_group.values()) for moment in (1, 2))
        beside = gradients + self._gathered + self._staged + kept + passing
        kinds = {
            **self.rests.kinds,
            "gathered_bytes": self._gathered,
            "activation_bytes": max(0, kept + passing - loss),
            "loss_bytes": loss,
            "buffer_bytes": self.rests.kinds["buffer_bytes"] + self._staged,
        }
        return kinds, max(self.rests.after_backward, self.rests.bytes + beside)

    def all_sent(self, stages: Stages, run: Run, place: int) -> dict[str, int]:
        """By link, with outputs of stages and their gradients."""
        schedule = run.simulation.schedule
        own = schedule.stages_of_rank(place)
        ends = [stage for stage in own if schedule.crosses(stage)]
        ends += [stage - 1 for stage in own if stage and schedule.crosses(stage - 1)]
        return {**self._sent, "pipe": run.num_microbatches * sum(map(stages.output_bytes, ends))}
