"""Lower bounds of a choice: arithmetic without a blueprint, some microseconds each.

Pipelines are bounded as if every stage had as few blocks as the smallest, models by their bytes without sharding.
Collectives count as hidden: bounds with them left out 7 more of 206 choices (Llama 8B on 64 GPUs), but 478 of 844 (405B
on 16,384 GPUs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cache

from ...pipe.schedules.registry import find_kind
from ...zero.plan import GroupPlan
from ...zero.policy import ZeroPolicy
from ..blueprint.blueprint import Blueprint
from ..blueprint.footprint import Footprint, MemoryPhase
from .choice import Choice, num_chunks
from .estimate import MachineWork, kept_limit
from .machine import Machine
from .profile import ComputePhase, Profile
from .search import Bound


@dataclass(frozen=True)
class LeastBlock:
    """Costs of the cheapest block, and seconds of the model before and after the blocks."""

    num_blocks: int
    forward: float
    backward: float
    kept_bytes: int
    backward_bytes: int  # peak of its backward, relative to the start of its forward
    holding_bytes: int  # the same while it keeps its gradients
    gradient_bytes: int
    output_bytes: int
    forward_before: float
    backward_before: float
    behind: float

    @classmethod
    def of(cls, profile: Profile, work: MachineWork, blocks: Sequence[str]) -> LeastBlock:
        """Take the minimum over blocks. blocks: their names, in order."""
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
        """Return the earliest end of the last rank of a pipeline.

        It waits for the first microbatch. If backwards are not split, the first rank also waits for the last
        microbatch.
        """
        kind, chunks, each = find_kind(choice.schedule), num_chunks(choice), self.forward + self.backward
        # end >= a forward through the p - 1 stages before + all work of the last rank + a backward through as many.
        per_stage, others = self.num_blocks // (choice.pipeline * chunks), choice.pipeline - 1
        before = self.forward_before + others * per_stage * self.forward
        # No rank waits for a W, and the last action of a split backward may be a W.
        after = 0.0 if kind.splits_backward else self.backward_before + others * per_stage * self.backward
        of_last = chunks * per_stage * each
        # Some rank has at least the mean number of blocks, rounded up, and computes all microbatches.
        fullest = choice.accumulation * -(-self.num_blocks // choice.pipeline) * each
        if kind.is_v:  # rank 0 has the first and the last stage
            of_first = of_last + self.forward_before + self.backward_before + self.behind
            return max(before + choice.accumulation * of_last + after, choice.accumulation * of_first, fullest)
        return max(before + choice.accumulation * (of_last + self.behind) + after, fullest)

    def nbytes(self, choice: Choice, keeps_gradients: bool) -> float:
        """Return bytes of activations and messages, with keeps_gradients also of a backward's gradients."""
        chunks = num_chunks(choice)
        per_stage = self.num_blocks // (choice.pipeline * chunks)
        others, _ = least_held(choice)
        # Messages: an output at the end of a stage, and an output ahead for each stage, as in `_Place._passing_bytes`.
        held = others * per_stage * self.kept_bytes + (1 + chunks) * self.output_bytes
        if not keeps_gradients:
            return held + (per_stage - 1) * self.kept_bytes + self.backward_bytes
        return held + (per_stage - 1) * max(self.kept_bytes, self.gradient_bytes) + self.holding_bytes


def least_held(choice: Choice) -> tuple[int, bool]:
    """Return what some rank of the pipeline holds at least in some backward.

    (number of stages times microbatches whose activations it keeps besides the current, whether each of its stages has
    already ended a backward). `tests/plan/test_plan_search.py` checks it against the schedules.
    """
    ranks, count, chunks = choice.pipeline, choice.accumulation, num_chunks(choice)
    others = chunks * min(ranks, count) - 1
    is_long = count >= (2 * ranks if chunks > 1 else ranks + 1)
    if choice.schedule == "interleaved":
        return others + (ranks - 1) * is_long, is_long
    return others + (choice.schedule == "dualpipe-v"), is_long


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of the whole model on a single rank, without padding."""

    parameters: int
    summed: int  # gradients in the accumulation dtype
    passing: int  # gradients and parameters that an update reads and writes
    states: float  # of the optimizer
    least_slot: int  # largest message of a block, minimum over blocks
    adds_up_apart: bool
    """Each block accumulates some gradients flat, so a pipeline's backward keeps its gradients: see `pipelined`."""
    share_of_blocks: float  # of all parameters, if each block were as small as the smallest

    @classmethod
    def of(cls, first: Blueprint, blocks: Set[str]) -> ModelBytes:
        """Count the bytes of a blueprint without sharding. blocks: names."""
        plan = first.places[0]
        in_blocks = [groups for unit, groups in plan.units if unit.name in blocks]
        padded, numel = sum(group.layout.shard_numel for group in plan.updated), _bytes(plan.updated, lambda group: 1)
        states = Footprint(first, 0).at(MemoryPhase.BETWEEN_STEPS, gathers=False).optimizer
        slots = [max(group.layout.numel * group.reduce_dtype.itemsize for group in groups) for groups in in_blocks]
        least = min((_bytes(groups, lambda group: 1) for groups in in_blocks), default=0)
        refreshed = _bytes(plan.updated, _parameter_itemsize)
        return cls(
            parameters=_bytes(plan.groups, _parameter_itemsize),
            summed=_bytes(plan.trained, lambda group: group.accumulation_dtype.itemsize),
            passing=refreshed + _bytes(plan.updated, lambda group: group.accumulation_dtype.itemsize),
            # A choice may pad less, so padding must not be in a lower bound.
            states=states * numel / max(1, padded),
            least_slot=min(slots, default=0),
            adds_up_apart=all(any(group.is_added_up_flat for group in groups) for groups in in_blocks),
            share_of_blocks=least * len(blocks) / _bytes(plan.groups, lambda group: 1),
        )


