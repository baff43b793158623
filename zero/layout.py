"""Offsets of parameters in a flat buffer and in its shards: integers only.

    flat:    |  weight          |bias|.|  weight         .....|     .: padding
    rank:    |    0       |    1       |    2       |    3    |     shards are whole blocks of 1024 elements

[Note: blocks] A shard is a whole number of blocks, and offsets in the flat buffer do not depend on the number of
shards. So sums over a block and elementwise kernels on whole blocks give the same bits for any number of shards. This
is why the stages agree bitwise, norm and clipping included.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from ..offload import TensorShard, round_up

BLOCK_NUMEL = 1024
# 64 bytes of float32, 32 of bfloat16: a view begins where vector loads want it.
PARAM_ALIGNMENT_NUMEL = 16


@dataclass(frozen=True)
class ParamView:
    """A parameter's position in the flat buffer, and its position in the tensor of the model."""

    name: str
    tensor_shard: TensorShard  # the part of the model's tensor that this parameter is
    offset_in_flat: int

    # Cached: a step reads them about ten times for each parameter.

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.tensor_shard.shape

    @cached_property
    def numel(self) -> int:
        return self.tensor_shard.numel

    @cached_property
    def end_in_flat(self) -> int:
        return self.offset_in_flat + self.numel

    @cached_property
    def in_flat(self) -> slice:
        return slice(self.offset_in_flat, self.end_in_flat)


@dataclass(frozen=True)
class ParamShard:
    """The part of a parameter that lies in a shard."""

    index: int  # of the slot
    offset_in_param: int
    offset_in_shard: int
    numel: int

    @cached_property
    def in_param(self) -> slice:
        return slice(self.offset_in_param, self.offset_in_param + self.numel)

    @cached_property
    def in_shard(self) -> slice:
        return slice(self.offset_in_shard, self.offset_in_shard + self.numel)


class ParamShards(tuple[ParamShard, ...]):
    """The parts of parameters in a shard, in order."""

    def of(self, index: int) -> tuple[ParamShard, ...]:
        """Return the parts of the parameter with this index."""
        return self._by_index.get(index, ())

    @cached_property
    def _by_index(self) -> dict[int, tuple[ParamShard, ...]]:
        return {
            index: tuple(param_shards)
            for index, param_shards in groupby(self, key=lambda param_shard: param_shard.index)
        }


@dataclass(frozen=True)
class FlatLayout:
    """Parameters in sequence, each aligned, padded to shard_count shards of whole blocks."""

    param_views: tuple[ParamView, ...]
    shard_count: int
    shard_numel: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[str, tuple[int, ...]]], shard_count: int) -> FlatLayout:
        """Lay out whole tensors. shapes: (name, shape) of each parameter, in order."""
        return cls.of_tensor_shards([(name, TensorShard.all_of(shape)) for name, shape in shapes], shard_count)

    @classmethod
    def of_tensor_shards(cls, tensor_shards: Sequence[tuple[str, TensorShard]], shard_count: int) -> FlatLayout:
        """Lay out parts of tensors. tensor_shards: (name of the tensor, part) in order. Empty parameters take no
        space."""
        param_views, offset = [], 0
        for name, tensor_shard in tensor_shards:
            param_views.append(ParamView(name, tensor_shard, offset))
            offset += round_up(tensor_shard.numel, PARAM_ALIGNMENT_NUMEL)
        return cls(tuple(param_views), shard_count, round_up(-(-offset // shard_count), BLOCK_NUMEL))

    @cached_property
    def padded_numel(self) -> int:
        return self.shard_count * self.shard_numel

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(param_view.name for param_view in self.param_views)

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Names of parameters -> indices of their slots."""
        return {name: index for index, name in enumerate(self.names)}

    @cached_property
    def is_dense(self) -> bool:
        """Whether no padding lies between parameters, and each has at least one element and one dimension."""
        ends = [0, *(param_view.end_in_flat for param_view in self.param_views)]
        starts = [param_view.offset_in_flat for param_view in self.param_views if param_view.shape and param_view.numel]
        return bool(starts) and starts == ends[:-1]

    @property
    def numel(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(param_view.numel for param_view in self.param_views)

    def param_shards(self, rank: int) -> ParamShards:
        """Return the part of each parameter in the shard of `rank`. Parameters outside of the shard are left out."""
        start, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        param_shards = []
        for index, param_view in enumerate(self.param_views):
            low, high = max(start, param_view.offset_in_flat), min(end, param_view.end_in_flat)
            if low < high:
                param_shards.append(ParamShard(index, low - param_view.offset_in_flat, low - start, high - low))
        return ParamShards(param_shards)

    def outside(self, indices: Set[int]) -> Sequence[tuple[int, int]]:
        """Return the ranges [start, end) that belong to none of these parameters, padding included."""
        return self._between(param_view for index, param_view in enumerate(self.param_views) if index in indices)

    @cached_property
    def padding(self) -> Sequence[tuple[int, int]]:
        """The ranges [start, end) between and after the parameters."""
        return self._between(self.param_views)

    def _between(self, param_views: Iterable[ParamView]) -> list[tuple[int, int]]:
        gaps, end = [], 0
        for param_view in param_views:
            gaps.append((end, param_view.offset_in_flat))
            end = param_view.end_in_flat
        return [(low, high) for low, high in [*gaps, (end, self.padded_numel)] if low < high]

    def whole_parameters(self, start: int, end: int) -> tuple[int, int]:
        """Shrink [start, end) to whole parameters. start >= end if no parameter is left."""
        for param_view in self.param_views:
            if param_view.offset_in_flat < start < param_view.end_in_flat:
                start = param_view.end_in_flat
            if param_view.offset_in_flat < end < param_view.end_in_flat:
                end = param_view.offset_in_flat
        return start, end

    def param_view_at(self, offset_in_flat: int) -> ParamView:
        """Return the parameter that holds the element. For padding: the parameter before it."""
        # An empty parameter has the offset of the next parameter, and holds no element.
        used = [param_view for param_view in self.param_views if param_view.numel]
        index = bisect_right([param_view.offset_in_flat for param_view in used], offset_in_flat) - 1
        return used[index]
