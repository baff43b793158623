"""A profile divided over the stages of a pipeline: time, memory and messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...pipe.schedules.costs import Costs
from ...pipe.split.split import SplitPlan
from .estimate import MachineWork
from .machine import Machine
from .profile import Profile, ProfilePart


@dataclass(frozen=True)
class Stages:
    """A profile divided over the stages of a pipeline."""

    split: SplitPlan
    profile: Profile
    work: MachineWork

    @cached_property
    def parts(self) -> tuple[tuple[tuple[str, ProfilePart], ...], ...]:
        """The parts of each stage. Parts before the blocks are in the first stage, parts after them in the last."""
        if missing := [name for name in self.split.blocks if name not in self.profile.parts]:
            raise ValueError(
                "plan: a pipeline and layered_gradient_accumulation are planned by blocks: expected each block as a "
                f"unit of zero_optimization.units, found '{missing[0]}' missing; leave units out of a planned config"
            )
        found: list[list[tuple[str, ProfilePart]]] = [[] for _ in range(self.split.num_stages)]
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
        """Bytes that a rank sends in a microbatch to ranks that share layers or sequences: by stage, by link."""
        different = {id(part): part for part in self.profile.parts.values()}
        known = {key: self.work.sent(part.exchanges) for key, part in different.items()}
        return tuple(
            {link: sum(known[id(part)][link] for _, part in parts) for link in ("intra", "inter")}
            for parts in self.parts
        )

    def costs(self, send_seconds: float) -> Costs:
        """Return seconds and bytes of each stage. Each half of a split backward takes half of its time."""
        forward = tuple(sum(self.work.forward(name) for name, _ in parts) for parts in self.parts)
        backward = tuple(sum(self.work.backward(name) for name, _ in parts) for parts in self.parts)
        # Of a linear layer y = x w^T, I computes dx = dy w and W computes dw = dy^T x: as many operations.
        halves = tuple(seconds / 2 for seconds in backward)
        kept = tuple(map(float, self.kept_bytes))
        # With recomputation the tensors of W are made in the backward, and a stage keeps less before it.
        put_off = tuple(map(min, kept, map(float, self.put_off_bytes)))
        nothing = (0.0,) * len(forward)
        return Costs(forward, backward, halves, halves, kept, put_off, nothing, send_seconds)

    @cached_property
    def kept_bytes(self) -> tuple[int, ...]:
        """Bytes of a microbatch until its backward, by stage: input and saved tensors, without the output."""
        found = []
        for stage, parts in enumerate(self.parts):
            total = self.input_bytes(stage) + sum(part.kept_bytes for _, part in parts)
            # The next stage has the output as its input: a message is counted with its receiver.
            found.append(max(0, total - (self.output_bytes(stage) if stage + 1 < len(self.parts) else 0)))
        return tuple(found)

    @cached_property
    def put_off_bytes(self) -> tuple[int, ...]:
        """Bytes of a microbatch from I until W, by stage. With recomputation they exceed those until I."""
        return tuple(sum(part.linear_bytes for _, part in parts) for parts in self.parts)

    def input_bytes(self, stage: int) -> int:
        """Return bytes that a stage receives from the stage before it."""
        return self.output_bytes(stage - 1) if stage else 0

    def working_bytes(self, stage: int, holds: bool) -> tuple[int, int, int, int]:
        """Return the peaks while a stage computes F, B, I or W of a microbatch that counts nowhere else.

        holds: gradients of its backward are separate tensors until the backward ends.
        """
        base = self.input_bytes(stage)
        forward = backward = halved = base
        bases = []
        for _, part in self.parts[stage]:
            bases.append(base)
            forward = max(forward, base + part.forward_peak_bytes)
            base += part.kept_bytes
        gradients = put_off = 0
        # From the last part to the first, as a backward goes. `bases` has the bytes that earlier parts still keep.
        for base, (_, part) in zip(reversed(bases), reversed(self.parts[stage]), strict=True):
            peak = part.holding_peak_bytes if holds else part.backward_peak_bytes
            backward = max(backward, base + gradients + peak)
            halved = max(halved, base + put_off + part.backward_peak_bytes)
            put_off += part.linear_bytes
            gradients += part.gradient_bytes * holds
        return forward, backward, halved, self.put_off_bytes[stage] + gradients

    def exchanging(self, stage: int) -> float:
        """Return seconds of a microbatch in which a stage waits for ranks that share layers or sequences."""
        return sum(self.work.exchanging(name) for name, _ in self.parts[stage])

    def output_bytes(self, stage: int) -> int:
        """Return bytes of a microbatch that a stage sends to the next stage; the gradient has as many."""
        return self.parts[stage][-1][1].output_bytes if self.parts[stage] else 0

    def send_seconds(self, machine: Machine) -> float:
        """Return seconds to send a microbatch's output to the next stage, for the largest output."""
        largest = max(self.output_bytes(stage) for stage in range(len(self.parts)))
        is_inside = machine.num_hosts == 1  # the pipeline is the outermost axis, so stages are on different hosts
        speed = machine.intra if is_inside else machine.inter
        latency = machine.intra_latency if is_inside else machine.inter_latency
        return machine.moving("sockets message", largest, latency + largest / speed)
