"""A memory cgroup for a job, with a limit, or with none to see the most that it takes. Linux, root; version 1 or 2."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = {1: "-1", 2: "max"}
_SECONDS_TO_EMPTY = 10.0


class NoCgroup(Exception):
    """A memory cgroup cannot be made here; the text says why."""


def join(folder: str) -> None:
    """Puts this process into the group, before it has taken anything. It is no part of the class: workers import it."""
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))


class MemoryGroup:
    """One group, which is removed at the end. limit: bytes, or None.

    Without swap: what does not fit is killed. Raises NoCgroup.
    """

    def __init__(self, limit: int | None) -> None:
        self._version = 1 if (ROOT / "memory").is_dir() else 2
        parent = ROOT / "memory" if self._version == 1 else ROOT
        self.folder = parent / f"lowtide-law-{os.getpid()}-{time.monotonic_ns()}"
        try:
            self.folder.mkdir()
        except OSError as error:
            raise NoCgroup(
                f"cannot make {self.folder}: {error.strerror}; it takes root and a writable {parent}"
            ) from error
        names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if self._version == 1 else ("memory.max",)
        if not (self.folder / names[0]).exists():
            self.close()
            raise NoCgroup(f"{parent} has no memory controller; it must be in {parent}/cgroup.subtree_control")
        value = _UNLIMITED[self._version] if limit is None else str(limit)
        for name in names:
            with contextlib.suppress(OSError):  # swap is not accounted for everywhere
                (self.folder / name).write_text(value)
        if self._version == 2:
            with contextlib.suppress(OSError):
                (self.folder / "memory.swap.max").write_text("0")

    @property
    def peak_bytes(self) -> int:
        """The most that was charged, with page cache that might have been given back."""
        name = "memory.max_usage_in_bytes" if self._version == 1 else "memory.peak"
        return int((self.folder / name).read_text())

    @property
    def num_killed(self) -> int:
        """Processes that were killed for the limit."""
        name = "memory.oom_control" if self._version == 1 else "memory.events"
        for line in (self.folder / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def close(self) -> None:
        """Removes it, when its processes are gone."""
        deadline = time.monotonic() + _SECONDS_TO_EMPTY
        while self.folder.exists():
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
