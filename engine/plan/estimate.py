"""Memory and time of a step without a pipeline: bytes at every moment, seconds of every part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ...comm import ParallelDims
from ...offload.activations import BLOCKS_IN_MEMORY
from ...zero.plan import GroupPlan
from ...zero.policy import ZeroPolicy
from ..blueprint.blueprint import Blueprint, Timing
from ..blueprint.footprint import Footprint, MemoryPhase
from ..blueprint.offload import Placement, placement_of
from ..config.config import Config
from .exchange import CollectiveCost, CollectiveCosts, gradient_seconds, host_seconds, over_links, sent_by_link
from .host_timeline import UnitWork, host_timeline
from .machine import Machine
from .profile import CollectiveCall, ComputePhase, Profile, ProfilePart
from .step_order import END, START, SimulatedTimeline, StepOrder

_CHUNKS_IN_MEMORY = 4  # of states in files: a chunk is read, a chunk is updated, two are written


@dataclass(frozen=True)
class Estimate:
    """Costs of the fullest rank. Memory that the ranks of a host share is divided by their number.

    bytes: peak of each kind, named as in `engine.memory()` and docs/planning.md; kinds may peak at different times.
    peak_bytes: peak of the total in a step. sent: bytes that a rank sends in a step, by link. seconds: the parts of
    step_seconds. hidden: seconds that overlap with computing.
    """

    bytes: Mapping[str, int]
    peak_bytes: int
    host_bytes: int
    nvme_bytes: int
    sent: Mapping[str, int]
    step_seconds: float
    seconds: Mapping[str, float]
    hidden: Mapping[str, float]
    num_samples: int  # of a step, over all ranks
    num_tokens: int

    def missing(self, machine: Machine) -> dict[str, int]:
        """Return the bytes that a rank lacks, by kind of memory."""
        share = machine.devices_per_host
        beyond = {
            "device memory": self.peak_bytes - machine.usable_bytes,
            # On CPUs a device's memory is its host's, compared in the line above.
            "host memory": self.host_bytes - machine.host_bytes / share if machine.device == "cuda" else 0,
            "nvme": self.nvme_bytes - machine.nvme_bytes / share,
        }
        return {where: round(nbytes) for where, nbytes in beyond.items() if nbytes > 0}

    @property
    def seconds_per_sample(self) -> float:
        return self.step_seconds / self.num_samples


@dataclass(frozen=True)
class MachineWork:
    """Seconds of a microbatch's parts on a machine, by a unit's name, START or END of `step_order`.

    transport: transport of the exchanges between ranks that share layers or sequences, see `comm.Collectives`.

    | exchange | whole tensor of n bytes on r ranks: each rank sends      |
    |----------|----------------------------------------------------------|
    | sum      | 2 (r - 1) / r n                                          |
    | sum_part | (r - 1) / r n                                            |
    | gather   | (r - 1) / r n                                            |
    | swap     | (r - 1) / r n, in equal parts to all ranks               |
    | trade    | its pieces for other ranks: in a hop of a ring, all n    |

    The caller waits for the result, so no exchange is hidden. Here this includes rings, which overlap with products.
    """

    profile: Profile
    machine: Machine
    transport: str = "native"

    def forward(self, name: str) -> float:
        return self._seconds[name][0] if name in self._seconds else 0.0

    def backward(self, name: str) -> float:
        return self._seconds[name][1] if name in self._seconds else 0.0

    def exchanging(self, name: str) -> float:
        """Return seconds in which a part's forward and backward wait for other ranks."""
        return self._seconds[name][2] if name in self._seconds else 0.0

    @cached_property
    def _seconds(self) -> Mapping[str, tuple[float, float, float]]:
        """Seconds of (forward, backward, exchanges) by part. Equal blocks share a `ProfilePart`."""
        found, known = {}, dict[int, tuple[float, float, float]]()
        for name, part in self.profile.parts.items():
            if id(part) not in known:
                known[id(part)] = self._of_part(part)
            found[name] = known[id(part)]
        return found

    def _of_part(self, part: ProfilePart) -> tuple[float, float, float]:
        machine, itemsize = self.machine, self.profile.itemsize
        before, behind = (
            sum(self._exchange(call).seconds for call in calls)
            for calls in (part.forward_exchanges, part.backward_exchanges)
        )
        forward = machine.computing(
            "forward", part.forward_flops, part.forward_traffic, itemsize, part.forward_operations
        )
        backward = machine.computing(
            "backward", part.backward_flops, part.backward_traffic, itemsize, part.backward_operations
        )
        return forward + before, backward + behind, before + behind

    def sent(self, calls: Sequence[CollectiveCall]) -> dict[str, int]:
        """Return bytes of exchanges by link."""
        return sent_by_link(list(map(self._exchange, calls)))

    @cached_property
    def _axes(self) -> Mapping[str, tuple[int, int]]:
        """By axis: its number of ranks, and how many of them share a host."""
        parallel_dims = ParallelDims(self.profile.sizes, data=())
        names = [name for name, _ in self.profile.sizes]
        return {
            name: (parallel_dims.size((name,)), self.machine.ranks_on_host(parallel_dims, (name,))) for name in names
        }

    def _exchange(self, call: CollectiveCall) -> CollectiveCost:
        size, on_host = self._axes.get(call.axis, (1, 1))
        if call.kind == "swap":
            seconds = self.machine.all_to_all(call.nbytes, size, on_host)
        elif call.kind == "trade":
            seconds = self.machine.pass_on(call.sent, is_inside=on_host >= size)
        else:
            # sum = sum_part + gather.
            seconds = self.machine.collective(call.nbytes, size, on_host) * (2 if call.kind == "sum" else 1)
        name = "gather" if call.kind == "gather" else "reduce"
        if self.transport == "shared_memory":
            return CollectiveCost(call.sent, 0, self.machine.moving("shared_memory reduce", call.sent, seconds))
        seconds = self.machine.moving(f"{self.transport} {name}", call.sent, seconds)
        goes_to_each = self.transport == "sockets" or call.kind == "swap"
        return over_links(call.sent, size, on_host, goes_to_each, seconds)


