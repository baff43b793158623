"""What a rank holds of a named tensor, and where such ranges are read from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fragment:
    """A contiguous range of a named tensor, flattened: the elements [start, start + values.numel()).

    Written to a file it is a source, read from a file it is the memory that is filled.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    values: Tensor  # (n,) contiguous, any dtype, on any device

    @property
    def end(self) -> int:
        return self.start + self.values.numel()

    @property
    def is_whole(self) -> bool:
        return self.values.numel() == math.prod(self.shape)


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
