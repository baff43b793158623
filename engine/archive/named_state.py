"""The model's and the optimizer's state by name: the range of each tensor that this rank has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...checkpoint.chunk_view import ChunkView, TensorInfo, flat_ranges_of
from ...comm import Collectives, Mesh
from ...offload import Memory, TensorChunk, TensorShard
from ...zero.group import ShardedGroup, part_of, values_of
from ...zero.layout import ParamShard
from ...zero.optimizer import ShardedOptimizer
from ...zero.parameter_states import StateKey
from ...zero.unit import Unit


@dataclass(frozen=True)
class Catalog:
    """Names, shapes and dtypes, the same on every rank. Tied parameters have their first name."""

    parameters: Mapping[str, TensorInfo]  # shape, and dtype of the most precise copy
    compute_dtypes: Mapping[str, torch.dtype]  # of the parameters
    buffers: Mapping[str, TensorInfo]  # those that are persistent
    aliases: Mapping[str, str]  # further names of tied parameters -> first name
    state_keys: Mapping[str, StateKey]  # trained parameter -> key of its states' descriptions


@dataclass(frozen=True)
class UnsplitModel:
    """Parameters and names of the model before a pipeline has split it."""

    params: Mapping[str, nn.Parameter]  # by first name
    names: Sequence[str]  # of its state_dict, in its order: aliases too

    @classmethod
    def of(cls, module: nn.Module, units: Sequence[Unit]) -> UnsplitModel:
        """Describe a module that is the whole model. units: all units."""
        groups = [group for unit in units for group in unit.groups]
        params = {name: param for group in groups for name, param in group.plan.params}
        return cls(params, tuple(module.state_dict(keep_vars=True)))


class NamedState:
    """Parameters, buffers and optimizer states as views of this rank's shards; nothing is gathered.

    Names are the model's; a tied parameter has its first name, and the further names are in `aliases`. A parameter
    that is computed in half precision is its float32 master weight here.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        optimizer: ShardedOptimizer,
        mesh: Mesh,
        whole: UnsplitModel,
    ) -> None:
        """A collective. units: of this rank. whole: describes the whole model; `module` may be a part."""
        self.module = module
        self.units = units
        self.groups = [group for unit in units for group in unit.groups]
        self.shards = {id(shard.group): shard for shard in optimizer.shards}
        self.optimizer = optimizer
        self.mesh = mesh
        self.whole = whole
        self.catalog = self._own_catalog()
        if not mesh.has_whole:
            # Ranks of the same stage have equal catalogs, with the shapes of whole tensors. So a single rank sends it.
            own = self.catalog if mesh.is_first else None
            parts = [vars(part) for part in mesh.world.gather_objects(own) if part is not None]
            # The stages of a pipeline in their order, since the files list tensors in the model's order.
            merged = {
                key: {name: one for part in parts for name, one in part[key].items()} for key in vars(self.catalog)
            }
            self.catalog = Catalog(**merged)

    def _own_catalog(self) -> Catalog:
        param_views = [(param_view, group) for group in self.groups for param_view in group.layout.param_views]
        return Catalog(
            {
                param_view.name: TensorInfo(param_view.tensor_shard.whole, self._dtype_of(group))
                for param_view, group in param_views
            },
            {param_view.name: group.plan.dtype for param_view, group in param_views},
            {name: TensorInfo(tuple(buffer.shape), buffer.dtype) for name, buffer in self.buffers().items()},
            self._aliases(),
            self.optimizer.by_parameter.state_keys,
        )

    def _dtype_of(self, group: ShardedGroup) -> torch.dtype:
        shard = self.shards.get(id(group))
        return group.plan.dtype if shard is None else shard.form.master_dtype

    @property
    def option_groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the parameter names in each of the optimizer's groups, over the whole model."""
        names = {id(param): name for name, param in self.whole.params.items()}
        groups = self.optimizer.param_groups
        return tuple(tuple(names[id(param)] for param in group["params"] if id(param) in names) for group in groups)

    def _aliases(self) -> dict[str, str]:
        first = {id(param): name for group in self.groups for name, param in group.plan.params}
        names = self.module.state_dict(keep_vars=True)
        return {
            name: first[id(value)] for name, value in names.items() if id(value) in first and first[id(value)] != name
        }

    def buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers of this rank's stages, not copies."""
        state = self.module.state_dict(keep_vars=True)
        return {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not is_extra_state(name)
        }

    @property
    def holds_buffers(self) -> bool:
        """Return True on the rank that saves the buffers of its stages."""
        return self.mesh.is_first

    def weights(self, rounded: bool = False, changes: bool = False, saves: bool = False) -> list[ChunkView]:
        """Return this rank's ranges of the parameters. rounded: in the compute dtype, instead of master weights.

        changes: for writing; then the store keeps the changed values. saves: without ranges that replicas save.
        """
        chunk_views = []
        for group in self.groups:
            shard = None if rounded else self.shards.get(id(group))
            if shard is not None and changes:
                # Remainders are the low bits of the weights before. A reader sets them again, if the file has them.
                shard.forget_remainders(shard.param_shards)
            for param_shard in group.param_shards if shard is None else shard.param_shards:
                if shard is None:
                    memory = part_of(group.own_values(changes), param_shard.in_shard)
                else:
                    memory = shard.master_of(param_shard, changes)
                chunk_views += chunk_views_of(group, param_shard, "", memory, saves)
        return chunk_views

    def full_parts(self, unit: Unit) -> list[ChunkView]:
        """Return this rank's ranges of a unit's parameters, read from full parameters (or copies of these)."""
        chunk_views = []
        for group in unit.groups:
            for param_shard in group.param_shards:
                memory = group.params[param_shard.index].detach().reshape(-1)[param_shard.in_param]
                chunk_views += chunk_views_of(group, param_shard, "", memory, saves=True)
        return chunk_views

    def states(self, changes: bool = False, saves: bool = False) -> list[ChunkView]:
        """Return this rank's ranges of elementwise optimizer states, as `parameter.state`. saves: as in `weights`."""
        return [
            chunk_view
            for shard in self.optimizer.shards
            for param_shard in shard.param_shards
            for name, memory in self.optimizer.by_parameter.states_of(shard, param_shard, changes).items()
            for chunk_view in chunk_views_of(shard.group, param_shard, f".{name}", memory, saves)
        ]

    def rank_states(self) -> list[ChunkView]:
        """Return the states that no other rank has."""
        return [
            chunk_view
            for shard, param_shard, name, values in self.optimizer.by_parameter.rank_states()
            for chunk_view in chunk_views_of(shard.group, param_shard, f".{name}", values, saves=False)
        ]

    def averages(self, saves: bool = False) -> list[ChunkView]:
        """Return this rank's ranges of the averages of master weights, under their names; [] without averages."""
        averages = self.optimizer.averages
        if averages is None:
            return []
        return [
            chunk_view
            for shard in self.optimizer.shards
            for param_shard in shard.param_shards
            for chunk_view in chunk_views_of(shard.group, param_shard, "", averages.of(shard, param_shard), saves)
        ]

    @property
    def has_replicas(self) -> bool:
        """Return True if any range of this rank is also on another rank."""
        return any(group.axes.replicas.size > 1 for group in self.groups)

    def publish(self, groups: Sequence[ShardedGroup] | None = None, ends_graphs: bool = True) -> None:
        """Bring weights that were changed in place to their computed copies, on all ranks. A collective.

        groups: the changed groups; None: all. ends_graphs: autograd refuses backwards of earlier forwards, as after any
        change in place; False if the weights of these forwards come back and their backwards gather them.
        """
        # Changes of 8-bit values are in a float32 copy until here.
        self.optimizer.flush()
        groups = self.groups if groups is None else groups
        for shard in [self.shards[id(group)] for group in groups if id(group) in self.shards]:
            for param_shard in shard.param_shards if shard.form.is_mixed else ():
                own = values_of(part_of(shard.group.own_values(changes=True), param_shard.in_shard))
                own.copy_(values_of(shard.master_of(param_shard)))
        # Full parameters have old values of other ranks, also if `UnitSequence.read` keeps them: released, they are
        # gathered anew. Memory at rest is refreshed.
        for group in groups:
            # No backward gathers a group again that is read outside of its forward.
            is_lost = group.frees_memory and group.keeper is not None
            if group.frees_memory:
                group.release_kept()
            if ends_graphs or is_lost:
                torch.autograd.graph.increment_version(group.params)
        pending = [group.refresh() for group in groups]
        for one in pending:
            one.wait()
        self.mesh.fence("new parameters")


