"""Sums in rank order: the order of additions of an element never depends on how the tensor was split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK_NUMEL = 1 << 17  # 512 KiB of float32: what is summed stays in the cache between the passes


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor, accumulate: bool) -> None:
    """out = (out +) parts[0] + parts[1] + ..., added in that order in the dtype of `out`.

    parts: each (numel,) of the reduce dtype; out: (numel,). One of the parts may be `out` itself.
    """
    same_dtype = all(part.dtype == out.dtype for part in parts)
    if len(parts) == 2 and same_dtype and not accumulate:
        torch.add(parts[0], parts[1], out=out)
        return
    for start in range(0, out.numel(), CHUNK_NUMEL):
        end = start + CHUNK_NUMEL
        chunk = out[start:end]
        pieces = [chunk.clone() if part is out else part[start:end] for part in parts]
        if not accumulate:
            chunk.copy_(pieces.pop(0))
        for piece in pieces:
            chunk.add_(piece)
