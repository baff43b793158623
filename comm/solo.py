"""The route of an axis with one rank: the same calls, nothing to move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .pending import Inspect, Pending, Reduction


class SoloRoute:
    """Collectives of a single rank: a sum over ranks is the tensor itself."""

    name = "solo"
    sums_in_place = False
    copies_are_shared = False
    size = 1
    rank = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next: Tensor | None = None

    def allocate(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """One zero-filled buffer for each (numel, dtype)."""
        return [torch.zeros(numel, dtype=dtype, device=self._device) for numel, dtype in specs]

    def reserve_slots(self, nbytes: int, count: int) -> None:
        """Nothing to reserve."""

    def gather(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """full = part, unless they are the same memory already."""
        if full.data_ptr() != part.data_ptr():
            full.copy_(part)
        return Pending()

    def next_slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        """What `open_slot` will give next: it may be written already."""
        if self._next is None or self._next.numel() != numel or self._next.dtype != dtype:
            self._next = torch.empty(numel, dtype=dtype, device=self._device)
        return self._next

    def open_slot(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """A buffer to stage a gradient in, (numel,) of dtype, uninitialized."""
        slot, self._next = self.next_slot(numel, dtype), None
        return slot

    def reduce_scatter(
        self, slot: Tensor, out: Tensor, accumulate: bool, held: slice, what: str, inspect: Inspect | None
    ) -> Reduction:
        """out = (out +) slot."""
        out.add_(slot) if accumulate else out.copy_(slot)
        return self._inspected(out, slot, inspect)

    def all_reduce(self, slot: Tensor, out: Tensor, held: slice, what: str, inspect: Inspect | None) -> Reduction:
        """out = slot."""
        out.copy_(slot)
        return self._inspected(out, slot, inspect)

    def sum_small(self, values: Tensor, what: str) -> Tensor:
        """The values themselves."""
        return values

    def fence(self, what: str) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nothing to let go."""

    def _inspected(self, out: Tensor, slot: Tensor, inspect: Inspect | None) -> Reduction:
        if inspect is not None:
            inspect(0, out, (slot,))
        return Reduction([])
