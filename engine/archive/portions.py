"""Parts of tensors as a rank has them: between the whole and what lies in its memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...checkpoint.fragment import stretches_of
from ...comm import Exchange
from ...offload import Box, Portion

_INTEGERS = {1: torch.uint8, 2: torch.uint8, 4: torch.int32, 8: torch.int64}  # neither NCCL nor gloo adds up int16


def taken(portion: Portion, whole: Tensor) -> Tensor:
    """The portion of these values: themselves where it is all of them, else a new tensor."""
    if portion.is_all:
        return whole
    out = torch.empty(portion.shape, dtype=whole.dtype, device=whole.device)
    for box, own in portion.boxes:
        out[own.index] = whole[box.index]
    return out


def put_together(exchange: Exchange, portion: Portion, values: Tensor, is_counted: bool) -> Tensor:
    """The whole of which the ranks of an axis have portions, on each of them; of one, all of it may be. A collective.

    is_counted: the values are not another rank's too, which gives them.
    """
    whole = torch.zeros(portion.whole, dtype=values.dtype, device=values.device)
    for box, own in portion.boxes if is_counted else ():
        whole[box.index] = values[own.index]
    bits = whole.view(_INTEGERS[values.dtype.itemsize])  # added as integers, so that none changes: -0.0; to zeros
    return exchange.sum(bits, "parts of a tensor").view(values.dtype)


def ranges_of(portion: Portion, start: int, end: int) -> Iterator[tuple[Box, int, int, int]]:
    """The elements [start, end) of a flattened portion, in order within each box of the whole that they are of.

    Gives (box of the whole, offset in the flattened box, start, end): of each contiguous range of both.
    """
    for box, own in portion.boxes:
        offset = 0
        for first, last in stretches_of(own, portion.shape) if own.numel else ():
            low, high = max(first, start), min(last, end)
            if low < high:
                yield box, offset + low - first, low, high
            offset += last - first
