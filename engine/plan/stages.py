"""What the stages of a pipeline compute, keep and exchange: a profile divided over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...pipe.schedules.costs import Costs
from ...pipe.split.split import SplitPlan
from .estimate import MachineWork
from .exchange import Calls
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
        """By stage. What comes before the blocks is of the first stage, what comes behind them of the last."""
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

    def send_seconds(self, machine: Machine) -> float:
        """Of what the stage with the largest output makes of a microbatch, to the next one."""
        largest = max(self.output_bytes(stage) for stage in range(len(self.parts)))
        is_inside = machine.num_hosts == 1  # the pipe is the outermost axis: its ranks are as far apart as can be
        speed = machine.intra if is_inside else machine.inter
        latency = machine.intra_latency if is_inside else machine.inter_latency
        return machine.moving("sockets message", largest, latency + largest / speed)
