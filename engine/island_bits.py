"""What islands exchange, in few bits (`outer.dtype`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.quantized_blocks import QUANTIZED_BLOCK_NUMEL, dequantize, quantize, quantized_bytes
from ..kernels.weight_rounding import Rounding


def message_bytes(numel: int, bits: int) -> int:
    """Of so many values, in whole blocks."""
    return quantized_bytes(_in_blocks(numel), bits)


@dataclass(frozen=True)
class InBlocks:
    """In blocks with a scale each, rounded at random so that the mean is exact; see [Note: Quantized blocks].

    What rounding loses is not kept for the next exchange, whose differences are to what all have agreed on: a rounding
    to the nearest would lose small differences each time.
    """

    bits: int
    rounding: Rounding  # of no other rank
    step: int  # after which the exchange starts

    def __str__(self) -> str:
        return f"int{self.bits}"

    def write(self, values: Tensor, first: int) -> Tensor:
        whole = torch.zeros(_in_blocks(values.numel()))
        whole[: values.numel()].copy_(values)
        message = torch.empty(message_bytes(values.numel(), self.bits), dtype=torch.uint8)
        quantize(whole, self.bits, message, rounding=self.rounding.at(first), step=self.step)
        return message

    def read(self, message: Tensor, numel: int) -> Tensor:
        whole = torch.empty(_in_blocks(numel))
        dequantize(message, self.bits, whole)
        return whole[:numel]


def _in_blocks(numel: int) -> int:
    return -(-numel // QUANTIZED_BLOCK_NUMEL) * QUANTIZED_BLOCK_NUMEL
