"""A store on a disk: a file of this process, written and read in blocks by a few threads.

    key      "a" (20 MiB, saved)       "b" (5 MiB + 3 bytes)
    file     [8 MiB][8 MiB][4 MiB]     [5 MiB + 4096]  free ...
    threads     1      2      1            2

The blocks of a request are spread over the threads, and requests follow each other without a gap. A buffer at a
multiple of 4096 is transferred without a copy, except its last incomplete sector. Other buffers are copied through the
thread's memory. Room of dropped keys is reused; the file never shrinks.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor

from .block_file import ALIGNMENT_BYTES, BlockError, BlockFile, Checksum
from .host_memory import OffloadError
from .store import Transfer, check_bytes, check_size, closed_error, unknown_key_error
from .tensor_chunk import round_up

_Verb = Literal["save", "load"]


@dataclass(frozen=True)
class AioOptions:
    """Options of a FileStore's transfers. Larger values brought nothing: see benchmarks/offload_io.py."""

    block_size: int = 8 << 20  # bytes of a system call, a multiple of 4096
    thread_count: int = 4  # concurrent system calls
    verify: bool = True  # compare a checksum of each block on load: see `Checksum`
    direct: bool = True  # bypass the page cache if the file system can

    def __post_init__(self) -> None:
        if self.block_size < ALIGNMENT_BYTES or self.block_size % ALIGNMENT_BYTES:
            raise ValueError(
                f"block_size: expected a multiple of {ALIGNMENT_BYTES} bytes, found {self.block_size}; "
                f"the next multiple is {round_up(max(self.block_size, 1), ALIGNMENT_BYTES)}"
            )
        if self.thread_count < 1:
            raise ValueError(f"thread_count: expected 1 or more threads, found {self.thread_count}")


