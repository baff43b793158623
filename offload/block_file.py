"""A private file of a process, read and written past the page cache by any number of threads, and checksums of blocks.

[Note: a file without a name]
The file is unlinked as soon as it is open, so the system frees its blocks when the process ends for any reason. A named
file would remain on the disk, with hundreds of gigabytes, until a later job on the same folder learns that its owner is
dead, which it cannot know about a process in another container or on another host. Two jobs can share a folder, and a
user may empty or remove the folder. The price: `ls` and `du` do not show the file. `df` counts it, `lsof +L1` lists it,
and errors name it.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .host_memory import OffloadError

ALIGNMENT_BYTES = 4096  # of memory, offsets and lengths: enough for O_DIRECT on every device
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
SECTOR_BYTES = 4096  # the unit that `Checksum` weights
_WORDS = SECTOR_BYTES // 8

logger = logging.getLogger("lowtide")


class BlockError(Exception):
    """A block could not be moved. The text says why and what to do; the caller adds which block."""


class BlockFile:
    """A new file in a folder. See [Note: a file without a name]. Closed with its last reference.

    The folder is made if its parent exists. If the file system refuses O_DIRECT, the page cache is used and the log
    says so. Raises OffloadError if the file cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, direct: bool = True) -> None:
        self.rank = rank
        self.path = Path(folder).absolute() / f"lowtide-{secrets.token_hex(6)}-rank{rank}.offload"
        try:
            self.path.parent.mkdir(exist_ok=True)
            self.is_direct = direct and self._is_direct_possible()
            self._descriptor = self._open(self.is_direct)
        except OSError as error:
            raise OffloadError(
                f"{self.path.parent}: rank {rank} expected a writable folder, and cannot create a file there: "
                f"{_cause(error)}"
            ) from error
        self.close = weakref.finalize(self, os.close, self._descriptor)
        # Not at exit: threads may still write, and a reused descriptor number could be another file.
        self.close.atexit = False

    def reserve(self, nbytes: int) -> None:
        """Allocate disk space for a file of nbytes in total. Raises OffloadError."""
        status = os.fstatvfs(self._descriptor)
        free = status.f_bavail * status.f_frsize
        # `st_blocks` counts 512 bytes on every file system.
        has = os.fstat(self._descriptor).st_blocks * 512
        wanted = f"{self.path.parent}: rank {self.rank} needs {nbytes:,} bytes for {self.path.name}"
        if nbytes > has + free:
            raise OffloadError(
                f"{wanted}: {has:,} allocated + {free:,} free = {has + free:,} < {nbytes:,}. Free "
                f"{nbytes - has - free:,} bytes, choose another folder, or offload less."
            )
        try:
            if nbytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            if error.errno in REFUSALS:  # the file system cannot allocate: the check above must do
                return
            raise OffloadError(f"{wanted}, and cannot allocate them, with {free:,} free: {_cause(error)}") from error

    def write(self, parts: Sequence[memoryview], offset: int) -> None:
        """Write the parts consecutively. Address, length and offset of each are aligned. Raises BlockError."""
        self._move(os.pwritev, parts, offset)

    def read(self, parts: Sequence[memoryview], offset: int) -> None:
        """Fill the parts consecutively. Address, length and offset of each are aligned. Raises BlockError."""
        self._move(os.preadv, parts, offset)

    # -- system calls ---------------------------------------------------------------------------------------------

    def _move(
        self, call: Callable[[int, Sequence[memoryview], int], int], parts: Sequence[memoryview], offset: int
    ) -> None:
        while parts:
            try:
                count = call(self._descriptor, parts, offset)
            except OSError as error:
                raise BlockError(_cause(error)) from error
            whole = count // ALIGNMENT_BYTES * ALIGNMENT_BYTES  # after a short transfer: go on at an aligned offset
            if not whole:
                size = os.fstat(self._descriptor).st_size
                wanted = sum(len(part) for part in parts)
                raise BlockError(
                    f"expected {wanted:,} bytes at offset {offset:,}, found {count:,} in a file of {size:,}: the file "
                    "was truncated and its data are lost. Continue from a checkpoint."
                )
            parts = _without_first(parts, whole)
            offset += whole

    def _is_direct_possible(self) -> bool:
        """Write a test block: some file systems refuse O_DIRECT on open, some only on use."""
        if not _DIRECT:
            return False
        try:
            descriptor = self._open(direct=True)
            try:
                # A mapping begins at a page: O_DIRECT refuses memory that is not aligned.
                os.pwritev(descriptor, [mmap.mmap(-1, ALIGNMENT_BYTES)], 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            logger.warning(
                "%s: rank %d: the file system refuses O_DIRECT. Offload goes through the page cache, which is slower "
                "and takes memory. Choose a folder on a local disk.",
                self.path.parent,
                self.rank,
            )
            return False
        return True

    def _open(self, direct: bool) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | (_DIRECT if direct else 0)
        try:
            descriptor = os.open(self.path, flags, 0o600)
        finally:
            # Also after a failure: O_DIRECT is refused after the file is made.
            self.path.unlink(missing_ok=True)
        return descriptor


def _without_first(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """Drop the first `count` bytes of the parts."""
    left = []
    for part in parts:
        if count < len(part):
            left.append(part[count:])
        count = max(count - len(part), 0)
    return left


def _cause(error: OSError) -> str:
    """Describe a system error, and say what to do."""
    advice = "the device or its connection is faulty: see the system log"
    if error.errno in _FULL:
        advice = "the disk or its quota is full: free space, or choose another folder"
    elif error.errno == errno.EFBIG:
        advice = "the file would be too large: raise `ulimit -f`, or choose a folder on another file system"
    elif error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST):
        advice = "choose a folder that exists, or that has an existing parent"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "choose a folder that this user may write to"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "too many files are open: raise `ulimit -n`"
    return f"{error.strerror}: {advice}"


class Checksum:
    """64 bits of a block: sum over its sectors of weight x (sum of the sector's 8-byte words), modulo 2^64.

    The weights are random and odd. The checksum always detects a change of less than eight consecutive bytes in a
    single sector, so every changed bit or byte. It misses with a chance of about 2^-63 the faults of disks: sectors
    that were not written, sectors of zeros, misplaced sectors. It does not detect words that change places within a
    sector, and does not protect against intent. Speed: 10 GB/s per thread; CRC-32 of zlib makes 3 to 4.
    """

    def __init__(self, largest_block_bytes: int, seed: int | None = None) -> None:
        """seed: of the weights, for checksums that outlive the process. NumPy guarantees the stream of PCG64."""
        count = largest_block_bytes // SECTOR_BYTES + 2
        # An odd weight has an inverse modulo 2^64, so a change of a single sector's sum always shows.
        self._weights = np.random.PCG64(seed).random_raw(count) | np.uint64(1)

    def of(self, block: memoryview) -> int:
        """Compute the checksum of at most `largest_block_bytes` bytes at any address."""
        # NumPy, because torch would start its thread pool beside each of our threads.
        num_words = len(block) // 8
        words: npt.NDArray[np.uint64] = np.frombuffer(block, np.uint64, num_words)
        num_sectors = num_words // _WORDS
        sums = np.add.reduce(words[: num_sectors * _WORDS].reshape(num_sectors, _WORDS), axis=1)
        # Products and sums of uint64 wrap: this is the modulo.
        total = int(np.add.reduce(sums * self._weights[:num_sectors]))
        total += int(np.add.reduce(words[num_sectors * _WORDS :])) * int(self._weights[num_sectors])
        total += int.from_bytes(block[num_words * 8 :], "little") * int(self._weights[num_sectors + 1])
        return total % 2**64
