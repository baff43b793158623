"""Memory and time of a step layer by layer: all microbatches go through a block before any enters the next block.

With m microbatches, while a microbatch goes through block s, memory has

    forward     m times the kept bytes of earlier blocks, and (m - 1) times the kept bytes and the output of block s
    backward    m times the kept bytes of earlier blocks; for each microbatch still to come the kept bytes of block s
                and the gradient of its output; for each earlier microbatch the gradient of its input

and full gradients of block s alone. A block is gathered while the block before it computes, once in each direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from ...pipe.schedules.schedule import Action, Op
from ...zero.plan import GroupPlan
from ..blueprint.blueprint import Blueprint, Timing
from ..blueprint.footprint import Footprint
from ..blueprint.offload import Placement
from ..config.config import Config
from .estimate import (
    Estimate,
    MachineWork,
    Resting,
    exposed_seconds,
    kept_limit,
    placement_of_activations,
    speed_of_activations,
    update_seconds,
)
from .exchange import CollectiveCost, CollectiveCosts, gradient_seconds, host_seconds, sent_by_link
from .machine import Machine
from .profile import Profile
from .stages import Stages
from .step_order import SimulatedTimeline

_Moment = tuple[Action, int, int, int]
"""A block computes all microbatches: (action, gathered bytes, gradients in the first microbatch, in later ones)."""


class LayeredParts:
    """The costs of a step that do not depend on the microbatch, for many profiles."""

    def __init__(self, blueprint: Blueprint, machine: Machine, place: int = -1) -> None:
        """Take a blueprint with any number of microbatches. place: index in its places; -1: the fullest."""
        assert blueprint.pipeline is not None and blueprint.is_layered
        self.blueprint, self.machine, self.split = blueprint, machine, blueprint.pipeline.split
        self._place = place % len(blueprint.places)
        self._actions = blueprint.pipeline.schedule.actions[0]
        rank, plan = blueprint.first_rank_of(self._place), blueprint.places[self._place]
        self._footprint, exchange = Footprint(blueprint, rank), CollectiveCosts(blueprint, machine)
        self.rests = Resting.of(blueprint, self._footprint, self._place)
        self._plan = plan
        names = [set(names) for names in self.split.parameters]
        # A unit is gathered as a whole, even if a block uses only one of its groups.
        units = [groups for _, groups in plan.units]
        used = [[groups for groups in units if any(_uses(of_stage, group) for group in groups)] for of_stage in names]
        self._groups = [[group for groups in of_stage for group in groups] for of_stage in used]
        self._gathers = {id(group): exchange.gather(group) for group in plan.groups}
        self._sums = {
            id(group): exchange.reduce(group).and_then(exchange.all_reduce(group, rank)) for group in plan.trained
        }
        self._refreshes = [exchange.refresh(group).and_then(exchange.matrices(group, rank)) for group in plan.updated]
        is_native = blueprint.transport == "native"
        self._staged = 2 * max((group.slot_bytes for group in plan.trained), default=0) if is_native else 0
        self._update = update_seconds(blueprint, machine, self._place)
        ends = ((True, False), (False, False), (False, True))
        self._added = [gradient_seconds(blueprint, machine, self._place, *end, False) for end in ends]

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory(self, config: Config, stages: Stages) -> tuple[Mapping[str, int], int]:
        """Return (peak of each kind, peak of the total)."""
        count, profile = config.gradient_accumulation_steps or 1, stages.profile
        most = peak = gathered = 0
        for action, of_groups, gradients_first, gradients_later in self._moments:
            stage = action.stage
            of_first, of_later = self._held(config, stages, action.op, stage)
            working = stages.working_bytes(stage, False), stages.working_bytes(stage, True)
            is_forward = action.op is Op.F
            plain = working[0][0 if is_forward else 1]
            first, later = (plain, plain) if is_forward else (working[1][1], working[self._holds_each][1])
            most = max(most, of_first + plain, (of_later + plain) * (count > 1))
            peak = max(peak, of_first + first + gradients_first + of_groups)
            if count > 1:
                peak = max(peak, of_later + later + gradients_later + of_groups)
            gathered = max(gathered, of_groups)
        slots = profile.slot_bytes
        # All microbatches enter the first block before any leaves it, so all inputs exist together.
        cast = count * profile.cast_bytes
        kinds = {
            **self.rests.kinds,
            "gathered_bytes": gathered,
            "activation_bytes": max(0, most + cast - profile.loss_bytes),
            "loss_bytes": profile.loss_bytes,
            "buffer_bytes": self.rests.kinds["buffer_bytes"] + self._staged + slots,
        }
        return kinds, max(self.rests.after_backward, self.rests.bytes + peak + cast + self._staged) + slots

    def _held(self, config: Config, stages: Stages, op: Op, stage: int) -> tuple[int, int]:
        """Return bytes of the other microbatches, while the first one computes, and the fullest of the later ones.

        That is the last one in a forward, and the second one in a backward.
        """
        others = (config.gradient_accumulation_steps or 1) - 1
        kept, given = stages.kept_bytes, stages.output_bytes(stage) if stage + 1 < len(stages.parts) else 0
        before, here = (others + 1) * sum(kept[:stage]), others * kept[stage]
        if placement_of_activations(config, self.blueprint) is not Placement.MODEL:
            limit = kept_limit(stages.profile, config)
            before, here = min(before, limit), min(before + here, limit) - min(before, limit)
        received = stages.input_bytes(stage)
        if op is Op.F:
            return before + others * received, before + here + others * given
        # Besides the second microbatch, which computes, m - 2 of the m - 1 counted are still to come.
        to_come = max(0, others - 1) / max(1, others)
        return before + here + others * given, before + received + int(to_come * (here + others * given))

    @property
    def _holds_each(self) -> bool:
        """Whether each microbatch keeps its gradients, because they are accumulated in another dtype."""
        return any(group.is_added_up_flat for group in self._plan.trained)

    @cached_property
    def _moments(self) -> list[_Moment]:
        """The moments of a step, in order."""
        found, full = [], set[int]()
        by_id = {id(group): group for of_stage in self._groups for group in of_stage}
        frees = self._footprint.frees_memory
        for action in self._actions:
            of_stage = {id(group) for group in self._groups[action.stage]}
            if action.op is Op.GATHER:
                full |= of_stage
            elif action.op is Op.RELEASE:
                full -= of_stage
            elif action.op in (Op.F, Op.B) and action.microbatch == 0:
                gathered = sum(self._footprint.gathered(by_id[key]) for key in full) if frees else 0
                first, later = (self._gradients(action, is_later) for is_later in (False, True))
                found.append((action, gathered, first, later))
        return found

    def _gradients(self, action: Action, is_later: bool) -> int:
        """Return gradients of all groups while a block computes the first or a later microbatch."""
        total = 0
        for (first, last), (between, added, reduced) in self._spans:
            begins = action.stage == last and not is_later
            if action.op is Op.F or action.stage > last or begins:
                total += between
            else:
                total += reduced if action.stage < first else added
        return total

    @cached_property
    def _spans(self) -> list[tuple[tuple[int, int], tuple[int, int, int]]]:
        """((first block, last block), gradients (before, between, after)) of each trained group."""
        used: dict[int, list[int]] = {}
        for number, groups in enumerate(self._groups):
            for group in groups:
                used.setdefault(id(group), []).append(number)
        found = []
        for group in self._plan.trained:
            numbers, sizes = used.get(id(group), [0]), self.rests.by_group[group.name]
            final = sizes[-1] + self.rests.copies[group.name]
            found.append(((numbers[0], numbers[-1]), (sizes[0], self._footprint.added_up(group), final)))
        return found

    # -- a step ---------------------------------------------------------------------------------------------------

    def estimate(self, config: Config, stages: Stages) -> Estimate:
        """Estimate a step. config: with its microbatches. stages: of the profile of a microbatch."""
        count, samples, machine = config.gradient_accumulation_steps or 1, config.train_batch_size or 0, self.machine
        kinds, peak = self.memory(config, stages)
        # A block computes all microbatches in a row: to the timeline it is a single long part.
        computed = [count * seconds for seconds in stages.costs(0.0).forward]
        back = [count * seconds for seconds in stages.costs(0.0).backward]
        exchanging = count * sum(map(stages.exchanging, range(len(computed))))
        line = self._timeline(computed, back)
        first, between, last = self._added
        compute = sum(computed) + sum(back) - exchanging + first + last + between * max(0, count - 2)
        beside = {Timing.DELAYED: compute, Timing.SPECULATIVE: sum(back)}.get(self.blueprint.timing, 0.0)
        away = self._away(config, stages)
        placement = placement_of_activations(config, self.blueprint)
        moved = 2 * away / speed_of_activations(placement, machine)
        seconds = {
            "compute": compute,
            **exposed_seconds(line),
            "exchange exposed": exchanging,
            "activations exposed": max(0.0, moved - compute),
            "update": max(0.0, self._update - beside),
            "refresh exposed": sum(message.seconds for message in self._refreshes),
            "host": host_seconds(self.blueprint, machine, len(self._plan.units), count),
        }
        host, file = self.rests.host_bytes, self.rests.file_bytes
        return Estimate(
            bytes=kinds,
            peak_bytes=peak,
            host_bytes=host + away * (placement is Placement.HOST),
            nvme_bytes=file + away * (placement is Placement.FILE),
            sent=self._sent(stages, count),
            step_seconds=sum(seconds.values()),
            seconds=seconds,
            hidden={
                "collectives": line.hidden_seconds,
                "activations": moved - seconds["activations exposed"],
                "update": self._update - seconds["update"],
            },
            num_samples=samples,
            num_tokens=samples * stages.profile.tokens // stages.profile.rows,
        )

    def _away(self, config: Config, stages: Stages) -> int:
        """Return offloaded bytes of activations at the end of the forward."""
        if placement_of_activations(config, self.blueprint) is Placement.MODEL:
            return 0
        kept = (config.gradient_accumulation_steps or 1) * sum(stages.kept_bytes)
        return max(0, kept - kept_limit(stages.profile, config))

    def _timeline(self, forward: Sequence[float], backward: Sequence[float]) -> SimulatedTimeline:
        """Return the times of a step. forward, backward: seconds of all microbatches in each block."""
        line, gathered, end = SimulatedTimeline(overlaps=self.machine.overlaps), [0.0] * len(forward), 0.0
        for action, messages in self._collectives:
            if action.op in (Op.F, Op.B):
                line.wait("gather", gathered[action.stage])
                line.compute((forward if action.op is Op.F else backward)[action.stage])
                continue
            kind = "gather" if action.op is Op.GATHER else "reduce"
            end = line.start(kind, sum(message.seconds for message in messages))
            if action.op is Op.GATHER:
                gathered[action.stage] = end
        line.wait("reduce", end)  # the update needs the reductions that are still queued
        return line

    @cached_property
    def _collectives(self) -> list[tuple[Action, list[CollectiveCost]]]:
        """The collectives of a step in order, with the first microbatch of each block between them."""
        found, full = [], set[int]()
        ends = {id(group): first for group, ((first, _), _) in zip(self._plan.trained, self._spans, strict=True)}
        for action in self._actions:
            groups, messages = self._groups[action.stage], list[CollectiveCost]()
            if action.op is Op.GATHER:
                # A group of a unit that the block before uses too is full already.
                messages = [self._gathers[id(group)] for group in groups if id(group) not in full]
                full |= {id(group) for group in groups}
            elif action.op is Op.RELEASE:
                full -= {id(group) for group in groups}
                continue
            elif action.op is Op.REDUCE:
                messages = [self._sums[id(group)] for group in groups if ends.get(id(group)) == action.stage]
            # The first microbatch stands for all of its block, see `_timeline`.
            elif action.microbatch != 0:
                continue
            found.append((action, messages))
        return found

    def _sent(self, stages: Stages, count: int) -> dict[str, int]:
        found = sent_by_link([message for _, several in self._collectives for message in several] + self._refreshes)
        for exchanged in stages.exchanged:
            for link, nbytes in exchanged.items():
                found[link] += count * nbytes
        return found


def _uses(names: set[str], group: GroupPlan) -> bool:
    return any(name in names for name, _ in group.params)


def layered_memory(
    blueprint: Blueprint, machine: Machine, profile: Profile, place: int
) -> tuple[Mapping[str, int], int]:
    """Return (peak of each kind, peak of the total) of a place's ranks."""
    parts = LayeredParts(blueprint, machine, place)
    return parts.memory(
        blueprint.config, Stages(parts.split, profile, MachineWork(profile, machine, blueprint.transport))
    )
