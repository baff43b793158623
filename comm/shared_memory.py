"""The transport between CPU ranks of a host: memory that all of them map.

[Note: one copy per host]
All ranks of the axis map the same memory for a buffer from `allocate`. Each rank writes its part and reads the other
parts in place. So a gather moves nothing, and needs only a `fence` after the writes.

[Note: slots]
Gradients go through a ring of slots. Only rank r writes slot s of rank r. Operation n uses slot n % count:

    rank r:  write slot[r]   -> posted  = n + 1
             wait for all    posted > n;  out[part r] = slot[0][part r] + slot[1][part r] + ...
             (all-reduce)    slot[r][part r] = out[part r] -> reduced = n + 1;  wait for all; copy the other parts.
                             If the slot's dtype cannot hold the sum, the sum goes behind the slot's content.
                             If all ranks map `out`, nothing is copied: `reduced` says that the part is in `out`.
             -> consumed = n + 1. The slot is written again after every rank has consumed its content.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .axis import Chunk, Numels, Pending, Terms, Transport, regions_of
from .errors import CollectiveError, no_answer
from .in_flight import AxisRecorder
from .shared_segment import (
    CONSUMED,
    COUNTERS_NUMEL,
    FENCED,
    LETTER_NUMEL,
    MAIL_NUMEL,
    POSTED,
    REDUCED,
    Gather,
    SharedCounters,
    SharedMail,
    map_together,
    page_aligned,
)

_CACHE_LINE_BYTES = 64


def counters_bytes(size: int) -> int:
    """Return the bytes that the transport between `size` ranks takes before its first use."""
    return page_aligned(8 * size * (COUNTERS_NUMEL + MAIL_NUMEL))


class SharedMemoryTransport(Transport):
    """Collectives between ranks that map the same memory. See the notes at the top of the file."""

    name = "shared_memory"
    sums_here = True
    copies_are_shared = True

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        places: Sequence[int],
        pids: Sequence[int],
        exchange: Callable[[Any], list[Any]],
        timeout_seconds: float,
        channel: AxisRecorder,
    ) -> None:
        """rank: on the axis. ranks, places: as in `Axis`. pids: process ids by rank.

        exchange: gathers a value from every rank, also a barrier. Used until the ranks share memory.
        """
        super().__init__(torch.device("cpu"), rank, ranks)
        self._places = places
        self._channel = channel
        told = _gather_by(exchange, rank, ranks, channel)
        control = map_together(counters_bytes(self.size), "counters", rank, ranks, told).view(torch.int64)
        mail_start, mail_end = self.size * COUNTERS_NUMEL, self.size * (COUNTERS_NUMEL + MAIL_NUMEL)
        self._counters = SharedCounters(control[:mail_start], rank, ranks, pids, timeout_seconds, channel)
        self._mail = SharedMail(control[mail_start:mail_end], rank, ranks, self._counters, channel)
        self._slots: list[list[Tensor]] = []  # [slot][rank]: (capacity_bytes,) uint8
        self._common: set[int] = set()  # addresses of buffers from `allocate`
        self._num_opened = 0
        self._sequence = 0  # of the newest collective
        self._num_fenced = 0

    # -- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Map a zero-filled buffer for each (numel, dtype) into all ranks of the axis."""
        sizes = [page_aligned(numel * dtype.itemsize) for numel, dtype in specs]
        # A file of no bytes cannot be reserved. All ranks pass the same sizes, so no rank waits in `map_together`.
        if not sum(sizes):
            return [torch.empty(0, dtype=dtype) for _, dtype in specs]
        segment = self._map(sum(sizes), "parameters")
        # `all_reduce` recognises these buffers by their storage: a view or `.data` of a buffer is a new tensor.
        self._common.add(segment.data_ptr())
        buffers, start = [], 0
        for (numel, dtype), size in zip(specs, sizes, strict=True):
            buffers.append(segment[start : start + numel * dtype.itemsize].view(dtype))
            start += size
        return buffers

    @property
    def slot_bytes(self) -> int:
        """Bytes of this rank's slots in the shared memory."""
        return sum(slots[self.rank].nbytes for slots in self._slots)

    def reserve_slots(self, nbytes: int, count: int) -> None:
        """Map the ring of slots, each with room for nbytes: the content, and a sum of a wider dtype."""
        capacity = page_aligned(nbytes)
        segment = self._map(count * self.size * capacity, "gradients")
        grid = segment.view(count, self.size, capacity)
        self._slots = [[grid[slot, rank] for rank in range(self.size)] for slot in range(count)]

    def release_slots(self) -> None:
        """Unmap the ring of slots. `reserve_slots` comes before the next operation that uses one."""
        self._slots = []

    def _map(self, nbytes: int, purpose: str) -> Tensor:
        return map_together(nbytes, purpose, self.rank, self.ranks, self._mail.gather)

    # -- collectives ----------------------------------------------------------------------------------------------

    def gather(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """Do nothing: all ranks read the same `full`. See [Note: one copy per host]."""
        return Pending()

    def gather_copies(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """Gather into private memory of this rank. Each `part` goes through a slot."""
        slot = self.open_slot(part.numel(), part.dtype, what)
        slot.copy_(part)
        number, arrived = self._post(what)

        def collect() -> None:
            arrived.wait()
            for place, other in zip(self._places, self._views(number, slot, slice(None)), strict=True):
                full[place * part.numel() : (place + 1) * part.numel()].copy_(other)
            self._counters.store(CONSUMED, number + 1)

        return Pending(collect)

    def next_slot(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return the slot that `open_slot` will return next, to be written early. None if a rank still reads it."""
        # The last operation in this slot was n - count, and all ranks have consumed it at n - count + 1.
        if not self._counters.has_come(CONSUMED, self._num_opened - len(self._slots) + 1):
            return None
        return self._slots[self._num_opened % len(self._slots)][self.rank][: numel * dtype.itemsize].view(dtype)

    def open_slot(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """Return this rank's next slot, (numel,) of dtype, uninitialized, as soon as no rank reads its old content."""
        self._sequence = self._channel.begin(what)
        self._counters.wait_for(CONSUMED, self._num_opened - len(self._slots) + 1, what, self._sequence)
        slot = self.next_slot(numel, dtype)
        assert slot is not None
        self._num_opened += 1
        return slot

    def reduce_scatter(self, slot: Tensor, spare: Tensor | None, what: str) -> Terms:
        """Start to sum slot[this rank's part] over the ranks. slot: (size * n,)."""
        number, arrived = self._post(what)
        numel = slot.numel() // self.size
        place = self._places[self.rank]
        mine = slice(place * numel, (place + 1) * numel)

        # No other rank needs the sum. The counter says that this rank no longer reads the slots.
        def summed() -> None:
            self._counters.store(CONSUMED, number + 1)

        return Terms(arrived, slice(0, numel), lambda: self._views(number, slot, mine), summed)

    def swap(self, out: Tensor, given: Tensor, numels: Numels, what: str) -> Pending:
        """All-to-all of uneven parts, in rank order. Slots must have room for the largest `given` of all ranks."""
        slot = self.open_slot(given.numel(), given.dtype, what)
        # This rank reads its part of `out` from `given`, so that part is not copied to the slot.
        own_start = sum(numels[self.rank][: self.rank])
        own = slice(own_start, own_start + numels[self.rank][self.rank])
        slot[: own.start].copy_(given[: own.start])
        slot[own.stop :].copy_(given[own.stop :])
        number, arrived = self._post(what)

        def collect() -> None:
            arrived.wait()
            start = 0
            for rank, row in enumerate(numels):
                low, end = sum(row[: self.rank]), start + row[self.rank]
                other = given if rank == self.rank else self._slot_of(rank, number, sum(row), given.dtype)
                out[start:end].copy_(other[low : low + row[self.rank]])
                start = end
            self._counters.store(CONSUMED, number + 1)

        return Pending(collect)

    def pass_on(self, chunks: Tensor, to: Sequence[int], of: Sequence[Chunk], out: Tensor, what: str) -> Pending:
        """Read into out[n] the chunk of[n] = (rank, index). chunks: (any, ...), of the same shape on all ranks.

        Several calls may be in flight. Wait for them in the order of their start.
        """
        slot = self.open_slot(chunks.numel(), chunks.dtype, what)
        slot.view(chunks.shape).copy_(chunks)
        number, arrived = self._post(what)
        theirs = self._views(number, slot, slice(None))  # made now, since `reserve_slots` may replace the slots

        def collect() -> None:
            arrived.wait()
            for one, (rank, chunk) in zip(out, of, strict=True):
                one.copy_(theirs[rank].view(chunks.shape)[chunk])
            self._counters.store(CONSUMED, number + 1)

        return Pending(collect)

    def all_reduce(self, slot: Tensor, out: Tensor, what: str) -> Terms:
        """Start out = sum over ranks of slot. Each rank sums its region of all slots and reads the sums of the other
        ranks.

        If `out` is from `allocate`, each sum is written once for all ranks. Before it is written again, all ranks must
        pass a fence or a barrier.
        """
        number, arrived = self._post(what)
        # Taken now: further collectives begin before `collect` runs.
        sequence = self._sequence
        regions = regions_of(out.numel(), self.size)
        mine = regions[self.rank]
        is_common = out.untyped_storage().data_ptr() in self._common

        def summed() -> Pending:
            if not is_common:
                # May overwrite this rank's term: only this rank reads its region of the slots.
                self._sums_of(self.rank, number, slot, out, mine).copy_(out[mine])
            self._counters.store(REDUCED, number + 1)
            return Pending(collect, lambda: self._counters.has_come(REDUCED, number + 1))

        def collect() -> None:
            self._counters.wait_for(REDUCED, number + 1, what, sequence)
            for rank, region in enumerate(regions):
                if rank != self.rank and not is_common:
                    out[region].copy_(self._sums_of(rank, number, slot, out, region))
            self._counters.store(CONSUMED, number + 1)

        return Terms(arrived, mine, lambda: self._views(number, slot, mine), summed)

    def sum_small(self, values: Tensor, what: str) -> Tensor:
        """Sum a small int64 vector over the ranks. Also a barrier."""
        return torch.cat([self._mail.sum(part, what) for part in torch.split(values, LETTER_NUMEL)])

    def fence(self, what: str) -> None:
        """Wait until every rank of the axis has arrived. Their earlier writes can then be read."""
        sequence = self._channel.begin(what)
        self._num_fenced += 1
        self._counters.store(FENCED, self._num_fenced)
        self._counters.wait_for(FENCED, self._num_fenced, what, sequence)

    def close(self) -> None:
        """Tell the other ranks that this rank has left. Mapped memory lives as long as its tensors."""
        self._counters.close()

    # -- slots ----------------------------------------------------------------------------------------------------

    def _post(self, what: str) -> tuple[int, Pending]:
        """Publish the newest slot. Returns its number and a handle that waits for the slots of all ranks."""
        posted, sequence = self._num_opened, self._sequence
        counters = self._counters
        counters.store(POSTED, posted)
        arrived = Pending(
            lambda: counters.wait_for(POSTED, posted, what, sequence), lambda: counters.has_come(POSTED, posted)
        )
        return posted - 1, arrived

    def _views(self, number: int, slot: Tensor, part: slice) -> list[Tensor]:
        """View a part of the slots of all ranks."""
        return [self._slot_of(rank, number, slot.numel(), slot.dtype)[part] for rank in range(self.size)]

    def _slot_of(self, rank: int, number: int, numel: int, dtype: torch.dtype) -> Tensor:
        """View the slot of a rank, (numel,)."""
        return self._slots[number % len(self._slots)][rank][: numel * dtype.itemsize].view(dtype)

    def _sums_of(self, rank: int, number: int, slot: Tensor, out: Tensor, region: slice) -> Tensor:
        """View the memory where `rank` publishes its sum of an all-reduce, in a dtype that holds it exactly."""
        whole = self._slots[number % len(self._slots)][rank]
        slot_bytes = slot.numel() * slot.dtype.itemsize
        if torch.promote_types(slot.dtype, out.dtype) == slot.dtype:
            return whole[:slot_bytes].view(slot.dtype)[region]
        start = -(-slot_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        numel = region.stop - region.start
        return whole[start : start + numel * out.dtype.itemsize].view(out.dtype)


def _gather_by(exchange: Callable[[Any], list[Any]], rank: int, ranks: Sequence[int], channel: AxisRecorder) -> Gather:
    """Make a gather from `exchange`, for use before the ranks share memory."""

    def gather(value: Any, what: str) -> list[Any]:
        started = time.monotonic()
        try:
            return exchange(value)
        except RuntimeError as error:  # from gloo: a rank is late or gone
            others = [other for other in ranks if other != ranks[rank]]
            text = no_answer(ranks[rank], what, others, time.monotonic() - started, error)
            raise CollectiveError(text + channel.recorder.compare(others)) from error

    return gather