@dataclass(frozen=True)
class Activations:
    """Bytes of a microbatch's activations at each part, without the offloaded ones."""

    profile: Profile
    config: Config
    policy: ZeroPolicy
    placement: Placement  # of the offloaded ones

    @cached_property
    def bases(self) -> Mapping[str, int]:
        return self.profile.base_bytes()

    @cached_property
    def _waiting(self) -> Mapping[str, int]:
        """Gradients of the root unit from later parts, by part."""
        waiting, total = {}, 0
        for name, part in reversed(list(self.profile.parts.items())):
            waiting[name] = total
            total += part.rest_gradient_bytes
        return waiting

    @property
    def _rest_waits(self) -> bool:
        """Whether these gradients are new memory, not added to those of earlier microbatches."""
        accumulates = (self.config.gradient_accumulation_steps or 1) > 1
        return not accumulates or self.policy.reduces_every_backward

    @cached_property
    def _limit(self) -> int:
        return kept_limit(self.profile, self.config)

    def at(self, name: str, phase: ComputePhase) -> int:
        """Return bytes while a part computes."""
        part = self.profile.part(name)
        base = self.bases.get(name, 0)
        # Earlier parts have kept `base` bytes. With offload, at most the limit is still in memory.
        base = base if self.placement is Placement.MODEL else min(base, self._limit)
        base += self.profile.cast_bytes
        waiting = 0 if phase is ComputePhase.FORWARD else self._waiting[name] * self._rest_waits
        return base + part.peak_bytes(phase) + waiting

    @property
    def offloaded_bytes(self) -> int:
        """Peak of the offloaded bytes."""
        kept = sum(part.kept_bytes for part in self.profile.parts.values())
        return 0 if self.placement is Placement.MODEL else max(0, kept - self._limit)


def kept_limit(profile: Profile, config: Config) -> int:
    """Return the most bytes of offloaded activations in memory, besides the part that computes."""
    largest = max((part.kept_bytes for part in profile.parts.values()), default=0)
    # Without a budget the offload has this many blocks on their way: see offload/activations.py.
    return config.activation_checkpointing.offload.budget_bytes or BLOCKS_IN_MEMORY * largest


