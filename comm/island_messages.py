"""How values are written for their way between islands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class MessageForm(Protocol):
    """Its text names it: the same on all islands."""

    def write(self, values: Tensor, first: int) -> Tensor:
        """(n,) on the CPU -> a message, (m,) uint8 in memory of its own; m depends on n alone.

        first: the number of the first value in this exchange, where random bits are drawn.
        """
        ...

    def read(self, message: Tensor, numel: int) -> Tensor:
        """(numel,), maybe in the memory of the message."""
        ...


@dataclass(frozen=True)
class InDtype:
    """As numbers of a float dtype, to which they are rounded."""

    dtype: torch.dtype

    def __str__(self) -> str:
        return str(self.dtype)

    def write(self, values: Tensor, first: int) -> Tensor:
        return values.to(self.dtype, copy=True).view(torch.uint8)

    def read(self, message: Tensor, numel: int) -> Tensor:
        return message.view(self.dtype)
