"""What one rank of a blueprint takes and how long its step is: bytes at every moment, seconds of every part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ...zero.plan import GroupPlan
from ..blueprint import Blueprint
from ..footprint import Footprint, Moment
from ..offload import Home
from ..step_update import Timing
from .exchange import Exchange
from .machine import Machine
from .profile import Profile
from .step_order import Moment as InPart
from .step_order import StepOrder

_MICROBATCHES = 3  # that are simulated: a first one, one in between for all of these, the last one
_BLOCKS_IN_MEMORY = 3  # of activations that are offloaded, without a budget: see `ActivationOffload`
_CHUNKS_IN_MEMORY = 3  # of states that rest in a file, while they are updated


@dataclass(frozen=True)
class Estimate:
    """Of the fullest rank. Bytes are of its own share; what ranks of a host share is divided by their number.

    bytes: the most of each kind, by the names of `engine.memory()` and docs/planning.md; they need not come together.
    peak_bytes: the most at one moment of a step. sent: by a rank in a step, by link. seconds: the parts of
    step_seconds.
    """

    bytes: Mapping[str, int]
    peak_bytes: int
    host_bytes: int
    nvme_bytes: int
    sent: Mapping[str, int]
    step_seconds: float
    seconds: Mapping[str, float]
    num_samples: int  # of a step, over all ranks
    num_tokens: int

    def missing(self, machine: Machine) -> dict[str, int]:
        """What does not fit, by where, and by how many bytes of a rank."""
        share = machine.devices_per_host
        beyond = {
            "device memory": self.peak_bytes - machine.usable_bytes,
            "host memory": self.host_bytes - machine.host_bytes / share if machine.device == "cuda" else 0,
            "nvme": self.nvme_bytes - machine.nvme_bytes / share,
        }
        return {where: round(nbytes) for where, nbytes in beyond.items() if nbytes > 0}

    @property
    def seconds_per_sample(self) -> float:
        return self.step_seconds / self.num_samples


@dataclass(frozen=True)
class Work:
    """Seconds of the parts of a microbatch on a machine; see the protocol of `step_order`."""

    profile: Profile
    machine: Machine

    def forward(self, name: str) -> float:
        part = self.profile.part(name)
        return self._seconds(part.forward_flops, part.forward_traffic)

    def backward(self, name: str) -> float:
        part = self.profile.part(name)
        return self._seconds(part.backward_flops, part.backward_traffic)

    def _seconds(self, flops: int, traffic: int) -> float:
        return flops / self.machine.flops_of(self.profile.itemsize) + traffic / self.machine.memory


@dataclass(frozen=True)
class Activations:
    """Bytes of a microbatch's activations at each part, with what of them is offloaded."""

    profile: Profile
    blueprint: Blueprint

    @cached_property
    def bases(self) -> Mapping[str, int]:
        return self.profile.base_bytes()

    @cached_property
    def _waiting(self) -> Mapping[str, int]:
        """Gradients of the rest that the parts behind each have made."""
        waiting, total = {}, 0
        for name, part in reversed(list(self.profile.parts.items())):
            waiting[name] = total
            total += part.rest_gradient_bytes
        return waiting

    @property
    def _rest_waits(self) -> bool:
        """Else they are added to those of the microbatches before."""
        accumulates = (self.blueprint.config.gradient_accumulation_steps or 1) > 1
        return not accumulates or self.blueprint.policy.reduces_every_backward

    @property
    def is_offloaded(self) -> bool:
        return self.blueprint.config.activation_checkpointing.offload.device != "none"

    @property
    def _limit(self) -> int:
        largest = max((part.kept_bytes for part in self.profile.parts.values()), default=0)
        return self.blueprint.config.activation_checkpointing.offload.budget_bytes or _BLOCKS_IN_MEMORY * largest

    def at(self, name: str, is_backward: bool) -> int:
        """While a part computes."""
        part = self.profile.part(name)
        base = self.bases.get(name, 0)
        base = min(base, self._limit) if self.is_offloaded else base
        if not is_backward:
            return base + part.forward_peak_bytes
        return base + part.backward_peak_bytes + self._waiting[name] * self._rest_waits

    @property
    def offloaded_bytes(self) -> int:
        """The most that is elsewhere."""
        kept = sum(part.kept_bytes for part in self.profile.parts.values())
        return max(0, kept - self._limit) if self.is_offloaded else 0


