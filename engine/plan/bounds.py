"""What a choice takes at least: arithmetic without a blueprint, some microseconds each.

Of a pipeline it is that of stages with as few blocks as any has; of the model, its bytes where nothing is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cache

from ...comm import ParallelDims
from ...pipe.schedules.registry import find_kind
from ...zero.plan import GroupPlan
from ...zero.policy import ZeroPolicy
from ..blueprint.axes import REPLICA, SECONDARY, SEQUENCE, SHARD, TENSOR
from ..blueprint.blueprint import Blueprint
from ..blueprint.footprint import Footprint, MemoryPhase
from .choice import Choice, num_chunks
from .estimate import MachineWork, kept_limit
from .machine import Machine
from .profile import ComputePhase, Profile
from .search import Bound


@dataclass(frozen=True)
class LeastBlock:
    """Of the block that takes the least; and seconds of what comes before the blocks and behind them."""

    num_blocks: int
    forward: float
    backward: float
    kept_bytes: int
    backward_bytes: int  # the most of its backward, of what its forward began with
    holding_bytes: int  # the same while it keeps its gradients
    gradient_bytes: int
    output_bytes: int
    forward_before: float
    backward_before: float
    behind: float

    @classmethod
    def of(cls, profile: Profile, work: MachineWork, blocks: Sequence[str]) -> LeastBlock:
        """blocks: their names, in order."""
        parts, names = [profile.part(name) for name in blocks], profile.names
        first, last = names.index(blocks[0]), names.index(blocks[-1])
        return cls(
            num_blocks=len(blocks),
            forward=min(map(work.forward, blocks)),
            backward=min(map(work.backward, blocks)),
            kept_bytes=min(part.kept_bytes for part in parts),
            backward_bytes=min(part.backward_peak_bytes for part in parts),
            holding_bytes=min(part.holding_peak_bytes for part in parts),
            gradient_bytes=min(part.gradient_bytes for part in parts),
            output_bytes=min(profile.part(name).output_bytes for name in names[first : last + 1]),
            forward_before=sum(map(work.forward, names[:first])),
            backward_before=sum(map(work.backward, names[:first])),
            behind=sum(work.forward(name) + work.backward(name) for name in names[last + 1 :]),
        )

    def seconds(self, choice: Choice) -> float:
        """Until a last rank is done.

        A last rank waits for the first microbatch, and others for the last one where a backward is in one piece.
        """
        kind, chunks, each = find_kind(choice.schedule), num_chunks(choice), self.forward + self.backward
        per_stage, others = self.num_blocks // (choice.pipeline * chunks), choice.pipeline - 1
        before = self.forward_before + others * per_stage * self.forward
        after = 0.0 if kind.splits_backward else self.backward_before + others * per_stage * self.backward
        of_last = chunks * per_stage * each
        fullest = choice.accumulation * -(-self.num_blocks // choice.pipeline) * each
        if kind.is_v:  # the last stage is on the first rank
            of_first = of_last + self.forward_before + self.backward_before + self.behind
            return max(before + choice.accumulation * of_last + after, choice.accumulation * of_first, fullest)
        return max(before + choice.accumulation * (of_last + self.behind) + after, fullest)

    def nbytes(self, choice: Choice, keeps_gradients: bool) -> float:
        """Of activations, messages, and, with keeps_gradients, those that a backward makes: while one computes."""
        chunks = num_chunks(choice)
        per_stage = self.num_blocks // (choice.pipeline * chunks)
        others, _ = least_held(choice)
        held = others * per_stage * self.kept_bytes + (1 + chunks) * self.output_bytes
        if not keeps_gradients:
            return held + (per_stage - 1) * self.kept_bytes + self.backward_bytes
        return held + (per_stage - 1) * max(self.kept_bytes, self.gradient_bytes) + self.holding_bytes


def least_held(choice: Choice) -> tuple[int, bool]:
    """(stages of other microbatches of which some rank holds activations in some backward, at least; whether each of
    its stages has ended a backward by then). `tests/plan/test_plan_search.py` holds it to the schedules.
    """
    ranks, count, chunks = choice.pipeline, choice.accumulation, num_chunks(choice)
    others = chunks * min(ranks, count) - 1
    is_long = count >= (2 * ranks if chunks > 1 else ranks + 1)
    if choice.schedule == "interleaved":
        return others + (ranks - 1) * is_long, is_long
    return others + (choice.schedule == "dualpipe-v"), is_long


@dataclass(frozen=True)
class ModelBytes:
    """Without padding. Of one rank that has all layers."""

    parameters: int
    gathered_again: int  # in the backward: all but the rest and the last unit
    reduced: int  # gradients, as messages have them
    summed: int  # gradients, as they are added up
    refreshed: int  # parameters that an update changes
    passing: int  # what an update reads and writes at least: gradients, and those parameters
    states: float  # of the optimizer
    least_slot: int  # the largest message of a block, of the block where that is least
    adds_up_apart: bool
    """Each block adds some gradients up flat. Then a pipeline's backward keeps its gradients: see `PlaceMemory`."""
    share_of_blocks: float  # of all parameters, if each block had as few as any

    @classmethod
    def of(cls, first: Blueprint, blocks: Set[str]) -> ModelBytes:
        """first: nothing is divided over its data-parallel ranks. blocks: names."""
        plan = first.places[0]
        in_blocks = [groups for unit, groups in plan.units if unit.name in blocks]
        padded, numel = sum(one.layout.shard_numel for one in plan.updated), _bytes(plan.updated, lambda one: 1)
        states = Footprint(first, 0).at(MemoryPhase.BETWEEN_STEPS, gathers=False).optimizer
        slots = [max(_bytes([one], lambda one: one.reduce_dtype.itemsize) for one in groups) for groups in in_blocks]
        least = min((_bytes(groups, lambda one: 1) for groups in in_blocks), default=0)
        refreshed = _bytes(plan.updated, lambda one: one.dtype.itemsize)
        return cls(
            parameters=_bytes(plan.groups, lambda one: one.dtype.itemsize),
            gathered_again=sum(_bytes(groups, lambda one: one.dtype.itemsize) for _, groups in plan.units[1:-1]),
            reduced=_bytes(plan.trained, lambda one: one.reduce_dtype.itemsize),
            summed=_bytes(plan.trained, lambda one: one.accumulation_dtype.itemsize),
            refreshed=refreshed,
            passing=refreshed + _bytes(plan.updated, lambda one: one.accumulation_dtype.itemsize),
            states=states * numel / max(1, padded),
            least_slot=min(slots, default=0),
            adds_up_apart=all(any(one.is_added_up_flat for one in groups) for groups in in_blocks),
            share_of_blocks=least * len(blocks) / _bytes(plan.groups, lambda one: 1),
        )


