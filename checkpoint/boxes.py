"""A contiguous range of a flattened tensor as boxes of the tensor: integers only.

    shape (4, 5), elements [3, 18):   . . . 1 1      box 1: offsets (0, 3), sizes (1, 2)
                                      2 2 2 2 2      box 2: offsets (1, 0), sizes (2, 5)
                                      2 2 2 2 2
                                      3 3 3 . .      box 3: offsets (3, 0), sizes (1, 3)

A range of a tensor with N dimensions is at most 2N - 1 boxes, and each of them is contiguous itself. That is what lets
a flat shard be written where others expect pieces of tensors, without a gather and without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A block of a tensor: the indices [offsets[d], offsets[d] + sizes[d]) of each dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def is_range_of(self, shape: tuple[int, ...]) -> bool:
        """True where its elements are some of a tensor of that shape, and follow each other when it is flattened."""
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        is_inner = False  # behind the first dimension that it has more than one index of
        for offset, size, dim in zip(self.offsets, self.sizes, shape, strict=True):
            if not 0 < size <= dim - offset or (is_inner and size != dim):
                return False
            is_inner = is_inner or size > 1
        return True

    def start_in(self, shape: tuple[int, ...]) -> int:
        """The place of its first element in the flattened tensor."""
        start = 0
        for offset, size in zip(self.offsets, shape, strict=True):
            start = start * size + offset
        return start


def boxes_of_range(shape: tuple[int, ...], start: int, end: int, max_numel: int) -> list[Box]:
    """The elements [start, end) of the flattened tensor as contiguous boxes in order, none above max_numel."""
    if start >= end:
        return []
    return [part for box in _boxes(shape, start, end) for part in _split(box, max_numel)]


def _boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    if len(shape) < 2:
        yield Box((start,), (end - start,)) if shape else Box((), ())
        return
    row_numel = math.prod(shape[1:])
    row, column = divmod(start, row_numel)
    last_row, last_column = divmod(end, row_numel)
    if column:
        row_end = row_numel if last_row > row else last_column
        yield from _in_row(row, _boxes(shape[1:], column, row_end))
        row += 1
    if row < last_row:
        yield Box((row,) + (0,) * (len(shape) - 1), (last_row - row, *shape[1:]))
    if last_column and row <= last_row:
        yield from _in_row(last_row, _boxes(shape[1:], 0, last_column))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((row, *box.offsets), (1, *box.sizes))


def _split(box: Box, max_numel: int) -> Iterator[Box]:
    """Cuts a contiguous box along its first dimension that is longer than 1, and the pieces again where needed."""
    if box.numel <= max_numel:
        yield box
        return
    dim = next(index for index, size in enumerate(box.sizes) if size > 1)
    rows = max(1, max_numel // math.prod(box.sizes[dim + 1 :]))
    end = box.offsets[dim] + box.sizes[dim]
    for first in range(box.offsets[dim], end, rows):
        offsets = (*box.offsets[:dim], first, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], min(rows, end - first), *box.sizes[dim + 1 :])
        yield from _split(Box(offsets, sizes), max_numel)
