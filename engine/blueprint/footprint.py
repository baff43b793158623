"""The arithmetic of memory: bytes of a blueprint by kind. An assembled engine takes exactly these bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial

import torch

from ...comm import EXCHANGE_SLOTS, ParallelDims, exchange_slot_bytes, regions_of
from ...comm.shared_memory import counters_bytes
from ...comm.shared_segment import page_aligned
from ...kernels.optimizer_states import SCALE_SUFFIX
from ...kernels.optimizer_step import chunk_numel
from ...kernels.quantized_blocks import quantized_bytes
from ...offload import FileStore, round_up
from ...optimizers.optimizer import WholeTensorRule
from ...zero.host_update import MAX_LEAVING
from ...zero.master_weights import MASTER, Kinds, kinds_of_block, scaled
from ...zero.placement import lay_out
from ...zero.plan import GroupPlan, ModelPlan, Role
from ...zero.powersgd import ThinLayout
from ...zero.sharding_spec import ShardingSpec
from ...zero.sign_update import SignLayout
from ...zero.whole_update import owners_of
from .axes import SEQUENCE, TENSOR
from .blueprint import Blueprint, Timing
from .gathered import peak_gathered_bytes
from .offload import Placement

_SLOTS_IN_TURN = 3  # buffers of the sockets transport that take turns


class MemoryPhase(Enum):
    """A moment at which bytes are counted, after the first steps of a training that uses every parameter."""

    BETWEEN_STEPS = "between two steps"
    ACCUMULATING = "between two microbatches of a step"  # layered: in the first block, which is the last to reduce
    REDUCED = "after the last microbatch, before the step: gradients are final, and only now updated after the norm"


@dataclass(frozen=True)
class RankBytes:
    """Bytes of a rank, by kind. Memory that ranks of a host share is divided by their number.

    Not included: activations, buffers of the model, workspace of kernels, host buffers for transfers, and states of a
    caller's optimizer, which are unknown before its first step.
    """

    parameters: int  # at rest, with the model
    gradients: int  # of a model on an accelerator: only those on it
    optimizer: int  # states, master weights and second versions of them, with the model
    gathered: int  # peak of full parameters in addition to `parameters`
    staging: int  # gradients in flight to ranks (not on the native transport) or to the host
    host: int  # of a model on an accelerator: offloaded bytes and gradients in host memory
    file: int

    @property
    def model(self) -> int:
        """The peak in the memory of the model."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.staging


def bytes_of(blueprint: Blueprint, rank: int = 0, moment: MemoryPhase = MemoryPhase.REDUCED) -> RankBytes:
    """Return the bytes of a rank at a moment."""
    return Footprint(blueprint, rank).at(moment)


