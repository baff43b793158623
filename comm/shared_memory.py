"""The route between CPU ranks of one host: memory that all of them map.

[Note: one copy per host]
A buffer from `allocate` is one piece of memory that every rank of the axis maps. Each rank writes its own part and
reads the others' parts in place, so that a gather moves nothing: `fence` after the writes is all it takes.

[Note: slots]
Gradients go through a ring of slots. Slot s of rank r is written by r alone. Operation n uses slot n % count:

    rank r:  write slot[r]   -> posted  = n + 1
             wait for all    posted > n;  out[part r] = slot[0][part r] + slot[1][part r] + ...
             (all-reduce)    slot[r][part r] = out[part r] -> reduced = n + 1;  wait for all; copy the others' parts
                             (behind the slot's content, where its dtype cannot hold the sum); where `out` itself is
                             one copy, there is nothing to copy, and reduced tells that the part is there
             -> consumed = n + 1; a slot is written again when every rank has consumed what was in it

[Note: ordering of stores]
A counter is stored after the data that it announces. Between the two lies at least one release and acquire of a lock
(torch gives up the interpreter's lock around a copy), which orders them on every processor.

The file is unlinked as soon as every rank has mapped it: nothing is left behind, whatever kills the job.
"""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from .axis import Piece
from .errors import UNEVEN, CollectiveError, no_answer
from .pending import Numels, Pending, Terms, regions_of
from .trail import Channel

FOLDER = "/dev/shm"
_PAGE_BYTES = 4096
_LINE_BYTES = 64  # of the cache
_MAIL_NUMEL = 256  # the last one names the call
_MAIL_BYTES = 8 * (_MAIL_NUMEL - 1)
_POSTED, _REDUCED, _CONSUMED, _MAILED, _FENCED, _LEFT = range(6)
_ROW_NUMEL = 64  # one rank's counters fill lines of the cache that no other rank writes
_LIVENESS_SECONDS = 0.2
_IN_PEACE, _AFTER_ERROR = 1, 2  # values of _LEFT


