"""A file that is written once from beginning to end, past the page cache, by a thread.

    write(data) --copy--> [block] [block] [block] --thread--> disk

With O_DIRECT a write makes no copy in the page cache, does not evict cached pages, and ends when the device has the
data. It requires memory, offsets and lengths that are multiples of the device's block size, so data goes through
aligned blocks. If the file system refuses O_DIRECT (tmpfs before Linux 6.6, some network file systems), the same blocks
go through the page cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import threading
from types import TracebackType
from typing import Any, Self

from .block_file import REFUSALS
from .host_memory import allocate_host
from .tensor_chunk import round_up

BLOCK_BYTES = 4 << 20
_ALIGNMENT_BYTES = 4096
_NUM_BLOCKS = 3  # a block being filled, a block being written, and a full block waiting: neither side stalls
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only


class SequentialFile:
    """Writes a new file, which is on the disk when `close` has returned. The OSError of a write is raised by a later
    call.

    Takes 3 blocks of 4 MiB. Not thread-safe.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._descriptor = _open_new(path)
        self.nbytes = 0
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(_NUM_BLOCKS):
            self._free.put(allocate_host(BLOCK_BYTES, BLOCK_BYTES).numpy().data)
        self._full: queue.SimpleQueue[tuple[memoryview, int, int] | None] = queue.SimpleQueue()
        self._block = self._free.get()
        self._filled = 0  # bytes in the current block
        self._offset = 0  # of the current block in the file
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._write_blocks, name="lowtide file writer", daemon=True)
        self._has_thread = False  # not `is_alive`: a thread may end between a request and the question
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts none after the script: the caller writes
            self._thread.start()
            self._has_thread = True

    def write(self, data: bytes | memoryview[Any]) -> int:
        """Append bytes. The caller may change them as soon as this returns."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            count = min(BLOCK_BYTES - self._filled, len(view) - done)
            self._block[self._filled : self._filled + count] = view[done : done + count]
            self._filled += count
            done += count
            if self._filled == BLOCK_BYTES:
                self._hand_over()
        self.nbytes += done
        return done

    def flush(self) -> None:
        """Do nothing: blocks are written as they fill. Part of the interface of files."""

    def close(self) -> None:
        """Write the remaining bytes and wait until the whole file is on the disk."""
        if self._descriptor < 0:
            return
        try:
            if self._filled:
                self._hand_over()
            self._end_writing()
            self._raise_error()
            os.ftruncate(self._descriptor, self.nbytes)  # the last block was padded
            # O_DIRECT bypasses the page cache, but neither the device's cache nor the metadata of the file.
            os.fsync(self._descriptor)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file in its current state."""
        if self._descriptor < 0:
            return
        self._end_writing()
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon() if error is not None else self.close()

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        self._raise_error()
        padded = round_up(self._filled, _ALIGNMENT_BYTES)
        self._full.put((self._block, self._offset, padded))
        if not self._has_thread:
            self._end_writing()
        self._offset += self._filled
        self._block, self._filled = self._free.get(), 0

    def _end_writing(self) -> None:
        self._full.put(None)
        self._thread.join() if self._has_thread else self._write_blocks()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_blocks(self) -> None:
        while (item := self._full.get()) is not None:
            block, offset, nbytes = item
            if self._error is None:
                try:
                    _write_all(self._descriptor, block[:nbytes], offset)
                except OSError as error:
                    self._error = error
            # After an error too: `_hand_over` waits here for a free block, and raises the error at its next call.
            self._free.put(block)


def _open_new(path: str | os.PathLike[str]) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if not _DIRECT or error.errno not in REFUSALS:
            raise
        return os.open(path, flags, 0o666)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        try:
            count = os.pwrite(descriptor, data[done:], offset + done)
        except OSError as error:
            if error.errno not in REFUSALS or not _leave_direct(descriptor):
                raise
            continue
        done += count
        if count % _ALIGNMENT_BYTES:  # a short write, on a nearly full disk: the remainder is not aligned
            _leave_direct(descriptor)


def _leave_direct(descriptor: int) -> bool:
    """Send later writes through the page cache. Returns False if they already go there."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & _DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
    return True