def writes_gradients(blueprint: Blueprint) -> bool:
    """Return whether gradients of large weights are written where they are staged: see `make_gradients_in_place`."""
    config, size = blueprint.config, blueprint.parallel_dims.size(blueprint.sharding.states)
    is_sent = blueprint.policy.reduces_every_backward and size > 1
    is_added = (config.gradient_accumulation_steps or 1) > 1 and not is_sent
    groups = [group for place in blueprint.places for group in place.trained]
    has_others = blueprint.parallel_dims.size(blueprint.sharding.summed) > 1
    staged = {(group.dtype, group.reduce_dtype if has_others else group.accumulation_dtype) for group in groups}
    is_cast = any(dtype not in (there, torch.float64) for dtype, there in staged)
    return blueprint.device == "cpu" and blueprint.pipeline is None and not is_added and not is_cast


class StepParts:
    """The costs of a step without a pipeline that do not depend on the microbatch, for many profiles."""

    def __init__(self, blueprint: Blueprint, machine: Machine, place: int = -1, like: StepParts | None = None) -> None:
        """Take a blueprint with one or several microbatches per step, as in the estimates.

        place: index in `blueprint.places`. like: parts of a blueprint that differs only in offloads; its order is
        reused.
        """
        self.blueprint, self.machine = blueprint, machine
        self.place = place % len(blueprint.places)
        rank = blueprint.first_rank_of(self.place)
        footprint = Footprint(blueprint, rank)
        self.rests = Resting.of(blueprint, footprint, self.place)
        exchange = CollectiveCosts(blueprint, machine)
        accumulates = (blueprint.config.gradient_accumulation_steps or 1) > 1
        self.order: StepOrder
        self._inner: StepOrder | None
        if like is not None:
            self.order, self._inner = like.order, like._inner
        else:
            bytes_of = footprint.gathered if footprint.frees_memory else None
            self.order = StepOrder(blueprint, exchange, bytes_of, True, self.place)
            self._inner = StepOrder(blueprint, exchange, bytes_of, False, self.place) if accumulates else None
        updated = blueprint.places[self.place].updated
        self._refreshes = [exchange.refresh(group) for group in updated]
        self._matrices = [exchange.matrices(group, rank) for group in updated]
        self._update = update_seconds(blueprint, machine, self.place)
        self._on_host = _updates_on_host(blueprint, footprint, machine, self.place)
        self.is_direct = writes_gradients(blueprint)
        # If gradients are written in place, asking for the place first uses up the received terms of other ranks.
        self._waits = not self.is_direct and blueprint.parallel_dims.size(blueprint.sharding.summed) > 1
        # With m microbatches a step is: the first, m - 2 between, the last. A single microbatch is first and last.
        moments = [(True, True)] if not accumulates else [(True, False), (False, False), (False, True)]
        self._gradients = [gradient_seconds(blueprint, machine, self.place, *ends, self.is_direct) for ends in moments]
        self._num_units = len(blueprint.places[self.place].units)

    def estimate(self, config: Config, profile: Profile) -> Estimate:
        """Estimate a step. config: with its microbatches. profile: of a microbatch."""
        accumulation, samples = config.gradient_accumulation_steps or 1, config.train_batch_size or 0
        work = MachineWork(profile, self.machine, self.blueprint.transport)
        placement = placement_of_activations(config, self.blueprint)
        activations = Activations(profile, config, self.blueprint.policy, placement)
        line = self.order.timeline(work.forward, work.backward)
        times = {"compute": line.computed, **exposed_seconds(line)}
        collectives = line.hidden_seconds
        sent: Mapping[str, int] = self.order.sent
        # step = last microbatch + (m - 1) x inner microbatch. An inner microbatch sends less.
        if self._inner is not None:
            line = self._inner.timeline(work.forward, work.backward)
            more = {"compute": line.computed, **exposed_seconds(line)}
            times = {name: times[name] + (accumulation - 1) * more[name] for name in times}
            collectives += (accumulation - 1) * line.hidden_seconds
            sent = {link: nbytes + (accumulation - 1) * self._inner.sent[link] for link, nbytes in sent.items()}
        # A single microbatch has a single number, and `between` is empty: 0.0 stands for the last.
        first, *between, last = (*self._gradients, 0.0) if len(self._gradients) == 1 else self._gradients
        times["compute"] += first + last + sum(between) * (accumulation - 2)
        in_backward = sum(work.backward(name) for name in profile.names)
        # A delayed update runs beside the whole computing of the next step, a speculative update beside the backward.
        beside = {Timing.DELAYED: times["compute"], Timing.SPECULATIVE: in_backward}
        update = max(0.0, self._update - beside.get(self.blueprint.timing, 0.0))
        # update = all seconds - those of units on the host + the device's wait for these units, by their timeline.
        if self._on_host and self.blueprint.timing in (Timing.AFTER_NORM, Timing.SPECULATIVE):
            update = self._update - sum(unit.update for unit in self._on_host) + self._waits_for_host(work)
        speed = speed_of_activations(activations.placement, self.machine)
        # Each byte leaves in the forward and returns in the backward.
        moved = 2 * activations.offloaded_bytes * accumulation / speed
        exchanging = sum(map(work.exchanging, profile.names)) * accumulation
        # `MachineWork` has these waits inside the forwards and backwards. Here they are a separate part.
        times["compute"] -= exchanging
        seconds = {
            **times,
            "exchange exposed": exchanging,
            "activations exposed": max(0.0, moved - times["compute"]),
            "update": update,
            "refresh exposed": sum(message.seconds for message in [*self._refreshes, *self._matrices]),
            "host": host_seconds(self.blueprint, self.machine, self._num_units, accumulation),
        }
        exchanged = work.sent([call for part in profile.parts.values() for call in part.exchanges])
        in_update = sent_by_link([*self._refreshes, *self._matrices])
        sent = {link: nbytes + in_update[link] + accumulation * exchanged[link] for link, nbytes in sent.items()}
        kinds, peak = self._memory(activations)
        host, file = self.rests.elsewhere(activations)
        tokens = samples * profile.tokens // profile.rows
        hidden = {
            "collectives": collectives,
            "activations": moved - seconds["activations exposed"],
            "update": max(0.0, self._update - update),
        }
        return Estimate(kinds, peak, host, file, sent, sum(seconds.values()), seconds, hidden, samples, tokens)

    def _waits_for_host(self, work: MachineWork) -> float:
        """Return seconds in which the device waits for an update on the host."""
        units = [
            unit._replace(forward=work.forward(unit.name), backward=work.backward(unit.name)) for unit in self._on_host
        ]
        has_copies = any(message.seconds for message in self._refreshes)  # on other ranks, updated at once
        by_unit = self.blueprint.policy.frees_parameters and not has_copies
        return host_timeline(units, self.blueprint.timing is Timing.SPECULATIVE, by_unit)[1]

    def _memory(self, activations: Activations) -> tuple[Mapping[str, int], int]:
        """Return (peak of each kind, peak of the total)."""
        slots = activations.profile.slot_bytes
        rests, peak = self.rests, self.rests.after_backward + slots
        most = {"gathered_bytes": 0, "activation_bytes": 0, "buffer_bytes": 0}
        in_backward = 0
        for beside, gathered, staged, name, phase in self._moments:
            held = activations.at(name, phase)
            in_backward = max(in_backward, beside + held)
            for kind, nbytes in zip(most, (gathered, held, staged), strict=True):
                most[kind] = max(most[kind], nbytes)
        # Two candidates: the update has temporaries and no activations, a backward has activations and no temporaries.
        peak = max(peak, rests.bytes + in_backward + slots)
        if self.blueprint.config.compile.graphs and self.machine.device == "cuda":
            # The pool of the graphs keeps `in_backward` while shards are updated, and a batch is copied for them.
            inputs = activations.profile.input_bytes
            peak = max(peak, rests.bytes + in_backward + rests.in_update + inputs + slots)
            most["buffer_bytes"] += inputs
        loss = min(activations.profile.loss_bytes, most["activation_bytes"])
        most["activation_bytes"] -= loss
        most["buffer_bytes"] += rests.kinds["buffer_bytes"] + slots
        return {**rests.kinds, **most, "loss_bytes": loss}, peak

    @cached_property
    def _moments(self) -> list[tuple[int, int, int, str, ComputePhase]]:
        """(bytes besides those at rest, gathered bytes, staged bytes, part, phase) at each moment."""
        found = []
        accumulates = self._inner is not None
        # With several microbatches: the last, the first, and any between. Their gradients at the start differ.
        runs = [(self.order, not accumulates)] + ([(self._inner, True), (self._inner, False)] if self._inner else [])
        for step, is_first in runs:
            gradients, before, after = self.rests.gradients(is_first, step.is_last)
            before_moment: frozenset[str] = frozenset()
            waits = 0  # bytes until the next unit's gradients are collected
            copies = 0  # bytes until the step ends
            for name, phase, gathered, staged, arrived in step.moments:
                arriving, before_moment = arrived - before_moment, arrived
                gradients += sum(after[group] - before[group] for group in arriving)
                passing = sum(self.rests.passing[group] for group in arriving)
                beside = gradients + passing + waits + copies + gathered + staged
                if arriving:
                    waits = passing * self._waits
                    copies += sum(self.rests.copies[group] for group in arriving) * step.is_last
                found.append((beside, gathered, staged, name, phase))
        return found


