"""The layout of a rank's progress record in memory, for the rank and its readers, and the folder of records.

[Note: the record]
The rank stores, the agent of its host reads, and neither calls the other: no lock, no message, and no system call of
the rank. So the record can be read at any time, even if the rank hangs in C code, is stopped, or is dead.

    words of 8 bytes    pid, rank, step, ... and the number of begun collectives of each channel; each stored atomically
    two slots           activity, unit, microbatch
    two slots           the awaited collective

A slot begins with the time of its writing and ends with a checksum of its content. The rank writes the two slots of a
pair in turn, so at least one is complete, and the reader takes the newer complete slot.

Times are of the monotonic clock, which all processes of a host share. `read_progress` converts them to durations, which
are comparable between hosts.

[Note: whose folder it is]
An agent holds a lock on its folder. The kernel releases the lock when the agent ends for any reason. So a folder that
can be locked has no agent, and is removed by the agent's guard or by the next agent on the host. A process id in the
name would not suffice: containers that share /dev/shm number their processes separately.
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
# 64 channels fill words 64 to 127. Behind them are two slots of 180 bytes, and two of 276.
FIRST_CHANNEL = 64  # words
_ACTIVITY_SLOTS, _WAIT_SLOTS = 1024, 2048  # bytes
_CHECK = struct.Struct("<I")


class Pair:
    """Two slots for a content, each [time of writing, content, checksum]. See [Note: the record]."""

    def __init__(self, memory: mmap.mmap | bytes, offset: int, layout: str) -> None:
        self._struct = struct.Struct("<q" + layout)
        self._memory: Any = memory
        self._nbytes = self._struct.size + _CHECK.size
        self._offsets = (offset, offset + self._nbytes)
        self._turn = 0

    def write(self, now: int, *content: Any) -> None:
        """Write the slot whose turn it is. now: of the monotonic clock, in nanoseconds."""
        data = self._struct.pack(now, *content)
        self._turn = 1 - self._turn
        start = self._offsets[self._turn]
        self._memory[start : start + self._nbytes] = data + _CHECK.pack(zlib.crc32(data))

    def read(self) -> tuple[Any, ...] | None:
        """Return the newer complete slot. None if nothing was written."""
        whole = []
        for start in self._offsets:
            data = self._memory[start : start + self._nbytes]
            if zlib.crc32(data[: -_CHECK.size]) == _CHECK.unpack(data[-_CHECK.size :])[0]:
                whole.append(self._struct.unpack(data[: -_CHECK.size]))
        # Tuples compare by their first element, the time.
        newest = max(whole, default=(0,))
        return newest if newest[0] else None


def pairs(memory: mmap.mmap | bytes) -> tuple[Pair, Pair]:
    """Return the pairs (activity, microbatch, unit) and (channel, sequence, first, distance, count, name)."""
    return Pair(memory, _ACTIVITY_SLOTS, "ii160s"), Pair(memory, _WAIT_SLOTS, "iqiii240s")


def mapped(path: str) -> mmap.mmap:
    """Map the file at `path`, (NBYTES,), and make it if necessary. Raises OSError."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, NBYTES)  # on a full disk raises here, instead of a signal at a later store
        return mmap.mmap(handle, NBYTES)
    finally:
        os.close(handle)


class RecordFolder:
    """A new folder that belongs to this process until `remove`. parent: None takes a file system in memory.

    Raises OSError if no folder can be made or locked.
    """

    def __init__(self, parent: Path | None = None) -> None:
        place = parent or memory_folder()
        remove_dead_folders(place)
        while True:
            self.path = tempfile.mkdtemp(prefix=PREFIX, dir=place)
            try:
                self._lock = _locked(self.path)
            except (BlockingIOError, FileNotFoundError):  # another process just locked it to remove it
                continue
            except OSError:
                os.rmdir(self.path)
                raise
            # Between `mkdtemp` and the lock another agent may have removed the folder as dead.
            if os.path.exists(self.path):
                return
            os.close(self._lock)

    def remove(self) -> None:
        """Delete the folder with its content. Call it once."""
        shutil.rmtree(self.path, ignore_errors=True)
        # Last: a folder that can be locked counts as dead.
        os.close(self._lock)


def remove_dead_folders(place: Path | None = None) -> None:
    """Remove folders of killed agents. place: see `RecordFolder`."""
    for folder in (place or memory_folder()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # its agent is alive, or another user or process owns it
            lock = _locked(str(folder))
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def memory_folder() -> Path:
    """Return a folder in memory, or else the folder for temporary files."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def _locked(path: str) -> int:
    """Lock the folder and return the descriptor that holds the lock. Raises OSError if it is locked."""
    # O_CLOEXEC: a child that runs another program would hold the lock after the agent's end.
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
