"""Proof that the rows of all ranks are the tensors: every element once, and all of its bytes where a file has some."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..offload import Box
from .archive import MAX_VALUES_BYTES
from .dcp import PARAM_GROUPS
from .fragment import TensorInfo
from .index import Row
from .names import shortened

Rows = Mapping[str, Sequence[tuple[int, Row]]]
"""The boxes of each tensor, each with the rank in whose file it is."""


def check_coverage(tensors: Mapping[str, TensorInfo], rows: Rows, file_sizes: Sequence[int]) -> None:
    """Raises ValueError, which names a tensor and an element, unless all of this holds:

    each box lies in its tensor; the boxes of a tensor are all of its elements, and none of them twice; their bytes
    lie in their archives, and these in the files. file_sizes: bytes of the file of each rank.
    """
    for name, found in rows.items():
        info = tensors.get(name)
        if info is None and not name.startswith(PARAM_GROUPS):
            raise ValueError(f"an index has rows of {shortened(name)}, which the description does not name")
        for rank, row in found:
            _check_place(row, info, file_sizes[rank], rank)
    for name, info in tensors.items():
        _check_elements(name, info, rows.get(name, ()))


def _check_place(row: Row, info: TensorInfo | None, file_nbytes: int, rank: int) -> None:
    place = row.place
    nbytes = place.nbytes if info is None else row.box.numel * info.dtype.itemsize
    values_end, end = place.values_offset + nbytes, place.offset + place.nbytes
    if not (place.offset <= place.values_offset and values_end <= end <= file_nbytes and nbytes <= MAX_VALUES_BYTES):
        raise ValueError(
            f"the index of rank {rank} says that {nbytes} bytes of {shortened(row.name)} are at {place.values_offset}, "
            f"in an archive from {place.offset} to {end}, in a file of {file_nbytes} bytes; a box has at most "
            f"{MAX_VALUES_BYTES} bytes, and lies in its archive"
        )


def _check_elements(name: str, info: TensorInfo, rows: Sequence[tuple[int, Row]]) -> None:
    for rank, row in rows:
        if not row.box.lies_in(info.shape):
            raise ValueError(
                f"the index of rank {rank} has a box of {shortened(name)} at {row.box.offsets} of sizes {row.box.sizes}"
                f", which is no part of its shape {info.shape}"
            )
    boxes = [row.box for _, row in rows]
    if all(box.is_range_of(info.shape) for box in boxes):
        problem = _gap_between_ranges(boxes, info.shape)
    else:
        problem = _gap_between_boxes(boxes, info.shape)
    if problem is not None:
        raise ValueError(f"expected each element of {shortened(name)} once, found {problem}")


def _gap_between_ranges(boxes: Sequence[Box], shape: tuple[int, ...]) -> str | None:
    covered = 0
    for start, numel in sorted((box.start_in(shape), box.numel) for box in boxes):
        if start != covered:
            return f"element {min(start, covered)} " + ("in two rows" if start < covered else "in none")
        covered = start + numel
    return None if covered == math.prod(shape) else f"element {covered} in none"


def _gap_between_boxes(boxes: Sequence[Box], shape: tuple[int, ...]) -> str | None:
    """Of a layer that was split by columns: as many elements as the tensor has, and no two boxes with a common one."""
    open_boxes: list[Box] = []  # those that reach to where the next one begins, in the first dimension
    for box in sorted(boxes, key=lambda box: box.offsets):
        open_boxes = [other for other in open_boxes if other.offsets[0] + other.sizes[0] > box.offsets[0]]
        for other in open_boxes:
            common = box.common(other)
            if common is not None:
                return f"element {common.start_in(shape)} in two rows"
        open_boxes.append(box)
    covered, numel = sum(box.numel for box in boxes), math.prod(shape)
    return None if covered == numel else f"{covered} of its {numel} elements in rows"
