"""Sums in rank order: the order of additions of an element never depends on how the tensor was split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK_NUMEL = 1 << 17  # 512 KiB of float32: what is summed stays in the cache between the passes


NOTHING = slice(0, 0)
"""Of what is summed: none of it."""


def sum_with_held(parts: list[Tensor], own: int, out: Tensor, held: slice, accumulate: bool) -> None:
    """As `sum_in_rank_order`, where `out` has the values of parts[own] in `held`, and parts[own] what is outside of it.

    If anything is held, parts[own] is `out` afterwards: what it was is gone.
    """
    for piece in (slice(0, held.start), held, slice(held.stop, out.numel())):
        if piece.start < piece.stop:
            chunk = out[piece]
            chunks = [part[piece] for part in parts]
            if piece is held:
                chunks[own] = chunk
            sum_in_rank_order(chunks, chunk, accumulate)
    if held != NOTHING:
        parts[own] = out


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
