"""A file of one process, written and read past the page cache by any number of threads; and checksums of its blocks.

[Note: a file without a name]
The file is unlinked as soon as it is open, so that the system frees its blocks when the process ends, however it ends:
killed, crashed, or with its machine. A named file would stay behind, hundreds of gigabytes of it, until the next start
on the same folder finds out that its owner is dead, which it cannot know of a process in another container or on
another host. Two jobs on one folder do not meet, and whoever empties or removes the folder does no harm. The price is
that `ls` and `du` do not show it; `df` counts it, `lsof +L1` lists it, and errors say its name and folder.
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

ALIGNMENT_BYTES = 4096  # of memory, offsets and lengths: no device wants more for O_DIRECT
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
SECTOR_BYTES = 4096  # of a checksum
_WORDS = SECTOR_BYTES // 8

logger = logging.getLogger("lowtide")


class BlockError(Exception):
    """Why a block could not be moved, and what to do; its caller knows which."""


class BlockFile:
    """A new file in a folder; see [Note: a file without a name]. Goes with the last reference to it.

    The folder is made where only it is missing. Where the file system refuses O_DIRECT the page cache is used, and the
    log says so. Raises OffloadError where the file cannot be made.
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
                f"{self.path.parent}: rank {rank} expected a folder to write to, and cannot make a file there: "
                f"{_cause(error)}"
            ) from error
        self.close = weakref.finalize(self, os.close, self._descriptor)
        # While the process ends threads may still write; with the number closed, they might into another file.
        self.close.atexit = False

    def reserve(self, nbytes: int) -> None:
        """Takes room on the disk for a file of nbytes, what it has already counted in. Raises OffloadError."""
        status = os.fstatvfs(self._descriptor)
        free = status.f_bavail * status.f_frsize
        has = os.fstat(self._descriptor).st_blocks * 512
        wanted = f"{self.path.parent}: rank {self.rank} needs {nbytes:,} bytes for {self.path.name}"
        if nbytes > has + free:
            raise OffloadError(
                f"{wanted}: {has:,} taken already + {free:,} free = {has + free:,} < {nbytes:,}; free "
                f"{nbytes - has - free:,} bytes, name another folder, or offload less"
            )
        try:
            if nbytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            if error.errno in _REFUSALS:  # the file system cannot; then the check must do
                return
            raise OffloadError(f"{wanted}, and cannot take them, with {free:,} free: {_cause(error)}") from error

    def write(self, parts: Sequence[memoryview], offset: int) -> None:
        """Writes the parts one after the other. Aligned each: address, length, offset. Raises BlockError."""
        self._move(os.pwritev, parts, offset)

    def read(self, parts: Sequence[memoryview], offset: int) -> None:
        """Fills the parts one after the other. Aligned each: address, length, offset. Raises BlockError."""
        self._move(os.preadv, parts, offset)

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _move(
        self, call: Callable[[int, Sequence[memoryview], int], int], parts: Sequence[memoryview], offset: int
    ) -> None:
        while parts:
            try:
                count = call(self._descriptor, parts, offset)
            except OSError as error:
                raise BlockError(_cause(error)) from error
            whole = count // ALIGNMENT_BYTES * ALIGNMENT_BYTES  # at an edge: what follows must stay aligned
            if not whole:
                size = os.fstat(self._descriptor).st_size
                wanted = sum(len(part) for part in parts)
                raise BlockError(
                    f"expected {wanted:,} bytes at offset {offset:,}, found {count:,}, and a file of {size:,}: "
                    "someone cut the file; what it kept is lost, go on from a checkpoint"
                )
            parts = _without_first(parts, whole)
            offset += whole

    def _is_direct_possible(self) -> bool:
        """Tries a block: some file systems refuse O_DIRECT when they open a file, others when they use it."""
        if not _DIRECT:
            return False
        try:
            descriptor = self._open(direct=True)
            try:
                os.pwritev(descriptor, [mmap.mmap(-1, ALIGNMENT_BYTES)], 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            logger.warning(
                "%s: rank %d: the file system refuses O_DIRECT; offload goes through the page cache, which is slower "
                "and takes memory; name a folder on a local disk",
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
            # Also where it failed: a refusal of O_DIRECT comes after the file was made.
            self.path.unlink(missing_ok=True)
        return descriptor


def _without_first(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the parts after their first `count` bytes."""
    left = []
    for part in parts:
        if count < len(part):
            left.append(part[count:])
        count = max(count - len(part), 0)
    return left


def _cause(error: OSError) -> str:
    """What the system says, and what to do about it."""
    advice = "the device or its connection is at fault; see the system's log"
    if error.errno in _FULL:
        advice = "the disk, or a quota on it, is full: free some of it, or name another folder"
    elif error.errno == errno.EFBIG:
        advice = "a file may not be that large: raise `ulimit -f`, or name a folder on another file system"
    elif error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST):
        advice = "name a folder that exists, or whose parent does"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "name a folder that this user may write to"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "too many files are open: raise `ulimit -n`"
    return f"{error.strerror}: {advice}"


class Checksum:
    """64 bits of a block: sum over its sectors of weight x (sum of the sector's 8-byte words), modulo 2^64.

    The weights are random and odd. It detects for certain what changes one sector by less than eight bytes in a row, so
    any one bit or byte; and but for a chance of about 2^-63 what disks do: sectors that were not written and still hold
    what was there before, sectors of zeros, sectors in the wrong place. It does not detect words that change places
    within one sector, and it is no defence against intent. 10 GB/s a thread, where zlib's CRC-32 makes 3 to 4. NumPy,
    because torch would start its own threads beside each of ours.
    """

    def __init__(self, largest_block_bytes: int, seed: int | None = None) -> None:
        """seed: of the weights, for checksums that outlive the process; a stream of bits that NumPy keeps for good."""
        count = largest_block_bytes // SECTOR_BYTES + 2
        self._weights = np.random.PCG64(seed).random_raw(count) | np.uint64(1)

    def of(self, block: memoryview) -> int:
        """The checksum of at most `largest_block_bytes` bytes at any address."""
        num_words = len(block) // 8
        words: npt.NDArray[np.uint64] = np.frombuffer(block, np.uint64, num_words)
        num_sectors = num_words // _WORDS
        sums = np.add.reduce(words[: num_sectors * _WORDS].reshape(num_sectors, _WORDS), axis=1)
        total = int(np.add.reduce(sums * self._weights[:num_sectors]))
        total += int(np.add.reduce(words[num_sectors * _WORDS :])) * int(self._weights[num_sectors])
        total += int.from_bytes(block[num_words * 8 :], "little") * int(self._weights[num_sectors + 1])
        return total % 2**64