def estimate(blueprint: Blueprint, machine: Machine, profile: Profile, place: int = -1) -> Estimate:
    """Estimate a step without a pipeline. profile: of a microbatch. place: index in `places`; -1: the fullest."""
    return StepParts(blueprint, machine, place).estimate(blueprint.config, profile)


def exposed_seconds(line: SimulatedTimeline) -> dict[str, float]:
    """Return exposed seconds by kind of collective."""
    found = {"gather exposed": 0.0, "reduce exposed": 0.0}
    for key, seconds in line.exposed.items():
        found[f"{key} exposed"] += seconds
    return found


def update_seconds(blueprint: Blueprint, machine: Machine, place: int) -> float:
    """Return seconds of the optimizer on the ranks of a place: it reads and writes states where they rest."""
    footprint = Footprint(blueprint, blueprint.first_rank_of(place))
    groups, share, offload_plan = blueprint.places[place].updated, machine.devices_per_host, blueprint.offload_plan
    on_host = _updates_on_host(blueprint, footprint, machine, place)
    states = footprint.at(MemoryPhase.BETWEEN_STEPS, gathers=False).optimizer
    passing = sum(
        group.layout.shard_numel * (group.accumulation_dtype.itemsize + group.dtype.itemsize)
        for group in groups
        if not footprint.leaves(group)
    )
    away = 0 if on_host else sum(sum(footprint.chunks(group)) for group in groups)
    # Each state is read and written. The gradient is only read. Beside master weights, the parameter is only written.
    moved = 2 * states + passing
    seconds = machine.moving("update", moved, moved / machine.memory)
    seconds += sum(unit.leaving + unit.update + unit.returning for unit in on_host)
    # States that are updated elsewhere pass through host memory, and through the drives if they rest in files.
    if away:
        seconds += machine.moving("update", 2 * away, 2 * away / (machine.host_memory / share))
        if offload_plan.states is Placement.FILE:
            passes = away / (machine.nvme / share)
            seconds += machine.moving("file read", away, passes) + machine.moving("file write", away, passes)
    return seconds if groups else 0.0


