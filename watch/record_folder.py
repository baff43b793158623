"""The folder in which the ranks of a host keep the records of their progress; see record.py and stacks.py.

[Note: whose folder it is]
An agent holds a lock on its folder, which the kernel takes away with the agent, however that ends. So a folder that can
be locked is a dead one, and whoever comes by removes it: the guard of its agent, or else the next agent on that host.
A process id in the name would not do: containers that share /dev/shm number their processes each for itself.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "lowtide-records-"


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