def writes_gradients(blueprint: Blueprint) -> bool:
    """Whether gradients of large weights are made where they are staged: see `DirectGradients`."""
    config, size = blueprint.config, blueprint.arrangement.size(blueprint.domain.states)
    is_sent = blueprint.policy.reduces_every_backward and size > 1
    is_added = (config.gradient_accumulation_steps or 1) > 1 and not is_sent
    groups = [group for place in blueprint.places for group in place.trained]
    is_cast = any(group.dtype not in (group.reduce_dtype, torch.float64) for group in groups)
    return blueprint.device == "cpu" and blueprint.pipeline is None and not is_added and not is_cast


def estimate(blueprint: Blueprint, machine: Machine, profile: Profile) -> Estimate:
    """Of a blueprint without a pipeline. profile: of its microbatch."""
    footprint, work = Footprint(blueprint, 0), Work(profile, machine)
    exchange = Exchange(blueprint, machine)
    step = StepOrder(blueprint, exchange, footprint.gathered if footprint.frees_memory else None)
    accumulation = blueprint.config.gradient_accumulation_steps or 1
    repeats = _run(step, work, accumulation)
    activations = Activations(profile, blueprint)
    compute = step.timeline.computed + repeats.computed
    exposed = {f"{kind} exposed": seconds for kind, seconds in _exposed(step, repeats).items()}
    update = update_seconds(blueprint, machine, 0)
    in_backward = sum(work.backward(name) for name in profile.names)
    hidden = {Timing.DELAYED: compute, Timing.SPECULATIVE: in_backward, Timing.IN_BACKWARD: 0.0}
    update = max(0.0, update - hidden.get(blueprint.timing, 0.0))
    moved = 2 * activations.offloaded_bytes * accumulation / _speed_of_activations(blueprint, machine)
    refresh = sum(exchange.refresh(group).seconds for group in blueprint.places[0].updated)
    seconds = {
        "compute": compute,
        **exposed,
        "activations exposed": max(0.0, moved - compute),
        "update": update,
        "refresh exposed": refresh,
    }
    sent = {link: step.sent.get(link, 0) + repeats.sent.get(link, 0) for link in step.sent}
    for group in blueprint.places[0].updated:
        message = exchange.refresh(group)
        sent = {**sent, "intra": sent.get("intra", 0) + message.intra, "inter": sent.get("inter", 0) + message.inter}
    memory = Memory.of(blueprint, footprint, step, activations)
    return Estimate(
        bytes=memory.bytes,
        peak_bytes=memory.peak_bytes,
        host_bytes=memory.host_bytes,
        nvme_bytes=memory.nvme_bytes,
        sent=sent,
        step_seconds=sum(seconds.values()),
        seconds=seconds,
        num_samples=blueprint.config.train_batch_size or 0,
        num_tokens=(blueprint.config.train_batch_size or 0) * profile.tokens // profile.rows,
    )


@dataclass(frozen=True)
class Repeats:
    """What the microbatches add that are not simulated."""

    computed: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)


def _run(step: StepOrder, work: Work, accumulation: int) -> Repeats:
    """All microbatches between the second and the last are as the second."""
    simulated = min(accumulation, _MICROBATCHES)
    repeats = Repeats()
    for number in range(1, simulated + 1):
        before = step.timeline.computed, dict(step.timeline.exposed), dict(step.sent)
        step.microbatch(work, is_last=number == simulated)
        if number == _MICROBATCHES - 1 and accumulation > _MICROBATCHES:
            times = accumulation - _MICROBATCHES
            repeats = Repeats(
                times * (step.timeline.computed - before[0]),
                {key: times * (value - before[1].get(key, 0.0)) for key, value in step.timeline.exposed.items()},
                {link: times * (value - before[2].get(link, 0)) for link, value in step.sent.items()},
            )
    return repeats


def _exposed(step: StepOrder, repeats: Repeats) -> dict[str, float]:
    """By kind of collective."""
    found = {"gather": 0.0, "reduce": 0.0}
    for times in (step.timeline.exposed, repeats.exposed):
        for key, seconds in times.items():
            found[key.partition(",")[0]] += seconds
    return found