def _bytes(groups: Iterable[GroupPlan], itemsize: Callable[[GroupPlan], int]) -> int:
    return sum(group.layout.numel * itemsize(group) for group in groups)


def _parameter_itemsize(group: GroupPlan) -> int:
    return group.dtype.itemsize


_ROUNDED = 1 - 1e-9  # a bound may exceed an estimate by the rounding of sums in another order


@dataclass(frozen=True)
class _Division:
    """Numbers of ranks over which batch, states and parameters are divided, on a place of the pipeline."""

    policy: ZeroPolicy
    data: int  # for the batch
    num_alike: int  # ranks with the same layers: data-parallel and sequence-parallel ranks
    states: int
    parameters: int

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
        )

    @property
    def frees(self) -> bool:
        """Whether parameters that are not in use are released."""
        return self.policy.frees_parameters and self.parameters > 1


class Bounds:
    """Lower bounds of `Planner.estimate` for choices with the same degrees of layers and sequences.

    first: a blueprint of these degrees without sharding over data-parallel ranks.
    """

    def __init__(
        self,
        machine: Machine,
        first: Blueprint,
        profile: Callable[[int, int], Profile],
        blocks: Sequence[str],
        beside: Callable[[bool], Sequence[tuple[int, str, ComputePhase]]],
    ) -> None:
        """Take the model's profile and moments.

        profile: (rows, every) -> a profile with at most the costs of a run. blocks: names. beside: whether parameters
        are released -> (gathered and staged bytes, part, phase) at each moment of a microbatch without a pipeline.
        """
        self._machine, self._config, self._transport = machine, first.config, first.transport
        self._is_layered = first.config.zero_optimization.layered_gradient_accumulation
        self._blocks, self._profile = blocks, profile
        self._model = ModelBytes.of(first, frozenset(blocks))
        self._microbatch, self._beside = cache(self._of_microbatch), cache(beside)
        self._block = cache(self._least_block)

    def of(self, choice: Choice) -> Bound:
        """Return the bound of a choice."""
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
        return seconds * _ROUNDED / samples, nbytes * _ROUNDED, fits

    def _of_layers(self, choice: Choice, parts: _Division) -> tuple[float, float, float]:
        """Return (seconds, bytes, bytes of offloaded activations) without a pipeline and the update."""
        machine, is_offloaded = self._machine, choice.offload_activations != "none"
        compute, exchanging, peak, away = self._microbatch(choice.rows, choice.every, parts.frees, is_offloaded)
        # Bytes leave and return while a microbatch computes. Only the time beyond computing is surely waited for.
        exposed = choice.accumulation * max(0.0, 2 * away / machine.link - (compute - exchanging))
        if self._is_layered:  # when the last microbatch enters the last block, earlier blocks keep all microbatches
            kept = 0 if is_offloaded else self._kept_before_last(choice.rows, choice.every)
            peak = choice.accumulation * kept
        resting = self._resting(choice, parts)
        # All gradients exist after the backward, all activations before it: the sum is no lower bound.
        nbytes = max(resting + self._gradients(choice, parts), resting + peak)
        return compute * choice.accumulation + exposed, nbytes, away

    def _of_stages(self, choice: Choice, parts: _Division) -> tuple[float, float]:
        """Return (seconds, bytes) of a pipeline without the update."""
        nbytes, gradients = self._resting(choice, parts), self._gradients(choice, parts)
        is_added = parts.policy.reduces_every_backward and parts.num_alike > 1
        block = self._block(choice.rows, choice.every)
        seconds, peak = block.seconds(choice), block.nbytes(choice, self._model.adds_up_apart or is_added)
        if self._machine.device == "cuda":
            if parts.frees:
                # A rank's shard, 1 / `parameters` of the stage, is in `_resting` already, unless it is offloaded.
                gathered = 1 - (choice.offload_param == "none") / parts.parameters
                nbytes += self._model.parameters / choice.pipeline * gathered
            # As `_staged` in pipelined.py, for the smallest block.
            peak += 2 * self._model.least_slot * (parts.num_alike > 1)
        # The rank with the most activations has at least the minimum of parameters, states and gradients.
        meanwhile = nbytes + gradients * least_held(choice)[1]
        return seconds, max(nbytes + gradients, meanwhile * self._even_share(choice) + peak)

    def _gradients(self, choice: Choice, parts: _Division) -> float:
        """Return bytes of gradients at the end of a backward."""
        is_sharded_at_once = parts.policy.reduces_every_backward or choice.accumulation == 1 or self._is_layered
        if choice.offload_optimizer != "none" and (is_sharded_at_once or self._machine.device == "cpu"):
            return 0.0
        held = parts.states if is_sharded_at_once else 1  # full gradients until the last microbatch
        nbytes = self._model.summed / held / choice.pipeline
        return nbytes / parts.num_alike if self._machine.device == "cpu" else nbytes

    def _even_share(self, choice: Choice) -> float:
        """Return the fraction of a rank's mean part of the model that every rank has."""
        num_stages = choice.pipeline * num_chunks(choice)
        return self._model.share_of_blocks * (len(self._blocks) // num_stages) * num_stages / len(self._blocks)

    def _kept_before_last(self, rows: int, every: int) -> int:
        """Return bytes that all blocks but the last keep, without the input of the last."""
        parts = list(self._profile(rows, every).parts.values())[:-2]
        return sum(part.kept_bytes for part in parts) - (parts[-1].output_bytes if parts else 0)

    def _least_block(self, rows: int, every: int) -> LeastBlock:
        profile = self._profile(rows, every)
        return LeastBlock.of(profile, MachineWork(profile, self._machine, self._transport), self._blocks)

    def _update(self, choice: Choice, states: int) -> float:
        """Return seconds of the update and of the collectives that send updated parameters."""
        machine, share = self._machine, 1 / states / choice.pipeline
        if self._config.zero_optimization.offload_optimizer.overlap != "none":
            return 0.0
        if choice.offload_optimizer != "none" and machine.device == "cuda":
            return 0.0  # the next forward may hide all of it
        if choice.offload_optimizer == "none" or self._config.zero_optimization.offload_optimizer.ratio < 1:
            return self._model.passing * share / machine.memory
        seconds = 2 * self._model.states * share / (machine.host_memory / machine.devices_per_host)
        if choice.offload_optimizer == "nvme":
            seconds += 2 * self._model.states * share / (machine.nvme / machine.devices_per_host)
        return seconds

    def _resting(self, choice: Choice, parts: _Division) -> float:
        """Return bytes of parameters and states in device memory."""
        shared = parts.states if self._machine.device == "cpu" else parts.parameters
        nbytes = self._model.parameters / shared if choice.offload_param == "none" else 0.0
        ratio = self._config.zero_optimization.offload_optimizer.ratio if choice.offload_optimizer != "none" else 0.0
        return (
            nbytes + self._model.states / parts.states * (1 - ratio if ratio in (0.0, 1.0) else 0.0)
        ) / choice.pipeline

    def _resting_on_host(self, choice: Choice, parts: _Division) -> float:
        """Return bytes of parameters and states in host memory, if it is separate."""
        nbytes = self._model.parameters / parts.parameters if choice.offload_param == "cpu" else 0.0
        is_whole = choice.offload_optimizer == "cpu" and self._config.zero_optimization.offload_optimizer.ratio == 1
        return (nbytes + self._model.states / parts.states * is_whole) / choice.pipeline

    def _of_microbatch(
        self, rows: int, every: int, frees_parameters: bool, is_offloaded: bool
    ) -> tuple[float, float, float, float]:
        """Return (seconds of computing, seconds of exchanges in them, peak bytes of activations, offloaded bytes)."""
        profile = self._profile(rows, every)
        work = MachineWork(profile, self._machine, self._transport)
        seconds = sum(work.forward(name) + work.backward(name) for name in profile.names)
        exchanging = sum(map(work.exchanging, profile.names))
        kept, limit = sum(part.kept_bytes for part in profile.parts.values()), kept_limit(profile, self._config)
        away = max(0.0, kept - limit) if is_offloaded else 0.0
        if self._machine.device == "cpu":  # gradients of large weights are written into staged memory
            return seconds, exchanging, 0.0 if is_offloaded else kept, away
        bases, most = profile.base_bytes(), 0
        for gathered, name, phase in self._beside(frees_parameters):
            part = profile.part(name)
            base = bases.get(name, 0)
            most = max(most, gathered + (min(base, limit) if is_offloaded else base) + part.peak_bytes(phase))
        return seconds, exchanging, most, away
