"""How the record of a rank's progress lies in memory, for the rank and for who reads it.

[Note: the record]
The rank stores, the agent of its host reads, and neither calls the other: no lock, no message, and no system call on
the rank's side. So the record can be read at any moment, also of a rank that hangs in C code, is stopped, or is dead.

    words of 8 bytes    pid, rank, step, ... and how many collectives each channel has begun; each stored at once
    two slots           activity, unit, microbatch
    two slots           the collective that is waited for

A slot ends with the checksum of its content and begins with the time of its writing. The rank writes the two of a pair
in turn, so that one of them is always whole, and the reader takes the newer one of those that are.

Times are of the monotonic clock, which all processes of a host share; `ProgressReader` makes durations of them, which
mean the same on every host.
"""

import mmap
import os
import struct
import zlib
from typing import Any

NBYTES = 4096
NUM_CHANNELS = 64
MAGIC = 0x31474F5250544C  # "LTPROG1"
PID, RANK, WORLD_SIZE, LIMIT_MS, WAITING, STEP, CLOCK = range(1, 8)
FIRST_CHANNEL = 64  # words
_ACTIVITY_SLOTS, _WAIT_SLOTS = 1024, 2048  # bytes
_CHECK = struct.Struct("<I")


class Pair:
    """Two slots of one content, [time of writing, content, checksum] each; see [Note: the record]."""

    def __init__(self, memory: mmap.mmap | bytes, offset: int, layout: str) -> None:
        self._struct = struct.Struct("<q" + layout)
        self._memory: Any = memory
        self._nbytes = self._struct.size + _CHECK.size
        self._offsets = (offset, offset + self._nbytes)
        self._turn = 0

    def write(self, now: int, *content: Any) -> None:
        """now: of the monotonic clock, in nanoseconds."""
        data = self._struct.pack(now, *content)
        self._turn = 1 - self._turn
        start = self._offsets[self._turn]
        self._memory[start : start + self._nbytes] = data + _CHECK.pack(zlib.crc32(data))

    def read(self) -> tuple[Any, ...] | None:
        """The newer of the whole ones; None where nothing was written."""
        whole = []
        for start in self._offsets:
            data = self._memory[start : start + self._nbytes]
            if zlib.crc32(data[: -_CHECK.size]) == _CHECK.unpack(data[-_CHECK.size :])[0]:
                whole.append(self._struct.unpack(data[: -_CHECK.size]))
        newest = max(whole, default=(0,))
        return newest if newest[0] else None


def pairs(memory: mmap.mmap | bytes) -> tuple[Pair, Pair]:
    """(activity, microbatch, unit) and (channel, sequence, first rank, distance of ranks, their number, what)."""
    return Pair(memory, _ACTIVITY_SLOTS, "ii160s"), Pair(memory, _WAIT_SLOTS, "iqiii240s")


def mapped(path: str) -> mmap.mmap:
    """The file at `path`, made where there is none, as memory of (NBYTES,). Raises OSError where that cannot be."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, NBYTES)  # on a full disk an error here, and not a signal at some later store
        return mmap.mmap(handle, NBYTES)
    finally:
        os.close(handle)