def shared_bytes(blueprint: Blueprint) -> int:
    """Return the bytes of shared memory that the ranks of the host take before the first batch; 0 on other
    transports.
    """
    if blueprint.transport != "shared_memory":
        return 0
    parallel_dims, same_size = blueprint.parallel_dims, blueprint.ranks_of_place
    lines = [*parallel_dims.lines(blueprint.folds), *((name,) for name in blueprint.inner)]
    sizes = [parallel_dims.size(names) for names in lines]
    total = sum(parallel_dims.num_ranks // size * counters_bytes(size) for size in sizes if size > 1)
    exchanged = parallel_dims.num_ranks * EXCHANGE_SLOTS * exchange_slot_bytes(known_exchange_bytes(blueprint))
    total += exchanged * len(parallel_dims.wide((SEQUENCE, TENSOR)))
    common: Counter[int] = Counter()  # number of ranks that share a copy -> bytes, summed over all ranks
    for plan in blueprint.places:
        total += same_size * _ring_bytes(plan, parallel_dims)
        for group in plan.groups:
            states_size, replicas_size = (
                parallel_dims.size(d) for d in (group.sharding.states, group.sharding.replicas)
            )
            if states_size > 1:
                common[states_size] += same_size * page_aligned(group.full_bytes)
            elif blueprint.shares_gradients and replicas_size > 1 and _is_summed(group):
                common[replicas_size] += same_size * page_aligned(_sum_bytes(group))
    # Each copy was counted once for every rank that shares it.
    return total + sum(nbytes // size for size, nbytes in common.items())


def known_exchange_bytes(blueprint: Blueprint) -> int:
    """Return the bytes of the largest exchange that no batch decides: the gradient of a partial parameter."""
    if blueprint.tensor is None:
        return 1
    splits = blueprint.tensor.parameters
    whole = [
        math.prod(splits[id(param)].tensor_shards[0].whole) * group.dtype.itemsize
        for plan in blueprint.places
        for group in plan.trained
        for _, param in group.params
        if id(param) in splits and splits[id(param)].is_partial
    ]
    return max(whole, default=1)


def _is_summed(group: GroupPlan) -> bool:
    """Return whether replicas may share a single sum of the gradient."""
    return group.role is not Role.FROZEN and not group.sharding.tied


class Footprint:
    """Computes the bytes of a rank, kind by kind."""

    def __init__(self, blueprint: Blueprint, rank: int) -> None:
        self._blueprint = blueprint
        self._place = blueprint.place_of(rank)
        self._plan: ModelPlan = blueprint.places[self._place]
        self._rank = rank
        self._counts = cache(partial(_shard_counts, blueprint))
        self._in_pipeline = blueprint.pipeline is not None
        self._accumulates = (blueprint.config.gradient_accumulation_steps or 1) > 1
        optimizer = blueprint.optimizer

        @cache
        def kinds_of(dtype: torch.dtype, index: int) -> Kinds:
            return kinds_of_block(dtype, optimizer.masters, partial(optimizer.new_states, options_index=index))

        @cache
        def of_chunk(dtype: torch.dtype, index: int, numel: int) -> int:
            return lay_out(scaled(kinds_of(dtype, index), numel))[1]

        self._kinds_of, self._of_chunk = kinds_of, of_chunk
        self._gradients: dict[Hashable, int] = {}
        self._of_first_block: set[int] | None = None  # ids of groups; None: not layered
        if blueprint.pipeline is not None and blueprint.pipeline.is_layered:
            # The backward comes to the first block last: its unit accumulates when all units behind it are reduced.
            first = set(blueprint.pipeline.split.parameters[0])
            units = [groups for _, groups in self._plan.units]
            units = [groups for groups in units if any(name in first for one in groups for name, _ in one.params)]
            self._of_first_block = {id(group) for groups in units for group in groups}
        numels = blueprint.offload_plan.states_plan.resident_numels(
            [one.layout.shard_numel for one in self._plan.updated]
        )
        self._resident = {id(group): numel for group, numel in zip(self._plan.updated, numels, strict=True)}

    def at(self, moment: MemoryPhase, gathers: bool = True) -> RankBytes:
        """Return all kinds at a moment. gathers=False skips the gathered peak: the units would have to run for it."""
        blueprint, offload_plan, plan = self._blueprint, self._blueprint.offload_plan, self._plan
        shards = [group.shard_bytes for group in plan.groups]
        chunks = [nbytes for group in plan.updated for nbytes in self.chunks(group)]
        left = [self._left(group, moment) for group in plan.trained]
        left += [nbytes for group in plan.updated for nbytes in self._second_on_host(group, moment)]
        return RankBytes(
            parameters=sum(map(self._at_rest, plan.groups)),
            gradients=sum(self.gradient(group, moment) + self.thin(group, moment) for group in plan.trained),
            optimizer=sum(self._states(group, moment) for group in plan.updated),
            gathered=peak_gathered_bytes(blueprint, self._place, self.gathered) if gathers and self.frees_memory else 0,
            staging=self._staging() + self._leaving(),
            host=_kept(shards, offload_plan.parameters is Placement.HOST)
            + _kept(chunks, offload_plan.states is Placement.HOST)
            + _kept(left, True),
            file=_kept(shards, offload_plan.parameters is Placement.FILE)
            # A list times a number: each chunk has so many places in the file, each rounded up.
            + _kept(chunks * offload_plan.states_plan.num_versions, offload_plan.states is Placement.FILE),
        )

    # -- parameters -----------------------------------------------------------------------------------------------

    @property
    def frees_memory(self) -> bool:
        """Whether released parameters free memory."""
        if self._blueprint.offload_plan.parameters is not Placement.MODEL:
            return True
        # In shared memory the ranks hold a copy together, and it stays.
        is_divided = any(self._size(group.sharding.parameters) > 1 for group in self._plan.groups)
        return is_divided and self._blueprint.transport != "shared_memory"

    def _size(self, axes: tuple[str, ...]) -> int:
        return self._blueprint.parallel_dims.size(axes)

    def _at_rest(self, group: GroupPlan) -> int:
        if self._blueprint.offload_plan.parameters is not Placement.MODEL:
            return 0
        exact = group.shard_bytes if group.sends_differences else 0  # the exact shard, beside the rounded copy
        return group.full_bytes // self._counts(group.sharding).parameters + exact

    def gathered(self, group: GroupPlan) -> int:
        """Return the bytes of full parameters beside those at rest. If pages move, those at rest lie within."""
        rest = group.full_bytes // self._counts(group.sharding).parameters
        # The full buffer has separate memory: without pages, or because a quantized gather writes rounded values to it.
        is_rounded = group.weight_bits is not None and not group.sends_differences
        is_beside = (not self._blueprint.moves_pages or is_rounded) and rest < group.full_bytes
        exact = group.shard_bytes if group.sends_differences else 0
        return group.full_bytes + rest * is_beside + exact - self._at_rest(group)

    # -- gradients ------------------------------------------------------------------------------------------------

    def gradient(self, group: GroupPlan, moment: MemoryPhase) -> int:
        """Return the bytes of the shard of the sum, and of the accumulation over microbatches before it.

        |               | stage 0, 1                              | stage 2, 3                             |
        |---------------|-----------------------------------------|----------------------------------------|
        | accumulating  | full gradients, no shard                | the shard, unless it is on the host    |
        | reduced       | the shard, or a part of the common sum; | the shard                              |
        |               | flat memory of full gradients stays     |                                        |
        | between steps | as before the step without freed shards: all shards are freed, except those of a sum that |
        |               | is divided over ranks without shared memory                                               |

        If flat memory would be as large as the shard, it is the shard: see `adds_up_in_shard`.

        Layered accumulation sums full gradients of a block and frees its flat memory, at every stage.
        """
        is_early = moment is MemoryPhase.ACCUMULATING and not self._is_last_to_come(group)
        return self._once(group, MemoryPhase.REDUCED if is_early else moment)

    def added_up(self, group: GroupPlan) -> int:
        """Return the bytes of a group that is accumulating now, for any group."""
        return self._once(group, MemoryPhase.ACCUMULATING)

    def _once(self, group: GroupPlan, moment: MemoryPhase) -> int:
        """Return `_gradient`, computed once for equal groups: a search asks for hundreds of equal blocks."""
        layout = group.layout
        sizes = layout.shard_numel, layout.shard_count, layout.numel, self._resident.get(id(group), 1) == 0
        key = moment, group.sharding, group.dtype, group.accumulation_dtype, sizes
        if key not in self._gradients:
            self._gradients[key] = self._gradient(group, moment)
        return self._gradients[key]

    def passing(self, group: GroupPlan) -> int:
        """Return the bytes of a gradient that is consumed in the backward while its unit computes. No moment includes
        it.
        """
        goes = self._is_on_accelerator and self.leaves(group)
        return _sum_bytes(group) if self._blueprint.timing is Timing.IN_BACKWARD and not goes else 0

    def _gradient(self, group: GroupPlan, moment: MemoryPhase) -> int:
        blueprint, shard = self._blueprint, _sum_bytes(group)
        shares_memory = blueprint.transport == "shared_memory"
        sizes = self._counts(group.sharding)
        common, own = (shard // sizes.replicas, 0) if self._is_common(group) else (0, shard)
        leaves = self.leaves(group)
        in_shard = self.adds_up_in_shard(group)
        if moment is MemoryPhase.ACCUMULATING and not (self.adds_in_place(group) or in_shard):
            if not blueprint.reduces_every_backward:
                return common + self._local(group)
            waits = bool(group.sharding.tied) or sizes.replicas > 1  # the shard stays for the sum over these ranks
            whole = group.layout.padded_numel * group.accumulation_dtype.itemsize
            return whole // sizes.gradients if waits or not leaves else 0
        # An update in the backward frees the sum at once. A sum that leaves the accelerator is counted as `host`.
        if blueprint.timing is Timing.IN_BACKWARD or (leaves and self._is_on_accelerator):
            own = 0
        # As in `GroupGradient.reset`: only a shard that is summed over sockets stays until the next step.
        is_sent = sizes.states > 1 and not shares_memory and not self._is_on_accelerator
        is_given_back = leaves or blueprint.timing is Timing.DELAYED or not is_sent
        if moment is MemoryPhase.BETWEEN_STEPS and is_given_back:
            own = 0
        has_local = self._accumulates and not blueprint.reduces_every_backward
        is_kept = has_local and not in_shard and group.is_added_up_flat and not blueprint.is_layered
        return common + own + (self._local(group) if is_kept else 0)

    def _is_last_to_come(self, group: GroupPlan) -> bool:
        """Return whether its gradients still accumulate at that moment. With layered accumulation only those of units
        with parameters of the first block do.
        """
        return self._of_first_block is None or id(group) in self._of_first_block

    def leaves(self, group: GroupPlan) -> bool:
        """Return whether the group's states rest apart, so that its gradients go to the host."""
        # The default 1: groups without states (left out of the optimizer) keep their gradients on the device.
        return self._blueprint.offload_plan.updates_on_host and not self._resident.get(id(group), 1)

    @property
    def _is_on_accelerator(self) -> bool:
        return self._blueprint.device != "cpu"

    def _left(self, group: GroupPlan, moment: MemoryPhase) -> int:
        """Return the bytes of a sum that has left the accelerator."""
        if not self._is_on_accelerator or not self.leaves(group) or moment is MemoryPhase.BETWEEN_STEPS:
            return 0
        is_full = moment is MemoryPhase.ACCUMULATING and not self._blueprint.reduces_every_backward
        return 0 if is_full or self._blueprint.timing is Timing.IN_BACKWARD else _sum_bytes(group)

    def _leaving(self) -> int:
        """Return the largest shards of gradients in flight between an accelerator and the host."""
        shards = [_sum_bytes(group) for group in self._plan.trained if self.leaves(group)]
        # A sum of earlier microbatches returns to the device, to add the next gradient.
        comes_back = self._accumulates and self._blueprint.reduces_every_backward
        in_flight = MAX_LEAVING + comes_back
        return sum(sorted(shards)[-in_flight:]) if self._is_on_accelerator else 0

    def _local(self, group: GroupPlan) -> int:
        """Return the bytes of full gradients: the parameters' `.grad`, or flat if accumulated in a different dtype."""
        if not group.is_added_up_flat:
            return group.layout.numel * group.dtype.itemsize
        return group.layout.padded_numel * group.accumulation_dtype.itemsize

    def adds_in_place(self, group: GroupPlan) -> bool:
        """Return whether autograd adds a step's gradients into the shard: see `GroupGradient.accumulate_in_place`."""
        sizes = self._counts(group.sharding)
        is_alone = sizes.states == sizes.replicas == 1
        is_added = is_alone and not self.leaves(group) and not group.is_added_up_flat
        return self._in_pipeline and not self._blueprint.is_layered and is_added

    def adds_up_in_shard(self, group: GroupPlan) -> bool:
        """Return whether the shard also serves as flat memory for microbatches of a different dtype, having the same
        size.
        """
        blueprint = self._blueprint
        is_elsewhere = self._is_common(group) or self.leaves(group)
        adds_up = blueprint.low_rank is None and not blueprint.is_layered and not is_elsewhere
        return adds_up and self._counts(group.sharding).states == 1 and group.is_added_up_flat

    def _is_common(self, group: GroupPlan) -> bool:
        """Return whether replicas hold a single sum of the gradient."""
        blueprint, has_replicas = self._blueprint, self._counts(group.sharding).replicas > 1
        is_shared = blueprint.shares_gradients and blueprint.transport == "shared_memory"
        return is_shared and has_replicas and not group.sharding.tied

    def _staging(self) -> int:
        trained, transport = self._plan.trained, self._blueprint.transport
        if transport == "shared_memory":
            return _ring_bytes(self._plan, self._blueprint.parallel_dims)
        if transport != "sockets":
            return 0
        # Each set of axes has separate buffers. Axes -> (dtype, elements of a slot, elements that this rank sums).
        parts: dict[tuple[str, ...], list[tuple[torch.dtype, int, int]]] = {}
        for one in self._in_backward(trained):
            numel, shard = one.layout.padded_numel, one.layout.shard_numel
            sent = numel - shard if self._sends_others_alone(one) else numel
            for number, (axes, bits) in enumerate(one.levels):  # quantized gradients use separate receive buffers
                numel //= self._size(axes)
                dtype = one.accumulation_dtype if number else one.reduce_dtype
                parts.setdefault(axes, []).append((dtype, 0 if number else sent, numel if bits is None else 0))
            replicas, bits = one.replicas
            place = self._blueprint.parallel_dims.place(self._rank, replicas)
            summed = _numel(regions_of(shard, self._size(replicas))[place])
            if bits is None:
                others = shard - summed if one.reduce_dtype == one.accumulation_dtype else shard
                parts.setdefault(replicas, []).append((one.reduce_dtype, others, summed))
            elif shard == one.layout.padded_numel:
                parts.setdefault(replicas, []).append((one.reduce_dtype, shard, 0))
        return sum(self._slots(own, self._size(axes)) for axes, own in parts.items() if self._size(axes) > 1)

    def quantized(self) -> int:
        """Return the bytes of quantized messages: those of two groups, while a third is staged. No moment includes
        them.
        """
        return sum(sorted(map(self._in_flight, self._plan.trained))[-2:])

    def _in_flight(self, group: GroupPlan) -> int:
        """Return the bytes of a group's quantized messages, sent and received: see `QuantizedCodec`."""
        total, numel = 0, group.layout.padded_numel
        for axes, bits in group.levels:
            size = self._size(axes)
            numel //= size
            total += 0 if bits is None else 2 * (size - 1) * quantized_bytes(numel, bits)
        axes, bits = group.replicas
        if bits is None or (size := self._size(axes)) == 1:
            return total
        summed = _numel(regions_of(numel, size)[self._blueprint.parallel_dims.place(self._rank, axes)])
        # Terms to and from all ranks but this, then the sum, its copies to them, and their sums.
        return total + 2 * quantized_bytes(numel - summed, bits) + (2 * size - 1) * quantized_bytes(summed, bits)

    def _in_backward(self, trained: Sequence[GroupPlan]) -> Iterable[GroupPlan]:
        """Yield groups in the order of their reduction: units from the last on, then the root unit."""
        is_trained = {id(one) for one in trained}
        units = list(reversed(self._plan.units))
        # A stable sort: it moves only the root unit, to the end.
        units.sort(key=lambda one: one[0].is_root)
        pipeline = self._blueprint.pipeline
        if pipeline is not None and pipeline.is_layered:
            units = pipeline.in_layers(self._plan.units)
        return (group for _, groups in units for group in groups if id(group) in is_trained)

    def _slots(self, parts: Sequence[tuple[torch.dtype, int, int]], num_ranks: int) -> int:
        """Return the bytes of an exchange over sockets.

        Slots take turns, so each sees every group unless turns end with a backward. The turns of pipeline stages are
        known only for three groups.
        """
        is_known = len(parts) == _SLOTS_IN_TURN or not self._in_pipeline or self._blueprint.is_layered
        # A backward then ends with a turn: slot k has the groups k, k + 3, ... in every backward.
        if is_known and len(parts) % _SLOTS_IN_TURN == 0:
            return sum(_exchanged(parts[turn::_SLOTS_IN_TURN], num_ranks) for turn in range(_SLOTS_IN_TURN))
        return _SLOTS_IN_TURN * _exchanged(parts, num_ranks)

    def _sends_others_alone(self, group: GroupPlan) -> bool:
        """Return whether a slot has no room for the rank's local part: see `GradientReducer`. It needs room if an
        earlier sum exists.
        """
        if len(group.levels) > 1 or group.levels[0][1] is not None:
            return False
        has_sum = self._accumulates and self._blueprint.reduces_every_backward
        return group.reduce_dtype == group.accumulation_dtype and not has_sum

    # -- states ---------------------------------------------------------------------------------------------------

    def _kinds(self, group: GroupPlan) -> Kinds:
        """Return the kinds of values that are kept of a block of the group's elements."""
        return self._kinds_of(group.dtype, self._blueprint.optimizer.options_index(group))

    def _states(self, group: GroupPlan, moment: MemoryPhase) -> int:
        resident = scaled(self._kinds(group), self._resident[id(group)])
        total = _bytes(resident) + self._factors(group) + self._beside_signs(group)
        if self._blueprint.timing is Timing.DELAYED:
            total += self._second(group)
        if self._blueprint.timing is Timing.SPECULATIVE and moment is MemoryPhase.REDUCED:
            # `Speculation` has copied the states in memory, and the parameters that are not rounded master weights.
            total += total + self._second(group) + sum(self._copied_chunks(group))
        return total - sum(self._second_on_host(group, moment))

    def copies(self, group: GroupPlan) -> int:
        """Return the bytes that a speculative update adds to the states until the step ends."""
        if self._blueprint.timing is not Timing.SPECULATIVE or group.role is not Role.UPDATED:
            return 0
        return self._states(group, MemoryPhase.REDUCED) - self._states(group, MemoryPhase.BETWEEN_STEPS)

    def _factors(self, group: GroupPlan) -> int:
        """Return the bytes of states that are not elementwise, for this rank's matrices of the group."""
        rule, owned = self._blueprint.optimizer.whole, self._owned_shapes(group)
        factors = [factor for shape in owned if rule is not None for factor in rule.factors(shape).values()]
        return sum(map(math.prod, factors)) * max(4, group.dtype.itemsize)

    def _owned_shapes(self, group: GroupPlan) -> list[tuple[int, ...]]:
        """Return the shapes of the group's matrices that this rank owns."""
        blueprint = self._blueprint
        # The first parameter answers for all: a group has matrices alone, or none.
        if not group.params or not blueprint.optimizer.is_matrix(group.params[0][1]):
            return []
        axes = group.sharding.owning_axes(self._counts(group.sharding).states)
        owners = owners_of(group.layout, blueprint.parallel_dims.size(axes))
        place = blueprint.parallel_dims.place(self._rank, axes)
        views = zip(group.layout.param_views, owners, strict=True)
        return [param_view.shape for param_view, owner in views if owner == place]

    def _beside_signs(self, group: GroupPlan) -> int:
        """Return the bytes of the error feedback of signs."""
        if not self._blueprint.optimizer.sends_signs:
            return 0
        dtype = torch.float32 if MASTER in self._kinds(group) else group.dtype
        layout = SignLayout.of(group.layout, self._counts(group.sharding).replicas, dtype)
        place = self._blueprint.parallel_dims.place(self._rank, group.sharding.replicas)
        return layout.error_numel(place) * dtype.itemsize

    def thin(self, group: GroupPlan, moment: MemoryPhase) -> int:
        """Return the bytes of PowerSGD's memory; two versions of it until a step counts."""
        low_rank, sizes = self._blueprint.low_rank, self._counts(group.sharding)
        # A rank without partners sends nothing, so it keeps no errors.
        if low_rank is None or sizes.states == sizes.replicas == 1:
            return 0
        layout = ThinLayout.of(group.layout, low_rank)
        itemsize = max(4, group.accumulation_dtype.itemsize)
        tried = layout.num_thin + layout.num_second if moment is MemoryPhase.REDUCED else 0
        return (layout.kept_numel(low_rank) + tried) * itemsize

    def thin_message(self) -> int:
        """Return the bytes that PowerSGD takes to stage a gradient after its backward. No moment includes them."""
        if self._blueprint.low_rank is None:
            return 0
        sizes = [(group, self._counts(group.sharding)) for group in self._plan.trained]
        sent = [group for group, size in sizes if size.states * size.replicas > 1]
        return max((one.layout.padded_numel * max(4, one.accumulation_dtype.itemsize) for one in sent), default=0)

    def directions(self) -> tuple[int, int]:
        """Return (model, host): peak bytes of an update of whole parameters. No moment includes it.

        A direction of a shard in float32 or wider, and this rank's matrices: see `MatrixTrip`.
        """
        optimizer, rule, found = self._blueprint.optimizer, self._blueprint.optimizer.whole, [0, 0]
        if rule is None:
            return 0, 0
        for group in self._plan.updated:
            is_matrix = optimizer.is_matrix(group.params[0][1]) if group.params else False
            if rule.beside is not None and not is_matrix:
                continue  # the elementwise rule updates this group
            numel, itemsize = group.layout.shard_numel, max(4, group.dtype.itemsize)
            sent, beside = self._of_matrices(group, rule) if is_matrix else (0, 0)
            on_host = int(self._is_on_accelerator and self.leaves(group))
            in_pass = min(numel, chunk_numel("cpu" if on_host else self._blueprint.device))
            elementwise = (1 + self._is_scaled) * in_pass * itemsize  # a result, and the gradient that is multiplied
            norms = 0
            if rule.ratio is not None:  # squares in float64, and these padded to whole blocks
                largest = max((view.numel for view in group.layout.param_views), default=0)  # on some rank whole
                norms = 2 * 8 * min(in_pass, largest)
            more = max(sent * itemsize, beside * itemsize, norms, elementwise)
            found[on_host] = max(found[on_host], numel * itemsize + more)
            found[0] = max(found[0], sent * itemsize)  # matrices of the host are sent by the device
        return found[0], found[1]

    @property
    def _is_scaled(self) -> bool:
        """Whether an update multiplies gradients: by the mean's factor, the clip factor or the loss scale."""
        config = self._blueprint.config
        has_terms = self._accumulates or self._size(self._blueprint.parallel_dims.data) > 1
        return has_terms or config.gradient_clipping > 0 or config.fp16.enabled

    def _of_matrices(self, group: GroupPlan, rule: WholeTensorRule) -> tuple[int, int]:
        """Return the elements that an update of matrices takes beside its direction: (while they are sent, then)."""
        owned = self._owned_shapes(group)
        whole, is_sharded = sum(map(math.prod, owned)), self._counts(group.sharding).states > 1
        workspace, replicas = max(map(rule.workspace, owned), default=0), self._size(group.sharding.replicas)
        if is_sharded:
            return group.layout.shard_numel + whole, max(2 * whole, whole + workspace)
        return (group.layout.shard_numel + replicas * whole) * (replicas > 1), workspace  # each gets a copy

    def _second(self, group: GroupPlan) -> int:
        """Return the bytes of a second version of the parameters. Resident master weights make it unnecessary."""
        has_master = MASTER in self._kinds(group)
        resident = self._resident[id(group)] if has_master else 0
        return (group.layout.shard_numel - resident) * group.dtype.itemsize

    def _copied_chunks(self, group: GroupPlan) -> list[int]:
        return self.chunks(group) if self._blueprint.offload_plan.states is Placement.HOST else []

    def snapshot(self) -> int:
        """Return the bytes of host memory that `checkpoint.async` keeps beside an accelerator. No moment includes them.

        They hold this rank's part of the weights and of their elementwise states, 8-bit states as float32.
        """
        if not (self._is_on_accelerator and self._blueprint.config.checkpoint.asynchronous):
            return 0
        updated, total = {id(group) for group in self._plan.updated}, 0
        for group in self._plan.groups:
            kinds = self._kinds(group) if id(group) in updated else {}
            sizes = {name: 4 if name + SCALE_SUFFIX in kinds else dtype.itemsize for name, (dtype, _) in kinds.items()}
            weight = sizes.pop(MASTER, group.dtype.itemsize)
            each = weight + sum(size for name, size in sizes.items() if not name.endswith(SCALE_SUFFIX))
            total += group.layout.shard_numel * each // self._counts(group.sharding).replicas
        return total

    def _second_on_host(self, group: GroupPlan, moment: MemoryPhase) -> list[int]:
        """Return the parts of second versions that the host holds for a model on an accelerator."""
        if not self._is_on_accelerator or not self.leaves(group):
            return []
        if self._blueprint.timing is Timing.DELAYED:
            return [self._second(group)]
        is_tried = self._blueprint.timing is Timing.SPECULATIVE and moment is MemoryPhase.REDUCED
        return self._copied_chunks(group) if is_tried else []

    def host_update_bytes(self, group: GroupPlan) -> int:
        """Return the bytes of host memory that an update of an offloaded group reads and writes.

        AdamW in mixed precision moves 30 bytes a parameter: masters and two states in float32 twice, the gradient, the
        rounded parameter. With `masters` and `state_dtype` "int8" it moves 14, and 12 with bfloat16 gradients.
        """
        numel, has_master = group.layout.shard_numel, MASTER in self._kinds(group)
        # With master weights the parameter is only written. Without them the update reads it too.
        values = numel * group.dtype.itemsize * (1 if has_master else 2)
        return 2 * sum(self.chunks(group)) + _sum_bytes(group) + values

    def chunks(self, group: GroupPlan) -> list[int]:
        """Return the bytes of each chunk of states that is not with the model."""
        index = self._blueprint.optimizer.options_index(group)
        parts = self._blueprint.offload_plan.states_plan.chunks(self._resident[id(group)], group.layout.shard_numel)
        return [self._of_chunk(group.dtype, index, high - low) for low, high in parts]


@dataclass(frozen=True)
class _ShardCounts:
    """The number of ranks that divide each kind of model state of a group; 1 is a full copy."""

    states: int
    parameters: int
    gradients: int  # between microbatches
    replicas: int  # ranks with the same states


def _shard_counts(blueprint: Blueprint, sharding: ShardingSpec) -> _ShardCounts:
    size = blueprint.parallel_dims.size
    states = size(sharding.states)
    has_one_copy = blueprint.transport == "shared_memory" and states > 1
    parameters = states if has_one_copy else size(sharding.parameters)
    # Stages 0 and 1 add up full gradients over the microbatches of a step.
    gradients = states if blueprint.reduces_every_backward else 1
    return _ShardCounts(states, parameters, gradients, size(sharding.replicas))


def _ring_bytes(plan: ModelPlan, parallel_dims: ParallelDims) -> int:
    """Return the bytes of a rank's slots in shared memory."""
    return sum(count * page_aligned(nbytes) for _, nbytes, count in plan.rings(parallel_dims))


def _sum_bytes(group: GroupPlan) -> int:
    """Return the bytes of a rank's shard of the summed gradient."""
    return group.layout.shard_numel * group.accumulation_dtype.itemsize


def _exchanged(parts: Sequence[tuple[torch.dtype, int, int]], num_ranks: int) -> int:
    """Return the bytes of a slot and of the receive buffers. parts: (dtype, elements of a slot, elements that this rank
    sums).
    """
    slot = max((dtype.itemsize * numel for dtype, numel, _ in parts), default=0)
    received = max(((num_ranks - 1) * dtype.itemsize * own for dtype, _, own in parts), default=0)
    return slot + received


def _kept(sizes: Iterable[int], are_here: bool) -> int:
    """Return the total, rounded up as files and host pools do."""
    return sum(round_up(size, FileStore.alignment_bytes) for size in sizes) if are_here else 0


def _bytes(kinds: Kinds) -> int:
    return sum(dtype.itemsize * numel for dtype, numel in kinds.values())


def _numel(region: slice) -> int:
    return int(region.stop - region.start)