def _bytes(groups: Iterable[GroupPlan], itemsize: Callable[[GroupPlan], int]) -> int:
    return sum(one.layout.numel * itemsize(one) for one in groups)


_Sizes = tuple[int, int, int, int, int]  # of the axes within a place of the pipeline
_ROUNDED = 1 - 1e-9  # sums of the same numbers in another order


@dataclass(frozen=True)
class _Division:
    """Over how many ranks of a place of the pipeline something is divided."""

    policy: ZeroPolicy
    data: int  # the batch
    num_alike: int  # those that have the same layers: data-parallel ones, and in line with them those of a sequence
    states: int
    parameters: int
    sizes: _Sizes

    @classmethod
    def of(cls, choice: Choice, num_devices: int) -> _Division:
        policy, data = ZeroPolicy.from_stage(choice.stage), num_devices // choice.ranks_of_sample
        groups = policy.shard_size(data, choice.shard_size)
        partition = choice.partition if choice.partition > 1 else groups
        return cls(
            policy,
            data,
            num_alike=data * choice.sequence,
            states=groups * choice.sequence if policy.shards_states else 1,
            parameters=partition * choice.sequence if policy.frees_parameters else 1,
            sizes=(data // groups, groups // partition, partition, choice.sequence, choice.tensor),
        )

    @property
    def frees(self) -> bool:
        """Parameters that are not used."""
        return self.policy.frees_parameters and self.parameters > 1


class Bounds:
    """Lower bounds of `Planner.estimate` for choices with the same degrees of layers and sequences.

    first: a blueprint of these degrees in which nothing is divided over data-parallel ranks.
    """

    def __init__(
        self,
        machine: Machine,
        first: Blueprint,
        profile: Callable[[int, int], Profile],
        blocks: Sequence[str],
        beside: Callable[[bool], Sequence[tuple[int, str, ComputePhase]]],
    ) -> None:
        """profile: of so many rows and `every`, no part of which is more than that of a run. blocks: names.

        beside: whether parameters are freed -> (bytes that are gathered and staged, part, whether in its backward) at
        each moment of a microbatch without a pipeline.
        """
        self._machine, self._config, self._route = machine, first.config, first.route
        self._is_layered = first.config.zero_optimization.layered_gradient_accumulation
        self._blocks, self._profile = blocks, profile
        self._model = ModelBytes.of(first, frozenset(blocks))
        wire = first.config.communication
        self._is_quantized = any((wire.weight_bits, wire.frozen_weight_bits, wire.gradient_bits))  # smaller messages
        self._microbatch, self._beside = cache(self._of_microbatch), cache(beside)
        self._block, self._seconds_per_byte = cache(self._least_block), cache(self._per_byte)

    def of(self, choice: Choice) -> Bound:
        """Of one choice."""
        machine, parts = self._machine, _Division.of(choice, self._machine.num_devices)
        if choice.pipeline == 1:
            seconds, nbytes, away = self._of_layers(choice, parts)
        else:
            (seconds, nbytes), away = self._of_stages(choice, parts), 0.0
        seconds += self._update(choice, parts.states)
        samples = choice.rows * choice.accumulation * parts.data
        fits = nbytes * _ROUNDED <= machine.usable_bytes
        if machine.device == "cuda":
            away = away if choice.offload_activations == "cpu" else 0.0
            on_host = away + self._resting_on_host(choice, parts)
            fits = fits and on_host * _ROUNDED <= machine.host_bytes / machine.devices_per_host
        return Bound(seconds * _ROUNDED / samples, nbytes * _ROUNDED, fits)

    def _of_layers(self, choice: Choice, parts: _Division) -> tuple[float, float, float]:
        """(seconds, bytes, bytes of activations elsewhere) without a pipeline and the update."""
        machine, is_offloaded = self._machine, choice.offload_activations != "none"
        compute, exchanging, peak, away = self._microbatch(choice.rows, choice.every, parts.frees, is_offloaded)
        exposed = choice.accumulation * max(0.0, 2 * away / machine.link - (compute - exchanging))
        wire = 0.0 if machine.device == "cpu" or self._is_layered else self._wire(choice, parts)
        if self._is_layered:  # while the last one comes to the last block, all are kept before it
            kept = 0 if is_offloaded else self._kept_before_last(choice.rows, choice.every)
            peak = choice.accumulation * kept
        resting = self._resting(choice, parts)
        nbytes = max(resting + self._gradients(choice, parts), resting + peak)
        return max(compute * choice.accumulation, wire) + exposed, nbytes, away

    def _of_stages(self, choice: Choice, parts: _Division) -> tuple[float, float]:
        """(seconds, bytes) of a pipeline without the update."""
        nbytes, gradients = self._resting(choice, parts), self._gradients(choice, parts)
        is_added = parts.policy.reduces_every_backward and parts.num_alike > 1
        block = self._block(choice.rows, choice.every)
        seconds, peak = block.seconds(choice), block.nbytes(choice, self._model.adds_up_apart or is_added)
        if self._machine.device == "cuda":
            if parts.policy.reduces_every_backward:
                seconds = max(seconds, (choice.accumulation - 1) * self._collected(choice, parts))
            seconds += self._exposed(choice, parts)
            if parts.frees:
                gathered = 1 - (choice.offload_param == "none") / parts.parameters
                nbytes += self._model.parameters / choice.pipeline * gathered
            peak += 2 * self._model.least_slot * (parts.num_alike > 1)
        # The rank that holds the most activations has the least of anything else that a rank can have.
        meanwhile = nbytes + gradients * least_held(choice)[1]
        return seconds, max(nbytes + gradients, meanwhile * self._even_share(choice) + peak)

    def _gradients(self, choice: Choice, parts: _Division) -> float:
        """Bytes that are there at the end of a backward."""
        is_sharded_at_once = parts.policy.reduces_every_backward or choice.accumulation == 1 or self._is_layered
        if choice.offload_optimizer != "none" and (is_sharded_at_once or self._machine.device == "cpu"):
            return 0.0
        held = parts.states if is_sharded_at_once else 1  # full until the last one
        nbytes = self._model.summed / held / choice.pipeline
        return nbytes / parts.num_alike if self._machine.device == "cpu" else nbytes

    def _even_share(self, choice: Choice) -> float:
        """Of a rank's part of the model, what every rank has: as few blocks as any."""
        num_stages = choice.pipeline * num_chunks(choice)
        return self._model.share_of_blocks * (len(self._blocks) // num_stages) * num_stages / len(self._blocks)

    def _kept_before_last(self, rows: int, every: int) -> int:
        """By all blocks but the last, what goes into that left out."""
        parts = list(self._profile(rows, every).parts.values())[:-2]
        return sum(part.kept_bytes for part in parts) - (parts[-1].output_bytes if parts else 0)

    def _least_block(self, rows: int, every: int) -> LeastBlock:
        profile = self._profile(rows, every)
        return LeastBlock.of(profile, MachineWork(profile, self._machine, self._route), self._blocks)

    def _exposed(self, choice: Choice, parts: _Division) -> float:
        """Seconds that a pipeline waits for collectives, of a rank with as much as the mean of all."""
        if choice.expert > 1 or self._is_quantized:  # experts are gathered by fewer ranks
            return 0.0
        of_states = (SECONDARY, SHARD, SEQUENCE)
        total = 0.0
        if parts.policy.shards_states:
            total += self._model.reduced * self._seconds_per_byte(parts.sizes, of_states) / num_chunks(choice)
            if not parts.policy.frees_parameters:
                total += self._model.refreshed * self._seconds_per_byte(parts.sizes, of_states)
        if parts.policy.frees_parameters:
            total += (
                self._model.parameters * self._seconds_per_byte(parts.sizes, (SHARD, SEQUENCE)) / num_chunks(choice)
            )
        return total / choice.pipeline

    def _collected(self, choice: Choice, parts: _Division) -> float:
        """Seconds in which a rank of a pipeline with the mean of all gradients reduces those of a microbatch."""
        if choice.expert > 1:
            return 0.0
        return self._model.reduced * self._seconds_per_byte(parts.sizes, (SECONDARY, SHARD, SEQUENCE)) / choice.pipeline

    def _wire(self, choice: Choice, parts: _Division) -> float:
        """Seconds of all collectives, one after the other, without a pipeline."""
        if choice.expert > 1 or self._is_quantized:  # experts are gathered by fewer ranks
            return 0.0
        total = 0.0
        if parts.policy.frees_parameters:
            each = self._model.parameters + self._model.gathered_again
            total += choice.accumulation * each * self._seconds_per_byte(parts.sizes, (SHARD, SEQUENCE))
        if parts.policy.shards_states:
            times = choice.accumulation if parts.policy.reduces_every_backward else 1
            total += times * self._model.reduced * self._seconds_per_byte(parts.sizes, (SECONDARY, SHARD, SEQUENCE))
        return total

    def _update(self, choice: Choice, states: int) -> float:
        """Seconds of the update, and of what brings updated parameters to other ranks."""
        machine, own = self._machine, 1 / states / choice.pipeline
        if self._config.zero_optimization.offload_optimizer.overlap != "none":
            return 0.0
        if choice.offload_optimizer == "none" or self._config.zero_optimization.offload_optimizer.ratio < 1:
            return self._model.passing * own / machine.memory
        seconds = 2 * self._model.states * own / (machine.host_memory / machine.devices_per_host)
        if choice.offload_optimizer == "nvme":
            seconds += 2 * self._model.states * own / (machine.nvme / machine.devices_per_host)
        return seconds + (self._model.passing * own / machine.link if machine.device == "cuda" else 0.0)

    def _resting(self, choice: Choice, parts: _Division) -> float:
        """Bytes of parameters and states in the model's memory."""
        shared = parts.states if self._machine.device == "cpu" else parts.parameters
        nbytes = self._model.parameters / shared if choice.offload_param == "none" else 0.0
        ratio = self._config.zero_optimization.offload_optimizer.ratio if choice.offload_optimizer != "none" else 0.0
        return (
            nbytes + self._model.states / parts.states * (1 - ratio if ratio in (0.0, 1.0) else 0.0)
        ) / choice.pipeline

    def _resting_on_host(self, choice: Choice, parts: _Division) -> float:
        """Bytes of parameters and states in the host's memory, where that is another one."""
        nbytes = self._model.parameters / parts.parameters if choice.offload_param == "cpu" else 0.0
        is_whole = choice.offload_optimizer == "cpu" and self._config.zero_optimization.offload_optimizer.ratio == 1
        return (nbytes + self._model.states / parts.states * is_whole) / choice.pipeline

    def _per_byte(self, sizes: _Sizes, names: Sequence[str]) -> float:
        """Seconds of a collective over these axes, for each byte, without latency."""
        axes = (REPLICA, SECONDARY, SHARD, SEQUENCE, TENSOR)
        parallel_dims = ParallelDims(tuple(zip(axes, sizes, strict=True)), data=())
        size, on_host = parallel_dims.size(names), self._machine.ranks_on_host(parallel_dims, names)
        return max(0.0, self._machine.collective(2.0, size, on_host) - self._machine.collective(1.0, size, on_host))

    def _of_microbatch(
        self, rows: int, every: int, frees_parameters: bool, is_offloaded: bool
    ) -> tuple[float, float, float, float]:
        """(seconds of computing, of them exchanging, the most bytes at a moment without what rests, offloaded)."""
        profile = self._profile(rows, every)
        work = MachineWork(profile, self._machine, self._route)
        seconds = sum(work.forward(name) + work.backward(name) for name in profile.names)
        exchanging = sum(map(work.exchanging, profile.names))
        kept, limit = sum(part.kept_bytes for part in profile.parts.values()), kept_limit(profile, self._config)
        away = max(0.0, kept - limit) if is_offloaded else 0.0
        if self._machine.device == "cpu":  # gradients of large weights are no tensors of their own
            return seconds, exchanging, 0.0 if is_offloaded else kept, away
        bases, most = profile.base_bytes(), 0
        for gathered, name, stretch in self._beside(frees_parameters):
            part = profile.part(name)
            base = bases.get(name, 0)
            most = max(most, gathered + (min(base, limit) if is_offloaded else base) + part.peak_bytes(stretch))
        return seconds, exchanging, most, away