def _updates_on_host(blueprint: Blueprint, footprint: Footprint, machine: Machine, place: int) -> list[UnitWork]:
    """Return the seconds of each unit's update on the host of a device, in the order of the forward; [] elsewhere."""
    plan, share = blueprint.places[place], machine.devices_per_host
    if not any(map(footprint.leaves, plan.updated)):
        return []
    updated, found = set(map(id, plan.updated)), []
    for unit, groups in plan.units:
        own = [group for group in groups if id(group) in updated and footprint.leaves(group)]
        gradients = sum(group.layout.shard_numel * group.accumulation_dtype.itemsize for group in own)
        parameters = sum(group.shard_bytes for group in own)
        files = sum(sum(footprint.chunks(group)) for group in own) * (blueprint.offload_plan.states is Placement.FILE)
        update = sum(map(footprint.host_update_bytes, own)) / (machine.host_memory / share)
        drive = 2 * files / (machine.nvme / share)
        name = START if unit.is_root else unit.name
        # Reading states of the next unit overlaps with the update of this unit, so the slower of the two counts.
        speeds = gradients / machine.link, max(update, drive), parameters / machine.link
        found.append(UnitWork(name, 0.0, 0.0, *speeds))
    found.sort(key=lambda unit: unit.name != START)
    # The head and the loss compute, but have no group of a unit.
    return [*found, UnitWork(END)]


def placement_of_activations(config: Config, blueprint: Blueprint) -> Placement:
    """Return where activations of a config rest; the blueprint is that of its model states."""
    return placement_of(config.activation_checkpointing.offload.device, blueprint.offload_plan.is_apart)


