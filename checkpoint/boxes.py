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
from itertools import product

from ..offload import Box


def boxes_of_range(shape: tuple[int, ...], start: int, end: int, max_numel: int) -> list[Box]:
    """The elements [start, end) of the flattened tensor as contiguous boxes in order, none above max_numel."""
    if start >= end:
        return []
    return [part for box in _boxes(shape, start, end) for part in _split(box, max_numel)]


def stretches_of(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, end) in the flattened tensor of each contiguous stretch of a box that is not empty, in order."""
    # The dimensions from `inner` on are whole: they, and a part of the one before, lie in one piece.
    inner = len(shape)
    while inner and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    numel = math.prod(box.sizes[outer:])
    lines = [range(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True)]
    for chosen in product(*lines[:outer]):
        start = Box((*chosen, *box.offsets[outer:]), box.sizes).start_in(shape)
        yield start, start + numel


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