def page_aligned(nbytes: int) -> int:
    """nbytes rounded up to whole pages."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def counters_bytes(size: int) -> int:
    """What a route between so many ranks takes before it is used."""
    return page_aligned(8 * size * (_ROW_NUMEL + 2 * _MAIL_NUMEL))


def free_shared_bytes() -> int:
    """Bytes that can still be taken from shared memory on this host; 0 where it has none."""
    try:
        stat = os.statvfs(FOLDER)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def shared_memory_fault(nbytes: int) -> str:
    """Why nbytes cannot be taken from shared memory by this process; "" where they can."""
    free = free_shared_bytes()
    if free <= nbytes:
        return f"{FOLDER} has {free:,} bytes free, and {nbytes:,} are needed"
    path, fault = _create_file(_PAGE_BYTES, "a first page")  # it may be read-only
    if path:
        os.unlink(path)
    return fault


class SharedMemoryRoute:
    """Collectives between ranks that map the same memory. See the notes at the top of the file."""

    name = "shared_memory"
    sums_here = True
    slots_may_lack_own = False
    copies_are_shared = True

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        places: Sequence[int],
        pids: Sequence[int],
        exchange: Callable[[Any], list[Any]],
        timeout_seconds: float,
        channel: Channel,
    ) -> None:
        """rank: within the axis. ranks, places: as of `Axis`. pids: of their processes, by rank.

        exchange: gives every rank's value, a barrier too; needed until they share memory.
        """
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self._places = places
        self._place = places[rank]
        self._timeout_seconds = timeout_seconds
        self._channel = channel
        self._processes = [psutil.Process(pid) for pid in pids]
        control = self._map(counters_bytes(self.size), "counters", exchange).view(torch.int64)
        counters_numel = self.size * _ROW_NUMEL
        self._counters = control[:counters_numel].numpy().reshape(self.size, _ROW_NUMEL)
        # Called by `close`, and at the end of a script that has not closed its engine.
        self._say_goodbye = weakref.finalize(self, _say_goodbye, self._counters[rank], os.getpid())
        mail_end = counters_numel + 2 * self.size * _MAIL_NUMEL
        self._mail = control[counters_numel:mail_end].view(2, self.size, _MAIL_NUMEL)
        self._slots: list[list[Tensor]] = []  # [slot][rank]: (capacity_bytes,) uint8
        self._common: set[int] = set()  # addresses of what `allocate` has mapped
        self._num_opened = 0
        self._sequence = 0  # of the newest reduction
        self._num_mailed = 0
        self._num_fenced = 0

    # -- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """One zero-filled buffer for each (numel, dtype), shared by the ranks of the axis."""
        sizes = [page_aligned(numel * dtype.itemsize) for numel, dtype in specs]
        if not sum(sizes):
            return [torch.empty(0, dtype=dtype) for _, dtype in specs]
        segment = self._map(sum(sizes), "parameters")
        self._common.add(segment.data_ptr())
        buffers, start = [], 0
        for (numel, dtype), size in zip(specs, sizes, strict=True):
            buffers.append(segment[start : start + numel * dtype.itemsize].view(dtype))
            start += size
        return buffers

    @property
    def slot_bytes(self) -> int:
        """This rank's own, in the memory that all share."""
        return sum(slots[self.rank].nbytes for slots in self._slots)

    def reserve_slots(self, nbytes: int, count: int) -> None:
        """Makes the ring of slots, each of them large enough for nbytes: content, and a sum of a wider dtype."""
        capacity = page_aligned(nbytes)
        segment = self._map(count * self.size * capacity, "gradients")
        grid = segment.view(count, self.size, capacity)
        self._slots = [[grid[slot, rank] for rank in range(self.size)] for slot in range(count)]

    def _map(self, nbytes: int, purpose: str, exchange: Callable[[Any], list[Any]] | None = None) -> Tensor:
        """nbytes that all ranks have, zero. exchange: what ranks tell each other by before they share any memory."""
        path, fault = _create_file(nbytes, purpose) if self.rank == 0 else ("", "")
        path, fault = self._gather((path, fault), purpose, exchange)[0]
        if fault:
            raise CollectiveError(fault)
        memory = torch.empty(0, dtype=torch.uint8)
        try:
            memory = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            fault = (
                f"shared memory for {purpose}: rank {self.ranks[self.rank]} cannot map {path} "
                f"({str(error).splitlines()[0]}); use the sockets route"
            )
        faults = [fault for fault in self._gather(fault, purpose, exchange) if fault]
        if self.rank == 0:
            os.unlink(path)
        if faults:
            raise CollectiveError(faults[0])
        return memory

    def _gather(self, value: Any, purpose: str, exchange: Callable[[Any], list[Any]] | None) -> list[Any]:
        """Every rank's value."""
        what = f"room in shared memory for {purpose}"
        if exchange is None:
            return self._gather_mail(value, what)
        started = time.monotonic()
        try:
            return exchange(value)
        except RuntimeError as error:  # of gloo: a rank is late or gone
            others = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
            text = no_answer(self.ranks[self.rank], what, others, time.monotonic() - started, error)
            raise CollectiveError(text + self._channel.compare(others)) from error

    # -- collectives ----------------------------------------------------------------------------------------------

    def gather(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """Nothing moves: `full` is the one copy that all ranks read. See [Note: one copy per host]."""
        return Pending()

    def gather_copies(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """As `gather`, where `full` is memory of this rank alone: each `part` goes through a slot."""
        slot = self.open_slot(part.numel(), part.dtype, what)
        slot.copy_(part)
        number, arrived = self._post(what)

        def collect() -> None:
            arrived.wait()
            for place, other in zip(self._places, self._views(number, slot, slice(None)), strict=True):
                full[place * part.numel() : (place + 1) * part.numel()].copy_(other)
            self._set(_CONSUMED, number + 1)

        return Pending(collect)

    def next_slot(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """What `open_slot` will give next: it may be written already. None where not all have consumed it yet."""
        if not self._has_come(_CONSUMED, self._num_opened - len(self._slots) + 1):
            return None
        return self._slots[self._num_opened % len(self._slots)][self.rank][: numel * dtype.itemsize].view(dtype)

    def open_slot(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """This rank's next slot, (numel,) of dtype, uninitialized; waits until all have consumed its old content."""
        self._sequence = self._channel.begin(what)
        self._wait_for(_CONSUMED, self._num_opened - len(self._slots) + 1, what, self._sequence)
        slot = self.next_slot(numel, dtype)
        assert slot is not None
        self._num_opened += 1
        return slot

    def reduce_scatter(self, slot: Tensor, spare: Tensor | None, what: str) -> Terms:
        """Of the sum over ranks of slot[this rank's part]. slot: (size * n,)."""
        number, arrived = self._post(what)
        numel = slot.numel() // self.size
        mine = slice(self._place * numel, (self._place + 1) * numel)

        def summed() -> None:
            self._set(_CONSUMED, number + 1)

        return Terms(arrived, slice(0, numel), lambda: self._views(number, slot, mine), summed)

    def swap(self, out: Tensor, given: Tensor, numels: Numels, what: str) -> Pending:
        """out = what each rank has given for this one, in their order; `given` is in the order of the ranks too.

        Slots have room for the largest `given` of all ranks.
        """
        slot = self.open_slot(given.numel(), given.dtype, what)
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
            self._set(_CONSUMED, number + 1)

        return Pending(collect)

    def pass_on(self, pieces: Tensor, to: Sequence[int], of: Sequence[Piece], out: Tensor, what: str) -> Pending:
        """out[n] = the piece of[n]. pieces: (any, ...), as many on each rank, that others may read.

        Several may be under way, and are waited for in the order of their start.
        """
        slot = self.open_slot(pieces.numel(), pieces.dtype, what)
        slot.view(pieces.shape).copy_(pieces)
        number, arrived = self._post(what)
        theirs = self._views(number, slot, slice(None))  # now: the slots may be others before they are read

        def collect() -> None:
            arrived.wait()
            for one, (rank, piece) in zip(out, of, strict=True):
                one.copy_(theirs[rank].view(pieces.shape)[piece])
            self._set(_CONSUMED, number + 1)

        return Pending(collect)

    def all_reduce(self, slot: Tensor, out: Tensor, what: str) -> Terms:
        """Of out = sum over ranks of slot. Each rank sums its region of all slots, and reads the others' sums.

        Where `out` is memory of `allocate`, each sum is written once, for all ranks; before it is written anew they
        must have come to a fence or a barrier.
        """
        number, arrived = self._post(what)
        sequence = self._sequence
        regions = regions_of(out.numel(), self.size)
        mine = regions[self.rank]
        is_common = out.untyped_storage().data_ptr() in self._common

        def summed() -> Pending:
            if not is_common:
                self._sums_of(self.rank, number, slot, out, mine).copy_(out[mine])
            self._set(_REDUCED, number + 1)
            return Pending(collect, lambda: self._has_come(_REDUCED, number + 1))

        def collect() -> None:
            self._wait_for(_REDUCED, number + 1, what, sequence)
            for rank, region in enumerate(regions):
                if rank != self.rank and not is_common:
                    out[region].copy_(self._sums_of(rank, number, slot, out, region))
            self._set(_CONSUMED, number + 1)

        return Terms(arrived, mine, lambda: self._views(number, slot, mine), summed)

    def sum_small(self, values: Tensor, what: str) -> Tensor:
        """The exact sum over ranks of a small int64 vector; also a barrier."""
        return torch.cat([self._sum_mail(part, what) for part in torch.split(values, _MAIL_NUMEL - 1)])

    def _sum_mail(self, values: Tensor, what: str) -> Tensor:
        return self._swap_mail(values, what).sum(dim=0)

    def _gather_mail(self, value: Any, what: str) -> list[Any]:
        """Every rank's value: short texts and numbers."""
        written = pickle.dumps(value)
        if len(written) > _MAIL_BYTES:
            raise ValueError(f"expected at most {_MAIL_BYTES} bytes in {what}, found {len(written)}")
        everyone = self._swap_mail(torch.frombuffer(bytearray(written.ljust(_MAIL_BYTES)), dtype=torch.int64), what)
        return [pickle.loads(row.tobytes()) for row in everyone.numpy()]

    def _swap_mail(self, values: Tensor, what: str) -> Tensor:
        """(ranks, n): what each has given, to be read before the next but one. values: (n,) int64; also a barrier."""
        sequence = self._channel.begin(what)
        box = self._mail[self._num_mailed % 2]
        box[self.rank, : values.numel()].copy_(values)
        box[self.rank, -1] = name = zlib.crc32(what.encode())
        self._num_mailed += 1
        self._set(_MAILED, self._num_mailed)
        self._wait_for(_MAILED, self._num_mailed, what, sequence)
        if not bool((box[:, -1] == name).all()):
            others = [rank for rank, theirs in zip(self.ranks, box[:, -1].tolist(), strict=True) if theirs != name]
            raise CollectiveError(
                f"rank {self.ranks[self.rank]} in {what}: rank {', '.join(map(str, others))} came to another call of "
                f"the engine. All ranks must make the same calls in the same order.{self._channel.compare(others)}"
            )
        return box[:, : values.numel()]

    def fence(self, what: str) -> None:
        """Returns when every rank of the axis has come here: what they wrote before can be read."""
        sequence = self._channel.begin(what)
        self._num_fenced += 1
        self._set(_FENCED, self._num_fenced)
        self._wait_for(_FENCED, self._num_fenced, what, sequence)

    def close(self) -> None:
        """Says goodbye to the others; the mapped memory stays with those who hold it."""
        self._say_goodbye()

    # -- counters -------------------------------------------------------------------------------------------------

    def _post(self, what: str) -> tuple[int, Pending]:
        """Shows the others the newest slot. Its number, and when theirs are there."""
        posted, sequence = self._num_opened, self._sequence
        self._set(_POSTED, posted)
        arrived = Pending(
            lambda: self._wait_for(_POSTED, posted, what, sequence), lambda: self._has_come(_POSTED, posted)
        )
        return posted - 1, arrived

    def _views(self, number: int, slot: Tensor, part: slice) -> list[Tensor]:
        """A part of the slots of all ranks."""
        return [self._slot_of(rank, number, slot.numel(), slot.dtype)[part] for rank in range(self.size)]

    def _slot_of(self, rank: int, number: int, numel: int, dtype: torch.dtype) -> Tensor:
        """What a rank has shown in its slot, (numel,)."""
        return self._slots[number % len(self._slots)][rank][: numel * dtype.itemsize].view(dtype)

    def _sums_of(self, rank: int, number: int, slot: Tensor, out: Tensor, region: slice) -> Tensor:
        """Where `rank` leaves its region of an all-reduce for the others, in a dtype that holds it exactly."""
        whole = self._slots[number % len(self._slots)][rank]
        slot_bytes = slot.numel() * slot.dtype.itemsize
        if torch.promote_types(slot.dtype, out.dtype) == slot.dtype:
            return whole[:slot_bytes].view(slot.dtype)[region]
        start = -(-slot_bytes // _LINE_BYTES) * _LINE_BYTES
        numel = region.stop - region.start
        return whole[start : start + numel * out.dtype.itemsize].view(out.dtype)

    def _set(self, counter: int, value: int) -> None:
        self._counters[self.rank, counter] = value

    def _has_come(self, counter: int, target: int) -> bool:
        return bool(self._counters[:, counter].min() >= target)

    def _wait_for(self, counter: int, target: int, what: str, sequence: int) -> None:
        """Returns when the counter of every rank has reached target. sequence: of the collective, for the record."""
        self._channel.note(what)
        column = self._counters[:, counter]
        for _ in range(200):
            if column.min() >= target:
                return
            os.sched_yield()
        self._channel.wait(what, sequence)
        started = checked = time.monotonic()
        pause_seconds = 2e-5
        try:
            while column.min() < target:
                time.sleep(pause_seconds)
                pause_seconds = min(pause_seconds * 1.5, 1e-3)
                now = time.monotonic()
                if now - checked > _LIVENESS_SECONDS:
                    checked = now
                    self._check_peers(column, target, now - started, what)
        finally:
            self._channel.go_on()

    def _check_peers(self, column: np.ndarray[Any, Any], target: int, waited_seconds: float, what: str) -> None:
        fates = {rank: self._fate(rank) for rank in np.flatnonzero(column < target).tolist()}
        # Looked at again: a rank may have come here, and gone, since.
        late = {self.ranks[rank]: fate for rank, fate in fates.items() if column[rank] < target}
        here = f"rank {self.ranks[self.rank]} in {what}"
        for fate in _Fate:
            gone = ", ".join(str(rank) for rank, found in late.items() if found is fate)
            if gone:
                raise CollectiveError(f"{here}: rank {gone} {fate.value}")
        if late and (found := self._channel.alone(list(late))):
            raise CollectiveError(f"{here}: {found}")
        if late and waited_seconds > self._timeout_seconds:
            raise CollectiveError(
                f"{here}: waited {waited_seconds:.0f} s for rank {', '.join(map(str, late))}, which is alive but "
                "elsewhere. Do all ranks run the same calls of the engine in the same order? "
                f"A slow rank needs a larger communication.timeout_seconds. {UNEVEN}"
                + self._channel.compare(list(late))
            )

    def _fate(self, rank: int) -> _Fate | None:
        """Why nothing more can come from a rank of the axis; None: it is alive, and has not left."""
        if goodbye := self._counters[rank, _LEFT]:
            return _Fate.FAILED if goodbye == _AFTER_ERROR else _Fate.LEFT
        return None if _is_alive(self._processes[rank]) else _Fate.DIED


class _Fate(Enum):
    """What has become of a rank that others wait for; the value is how users read it. The likely cause stands first."""

    DIED = "died. Its own output says why."
    FAILED = "left after an error. Its own output says which."
    LEFT = f"has left: it closed its engine, or its script came to an end. {UNEVEN}"


def _say_goodbye(counters: np.ndarray[Any, Any], pid: int) -> None:
    """counters: this rank's row. Does nothing in a process that was forked from the rank's own."""
    if os.getpid() == pid:
        counters[_LEFT] = _AFTER_ERROR if _is_failing() else _IN_PEACE


def _is_failing() -> bool:
    """Whether an exception ends this program, or the block in which the engine is closed."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    is_end = isinstance(error, StopIteration) or (isinstance(error, SystemExit) and not error.code)
    return error is not None and not is_end


def _create_file(nbytes: int, purpose: str) -> tuple[str, str]:
    path = os.path.join(FOLDER, f"lowtide-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        return "", f"shared memory for {purpose}: cannot create a file in {FOLDER} ({error}); use the sockets route"
    try:
        # Reserves the pages now: a full /dev/shm is an error here, and not a bus error at some later store.
        os.posix_fallocate(handle, 0, nbytes)
    except OSError:
        os.unlink(path)
        return "", (
            f"shared memory for {purpose}: expected {nbytes} free bytes in {FOLDER}, found {free_shared_bytes()}. "
            'Enlarge it (containers: --shm-size), or set "communication": {"route": "sockets"}.'
        )
    finally:
        os.close(handle)
    return path, ""


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
