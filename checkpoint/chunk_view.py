"""What a rank holds of a named tensor, where such ranges are read from, and how they are boxes of the tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from ..offload import Memory, TensorChunk
from .files import shortened


@dataclass(frozen=True)
class ChunkView:
    """A contiguous range of a box of a named tensor, flattened: the elements [start, start + numel) of the box.

    Written to a file it is a source, read from a file it is the memory that is filled. The box is what a rank has of
    the tensor, before that is sharded: all of it, some columns or rows, an expert.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    memory: Memory  # a tensor is (numel,) contiguous, any dtype, on any device
    part_of_whole: TensorChunk | None = None  # None: the box is the whole tensor

    @property
    def chunk(self) -> TensorChunk:
        """What `start` counts in."""
        return TensorChunk.whole(self.shape) if self.part_of_whole is None else self.part_of_whole

    @property
    def values(self) -> Tensor:
        """(numel,); of a stored range until the values of another one are asked for."""
        return self.memory if isinstance(self.memory, Tensor) else self.memory.open()

    @property
    def is_in_memory(self) -> bool:
        return isinstance(self.memory, Tensor)

    @property
    def numel(self) -> int:
        return self.memory.numel() if isinstance(self.memory, Tensor) else self.memory.numel

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.start + self.numel

    def chunks(self, max_numel: int | None = None) -> list[TensorChunk]:
        """Its elements as boxes of the whole tensor, in order; each lies in one piece in the memory."""
        chunk = self.chunk
        found = chunks_of_range(chunk.sizes, self.start, self.end, self.numel if max_numel is None else max_numel)
        return [one.outside(chunk) for one in found]

    def flat_ranges(self) -> list[tuple[int, int]]:
        """Its elements as ranges [low, high) of the flattened whole tensor, in order."""
        if self.part_of_whole is None:
            return [(self.start, self.end)] if self.numel else []
        return [flat_range for chunk in self.chunks() for flat_range in flat_ranges_of(chunk, self.shape)]


@cache
def _dtypes() -> Mapping[str, torch.dtype]:
    """By name, without those whose elements are no plain bytes."""
    found = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    return {name: dtype for name, dtype in found.items() if not name.startswith(("q", "bits"))}


def dtype_named(name: str, where: str) -> torch.dtype:
    """The dtype of a name such as "float32". Raises ValueError, which names the place."""
    dtype = _dtypes().get(name)
    if dtype is None:
        raise ValueError(f"{shortened(where)}: expected a dtype such as 'float32', found {shortened(name)}")
    return dtype


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as it lies in files."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorSource(Protocol):
    """Named tensors in files, of which ranges can be read.

    tensors: name -> shape and dtype. bytes_read: how many bytes of tensors were read so far.
    read: fills the values of each fragment, cast to their dtype; the names and shapes must be those of `tensors`.
    """

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def bytes_read(self) -> int: ...
    def read(self, chunk_views: Sequence[ChunkView]) -> None: ...


# -- a range as boxes: integers only ----------------------------------------------------------------------------------


def chunks_of_range(shape: tuple[int, ...], start: int, end: int, max_numel: int) -> list[TensorChunk]:
    """The elements [start, end) of the flattened tensor as contiguous boxes in order, none above max_numel.

        shape (4, 5), elements [3, 18):   . . . 1 1      box 1: offsets (0, 3), sizes (1, 2)
                                          2 2 2 2 2      box 2: offsets (1, 0), sizes (2, 5)
                                          2 2 2 2 2
                                          3 3 3 . .      box 3: offsets (3, 0), sizes (1, 3)

    A range of a tensor with N dimensions is at most 2N - 1 boxes, and each of them is contiguous itself. That is what
    lets a flat shard be written where others expect pieces of tensors, without a gather and without a copy.
    """
    if start >= end:
        return []
    return [part for chunk in _chunks(shape, start, end) for part in _split(chunk, max_numel)]


def flat_ranges_of(chunk: TensorChunk, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, end) in the flattened tensor of each contiguous stretch of a box that is not empty, in order."""
    # The dimensions from `inner` on are whole: they, and a part of the one before, lie in one piece.
    inner = len(shape)
    while inner and chunk.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    numel = math.prod(chunk.sizes[outer:])
    lines = [range(low, low + size) for low, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    for chosen in product(*lines[:outer]):
        start = TensorChunk((*chosen, *chunk.offsets[outer:]), chunk.sizes).start_in(shape)
        yield start, start + numel


def _chunks(shape: tuple[int, ...], start: int, end: int) -> Iterator[TensorChunk]:
    if len(shape) < 2:
        yield TensorChunk((start,), (end - start,)) if shape else TensorChunk((), ())
        return
    row_numel = math.prod(shape[1:])
    row, column = divmod(start, row_numel)
    last_row, last_column = divmod(end, row_numel)
    if column:
        row_end = row_numel if last_row > row else last_column
        yield from _in_row(row, _chunks(shape[1:], column, row_end))
        row += 1
    if row < last_row:
        yield TensorChunk((row,) + (0,) * (len(shape) - 1), (last_row - row, *shape[1:]))
    if last_column and row <= last_row:
        yield from _in_row(last_row, _chunks(shape[1:], 0, last_column))


def _in_row(row: int, chunks: Iterator[TensorChunk]) -> Iterator[TensorChunk]:
    for chunk in chunks:
        yield TensorChunk((row, *chunk.offsets), (1, *chunk.sizes))


def _split(chunk: TensorChunk, max_numel: int) -> Iterator[TensorChunk]:
    """Cuts a contiguous box along its first dimension that is longer than 1, and the pieces again where needed."""
    if chunk.numel <= max_numel:
        yield chunk
        return
    dim = next(index for index, size in enumerate(chunk.sizes) if size > 1)
    rows = max(1, max_numel // math.prod(chunk.sizes[dim + 1 :]))
    end = chunk.offsets[dim] + chunk.sizes[dim]
    for first in range(chunk.offsets[dim], end, rows):
        offsets = (*chunk.offsets[:dim], first, *chunk.offsets[dim + 1 :])
        sizes = (*chunk.sizes[:dim], min(rows, end - first), *chunk.sizes[dim + 1 :])
        yield from _split(TensorChunk(offsets, sizes), max_numel)
