"""The route of an axis with one rank: the same calls, nothing to move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .axis import Piece
from .pending import Numels, Pending, Terms


class SoloRoute:
    """Collectives of a single rank: a sum over ranks is the tensor itself."""

    name = "solo"
    sums_here = False
    slots_may_lack_own = False
    copies_are_shared = False
    size = 1
    rank = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next: Tensor | None = None

    def allocate(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """One zero-filled buffer for each (numel, dtype)."""
        return [torch.zeros(numel, dtype=dtype, device=self._device) for numel, dtype in specs]

    @property
    def slot_bytes(self) -> int:
        """None."""
        return 0

    def reserve_slots(self, nbytes: int, count: int) -> None:
        """Nothing to reserve."""

    def gather(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """full = part, unless they are the same memory already."""
        if full.data_ptr() != part.data_ptr():
            full.copy_(part)
        return Pending()

    def gather_copies(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """As `gather`."""
        return self.gather(full, part, what)

    def next_slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        """What `open_slot` will give next: it may be written already."""
        if self._next is None or self._next.numel() != numel or self._next.dtype != dtype:
            self._next = torch.empty(numel, dtype=dtype, device=self._device)
        return self._next

    def open_slot(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """A buffer to stage a gradient in, (numel,) of dtype, uninitialized."""
        slot, self._next = self.next_slot(numel, dtype), None
        return slot

    def reduce_scatter(self, slot: Tensor, spare: Tensor | None, what: str) -> Terms:
        """The sum is the slot itself."""
        return Terms(Pending(), slice(0, slot.numel()), lambda: [slot], lambda: None)

    def swap(self, out: Tensor, given: Tensor, numels: Numels, what: str) -> Pending:
        """out = given."""
        out.copy_(given)
        return Pending()

    def pass_on(self, pieces: Tensor, to: Sequence[int], of: Sequence[Piece], out: Tensor, what: str) -> Pending:
        """Pieces of its own."""
        for one, (_, piece) in zip(out, of, strict=True):
            one.copy_(pieces[piece])
        return Pending()

    def all_reduce(self, slot: Tensor, out: Tensor, what: str) -> Terms:
        """As `reduce_scatter`."""
        return self.reduce_scatter(slot, None, what)

    def sum_small(self, values: Tensor, what: str) -> Tensor:
        """The values themselves."""
        return values

    def fence(self, what: str) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nothing to let go."""
