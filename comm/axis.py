"""One axis of the mesh as this rank sees it: what every route of it can do, and what a started collective gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Pending:
    """A started collective. `wait` returns when its result may be used; waiting twice is harmless."""

    __slots__ = ("_finish", "_poll")

    def __init__(self, finish: Callable[[], None] | None = None, poll: Callable[[], bool] | None = None) -> None:
        """poll: says whether `finish` would return at once; None: that is not known before it has."""
        self._finish = finish
        self._poll = poll

    @property
    def is_done(self) -> bool:
        """True where it is known that `wait` would not wait."""
        return self._finish is None or (self._poll is not None and self._poll())

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Terms(NamedTuple):
    """A started sum over the ranks of an axis: what this rank has to add up.

        arrived.wait()  ->  out[region] = read()[0] + read()[1] + ...  ->  pending = summed()  ->  pending.wait()

    The caller adds, so he may look at the terms, and have his own elsewhere than in his slot.
    """

    arrived: Pending
    region: slice  # of the result: what this rank sums
    read: Callable[[], list[Tensor]]
    """One term for each rank, in their order, of the size of the region; or a single one, where the backend has summed
    (`Transport.sums_here` is False). They are there from `arrived` on until `summed`."""
    summed: Callable[[], Pending | None]
    """To be called when the region has its sum, which goes to the other ranks then; None: they do not need it."""


Numels = Sequence[Sequence[int]]
"""Of a swap: numels[i][j] elements that the i-th rank of an axis has for the j-th, alike on all of them."""

REGION_ALIGNMENT_NUMEL = 1024


def regions_of(numel: int, size: int) -> list[slice]:
    """The region of an all-reduce that each of `size` ranks sums: whole blocks, the last ones shorter or empty."""
    part = -(-numel // (size * REGION_ALIGNMENT_NUMEL)) * REGION_ALIGNMENT_NUMEL
    return [slice(min(rank * part, numel), min((rank + 1) * part, numel)) for rank in range(size)]


Chunk = tuple[int, int]
"""A rank of the axis, and which of its pieces: see `Transport.pass_on`."""


class Transport(ABC):
    """How bytes move between the ranks of an axis. `what` names the operation in error messages.

    What is defined here is that of a route whose slots and copies are its process's own.
    """

    name: str
    sums_here = False  # the caller sums, a term of each rank; else the backend has
    slots_may_lack_own = False  # reductions take a slot without this rank's part, which is in `spare` or `out` then
    copies_are_shared = False  # buffers from `allocate` are one copy for all ranks of the axis

    def __init__(self, device: torch.device, rank: int = 0, ranks: Sequence[int] = (0,)) -> None:
        """device: of buffers and slots. rank: within the axis; ranks: as of `Axis`."""
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self._device = device
        self._next: Tensor | None = None

    @property
    def slot_bytes(self) -> int:
        """What this rank keeps between operations for slots, and for what comes to them."""
        return 0

    def allocate(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """One zero-filled buffer for each (numel, dtype)."""
        return [torch.zeros(numel, dtype=dtype, device=self._device) for numel, dtype in specs]

    def reserve_slots(self, nbytes: int, count: int) -> None:  # noqa: B027 (a slot is made when it is opened)
        """Makes room for so many slots of so many bytes each, where they are not made when they are opened."""

    def next_slot(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """What `open_slot` will give next: it may be written already. None where it is not free yet."""
        if self._next is None or self._next.numel() != numel or self._next.dtype != dtype:
            self._next = torch.empty(numel, dtype=dtype, device=self._device)
        return self._next

    def open_slot(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """A buffer to stage a gradient in, (numel,) of dtype, uninitialized."""
        slot, self._next = self.next_slot(numel, dtype), None
        assert slot is not None
        return slot

    @abstractmethod
    def gather(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """full[part of q] = the `part` of rank q, for every q. full: (size * part.numel(),)."""

    def gather_copies(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """As `gather`, where `full` is memory of this rank alone."""
        return self.gather(full, part, what)

    @abstractmethod
    def reduce_scatter(self, slot: Tensor, spare: Tensor | None, what: str) -> Terms:
        """Of the sum over ranks of slot[this rank's part]. slot: (size * n,). spare: (n,) or None."""

    @abstractmethod
    def all_reduce(self, slot: Tensor, out: Tensor, what: str) -> Terms:
        """Of out = sum over ranks of slot."""

    @abstractmethod
    def swap(self, out: Tensor, given: Tensor, numels: Numels, what: str) -> Pending:
        """out = what each rank has given for this one, in their order; `given` is in the order of the ranks too."""

    @abstractmethod
    def pass_on(self, pieces: Tensor, to: Sequence[int], of: Sequence[Chunk], out: Tensor, what: str) -> Pending:
        """pieces[n] goes to rank to[n], and out[n] = the piece of[n]. pieces: (any, ...), which stay as they are."""

    @abstractmethod
    def sum_small(self, values: Tensor, what: str) -> Tensor:
        """The exact sum over ranks of a small int64 vector; also a barrier."""

    def fence(self, what: str) -> None:  # noqa: B027 (others see writes by messages alone)
        """Returns when every rank of the axis has come here, where they write to the same memory."""

    def close(self) -> None:  # noqa: B027 (nothing to let go)
        """Lets go of the process group, and of buffers."""


class SoloTransport(Transport):
    """Collectives of a single rank: nothing to move, and a sum over ranks is the tensor itself."""

    name = "solo"

    def gather(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """full = part, unless they are the same memory already."""
        if full.data_ptr() != part.data_ptr():
            full.copy_(part)
        return Pending()

    def reduce_scatter(self, slot: Tensor, spare: Tensor | None, what: str) -> Terms:
        """The sum is the slot itself."""
        return Terms(Pending(), slice(0, slot.numel()), lambda: [slot], lambda: None)

    def all_reduce(self, slot: Tensor, out: Tensor, what: str) -> Terms:
        """As `reduce_scatter`."""
        return self.reduce_scatter(slot, None, what)

    def swap(self, out: Tensor, given: Tensor, numels: Numels, what: str) -> Pending:
        """out = given."""
        out.copy_(given)
        return Pending()

    def pass_on(self, pieces: Tensor, to: Sequence[int], of: Sequence[Chunk], out: Tensor, what: str) -> Pending:
        """Pieces of its own."""
        for one, (_, piece) in zip(out, of, strict=True):
            one.copy_(pieces[piece])
        return Pending()

    def sum_small(self, values: Tensor, what: str) -> Tensor:
        """The values themselves."""
        return values


@dataclass(frozen=True)
class Axis:
    """A mesh axis, or several that are folded into one: this rank's number on it, and the route between its ranks."""

    name: str
    rank: int
    ranks: tuple[int, ...]  # the global rank of each, ascending: the order of sums
    places: tuple[int, ...]  # which part of what is divided over the axis each has
    route: Transport

    # Cached: a step asks for them some ten times for each block.

    @cached_property
    def place(self) -> int:
        """Which part this rank has."""
        return self.places[self.rank]

    @cached_property
    def size(self) -> int:
        return len(self.ranks)
