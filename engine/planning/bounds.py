"""What a choice takes at least: arithmetic without a blueprint, some microseconds each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from ...comm import Arrangement
from ...zero.plan import GroupPlan
from ...zero.policy import ZeroPolicy
from ..axes import REPLICA, SECONDARY, SEQUENCE, SHARD, TENSOR
from ..blueprint import Blueprint
from ..footprint import Footprint, Moment
from .choice import Choice, num_chunks
from .estimate import Work, kept_limit
from .machine import Machine
from .pipeline_bounds import LeastBlock, least_held
from .profile import Profile, Stretch
from .search import Bound

_Sizes = tuple[int, int, int, int, int]  # of the axes within a place of the pipeline
_ROUNDED = 1 - 1e-9  # sums of the same numbers in another order


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
        beside: Callable[[bool], Sequence[tuple[int, str, Stretch]]],
    ) -> None:
        """profile: of so many rows and `every`, no part of which is more than that of a run. blocks: names.

        beside: whether parameters are freed -> (bytes that are gathered and staged, part, whether in its backward) at
        each moment of a microbatch without a pipeline.
        """
        self._machine, self._config, self._route = machine, first.config, first.route
        self._blocks, self._profile = blocks, profile
        units = [groups for _, groups in first.places[0].units]
        in_blocks = [groups for unit, groups in first.places[0].units if unit.name in set(blocks)]
        groups, trained, updated = first.places[0].groups, first.places[0].trained, first.places[0].updated
        self._parameters = _bytes(groups, lambda one: one.dtype.itemsize)
        of_units = [_bytes(of_unit, lambda one: one.dtype.itemsize) for of_unit in units]
        self._gathered_again = sum(of_units[1:-1])  # in the backward: all but the rest and the last unit
        self._reduced = _bytes(trained, lambda one: one.reduce_dtype.itemsize)
        self._summed = _bytes(trained, lambda one: one.accumulation_dtype.itemsize)
        self._refreshed = _bytes(updated, lambda one: one.dtype.itemsize)
        self._passing = self._refreshed + _bytes(updated, lambda one: one.accumulation_dtype.itemsize)
        padded, numel = sum(one.layout.shard_numel for one in updated), _bytes(updated, lambda one: 1)
        self._states = Footprint(first, 0).at(Moment.BETWEEN_STEPS, gathers=False).optimizer * numel / max(1, padded)
        slots = [max(_bytes([one], lambda one: one.reduce_dtype.itemsize) for one in of_unit) for of_unit in in_blocks]
        wire = first.config.communication
        bits = wire.weight_bits, wire.frozen_weight_bits, wire.gradient_bits
        self._is_quantized = any(bits)  # messages are smaller than this arithmetic knows
        self._least_slot = min(slots, default=0)
        least = min((_bytes(of_unit, lambda one: 1) for of_unit in in_blocks), default=0)
        # Then a pipeline's backward keeps its gradients: see `_Place`.
        self._adds_up_apart = all(any(one.is_added_up_flat for one in of_unit) for of_unit in in_blocks)
        self._share_of_blocks = least * len(blocks) / _bytes(groups, lambda one: 1)
        self._microbatch, self._beside = cache(self._of_microbatch), cache(beside)
        self._block, self._seconds_per_byte = cache(self._least_block), cache(self._per_byte)

    def of(self, choice: Choice) -> Bound:
        """Of one choice."""
        machine, policy = self._machine, ZeroPolicy.from_stage(choice.stage)
        data = machine.num_devices // choice.ranks_of_sample
        groups = policy.shard_size(data, choice.shard_size)
        same = choice.sequence  # ranks that share a sequence are one line of shards with data-parallel ones
        states = groups * same if policy.shards_states else 1
        partition = choice.partition if choice.partition > 1 else groups
        parameters = partition * same if policy.frees_parameters else 1
        is_offloaded = choice.offload_activations != "none"
        frees = policy.frees_parameters and parameters > 1
        sizes = (data // groups, groups // partition, partition, choice.sequence, choice.tensor)
        is_layered = self._config.zero_optimization.layered_gradient_accumulation
        is_sharded_at_once = policy.reduces_every_backward or choice.accumulation == 1 or is_layered
        held = states if is_sharded_at_once else 1  # full until the last one
        leaves = choice.offload_optimizer != "none" and (is_sharded_at_once or machine.device == "cpu")
        gradients = 0.0 if leaves else self._summed / held / choice.pipeline
        if machine.device == "cpu":
            gradients /= data * same
        nbytes = self._resting(choice, states, parameters)
        away = 0.0
        if choice.pipeline == 1:
            compute, exchanging, peak, away = self._microbatch(choice.rows, choice.every, frees, is_offloaded)
            exposed = choice.accumulation * max(0.0, 2 * away / machine.link - (compute - exchanging))
            wire = 0.0 if machine.device == "cpu" or is_layered else self._wire(choice, policy, sizes)
            seconds = max(compute * choice.accumulation, wire) + exposed
            if is_layered:  # while the last one comes to the last block, all are kept before it
                kept = 0 if is_offloaded else self._kept_before_last(choice.rows, choice.every)
                peak = choice.accumulation * kept
            nbytes = max(nbytes + gradients, nbytes + peak)
        else:
            keeps = self._adds_up_apart or (policy.reduces_every_backward and data * same > 1)
            block = self._block(choice.rows, choice.every)
            seconds, peak = block.seconds(choice), block.nbytes(choice, keeps)
            if machine.device == "cuda":
                if policy.reduces_every_backward:
                    seconds = max(seconds, (choice.accumulation - 1) * self._collected(choice, sizes))
                seconds += self._exposed(choice, policy, sizes)
                if frees:
                    nbytes += self._parameters / choice.pipeline * (1 - (choice.offload_param == "none") / parameters)
                peak += 2 * self._least_slot * (data * same > 1)
            # The rank that holds the most activations has the least of anything else that a rank can have.
            meanwhile = nbytes + gradients * least_held(choice)[1]
            nbytes = max(nbytes + gradients, meanwhile * self._even_share(choice) + peak)
        seconds += self._update(choice, states)
        samples = choice.rows * choice.accumulation * data * machine.num_islands
        fits = nbytes * _ROUNDED <= machine.usable_bytes
        if machine.device == "cuda":
            away = away if choice.offload_activations == "cpu" else 0.0
            on_host = away + self._resting_on_host(choice, states, parameters)
            fits = fits and on_host * _ROUNDED <= machine.host_bytes / machine.devices_per_host
        return Bound(seconds * _ROUNDED / samples, nbytes * _ROUNDED, fits)

    def _even_share(self, choice: Choice) -> float:
        """Of a rank's part of the model, what every rank has: as few blocks as any."""
        num_stages = choice.pipeline * num_chunks(choice)
        return self._share_of_blocks * (len(self._blocks) // num_stages) * num_stages / len(self._blocks)

    def _kept_before_last(self, rows: int, every: int) -> int:
        """By all blocks but the last, what goes into that left out."""
        parts = list(self._profile(rows, every).parts.values())[:-2]
        return sum(part.kept_bytes for part in parts) - (parts[-1].output_bytes if parts else 0)

    def _least_block(self, rows: int, every: int) -> LeastBlock:
        profile = self._profile(rows, every)
        return LeastBlock.of(profile, Work(profile, self._machine, self._route), self._blocks)

    def _exposed(self, choice: Choice, policy: ZeroPolicy, sizes: _Sizes) -> float:
        """Seconds that a pipeline waits for collectives, of a rank with as much as the mean of all."""
        if choice.expert > 1 or self._is_quantized:  # experts are gathered by fewer ranks
            return 0.0
        of_states = (SECONDARY, SHARD, SEQUENCE)
        total = 0.0
        if policy.shards_states:
            total += self._reduced * self._seconds_per_byte(sizes, of_states) / num_chunks(choice)
            if not policy.frees_parameters:
                total += self._refreshed * self._seconds_per_byte(sizes, of_states)
        if policy.frees_parameters:
            total += self._parameters * self._seconds_per_byte(sizes, (SHARD, SEQUENCE)) / num_chunks(choice)
        return total / choice.pipeline

    def _collected(self, choice: Choice, sizes: _Sizes) -> float:
        """Seconds in which a rank of a pipeline with the mean of all gradients reduces those of a microbatch."""
        if choice.expert > 1:
            return 0.0
        return self._reduced * self._seconds_per_byte(sizes, (SECONDARY, SHARD, SEQUENCE)) / choice.pipeline

    def _wire(self, choice: Choice, policy: ZeroPolicy, sizes: _Sizes) -> float:
        """Seconds of all collectives, one after the other, without a pipeline."""
        if choice.expert > 1 or self._is_quantized:  # experts are gathered by fewer ranks
            return 0.0
        total = 0.0
        if policy.frees_parameters:
            each = self._parameters + self._gathered_again
            total += choice.accumulation * each * self._seconds_per_byte(sizes, (SHARD, SEQUENCE))
        if policy.shards_states:
            times = choice.accumulation if policy.reduces_every_backward else 1
            total += times * self._reduced * self._seconds_per_byte(sizes, (SECONDARY, SHARD, SEQUENCE))
        return total

    def _update(self, choice: Choice, states: int) -> float:
        """Seconds of the update, and of what brings updated parameters to other ranks."""
        machine, own = self._machine, 1 / states / choice.pipeline
        if self._config.zero_optimization.offload_optimizer.overlap != "none":
            return 0.0
        if choice.offload_optimizer == "none" or self._config.zero_optimization.offload_optimizer.ratio < 1:
            return self._passing * own / machine.memory
        seconds = 2 * self._states * own / (machine.host_memory / machine.devices_per_host)
        if choice.offload_optimizer == "nvme":
            seconds += 2 * self._states * own / (machine.nvme / machine.devices_per_host)
        return seconds + (self._passing * own / machine.link if machine.device == "cuda" else 0.0)

    def _resting(self, choice: Choice, states: int, parameters: int) -> float:
        """Bytes of parameters and states in the model's memory."""
        shared = states if self._machine.device == "cpu" else parameters
        nbytes = self._parameters / shared if choice.offload_param == "none" else 0.0
        ratio = self._config.zero_optimization.offload_optimizer.ratio if choice.offload_optimizer != "none" else 0.0
        return (nbytes + self._states / states * (1 - ratio if ratio in (0.0, 1.0) else 0.0)) / choice.pipeline

    def _resting_on_host(self, choice: Choice, states: int, parameters: int) -> float:
        """Bytes of parameters and states in the host's memory, where that is another one."""
        nbytes = self._parameters / parameters if choice.offload_param == "cpu" else 0.0
        is_whole = choice.offload_optimizer == "cpu" and self._config.zero_optimization.offload_optimizer.ratio == 1
        return (nbytes + self._states / states * is_whole) / choice.pipeline

    def _per_byte(self, sizes: _Sizes, names: Sequence[str]) -> float:
        """Seconds of a collective over these axes, for each byte, without latency."""
        axes = (REPLICA, SECONDARY, SHARD, SEQUENCE, TENSOR)
        arrangement = Arrangement(tuple(zip(axes, sizes, strict=True)), data=())
        size, on_host = arrangement.size(names), self._machine.ranks_on_host(arrangement, names)
        return max(0.0, self._machine.collective(2.0, size, on_host) - self._machine.collective(1.0, size, on_host))

    def _of_microbatch(
        self, rows: int, every: int, frees_parameters: bool, is_offloaded: bool
    ) -> tuple[float, float, float, float]:
        """(seconds of computing, of them exchanging, the most bytes at a moment without what rests, offloaded)."""
        profile = self._profile(rows, every)
        work = Work(profile, self._machine, self._route)
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


def _bytes(groups: Iterable[GroupPlan], itemsize: Callable[[GroupPlan], int]) -> int:
    return sum(one.layout.numel * itemsize(one) for one in groups)
