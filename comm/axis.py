"""An axis of the mesh as seen by this rank, the contract of its transport, and handles of started collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Pending:
    """A started collective. After `wait` the result may be used. Further waits do nothing."""

    __slots__ = ("_finish", "_poll")

    def __init__(self, finish: Callable[[], None] | None = None, poll: Callable[[], bool] | None = None) -> None:
        """poll: returns True if `finish` would not block. None if that is unknown."""
        self._finish = finish
        self._poll = poll

    @property
    def is_done(self) -> bool:
        """True if `wait` is known not to block."""
        return self._finish is None or (self._poll is not None and self._poll())

    def wait(self) -> None:
        finish, self._finish = self._finish, None  # frees the tensors that `finish` holds, also after an error
        if finish is not None:
            finish()


class Terms(NamedTuple):
    """A started sum over the ranks of an axis, which the caller completes.

        arrived.wait()  ->  out[region] = read()[0] + read()[1] + ...  ->  pending = summed()  ->  pending.wait()

    The caller adds, so it can inspect the terms, and its own term need not be in its slot.
    """

    arrived: Pending
    region: slice  # the part of the result that this rank sums
    read: Callable[[], list[Tensor]]
    """Return the terms of the region in rank order, or a single tensor if the backend has summed (`Transport.sums_here`
    is False). They are valid between `arrived` and `summed`."""
    summed: Callable[[], Pending | None]
    """Send the sum of the region to the other ranks. Returns None if they do not need it."""


Numels = Sequence[Sequence[int]]
"""Sizes of an all-to-all: rank i sends numels[i][j] elements to rank j. All ranks pass equal values."""

REGION_ALIGNMENT_NUMEL = 1024  # `BLOCK_NUMEL` of zero/layout.py, as a rank adds up the squares of its region by block


def regions_of(numel: int, size: int) -> list[slice]:
    """Divide `numel` elements into the regions that each rank of an all-reduce sums.

    A region is a whole number of blocks. The last regions may be shorter or empty.
    """
    # Rounded up to whole blocks, so the last ranks may get nothing. All ranks compute the same regions.
    part = -(-numel // (size * REGION_ALIGNMENT_NUMEL)) * REGION_ALIGNMENT_NUMEL
    return [slice(min(rank * part, numel), min((rank + 1) * part, numel)) for rank in range(size)]


Chunk = tuple[int, int]
"""(rank on the axis, index of its chunk): see `Transport.pass_on`."""


class Transport(ABC):
    """The transport of an axis. `what` names the operation in errors.

    The methods defined here are for transports whose slots and buffers are private to the process.
    """

    name: str
    sums_here = False  # if True, the caller sums the terms of all ranks; if False, the backend sums
    slots_may_lack_own = False  # reductions accept a slot without this rank's part, which is then in `spare` or `out`
    copies_are_shared = False  # all ranks of the axis map the same memory for buffers from `allocate`

    def __init__(self, device: torch.device, rank: int = 0, ranks: Sequence[int] = (0,)) -> None:
        """device: of buffers and slots. rank: on the axis. ranks: as in `Axis`."""
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self._device = device
        self._next: Tensor | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes that this rank keeps between operations for slots and receive buffers."""
        return 0

    def allocate(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Make a zero-filled buffer for each (numel, dtype)."""
        return [torch.zeros(numel, dtype=dtype, device=self._device) for numel, dtype in specs]

    def reserve_slots(self, nbytes: int, count: int) -> None:  # noqa: B027 (most transports make slots when opened)
        """Allocate `count` slots of `nbytes` each, if the transport does not make them in `open_slot`."""

    def release_slots(self) -> None:  # noqa: B027 (most transports keep none)
        """Free slots and receive buffers, if no operation uses them. Later operations make new buffers."""

    def next_slot(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return the slot that `open_slot` will return next, to be written early. None if it is still in use."""
        if self._next is None or self._next.numel() != numel or self._next.dtype != dtype:
            self._next = torch.empty(numel, dtype=dtype, device=self._device)
        return self._next

    def open_slot(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """Return an uninitialized buffer to stage a gradient in, (numel,) of dtype."""
        slot, self._next = self.next_slot(numel, dtype), None
        assert slot is not None
        return slot

    @abstractmethod
    def gather(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """Gather the parts of all ranks: full[part of q] = the `part` of rank q. full: (size * part.numel(),)."""

    def gather_copies(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """Do the same as `gather` if `full` is private memory of this rank."""
        return self.gather(full, part, what)

    @abstractmethod
    def reduce_scatter(self, slot: Tensor, spare: Tensor | None, what: str) -> Terms:
        """Start to sum slot[this rank's part] over the ranks. slot: (size * n,). spare: (n,) or None."""

    @abstractmethod
    def all_reduce(self, slot: Tensor, out: Tensor, what: str) -> Terms:
        """Start out = sum over ranks of slot."""

    @abstractmethod
    def swap(self, out: Tensor, given: Tensor, numels: Numels, what: str) -> Pending:
        """All-to-all of uneven parts. `out` and `given` are in rank order."""

    @abstractmethod
    def pass_on(self, chunks: Tensor, to: Sequence[int], of: Sequence[Chunk], out: Tensor, what: str) -> Pending:
        """Send chunks[n] to rank to[n], and receive into out[n] the chunk of[n] = (rank, index).

        chunks: (any, ...), unchanged until `wait`.
        """

    @abstractmethod
    def sum_small(self, values: Tensor, what: str) -> Tensor:
        """Sum a small int64 vector over the ranks. Also a barrier."""

    def fence(self, what: str) -> None:  # noqa: B027 (without shared memory there is nothing to order)
        """Wait until every rank of the axis has arrived, if they write to shared memory."""

    def close(self) -> None:  # noqa: B027 (nothing to release by default)
        """Drop the process group and the buffers."""


class SoloTransport(Transport):
    """The transport of a single rank: nothing moves, and a sum over ranks is the tensor itself."""

    name = "solo"

    def gather(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """Copy `part` to `full`, unless they share memory."""
        # The part may be the full buffer itself, since a single rank has all of it.
        if full.data_ptr() != part.data_ptr():
            full.copy_(part)
        return Pending()

    def reduce_scatter(self, slot: Tensor, spare: Tensor | None, what: str) -> Terms:
        """Return the slot: it is the sum."""
        return Terms(Pending(), slice(0, slot.numel()), lambda: [slot], lambda: None)

    def all_reduce(self, slot: Tensor, out: Tensor, what: str) -> Terms:
        """Return the slot: it is the sum."""
        return self.reduce_scatter(slot, None, what)

    def swap(self, out: Tensor, given: Tensor, numels: Numels, what: str) -> Pending:
        """Copy `given` to `out`."""
        out.copy_(given)
        return Pending()

    def pass_on(self, chunks: Tensor, to: Sequence[int], of: Sequence[Chunk], out: Tensor, what: str) -> Pending:
        """Copy chunks of this rank."""
        for one, (_, chunk) in zip(out, of, strict=True):
            one.copy_(chunks[chunk])
        return Pending()

    def sum_small(self, values: Tensor, what: str) -> Tensor:
        """Return the values."""
        return values


@dataclass(frozen=True)
class Axis:
    """A mesh axis, or several axes folded into one: this rank's number on it, and the transport between its ranks."""

    name: str
    rank: int
    ranks: tuple[int, ...]  # global ranks, ascending: the order of sums
    places: tuple[int, ...]  # coordinate of each rank: the part that it has of anything divided over the axis
    transport: Transport

    # Cached: a step reads them some ten times for each block.

    @cached_property
    def place(self) -> int:
        """This rank's coordinate."""
        return self.places[self.rank]

    @cached_property
    def size(self) -> int:
        return len(self.ranks)
