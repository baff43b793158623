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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor

from .block_file import ALIGNMENT_BYTES, BlockError, BlockFile, Checksum
from .host_memory import OffloadError
from .store import Transfer, check_bytes, check_size, closed_error, unknown_key_error

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
                f"the next multiple is {max(-(-self.block_size // ALIGNMENT_BYTES), 1) * ALIGNMENT_BYTES}"
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
        self._threads = IoThreads(aio.thread_count, aio.block_size)
        self._regions = FileSpace(ALIGNMENT_BYTES)
        self._entries: dict[str, _Entry] = {}
        self._running: set[_FileTransfer] = set()
        # Reentrant: `save` calls `drop`, and `then` may run its action at once.
        self._lock = threading.RLock()
        self._is_closed = False

    @property
    def is_direct(self) -> bool:
        """True if the page cache is bypassed."""
        return self._file.is_direct

    @property
    def bytes_held(self) -> int:
        with self._lock:
            return sum(entry.nbytes for entry in self._entries.values())

    def reserve(self, sizes: Iterable[int]) -> None:
        """Allocate disk space for keys of these sizes, rounded up, in a file of this total size.

        Raises OffloadError with folder, rank, and the bytes needed and free, if there is too little.
        """
        self._file.reserve(sum(self._regions.rounded(size) for size in sizes))

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
            entry.last.then(partial(self._give_region, entry))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for transfer in running:
            transfer.join()
        self._threads.close()
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
        transfer = _FileTransfer(values, len(entry.checksums))
        previous, entry.last = entry.last, transfer
        # Before `then`: an empty key has no blocks, so its transfer is done already and leaves the set at once.
        self._running.add(transfer)
        transfer.then(partial(self._forget, transfer))
        previous.then(partial(self._submit, entry, transfer, verb))
        return transfer

    def _submit(self, entry: _Entry, transfer: _FileTransfer, verb: _Verb) -> None:
        if verb == "save":
            entry.failure = None
        elif entry.failure is not None:
            error = OffloadError(
                f"{self._place()} cannot load '{entry.key}', because saving it failed: {entry.failure}"
            )
            error.__cause__ = entry.failure
            transfer.fail(error)
        # After a failure too: each block is counted, and the last one ends the transfer.
        for index in range(len(entry.checksums)):
            self._threads.submit(partial(self._do_block, entry, transfer, verb, index))

    def _do_block(self, entry: _Entry, transfer: _FileTransfer, verb: _Verb, index: int, scratch: memoryview) -> None:
        begin = index * self.aio.block_size
        end = min(begin + self.aio.block_size, entry.nbytes)
        move = self._save_block if verb == "save" else self._load_block
        try:
            if transfer.error is None:
                move(entry, transfer.bytes_between(begin, end), index, scratch)
        except BlockError as error:
            failure = OffloadError(
                f"{self._place()} could not {verb} '{entry.key}', bytes {begin:,} to {end:,} of {entry.nbytes:,}: "
                f"{error}"
            )
            failure.__cause__ = error
            transfer.fail(failure)
        except Exception as error:
            transfer.fail(error)
        finally:
            if transfer.error is not None and verb == "save":
                entry.failure = transfer.error
            transfer.end_block()

    def _save_block(self, entry: _Entry, block: memoryview, index: int, scratch: memoryview) -> None:
        if self.aio.verify:
            entry.checksums[index] = self._checksum.of(block)
        straight = _aligned_bytes(block)
        rest = len(block) - straight
        parts = [block[:straight]] if straight else []
        if rest:
            padded = scratch[: self._regions.rounded(rest)]
            padded[:rest] = block[straight:]
            parts.append(padded)
        self._file.write(parts, entry.offset + index * self.aio.block_size)

    def _load_block(self, entry: _Entry, block: memoryview, index: int, scratch: memoryview) -> None:
        straight = _aligned_bytes(block)
        rest = len(block) - straight
        parts = [block[:straight]] if straight else []
        padded = scratch[: self._regions.rounded(rest)] if rest else memoryview(b"")
        self._file.read([*parts, padded] if rest else parts, entry.offset + index * self.aio.block_size)
        block[straight:] = padded[:rest]
        if self.aio.verify and (found := self._checksum.of(block)) != entry.checksums[index]:
            raise BlockError(
                f"expected the saved checksum {entry.checksums[index]:016x}, found {found:016x}: the disk or the "
                "memory is faulty, or another program wrote to the file. Check the machine, and continue from a "
                "checkpoint."
            )

    def _place(self) -> str:
        return f"{self.path}: rank {self._file.rank}"

    def _give_region(self, entry: _Entry) -> None:
        with self._lock:
            self._regions.give(entry.offset, entry.nbytes)

    def _forget(self, transfer: _FileTransfer) -> None:
        with self._lock:
            self._running.discard(transfer)


class _FileTransfer:
    """Counts the unfinished blocks of a request, and keeps its tensor alive until they are done."""

    def __init__(self, values: Tensor | None, num_blocks: int) -> None:
        self._values = values
        self._left = num_blocks
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._next: list[Callable[[], None]] = []
        self.error: Exception | None = None
        if not num_blocks:
            self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self.join()
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        """Wait without raising."""
        self._done.wait()

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` when the last block is done: now, or later in another thread."""
        with self._lock:
            if not self._done.is_set():
                self._next.append(action)
                return
        action()

    def bytes_between(self, begin: int, end: int) -> memoryview:
        assert self._values is not None
        return memoryview((ctypes.c_char * (end - begin)).from_address(self._values.data_ptr() + begin)).cast("B")

    def fail(self, error: Exception) -> None:
        """Record an error. `wait` raises the first. Blocks that have not begun are skipped."""
        with self._lock:
            self.error = self.error or error

    def end_block(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
            self._values = None
            self._done.set()
            actions, self._next = self._next, []
        # Outside of the lock: an action takes the lock of the store, whose holders take this lock in `then`.
        for action in actions:
            action()


@dataclass(eq=False)
class _Entry:
    """A key of the file."""

    key: str
    offset: int
    nbytes: int
    block_size: int
    failure: Exception | None = None  # of the last save
    checksums: list[int] = field(init=False)  # of the blocks
    last: _FileTransfer = field(init=False)  # the newest transfer

    def __post_init__(self) -> None:
        self.checksums = [0] * -(-self.nbytes // self.block_size)
        self.last = _FileTransfer(None, 0)


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

    @property
    def free_bytes(self) -> int:
        """Free bytes before the end."""
        return sum(self._sizes.values())

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def take(self, nbytes: int) -> int:
        """Allocate nbytes and return their offset."""
        wanted = self.rounded(nbytes)
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
        size = self.rounded(nbytes)
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


Task = Callable[[memoryview], None]
"""Called with aligned scratch memory of its thread, for unaligned bytes."""


class IoThreads:
    """Runs tasks in their order on `count` threads, and all of them before the process ends. A task must not raise."""

    def __init__(self, count: int, scratch_bytes: int) -> None:
        self._threads = ThreadPoolExecutor(count, "lowtide disk")
        self._scratch = _Scratch(scratch_bytes)

    def submit(self, task: Task) -> None:
        self._threads.submit(_run, task, self._scratch)

    def close(self) -> None:
        """Run the submitted tasks and end the threads."""
        self._threads.shutdown()


class _Scratch(threading.local):
    """Aligned memory of each thread."""

    def __init__(self, nbytes: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, nbytes))  # takes memory only when written


def _run(task: Task, scratch: _Scratch) -> None:
    task(scratch.memory)
