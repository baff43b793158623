"""Sums in rank order: the order of additions of an element never depends on how the tensor was split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK_NUMEL = 1 << 17  # 512 KiB of float32: what is summed stays in the cache between the passes


NOTHING = slice(0, 0)
"""Of what is summed: none of it."""


def sum_with_held(terms: list[Tensor], own: int, out: Tensor, held: slice, accumulate: bool) -> None:
    """As `sum_in_rank_order`, where `out` has the values of terms[own] in `held`, and terms[own] what is outside of it.

    If anything is held, terms[own] is `out` afterwards: what it was is gone.
    """
    if held == NOTHING:
        sum_in_rank_order(terms, out, accumulate)
        return
    for piece in (slice(0, held.start), held, slice(held.stop, out.numel())):
        if piece.start < piece.stop:
            chunk = out[piece]
            chunks = [term[piece] for term in terms]
            if piece is held:
                chunks[own] = chunk
            sum_in_rank_order(chunks, chunk, accumulate)
    terms[own] = out


def sum_in_rank_order(terms: Sequence[Tensor], out: Tensor, accumulate: bool) -> None:
    """out = (out +) terms[0] + terms[1] + ..., added in that order in the dtype of `out`.

    terms: each (numel,) of the reduce dtype; out: (numel,). One of the terms may be `out` itself.
    """
    if len(terms) == 1:
        if accumulate:
            out.add_(terms[0])
        elif terms[0].data_ptr() != out.data_ptr():
            out.copy_(terms[0])
        return
    same_dtype = all(term.dtype == out.dtype for term in terms)
    if len(terms) == 2 and same_dtype and not accumulate:
        torch.add(terms[0], terms[1], out=out)
        return
    for start in range(0, out.numel(), CHUNK_NUMEL):
        end = start + CHUNK_NUMEL
        chunk = out[start:end]
        pieces = [chunk.clone() if term is out else term[start:end] for term in terms]
        if not accumulate:
            chunk.copy_(pieces.pop(0))
        for piece in pieces:
            chunk.add_(piece)
