"""L2 norms of segments of a flat shard in one pass over it: what LAMB needs of each parameter and of its update.

    norm_k = sqrt(sum of x_i^2 for start_k <= i < end_k)                   LAMB, arXiv 1904.00962, algorithm 2

A parameter may be cut by the shard's edge: then each rank has a segment of it, and the ranks add `segment_squares`
before the root. Segments are summed by pieces, their parts in each block of the shard, as in [Note: Block sums] of
sum_of_squares.py. Where all shards begin at whole blocks of the flat buffer, a parameter has the same pieces however
the buffer is sharded; `squares_by_piece` gives their sums, for those who add them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import Backend, uses_triton
from .sum_of_squares import check_blocks, squares_by_block_reference

Segment = tuple[int, int]
"""[start, end) of the shard."""


def segment_norms(
    shard: Tensor, segments: Sequence[Segment], *, block_numel: int = 1024, backend: Backend = "auto"
) -> Tensor:
    """The L2 norm of each segment of shard, (n,) -> (num_segments,) float64, on its device. Arguments: see below."""
    return segment_squares(shard, segments, block_numel=block_numel, backend=backend).sqrt()


def segment_squares(
    shard: Tensor, segments: Sequence[Segment], *, block_numel: int = 1024, backend: Backend = "auto"
) -> Tensor:
    """The sum of squares of each segment, (num_segments,) float64: 0 for an empty one, inf or nan where a value is.

    shard: (n,), contiguous. segments may overlap and leave gaps. block_numel: a power of 2, 16 to 4096. The same
    shard and segments give the same bits in every run. Raises ValueError where a segment reaches out of the shard.
    """
    squares, counts = squares_by_piece(shard, segments, block_numel=block_numel, backend=backend)
    with torch.no_grad():
        if uses_triton(backend, "segment_norms", shard):
            from .triton import segment_norms as triton_form

            return triton_form.sums_of_pieces(squares, counts)
        return torch.stack([part.sum() for part in torch.split(squares, counts)]) if counts else squares


def squares_by_piece(
    shard: Tensor, segments: Sequence[Segment], *, block_numel: int = 1024, backend: Backend = "auto"
) -> tuple[Tensor, list[int]]:
    """The sum of squares of each piece, (num_pieces,) float64, in the order of segments, and how many each has."""
    check_blocks("segment_norms", [shard], block_numel)
    _check_segments(shard, segments)
    with torch.no_grad():
        if uses_triton(backend, "segment_norms", shard):
            from .triton import segment_norms as triton_form

            return triton_form.squares_by_piece(shard, segments, block_numel)
        parts = [_pieces_reference(shard, start, end, block_numel) for start, end in segments]
        return torch.cat([shard.new_empty(0, dtype=torch.float64), *parts]), [part.numel() for part in parts]


def _pieces_reference(shard: Tensor, start: int, end: int, block_numel: int) -> Tensor:
    first_edge = min(-(-start // block_numel) * block_numel, end)
    whole = squares_by_block_reference(shard[first_edge:end], block_numel)
    if start == first_edge:
        return whole
    return torch.cat([squares_by_block_reference(shard[start:first_edge], block_numel), whole])


def _check_segments(shard: Tensor, segments: Sequence[Segment]) -> None:
    if shard.dim() != 1 or not shard.is_contiguous():
        raise ValueError(
            f"segment_norms: expected a contiguous shard of one dimension, found {tuple(shard.shape)} with strides "
            f"{shard.stride()}"
        )
    for index, (start, end) in enumerate(segments):
        if not 0 <= start <= end <= shard.numel():
            raise ValueError(
                f"segment_norms: expected segment {index} to lie in the shard, [0, {shard.numel()}), found "
                f"[{start}, {end})"
            )
