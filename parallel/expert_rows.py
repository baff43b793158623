"""Rows of experts in a list on their way: each goes to the one rank that has its expert, and comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm import Exchange


@dataclass(frozen=True)
class Way:
    """Where the rows of one forward go. order: these by expert."""

    exchange: Exchange
    what: str
    order: Tensor  # (sent,) int64
    counts: tuple[tuple[int, ...], ...]  # counts[i][j]: rows that the i-th rank has for the j-th
    experts: Tensor  # (received,) int64: of this rank, from 0

    def there(self, x: Tensor, what: str) -> Tensor:
        """x: (sent, width) in the order of the choices -> (received, width)."""
        return self.exchange.swap_rows(x, self.counts, f"{what} of {self.what}")

    def back(self, y: Tensor, what: str) -> Tensor:
        """The opposite of `there`."""
        counts = tuple(zip(*self.counts, strict=True))
        return self.exchange.swap_rows(y.contiguous(), counts, f"{what} of {self.what}")

    def placed(self, rows: Tensor) -> Tensor:
        """rows: (sent, width), in that order -> as they were."""
        out = torch.empty_like(rows)
        out[self.order] = rows
        return out


class DispatchedRows(torch.autograd.Function):
    """(sent, width) -> (received, width): the rows for this rank's experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return way.there(x[way.order], "tokens")

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        way: Way = ctx.way
        return way.placed(way.back(dy[0], "the gradient of tokens")), None


class CombinedRows(torch.autograd.Function):
    """(received, width) -> (sent, width): what the experts of all ranks have made of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return way.placed(way.back(made, "outputs"))

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        way: Way = ctx.way
        return way.there(dy[0][way.order], "the gradient of outputs"), None
