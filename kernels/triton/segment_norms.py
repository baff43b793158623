"""Triton form of `kernels/segment_norms.py`: pieces by the kernel of sums of squares, then a sum over pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .sum_of_squares import aligned, squares_of_spans
from .tables import entry_of, tables

STRIDE = 1024  # pieces that a program adds at once
NUM_PARTS = 16  # programs of a segment, at most; one alone would take long for a large segment


@triton.jit
def _sum_kernel(
    TABLE_ptr, S_ptr, PARTS_ptr,
    WIDTH: tl.constexpr, NUM_PARTS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Every NUM_PARTS-th stride of a segment's pieces. Fields of the table: their first and last + 1, the segment."""
    entry, part = entry_of(tl.program_id(0), TABLE_ptr, WIDTH)
    first = tl.load(TABLE_ptr + WIDTH + entry)
    last = tl.load(TABLE_ptr + 2 * WIDTH + entry)
    segment = tl.load(TABLE_ptr + 3 * WIDTH + entry)
    cols = tl.arange(0, STRIDE)
    sums = tl.zeros((STRIDE,), tl.float64)
    for start in range(first + part * STRIDE, last, NUM_PARTS * STRIDE):
        sums += tl.load(S_ptr + start + cols, mask=start + cols < last, other=0.0)
    tl.store(PARTS_ptr + segment * NUM_PARTS + part, tl.sum(sums, axis=0))


def squares_by_piece(shard: Tensor, segments: Sequence[tuple[int, int]], block_numel: int) -> tuple[Tensor, list[int]]:
    """shard: (n,), contiguous -> (num_pieces,) float64 and the numbers of pieces of the segments."""
    flat = aligned(shard)
    spans = []
    for start, end in segments:
        if start < end:
            first = start // block_numel * block_numel
            spans.append((flat.data_ptr() + first * flat.element_size(), start - first, end - first))
    squares, counts_of_used = squares_of_spans(spans, flat, block_numel, None)
    used = iter(counts_of_used)
    return squares, [next(used) if start < end else 0 for start, end in segments]


def sums_of_pieces(squares: Tensor, counts: Sequence[int]) -> Tensor:
    """The sum of each segment's pieces, (num_segments,) float64."""
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] + count)
    parts = torch.zeros((len(counts), NUM_PARTS), dtype=torch.float64, device=squares.device)
    used = [index for index, count in enumerate(counts) if count]
    num_programs = [min(-(-counts[index] // STRIDE), NUM_PARTS) for index in used]
    fields = [[firsts[index] for index in used], [firsts[index + 1] for index in used], used]
    for table, width, grid in tables(num_programs, fields, squares.device):
        launch(
            _sum_kernel, (grid,), num_warps=4, TABLE_ptr=table, S_ptr=squares, PARTS_ptr=parts,
            WIDTH=width, NUM_PARTS=NUM_PARTS, STRIDE=STRIDE,
        )  # fmt: skip
    return parts.sum(1)