def is_extra_state(name: str) -> bool:
    """Return True for the key of a module's `get_extra_state`, which may be a tensor of another size at each call."""
    return name.rpartition(".")[2] == "_extra_state"


def chunk_views_of(
    group: ShardedGroup, param_shard: ParamShard, suffix: str, memory: Memory, saves: bool
) -> list[ChunkView]:
    """Return the ranges of a piece on this rank. saves: of equal replicas, only this rank's part."""
    param_view = group.layout.param_views[param_shard.index]
    low, high = 0, param_shard.numel
    if saves:
        axis = group.axes.replicas
        # Replicas have the same values, so each writes an equal part of them: all disks and links work.
        low, high = (param_shard.numel * place // axis.size for place in (axis.rank, axis.rank + 1))
        # Of ranks with equal copies (tied weights of stages, whole layers beside split layers) only the first saves
        # them.
        if not group.axes.is_counted or low == high:
            return []
    first = param_shard.offset_in_param + low
    return [
        ChunkView(
            param_view.name + suffix,
            param_view.tensor_shard.whole,
            offset_in_chunk,
            part_of(memory, slice(start - param_shard.offset_in_param, end - param_shard.offset_in_param)),
            None if param_view.tensor_shard.is_all else chunk,
        )
        for chunk, offset_in_chunk, start, end in ranges_of(
            param_view.tensor_shard, first, param_shard.offset_in_param + high
        )
    ]


# -- between a whole tensor and the part in the memory of a rank -----------------------------------------------------


_INTEGERS = {1: torch.uint8, 2: torch.uint8, 4: torch.int32, 8: torch.int64}  # neither NCCL nor gloo adds up int16


def gather_whole(exchange: Collectives, tensor_shard: TensorShard, values: Tensor, is_counted: bool) -> Tensor:
    """Return the whole tensor on each rank of an axis, from the parts of these ranks. A collective.

    is_counted: False if another rank gives the same values.
    """
    whole = tensor_shard.put(values) if is_counted else values.new_zeros(tensor_shard.whole)
    # As integers, so that adding zeros keeps each bit: as floats, -0.0 + 0.0 is 0.0.
    bits = whole.view(_INTEGERS[values.dtype.itemsize])
    return exchange.sum(bits, "parts of a tensor").view(values.dtype)


def ranges_of(tensor_shard: TensorShard, start: int, end: int) -> Iterator[tuple[TensorChunk, int, int, int]]:
    """Yield the contiguous ranges of elements [start, end) of a flattened part of a tensor, in order within each chunk.

    Each is (chunk of the whole tensor, offset in the flattened chunk, start, end in the flattened part).
    """
    for chunk, own in tensor_shard.chunks:
        offset = 0
        for first, last in flat_ranges_of(own, tensor_shard.shape) if own.numel else ():
            low, high = max(first, start), min(last, end)
            if low < high:
                yield chunk, offset + low - first, low, high
            offset += last - first
