"""Proof that the rows of all ranks are the tensors: every element once, and all of its bytes where a file has some."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .archive import MAX_VALUES_BYTES
from .dcp import PARAM_GROUPS
from .fragment import TensorInfo
from .index import Row
from .names import shortened

Rows = Mapping[str, Sequence[tuple[int, Row]]]
"""The boxes of each tensor, each with the rank in whose file it is."""


def check_coverage(tensors: Mapping[str, TensorInfo], rows: Rows, file_sizes: Sequence[int]) -> None:
    """Raises ValueError, which names a tensor and an element, unless all of this holds:

    each box is a contiguous range of its tensor; the boxes of a tensor are all of its elements, and none of them twice;
    their bytes lie in their archives, and these in the files. file_sizes: bytes of the file of each rank.
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
        if not row.box.is_range_of(info.shape):
            raise ValueError(
                f"the index of rank {rank} has a box of {shortened(name)} at {row.box.offsets} of sizes {row.box.sizes}"
                f", which is no contiguous part of its shape {info.shape}"
            )
    covered = 0
    for start, numel in sorted((row.box.start_in(info.shape), row.box.numel) for _, row in rows):
        if start != covered:
            raise ValueError(
                f"expected each element of {shortened(name)} once, found element {min(start, covered)} "
                + ("in two rows" if start < covered else "in none")
            )
        covered = start + numel
    if covered != math.prod(info.shape):
        raise ValueError(f"expected each element of {shortened(name)} once, found element {covered} in none")
