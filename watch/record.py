"""How the record of a rank's progress lies in memory, for the rank and for who reads it; and the folder of records.

[Note: the record]
The rank stores, the agent of its host reads, and neither calls the other: no lock, no message, and no system call on
the rank's side. So the record can be read at any moment, also of a rank that hangs in C code, is stopped, or is dead.

    words of 8 bytes    pid, rank, step, ... and how many collectives each channel has begun; each stored at once
    two slots           activity, unit, microbatch
    two slots           the collective that is waited for

A slot ends with the checksum of its content and begins with the time of its writing. The rank writes the two of a pair
in turn, so that one of them is always whole, and the reader takes the newer one of those that are.

Times are of the monotonic clock, which all processes of a host share; `read_progress` makes durations of them, which
mean the same on every host.

[Note: whose folder it is]
An agent holds a lock on its folder, which the kernel takes away with the agent, however that ends. So a folder that can
be locked is a dead one, and whoever comes by removes it: the guard of its agent, or else the next agent on that host.
A process id in the name would not do: containers that share /dev/shm number their processes each for itself.
"""

import contextlib
import fcntl
import mmap
import os
import shutil
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

PREFIX = "lowtide-records-"
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


class RecordFolder:
    """A new folder at `path`, which is this process's until `remove`. parent: None: where files are kept in memory.

    Raises OSError where no folder can be made or locked.
    """

    def __init__(self, parent: Path | None = None) -> None:
        place = parent or memory_folder()
        remove_dead_folders(place)
        while True:
            self.path = tempfile.mkdtemp(prefix=PREFIX, dir=place)
            try:
                self._lock = _locked(self.path)
            except (BlockingIOError, FileNotFoundError):  # another process takes it for a dead one just then
                continue
            except OSError:
                os.rmdir(self.path)
                raise
            if os.path.exists(self.path):
                return
            os.close(self._lock)

    def remove(self) -> None:
        """Deletes it with what is in it. To be called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_dead_folders(place: Path | None = None) -> None:
    """Removes what agents have left that were killed. place: as for `RecordFolder`."""
    for folder in (place or memory_folder()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is alive, another user's, or another process removes it just now
            lock = _locked(str(folder))
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def memory_folder() -> Path:
    """Where files are kept in memory, or else the usual place for temporary files."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def _locked(path: str) -> int:
    """A descriptor that holds the lock of the folder. Raises OSError where another one has it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