class FileStore:
    """A Store in a new file of the folder, gone when the process ends: see [Note: a file without a name].

    Takes host memory only. Thread-safe. Raises OffloadError if the file cannot be made.
    """

    alignment_bytes = ALIGNMENT_BYTES
    is_host_memory = False

    def __init__(
        self,
        folder: str | os.PathLike[str],  # created if its parent exists
        rank: int,  # for the file name and errors
        aio: AioOptions = AioOptions(),
    ) -> None:
        self.aio = aio
        self._file = BlockFile(folder, rank, aio.direct)
        self.path = self._file.path
        self._checksum = Checksum(aio.block_size)
        self._threads = ThreadPoolExecutor(aio.thread_count, "lowtide disk")
        self._of_thread = threading.local()
        self._regions = FileSpace(ALIGNMENT_BYTES)
        self._entries: dict[str, _Entry] = {}
        self._running: list[Future[None]] = []  # and perhaps some that are done
        # Reentrant: `save` calls `drop`, and a callback may run at once.
        self._lock = threading.RLock()
        self._is_closed = False

    @property
    def is_direct(self) -> bool:
        """True if the page cache is bypassed."""
        return self._file.is_direct

    def reserve(self, sizes: Iterable[int]) -> None:
        """Allocate disk space for keys of these sizes, rounded up, in a file of this total size.

        Raises OffloadError with folder, rank, and the bytes needed and free, if there is too little.
        """
        self._file.reserve(sum(round_up(size, ALIGNMENT_BYTES) for size in sizes))

    def save(self, key: str, values: Tensor) -> Transfer:
        check_bytes("values", values)
        _check_host("values", values)
        with self._lock:
            if self._is_closed:
                raise closed_error(key)
            entry = self._entries.get(key)
            if entry is not None and entry.nbytes != values.numel():
                self.drop(key)
                entry = None
            if entry is None:
                offset = self._regions.take(values.numel())
                entry = self._entries[key] = _Entry(key, offset, values.numel(), self.aio.block_size)
            return self._begin(entry, values, "save")

    def load(self, key: str, out: Tensor) -> Transfer:
        check_bytes("out", out)
        _check_host("out", out)
        with self._lock:
            entry = self._entry(key)
            check_size(key, entry.nbytes, out)
            return self._begin(entry, out, "load")

    def drop(self, key: str) -> None:
        with self._lock:
            entry = self._entry(key)
            del self._entries[key]
            # Not before: a running transfer would write into another key's region.
            entry.last.add_done_callback(partial(self._give_region, entry))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        wait(self._running)
        self._threads.shutdown()
        self._entries.clear()
        self._file.close()

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _entry(self, key: str) -> _Entry:
        if self._is_closed:
            raise closed_error(key)
        if key not in self._entries:
            raise unknown_key_error(key)
        return self._entries[key]

    def _begin(self, entry: _Entry, values: Tensor, verb: _Verb) -> Transfer:
        """Submit every block of the key, after its earlier transfers."""
        request = _Request(values, len(entry.checksums))
        previous, entry.last = entry.last, request.done
        # No callback of `done` removes it: a store in a cycle would keep its file until the next garbage collection.
        self._running = [done for done in self._running if not done.done()] + [request.done]
        previous.add_done_callback(lambda _: self._submit(entry, request, verb))
        return Transfer(request.done.done, request.done.result)

    def _submit(self, entry: _Entry, request: _Request, verb: _Verb) -> None:
        if verb == "save":
            entry.failure = None
        elif entry.failure is not None:
            error = OffloadError(
                f"{self._place()} cannot load '{entry.key}', because saving it failed: {entry.failure}"
            )
            error.__cause__ = entry.failure
            request.error = error
        if not entry.checksums:  # an empty key has no blocks
            _end(request.done, request.error)
        # After a failure too: each block is counted, and the last one ends the transfer.
        for index in range(len(entry.checksums)):
            try:
                self._threads.submit(self._do_block, entry, request, verb, index)
            except RuntimeError as error:  # a callback's error would be lost, and `wait` would wait forever
                if not request.begins(index):
                    continue
                failure = OffloadError(
                    f"{self._place()} expected a thread to {verb} '{entry.key}', found {error}; let the main thread "
                    "wait for the training, and let this user start more threads (`ulimit -u`)"
                )
                failure.__cause__ = error
                self._end_block(entry, request, verb, failure)

    def _do_block(self, entry: _Entry, request: _Request, verb: _Verb, index: int) -> None:
        if not request.begins(index):
            return
        begin = index * self.aio.block_size
        end = min(begin + self.aio.block_size, entry.nbytes)
        move = self._save_block if verb == "save" else self._load_block
        failure: Exception | None = None
        try:
            if request.error is None:
                move(entry, request.bytes_between(begin, end), index)
        except BlockError as error:
            failure = OffloadError(
                f"{self._place()} could not {verb} '{entry.key}', bytes {begin:,} to {end:,} of {entry.nbytes:,}: "
                f"{error}"
            )
            failure.__cause__ = error
        except Exception as error:
            failure = error
        self._end_block(entry, request, verb, failure)

    def _end_block(self, entry: _Entry, request: _Request, verb: _Verb, failure: Exception | None) -> None:
        if failure is not None and verb == "save":
            entry.failure = failure
        request.end_block(failure)

    def _save_block(self, entry: _Entry, block: memoryview, index: int) -> None:
        if self.aio.verify:
            entry.checksums[index] = self._checksum.of(block)
        straight = _aligned_bytes(block)
        rest = len(block) - straight
        parts = [block[:straight]] if straight else []
        if rest:
            padded = self._scratch(rest)
            padded[:rest] = block[straight:]
            parts.append(padded)
        self._file.write(parts, entry.offset + index * self.aio.block_size)

    def _load_block(self, entry: _Entry, block: memoryview, index: int) -> None:
        straight = _aligned_bytes(block)
        rest = len(block) - straight
        parts = [block[:straight]] if straight else []
        padded = self._scratch(rest) if rest else memoryview(b"")
        self._file.read([*parts, padded] if rest else parts, entry.offset + index * self.aio.block_size)
        block[straight:] = padded[:rest]
        if self.aio.verify and (found := self._checksum.of(block)) != entry.checksums[index]:
            raise BlockError(
                f"expected the saved checksum {entry.checksums[index]:016x}, found {found:016x}: the disk or the "
                "memory is faulty, or another program wrote to the file. Check the machine, and continue from a "
                "checkpoint."
            )

    def _scratch(self, nbytes: int) -> memoryview:
        """Return aligned memory of this thread, of the rounded size, for unaligned bytes."""
        if not hasattr(self._of_thread, "memory"):
            self._of_thread.memory = memoryview(mmap.mmap(-1, self.aio.block_size))  # takes memory only when written
        scratch: memoryview = self._of_thread.memory[: round_up(nbytes, ALIGNMENT_BYTES)]
        return scratch

    def _place(self) -> str:
        return f"{self.path}: rank {self._file.rank}"

    def _give_region(self, entry: _Entry, done: Future[None]) -> None:
        with self._lock:
            self._regions.give(entry.offset, entry.nbytes)


