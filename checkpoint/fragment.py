"""What a rank holds of a named tensor, and where such ranges are read from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from ..offload import Box, Memory
from .boxes import boxes_of_range, stretches_of
from .names import shortened


@dataclass(frozen=True)
class Fragment:
    """A contiguous range of a box of a named tensor, flattened: the elements [start, start + numel) of the box.

    Written to a file it is a source, read from a file it is the memory that is filled. The box is what a rank has of
    the tensor, before that is sharded: all of it, some columns or rows, an expert.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    memory: Memory  # a tensor is (numel,) contiguous, any dtype, on any device
    part_of_whole: Box | None = None  # None: the box is the whole tensor

    @property
    def box(self) -> Box:
        """What `start` counts in."""
        return Box.whole(self.shape) if self.part_of_whole is None else self.part_of_whole

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

    def boxes(self, max_numel: int | None = None) -> list[Box]:
        """Its elements as boxes of the whole tensor, in order; each lies in one piece in the memory."""
        box = self.box
        found = boxes_of_range(box.sizes, self.start, self.end, self.numel if max_numel is None else max_numel)
        return [one.outside(box) for one in found]

    def stretches(self) -> list[tuple[int, int]]:
        """Its elements as ranges [low, high) of the flattened whole tensor, in order."""
        if self.part_of_whole is None:
            return [(self.start, self.end)] if self.numel else []
        return [stretch for box in self.boxes() for stretch in stretches_of(box, self.shape)]


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
    def read(self, fragments: Sequence[Fragment]) -> None: ...
