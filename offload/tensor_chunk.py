"""Ranges of a tensor in each dimension, as integers, the part of a tensor that a rank holds, and rounding of sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class TensorChunk:
    """The elements with index [offsets[d], offsets[d] + sizes[d]) in each dimension d of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> TensorChunk:
        """Return the chunk with all elements of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """The slices that select the chunk from its tensor."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def lies_in(self, shape: tuple[int, ...]) -> bool:
        """Return True if the chunk is not empty and lies in a tensor of this shape."""
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        # A chain: o >= 0, 0 < size, size <= dim - o.
        return all(o >= 0 < size <= dim - o for o, size, dim in zip(self.offsets, self.sizes, shape, strict=True))

    def is_range_of(self, shape: tuple[int, ...]) -> bool:
        """Return True if the chunk is contiguous in the flattened tensor of this shape. It must lie in the tensor."""
        is_inner = False  # an earlier dimension has a size above 1, so this dimension must be complete
        for size, dim in zip(self.sizes, shape, strict=True):
            if is_inner and size != dim:
                return False
            is_inner = is_inner or size > 1
        return True

    def start_in(self, shape: tuple[int, ...]) -> int:
        """Return the index of the first element in the flattened tensor."""
        start = 0
        for offset, size in zip(self.offsets, shape, strict=True):
            start = start * size + offset
        return start

    def inside(self, outer: TensorChunk) -> TensorChunk:
        """Convert to coordinates of `outer`, which contains the chunk."""
        return TensorChunk(
            tuple(own - other for own, other in zip(self.offsets, outer.offsets, strict=True)), self.sizes
        )

    def outside(self, outer: TensorChunk) -> TensorChunk:
        """Convert from coordinates of `outer` to coordinates of the tensor. The inverse of `inside`."""
        return TensorChunk(
            tuple(own + other for own, other in zip(self.offsets, outer.offsets, strict=True)), self.sizes
        )

    def common(self, other: TensorChunk) -> TensorChunk | None:
        """Intersect two chunks. Returns None if they share no element."""
        offsets, sizes = [], []
        for low, size, other_low, other_size in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, end = max(low, other_low), min(low + size, other_low + other_size)
            if start >= end:
                return None
            offsets.append(start)
            sizes.append(end - start)
        return TensorChunk(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class TensorShard:
    """The part of a tensor that a rank holds: chunks of the tensor that together form a smaller tensor.

    whole (6, 4): queries, keys, values      shard (3, 4) of the second of two ranks

        q q q q                                  q q q q    rows 1
        q q q q  <-
        k k k k                                  k k k k    rows 3
        k k k k  <-
        v v v v                                  v v v v    rows 5
        v v v v  <-
    """

    whole: tuple[int, ...]  # shape of the tensor
    shape: tuple[int, ...]  # shape of the shard
    chunks: tuple[tuple[TensorChunk, TensorChunk], ...]  # (chunk of the tensor, chunk of the shard), of equal sizes

    @classmethod
    def all_of(cls, shape: tuple[int, ...]) -> TensorShard:
        chunk = TensorChunk.whole(shape)
        return cls(shape, shape, ((chunk, chunk),))

    @classmethod
    def along(cls, whole: tuple[int, ...], dim: int, ranges: Sequence[tuple[int, int]]) -> TensorShard:
        """Concatenate the index ranges [low, high) of dimension `dim`."""
        chunks, start = [], 0
        for low, high in ranges:
            sizes = (*whole[:dim], high - low, *whole[dim + 1 :])
            before, behind = (0,) * dim, (0,) * (len(whole) - dim - 1)
            chunks.append((TensorChunk((*before, low, *behind), sizes), TensorChunk((*before, start, *behind), sizes)))
            start += high - low
        return cls(whole, (*whole[:dim], start, *whole[dim + 1 :]), tuple(chunks))

    def cut(self, dim: int, low: int, high: int) -> TensorShard:
        """Select the indices [low, high) of dimension `dim`, along which the shard is complete.

        An empty and a complete range are allowed in every dimension.
        """
        if high - low in (0, self.whole[dim]):
            none = TensorShard(self.whole, (*self.shape[:dim], 0, *self.shape[dim + 1 :]), ())
            return none if high == low else self

        def part(chunk: TensorChunk, start: int) -> TensorChunk:
            assert chunk.sizes[dim] == self.whole[dim]
            offsets, sizes = list(chunk.offsets), list(chunk.sizes)
            offsets[dim], sizes[dim] = start, high - low
            return TensorChunk(tuple(offsets), tuple(sizes))

        shape = (*self.shape[:dim], high - low, *self.shape[dim + 1 :])
        return TensorShard(self.whole, shape, tuple((part(chunk, low), part(own, 0)) for chunk, own in self.chunks))

    def take(self, whole: Tensor) -> Tensor:
        """Return the shard of a tensor: the tensor itself if the shard is all of it, else a new tensor."""
        if self.is_all:
            return whole
        out = whole.new_empty(self.shape)
        for chunk, own in self.chunks:
            out[own.index] = whole[chunk.index]
        return out

    def put(self, values: Tensor) -> Tensor:
        """Return a new tensor of the shape of the whole, with these values of the shard and zeros elsewhere."""
        whole = values.new_zeros(self.whole)
        for chunk, own in self.chunks:
            whole[chunk.index] = values[own.index]
        return whole

    @cached_property
    def is_all(self) -> bool:
        return self.shape == self.whole

    @property
    def numel(self) -> int:
        return math.prod(self.shape)