@dataclass(eq=False)
class _Request:
    """Counts the unfinished blocks of a transfer, and keeps its tensor alive until they are done."""

    values: Tensor | None
    num_left: int
    error: Exception | None = None
    """The first error. Blocks that have not begun are then skipped."""
    done: Future[None] = field(default_factory=Future)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._not_begun = set(range(self.num_left))

    def begins(self, index: int) -> bool:
        """Return True once for each block. If the system refuses a thread, its block stays in the pool's queue."""
        with self._lock:
            is_first = index in self._not_begun
            self._not_begun.discard(index)
            return is_first

    def bytes_between(self, begin: int, end: int) -> memoryview:
        assert self.values is not None
        return memoryview((ctypes.c_char * (end - begin)).from_address(self.values.data_ptr() + begin)).cast("B")

    def end_block(self, error: Exception | None) -> None:
        """Count a block, and end the transfer with the last."""
        with self._lock:
            self.error = self.error or error
            self.num_left -= 1
            if self.num_left:
                return
        self.values = None
        _end(self.done, self.error)


def _end(done: Future[None], error: Exception | None) -> None:
    done.set_result(None) if error is None else done.set_exception(error)


@dataclass(eq=False)
class _Entry:
    """A key of the file."""

    key: str
    offset: int
    nbytes: int
    block_size: int
    failure: Exception | None = None  # of the last save
    checksums: list[int] = field(init=False)  # of the blocks
    last: Future[None] = field(default_factory=Future)  # the end of the newest transfer

    def __post_init__(self) -> None:
        self.checksums = [0] * -(-self.nbytes // self.block_size)
        self.last.set_result(None)


def _aligned_bytes(block: memoryview) -> int:
    """Return how many leading bytes the device can transfer without a copy."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    return 0 if address % ALIGNMENT_BYTES else len(block) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def _check_host(name: str, values: Tensor) -> None:
    """Raise ValueError if the tensor is not in host memory."""
    if values.device.type != "cpu":
        raise ValueError(
            f"{name}: expected host memory, found {values.device}. Copy it into a buffer of a HostPool first."
        )


class FileSpace:
    """Allocates ranges of a file that grows at its end. Free neighbours are merged.

    A request takes the smallest sufficient free range, or else grows the file. Sizes are rounded up to `alignment`, so
    every offset is aligned.
    """

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.end = 0  # the file is free from here on
        self._offsets: list[int] = []  # of the free ranges before the end, in order
        self._sizes: dict[int, int] = {}  # of the free ranges, by offset

    def take(self, nbytes: int) -> int:
        """Allocate nbytes and return their offset."""
        wanted = round_up(nbytes, self.alignment)
        if not wanted:
            return 0
        enough = [offset for offset in self._offsets if self._sizes[offset] >= wanted]
        if not enough:
            offset, self.end = self.end, self.end + wanted
            return offset
        offset = min(enough, key=self._sizes.__getitem__)
        left = self._sizes.pop(offset) - wanted
        self._offsets.remove(offset)
        if left:
            self._insert(offset + wanted, left)
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Free a range of `take`."""
        size = round_up(nbytes, self.alignment)
        if not size:
            return
        index = bisect.bisect(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] == offset + size:
            size += self._sizes.pop(self._offsets.pop(index))
        if index and self._offsets[index - 1] + self._sizes[self._offsets[index - 1]] == offset:
            offset = self._offsets.pop(index - 1)
            size += self._sizes.pop(offset)
        if offset + size == self.end:
            self.end = offset
        else:
            self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        bisect.insort(self._offsets, offset)
        self._sizes[offset] = size
