"""How a gradient is written for its way to other ranks, and read there."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm import Axis
from .summation import sum_with_held


class Codec:
    """Gradients go as they are, in `dtype`, and are added up in the dtype of the sum, in the order of the ranks.

    Each group has a codec of its own. What one that loses something (blocks of int8, signs, low rank) has to remember,
    as the error that goes with the next gradient, is its state.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Whether a message has the very values of a gradient of that dtype, and of sums that are rounded to it."""
        return torch.promote_types(self.dtype, dtype) == self.dtype

    def may_lack_own(self, axis: Axis, dtype: torch.dtype) -> bool:
        """Whether this rank's own term may lie in the sum, of that dtype, and not in its message: it has those bits."""
        return axis.route.sums_here and self.dtype == dtype

    def next_message(self, axis: Axis, numel: int) -> Tensor | None:
        """What `open_message` will give, to be written already; None where it is not free yet."""
        return axis.route.next_slot(numel, self.dtype)

    def open_message(self, axis: Axis, numel: int, what: str) -> Tensor:
        """Memory for the gradient that is sent next, (numel,); may wait for other ranks."""
        return axis.route.open_slot(numel, self.dtype, what)

    def add_up(self, terms: list[Tensor], own: int, out: Tensor, held: slice, accumulate: bool) -> None:
        """out = (out +) what the messages of the ranks say; see `sum_with_held`."""
        sum_with_held(terms, own, out, held, accumulate)
