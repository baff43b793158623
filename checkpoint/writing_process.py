"""Which process writes a checkpoint, and whether it is still there."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import psutil


@dataclass(frozen=True)
class WritingProcess:
    """A process as others on its host find it again."""

    host: str  # its boot and its numbering of processes, which a container has for itself; "" where that is unknown
    pid: int
    started: float  # seconds since 1970; another process may have the same number later

    @classmethod
    def this(cls) -> WritingProcess:
        return cls(_host(), os.getpid(), psutil.Process().create_time())

    @classmethod
    def of(cls, content: Any) -> WritingProcess:
        """What `as_dict` gave, out of a file. Raises ValueError."""
        try:
            return cls(str(content["host"]), int(content["pid"]), float(content["started"]))
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"expected host, pid and started; {error!r}") from error

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_dead(self) -> bool:
        """True where it is known: a process of this host that is gone, or had its number before another."""
        if not self.host or self.host != _host():
            return False
        try:
            found = psutil.Process(self.pid)
            return found.create_time() != self.started or found.status() == psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, ValueError, OverflowError):
            return True


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
