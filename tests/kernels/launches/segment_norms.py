"""Launches of the norms of segments."""

import torch

from lowtide.kernels.triton import segment_norms


def squares(dtype: torch.dtype) -> None:
    shard = torch.empty(1 << 16, dtype=dtype, device="meta")
    segment_norms.squares_by_piece(shard, [(0, 5000), (5008, 1 << 16)], 1024)


def sums(dtype: torch.dtype, counts: list[int]) -> None:
    segment_norms.sums_of_pieces(torch.empty(sum(counts), dtype=torch.float64, device="meta"), counts)


CASES = {
    "squares": squares,
    "sums": lambda dtype: sums(dtype, [1 << 16, 3]),
}
NOT_VECTORIZED = {"sums": "they begin anywhere; they are a thousandth of what is read"}
