"""Values that rest outside of memory, and how to get at them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StoredRange:
    """A range of values in a store.

    open: brings them, (numel,) of dtype, until another range is opened. What is changed in them is kept, where whoever
    made the range said that it is for change.
    """

    numel: int
    dtype: torch.dtype
    open: Callable[[], Tensor]

    def part(self, low: int, high: int) -> StoredRange:
        return StoredRange(high - low, self.dtype, lambda: self.open()[low:high])


Memory = Tensor | StoredRange
"""Where values are, (n,): in memory, or in a store."""
