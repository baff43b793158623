"""Signs of numbers, eight to a byte."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BITS = 8


def packed_signs(values: Tensor) -> Tensor:
    """(n,), n a multiple of 8 -> (n / 8,) uint8: a bit is set where a value is not negative; the first is the highest.

    NumPy packs on the processor: torch has no operator for it, and seven would pass over memory in its place.
    """
    is_positive = values >= 0
    if values.device.type == "cpu":
        return torch.from_numpy(np.packbits(is_positive.numpy()))
    weights = _weights(values.device)
    return (is_positive.view(-1, BITS) * weights).sum(1, dtype=torch.uint8)


def unpacked_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """(n,) uint8 -> (8 n,) of +1 and -1."""
    if packed.device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(packed.numpy()))
    else:
        bits = ((packed.view(-1, 1) & _weights(packed.device)) != 0).view(-1)
    return bits.to(dtype).mul_(2).sub_(1)


def _weights(device: torch.device) -> Tensor:
    return torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8).to(device)