def speed_of_activations(placement: Placement, machine: Machine) -> float:
    """Return bytes per second of offloaded activations, in each direction."""
    is_file = placement is Placement.FILE
    return min(machine.link, machine.nvme / machine.devices_per_host) if is_file else machine.link


@dataclass(frozen=True)
class Resting:
    """Memory of a rank that does not depend on the microbatch, and its gradients at each moment."""

    footprint: Footprint
    blueprint: Blueprint
    trained: tuple[GroupPlan, ...]
    kinds: Mapping[str, int]
    bytes: int  # without gradients
    in_update: int  # of an update alone: old versions, and directions of whole parameters
    after_backward: int
    host_bytes: int
    file_bytes: int
    by_group: Mapping[str, tuple[int, ...]]  # gradients between steps, between microbatches, and after reduction
    passing: Mapping[str, int]  # gradients that exist until their unit is updated in the backward
    copies: Mapping[str, int]  # kept by a speculative update of a group until the step ends

    @classmethod
    def of(cls, blueprint: Blueprint, footprint: Footprint, place: int = 0) -> Resting:
        plan = blueprint.places[place]
        between = footprint.at(MemoryPhase.BETWEEN_STEPS, gathers=False)
        reduced = footprint.at(MemoryPhase.REDUCED, gathers=False)
        moments = (MemoryPhase.BETWEEN_STEPS, MemoryPhase.ACCUMULATING, MemoryPhase.REDUCED)
        by_group = {
            group.name: tuple(
                # If gradients accumulate in the shard, it exists from the start of a step.
                footprint.gradient(group, MemoryPhase.REDUCED if footprint.adds_in_place(group) else moment)
                + footprint.thin(group, moment)
                for moment in moments
            )
            for group in plan.trained
        }
        accumulates = (blueprint.config.gradient_accumulation_steps or 1) > 1
        columns = list(zip(*by_group.values(), strict=True))
        # With a single microbatch the moment between microbatches never comes.
        columns = columns if accumulates else columns[::2]
        chunks = [nbytes for group in plan.updated for nbytes in footprint.chunks(group)]
        passing = sum(sorted(chunks)[-_CHUNKS_IN_MEMORY:]) if blueprint.offload_plan.states is Placement.FILE else 0
        in_device_memory = not blueprint.offload_plan.is_apart
        buffers = reduced.staging + footprint.quantized() + (passing if in_device_memory else 0)
        copies = {group.name: footprint.copies(group) for group in plan.trained}
        kinds = {
            "parameter_bytes": reduced.parameters,
            "gradient_bytes": max(reduced.gradients, *(sum(column) for column in columns)),
            "optimizer_bytes": reduced.optimizer,
            "buffer_bytes": buffers,
        }
        rests = reduced.parameters + between.optimizer + buffers
        direction, on_host = footprint.directions()
        in_update = sum(copies.values()) + direction
        # PowerSGD's message is gone before the update makes its temporaries.
        after = rests + max(in_update, footprint.thin_message()) + reduced.gradients
        host = reduced.host + (0 if in_device_memory else passing) + on_host + footprint.snapshot()
        used_up = {group.name: footprint.passing(group) for group in plan.trained}
        trained, file = tuple(plan.trained), reduced.file
        return cls(footprint, blueprint, trained, kinds, rests, in_update, after, host, file, by_group, used_up, copies)

    def gradients(self, is_first: bool, is_last: bool) -> tuple[int, Mapping[str, int], Mapping[str, int]]:
        """Return gradients of a microbatch: (total at its start, by group before and after its backward).

        is_first, is_last: of the step's microbatches.
        """
        before, after = 0 if is_first else 1, 2 if is_last else 1
        of_groups = {name: (sizes[before], sizes[after]) for name, sizes in self.by_group.items()}
        first, last = ({name: sizes[place] for name, sizes in of_groups.items()} for place in (0, 1))
        return sum(first.values()), first, last

    def elsewhere(self, activations: Activations) -> tuple[int, int]:
        """Return (host, NVMe) bytes, including offloaded activations."""
        nbytes, is_file = activations.offloaded_bytes, activations.placement is Placement.FILE
        return self.host_bytes + nbytes * (not is_file), self.file_bytes + nbytes * is_file
