"""A file of a checkpoint, read in ranges: through the page cache or past it.

[Note: past the page cache]
A read through the page cache of uncached data needs new pages, a copy, and eviction of other pages. If ranks are as
many as cores, they wait for each other's evictions. With O_DIRECT the disk fills the same few huge pages again and
again, which stay in the processor's cache until they are copied to their destination:

    file     [chunk][chunk][chunk] --disk--> [block]  --copy--> view --verify
                                             [block]            (a block of 1 MiB for each thread)

Requests must be large. The disk serves them in order, so a request of a page would wait for all the megabytes requested
before it. Therefore readers request long ranges that include small chunks.

Also, nothing remains in the page cache, which counts as memory of the job in a container. Cached data are read through
the cache, which is faster.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..offload import HostPool, round_up

_ALIGNMENT_BYTES = 4096  # of memory, offsets and lengths: enough for O_DIRECT on every device
_HUGE_PAGE_BYTES = 2 << 20
_BLOCK_BYTES = 1 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux and FreeBSD
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class EndOfFileError(Exception):
    """A file ended before the requested bytes."""

    def __init__(self, file_nbytes: int) -> None:
        super().__init__(file_nbytes)
        self.file_nbytes = file_nbytes


@dataclass(frozen=True)
class FileChunk:
    """A range of a file and its destination in memory."""

    offset: int
    memory: memoryview  # (nbytes,) of bytes, writable

    @property
    def end(self) -> int:
        return self.offset + len(self.memory)


class Blocks:
    """Huge pages for `count` concurrent reads past the page cache, 1 MiB each. Thread-safe."""

    def __init__(self, count: int) -> None:
        pool = HostPool(alignment=_HUGE_PAGE_BYTES, pinned=False)
        memory = pool.take(count * _BLOCK_BYTES).numpy().data
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for begin in range(0, len(memory), _BLOCK_BYTES):
            self._free.put(memory[begin : begin + _BLOCK_BYTES])

    @contextmanager
    def lend(self) -> Iterator[memoryview]:
        """Lend a page-aligned block. Waits until a block is free."""
        block = self._free.get()
        try:
            yield block
        finally:
            self._free.put(block)


class DataFile:
    """A file that several threads read. Raises OSError if it cannot be opened.

    blocks: if given, uncached data are read past the page cache: see [Note: past the page cache]. Ignored if the file
    system refuses O_DIRECT (tmpfs before Linux 6.6, some network file systems).
    """

    def __init__(self, path: Path, blocks: Blocks | None = None) -> None:
        self._blocks = blocks
        self._descriptor = os.open(path, os.O_RDONLY | _CLOEXEC)
        self._direct = -1
        self._pages: np.ndarray[Any, Any] | None = None
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            if blocks is not None and _DIRECT:
                self._direct = _open_direct(path)
                self._pages = _mapped(self._descriptor)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._pages = None  # the last reference, so this unmaps the file
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        # A second close must not close a file that has been given the same number since.
        self._descriptor = self._direct = -1

    def read(self, parts: Sequence[FileChunk]) -> None:
        """Fill the parts, which are close together and sorted by offset. Raises OSError, EndOfFileError."""
        if not self._read_past_cache(parts):
            for part in parts:
                self._read_through_cache(part)

    # -- two ways to read -----------------------------------------------------------------------------------------

    def _read_through_cache(self, part: FileChunk) -> None:
        done = 0
        while done < len(part.memory):
            count = os.preadv(self._descriptor, [part.memory[done:]], part.offset + done)
            if not count:
                raise EndOfFileError(part.offset + done)
            done += count

    def _read_past_cache(self, parts: Sequence[FileChunk]) -> bool:
        """Return False if the data are cached, or if O_DIRECT is not possible."""
        if self._blocks is None or self._pages is None or self._direct < 0:
            return False
        low, high = parts[0].offset, max(part.end for part in parts)
        if _is_cached(self._pages, low, high):
            return False
        try:
            with self._blocks.lend() as block:
                self._read_blocks(parts, low, high, block)
        except OSError as error:
            if error.errno not in _REFUSALS:  # some file systems refuse O_DIRECT only when it is used
                raise
            return False
        return True

    def _read_blocks(self, parts: Sequence[FileChunk], low: int, high: int, block: memoryview) -> None:
        source = np.frombuffer(block, np.uint8)
        targets = [np.frombuffer(part.memory, np.uint8) for part in parts]
        offset = low // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        num_requests = -(-(high - offset) // len(block))
        # Equal sizes: no small last request.
        request_bytes = round_up(-(-(high - offset) // max(num_requests, 1)), _ALIGNMENT_BYTES)
        while offset < high:
            wanted = min(round_up(high - offset, _ALIGNMENT_BYTES), request_bytes)
            count = os.preadv(self._direct, [block[:wanted]], offset)
            end = offset + count
            for part, target in zip(parts, targets, strict=True):
                first, last = max(part.offset, offset), min(part.end, end)
                # By NumPy, as it releases the GIL: other threads read meanwhile.
                if first < last:
                    np.copyto(target[first - part.offset : last - part.offset], source[first - offset : last - offset])
            # A direct read is short of whole sectors only at the end of the file.
            if end < high and (not count or count % _ALIGNMENT_BYTES):
                raise EndOfFileError(end)
            offset = end


def _mapped(descriptor: int) -> np.ndarray[Any, Any]:
    """Map a file, to query its pages in the page cache."""
    if not os.fstat(descriptor).st_size:  # an empty file cannot be mapped
        return np.empty(0, np.uint8)
    return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)


def _is_cached(pages: np.ndarray[Any, Any], low: int, high: int) -> bool:
    """Return True if the first, middle and last page of the bytes [low, high) of a mapped file are in the page cache.

    The query loads no pages, unlike a read with RWF_NOWAIT. For a file that the user neither owns nor may write, the
    system claims that all pages are cached.
    """
    is_there = ctypes.c_ubyte(1)  # stays 1 if the call fails or the range is past the end of the file
    # Only three pages: to query each page would take a tenth of the time of a cached read.
    for offset in (low, (low + high) // 2, high - 1):
        if offset < len(pages):
            address = pages.ctypes.data + offset // mmap.PAGESIZE * mmap.PAGESIZE
            _mincore()(address, 1, ctypes.byref(is_there))
        if not is_there.value & 1:
            return False
    return True


@functools.cache
def _mincore() -> Callable[[int, int, object], int]:
    call = ctypes.PyDLL(None).mincore  # PyDLL keeps the GIL: to reacquire it would take longer than the call
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return call


def _open_direct(path: Path) -> int:
    """Open with O_DIRECT. Returns -1 if the file system refuses."""
    try:
        return os.open(path, os.O_RDONLY | _CLOEXEC | _DIRECT)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return -1
