"""The part of a named tensor that a rank holds, sources of such parts, and their division into chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Annotated, Protocol

import torch
from pydantic import PlainSerializer, PlainValidator
from pydantic_core import PydanticCustomError
from torch import Tensor

from ..offload import Memory, TensorChunk
from .files import Count


@dataclass(frozen=True)
class ChunkView:
    """The elements [start, start + numel) of a flattened chunk of a named tensor.

    A writer reads its values, a reader fills its memory. The chunk is the rank's part before sharding: the whole
    tensor, some columns or rows, or an expert.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    memory: Memory  # if a tensor: (numel,) contiguous, any dtype and device
    part_of_whole: TensorChunk | None = None  # None: the chunk is the whole tensor

    @property
    def chunk(self) -> TensorChunk:
        """The chunk in which `start` counts."""
        return TensorChunk.whole(self.shape) if self.part_of_whole is None else self.part_of_whole

    @property
    def values(self) -> Tensor:
        """(numel,). Values of a stored range are valid until the next range is opened."""
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
        """Return the elements as chunks of the whole tensor, in order, each contiguous in memory."""
        chunk = self.chunk
        found = chunks_of_range(chunk.sizes, self.start, self.end, self.numel if max_numel is None else max_numel)
        return [one.outside(chunk) for one in found]

    def flat_ranges(self) -> list[tuple[int, int]]:
        """Return the elements as ranges [low, high) of the flattened whole tensor, in order."""
        if self.part_of_whole is None:
            return [(self.start, self.end)] if self.numel else []
        return [flat_range for chunk in self.chunks() for flat_range in flat_ranges_of(chunk, self.shape)]


@cache
def _dtypes() -> Mapping[str, torch.dtype]:
    """Map names to dtypes, without quantized dtypes and bit dtypes, whose elements are not plain bytes."""
    found = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    return {name: dtype for name, dtype in found.items() if not name.startswith(("q", "bits"))}


def dtype_named(name: object) -> torch.dtype:
    """Look up a dtype such as "float32"; return a dtype unchanged. Raises ValueError."""
    dtype = name if isinstance(name, torch.dtype) else _dtypes().get(name) if isinstance(name, str) else None
    if dtype is None:
        raise PydanticCustomError("dtype", "expected a dtype such as 'float32'")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files, such as "float32"."""
    return str(dtype).removeprefix("torch.")


NamedDtype = Annotated[torch.dtype, PlainValidator(dtype_named), PlainSerializer(name_of)]


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor in files."""

    shape: tuple[Count, ...]
    dtype: NamedDtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorSource(Protocol):
    """Named tensors in files, of which ranges can be read.

    tensors: name -> shape and dtype. bytes_read: bytes of tensors read so far. read: fills the values of each view,
    cast to its dtype. Names and shapes must be as in `tensors`.
    """

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def bytes_read(self) -> int: ...
    def read(self, chunk_views: Sequence[ChunkView]) -> None: ...


def whole_values(source: TensorSource) -> dict[str, Tensor]:
    """Read all tensors into host memory."""
    found = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([ChunkView(name, tuple(value.shape), 0, value.view(-1)) for name, value in found.items()])
    return found


# -- a range as chunks: integers only ---------------------------------------------------------------------------------


def chunks_of_range(shape: tuple[int, ...], start: int, end: int, max_numel: int) -> list[TensorChunk]:
    """Divide the elements [start, end) of a flattened tensor into contiguous chunks, in order, none above max_numel.

        shape (4, 5), elements [3, 18):   . . . 1 1      chunk 1: offsets (0, 3), sizes (1, 2)
                                          2 2 2 2 2      chunk 2: offsets (1, 0), sizes (2, 5)
                                          2 2 2 2 2
                                          3 3 3 . .      chunk 3: offsets (3, 0), sizes (1, 3)

    A range of a tensor with N dimensions has at most 2N - 1 chunks, and each is contiguous. So a flat shard is written
    as chunks of tensors without a gather and without a copy.
    """
    if start >= end:
        return []
    return [part for chunk in _chunks(shape, start, end) for part in _split(chunk, max_numel)]


def flat_ranges_of(chunk: TensorChunk, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) in the flattened tensor of each contiguous range of a chunk that is not empty, in order."""
    # The dimensions from `inner` on are complete, so they and a range of the dimension before them are contiguous.
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
    # A part of the first row, full rows as one chunk, and a part of the last row.
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
    """Cut a contiguous chunk along its first dimension longer than 1, recursively."""
    if chunk.numel <= max_numel:
        yield chunk
        return
    dim = next(index for index, size in enumerate(chunk.sizes) if size > 1)
    # At least 1: a row that is still too long is cut along the next dimension.
    rows = max(1, max_numel // math.prod(chunk.sizes[dim + 1 :]))
    end = chunk.offsets[dim] + chunk.sizes[dim]
    for first in range(chunk.offsets[dim], end, rows):
        offsets = (*chunk.offsets[:dim], first, *chunk.offsets[dim + 1 :])
        sizes = (*chunk.sizes[:dim], min(rows, end - first), *chunk.sizes[dim + 1 :])
        yield from _split(TensorChunk(offsets, sizes), max_numel)
