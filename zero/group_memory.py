"""Memory of a group's parameters that comes and goes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..offload import PagedBuffer


class GroupMemory:
    """Addresses for `full`, (padded_numel,), and for `own`, the part of it that is at rest here; memory for a while.

    Content is arbitrary whenever memory comes. Here it is there for good, and nothing comes or goes.
    """

    own_is_in_full = True
    """Whether `own` is a part of `full`, with the same memory."""

    def __init__(self, full: Tensor, own: Tensor) -> None:
        self.full = full
        self.own = own

    def take_own(self) -> None: ...

    def take_others(self) -> None:
        """Memory for the rest of `full`, beside that of `own`."""

    def give_own(self) -> None:
        """The end of `take_own`."""

    def give_others(self) -> None:
        """The end of `take_others`."""


class PagedMemory(GroupMemory):
    """Pages that move between buffers, see [Note: moving pages]. `own` is a view of `full`."""

    def __init__(self, pages: PagedBuffer, own: slice) -> None:
        """own: which elements."""
        super().__init__(pages.tensor, pages.tensor[own])
        self._pages = pages
        self._own = own

    def take_own(self) -> None:
        self._pages.populate(self._own.start, self._own.stop)

    def take_others(self) -> None:
        self._pages.populate(0, self._own.start)
        self._pages.populate(self._own.stop, self.full.numel())

    def give_own(self) -> None:
        self._pages.vacate(self._own.start, self._own.stop)

    def give_others(self) -> None:
        self._pages.vacate(0, self._own.start)
        self._pages.vacate(self._own.stop, self.full.numel())


class PagesBesideOwn(GroupMemory):
    """Pages of `full`, all of which come and go, and `own` in memory for itself: `full` gets other values than it."""

    own_is_in_full = False

    def __init__(self, pages: PagedBuffer, own_numel: int) -> None:
        own = torch.empty(own_numel, dtype=pages.tensor.dtype)
        super().__init__(pages.tensor, own)
        self._pages = pages
        own.untyped_storage().resize_(0)

    def take_own(self) -> None:
        self.own.untyped_storage().resize_(self.own.nbytes)

    def take_others(self) -> None:
        self._pages.populate(0, self.full.numel())

    def give_own(self) -> None:
        self.own.untyped_storage().resize_(0)

    def give_others(self) -> None:
        self._pages.vacate(0, self.full.numel())


class ResizedMemory(GroupMemory):
    """Storages that are resized, on any device. `own` has one for itself, but where it is all of `full`."""

    def __init__(self, full: Tensor, own_numel: int) -> None:
        """full: (padded_numel,), whose memory is given back at once."""
        self.own_is_in_full = own_numel == full.numel()
        own = full if self.own_is_in_full else torch.empty(own_numel, dtype=full.dtype, device=full.device)
        super().__init__(full, own)
        for memory in (self.full, self.own):
            memory.untyped_storage().resize_(0)

    def take_own(self) -> None:
        self.own.untyped_storage().resize_(self.own.nbytes)

    def take_others(self) -> None:
        if not self.own_is_in_full:
            self.full.untyped_storage().resize_(self.full.nbytes)

    def give_own(self) -> None:
        self.own.untyped_storage().resize_(0)

    def give_others(self) -> None:
        if not self.own_is_in_full:
            self.full.untyped_storage().resize_(0)