def update_seconds(blueprint: Blueprint, machine: Machine, place: int) -> float:
    """Of the optimizer, of the ranks of one place: what it reads and writes, where that rests."""
    footprint = Footprint(blueprint, blueprint.arrangement.num_ranks // len(blueprint.places) * place)
    groups, share, homes = blueprint.places[place].updated, machine.devices_per_host, blueprint.homes
    states = footprint.at(Moment.BETWEEN_STEPS).optimizer
    elements = sum(group.layout.shard_numel for group in groups)
    passing = sum(
        group.layout.shard_numel * (group.accumulation_dtype.itemsize + group.dtype.itemsize) for group in groups
    )
    away = sum(sum(footprint.chunks(group)) for group in groups)
    seconds = (2 * states + passing) / machine.memory
    if away:
        seconds += 2 * away / (machine.host_memory / share)
        seconds += passing / machine.link if homes.is_apart else 0.0
        seconds += 2 * away / (machine.nvme / share) if homes.states is Home.FILE else 0.0
    return seconds if elements else 0.0


def _speed_of_activations(blueprint: Blueprint, machine: Machine) -> float:
    is_file = blueprint.homes.activations is Home.FILE
    return min(machine.link, machine.nvme / machine.devices_per_host) if is_file else machine.link


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank, with the most at a moment."""

    bytes: Mapping[str, int]
    peak_bytes: int
    host_bytes: int
    nvme_bytes: int

    @classmethod
    def of(cls, blueprint: Blueprint, footprint: Footprint, step: StepOrder, activations: Activations) -> Memory:
        """Of a rank that goes through the moments of `step`."""
        rests = Resting.of(blueprint, footprint)
        peaks = [rests.after_backward]
        for moment in step.moments:
            beside = moment.gathered_bytes + moment.staged_bytes + activations.at(moment.part, moment.is_backward)
            peaks.append(rests.bytes + rests.gradients(moment) + beside)
        profile = activations.profile
        kinds = {
            **rests.kinds,
            "gathered_bytes": max((one.gathered_bytes for one in step.moments), default=0),
            "activation_bytes": max(activations.at(one.part, one.is_backward) for one in step.moments),
            "loss_bytes": profile.loss_bytes,
            "buffer_bytes": rests.kinds["buffer_bytes"] + max((one.staged_bytes for one in step.moments), default=0),
        }
        kinds["activation_bytes"] = max(0, kinds["activation_bytes"] - kinds["loss_bytes"])
        return cls(kinds, max(peaks), *rests.elsewhere(activations))


@dataclass(frozen=True)
class Resting:
    """What a rank holds whatever it computes, and its gradients as they come."""

    footprint: Footprint
    blueprint: Blueprint
    trained: tuple[GroupPlan, ...]
    kinds: Mapping[str, int]
    bytes: int  # without gradients
    after_backward: int
    host_bytes: int
    file_bytes: int
    by_group: Mapping[str, tuple[int, ...]]  # gradients between steps, between microbatches, and when they are final

    @classmethod
    def of(cls, blueprint: Blueprint, footprint: Footprint, place: int = 0) -> Resting:
        plan = blueprint.places[place]
        between = footprint.at(Moment.BETWEEN_STEPS, gathers=False)
        reduced = footprint.at(Moment.REDUCED, gathers=False)
        moments = (Moment.BETWEEN_STEPS, Moment.ACCUMULATING, Moment.REDUCED)
        by_group = {
            group.name: tuple(footprint.gradient(group, moment) for moment in moments) for group in plan.trained
        }
        chunks = [nbytes for group in plan.updated for nbytes in footprint.chunks(group)]
        passing = sum(sorted(chunks)[-_CHUNKS_IN_MEMORY:]) if blueprint.homes.states is Home.FILE else 0
        is_here = not blueprint.homes.is_apart
        buffers = reduced.staging + (passing if is_here else 0)
        optimizer = max(between.optimizer, reduced.optimizer)
        kinds = {
            "parameter_bytes": reduced.parameters,
            "gradient_bytes": max(reduced.gradients, *(sum(column) for column in zip(*by_group.values(), strict=True))),
            "optimizer_bytes": optimizer,
            "buffer_bytes": buffers,
        }
        rests = reduced.parameters + optimizer + reduced.staging
        after = rests + reduced.gradients + (passing if is_here else 0)
        host = reduced.host + (0 if is_here else passing)
        return cls(footprint, blueprint, tuple(plan.trained), kinds, rests, after, host, reduced.file, by_group)

    def gradients(self, moment: InPart) -> int:
        """As far as the microbatch has made them."""
        before = 0 if moment.is_first else 1
        after = 2 if moment.is_last else 1
        return sum(sizes[after if name in moment.arrived else before] for name, sizes in self.by_group.items())

    def elsewhere(self, activations: Activations) -> tuple[int, int]:
        """(host, nvme) bytes, with activations that are offloaded."""
        home, nbytes = self.blueprint.homes.activations, activations.offloaded_bytes
        return self.host_bytes + nbytes * (home is Home.HOST), self.file_bytes + nbytes * (home is Home.FILE)
