"""What the disk itself does: sequential writes and reads of as many bytes, and control over the page cache.

Needs no torch: the parent of a benchmark runs it, in the same minute as the contender that it is for.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_BYTES = 4 << 20
ALIGNMENT_BYTES = 4096


@dataclass(frozen=True)
class DiskSpeed:
    """Seconds of one process for plain work on as many bytes as a checkpoint has, at the median of some repeats."""

    write: float  # write() and fsync
    write_direct: float | None  # the same with O_DIRECT; None where the file system refuses it
    read_cold: float  # read() of the checkpoint's own files, out of the page cache
    read_warm: float  # the same again, from the page cache


def files_below(folder: Path) -> list[Path]:
    """Every file in the folder, at any depth."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def bytes_below(folder: Path) -> int:
    """How many bytes the files have together."""
    return sum(path.stat().st_size for path in files_below(folder))


def sync_files(folder: Path) -> None:
    """Returns when every file below the folder, and its name, is on the disk."""
    for path in [*files_below(folder), *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Takes files out of the page cache; what is not on the disk yet is written first."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def bring_to_cache(paths: Iterable[Path]) -> None:
    """Reads files, so that the page cache has them, as far as it has room."""
    _read(paths)


def measure(folder: Path, nbytes: int, files: list[Path], repeats: int) -> DiskSpeed:
    """Writes `nbytes` into a file of its own in the folder, both ways, and reads the given files, cold and warm.

    Repeated as a contender's saves are: the first write into memory that a virtual machine has not touched for a while
    can take five times as long as the next.
    """
    found: dict[str, list[float]] = {"write": [], "write_direct": [], "read_cold": [], "read_warm": []}
    scratch = folder / "disk-speed"
    for _ in range(repeats):
        found["write"].append(_written(scratch, nbytes, 0))
        with contextlib.suppress(OSError):  # some file systems refuse it
            found["write_direct"].append(_written(scratch, nbytes, os.O_DIRECT))
        drop_from_cache(files)
        found["read_cold"].append(_read(files))
        found["read_warm"].append(_read(files))
    medians: dict[str, Any] = {name: statistics.median(values) if values else None for name, values in found.items()}
    return DiskSpeed(**medians)


def _written(path: Path, nbytes: int, flags: int) -> float:
    try:
        return _write(path, nbytes, flags)
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, nbytes: int, flags: int) -> float:
    block = mmap.mmap(-1, BLOCK_BYTES)  # begins at a page, as O_DIRECT wants it
    block[:] = os.urandom(BLOCK_BYTES)
    view = memoryview(block)
    started = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o666)
    try:
        left = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        while left:
            left -= os.write(descriptor, view[: min(left, BLOCK_BYTES)])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return time.perf_counter() - started


def _read(files: Iterable[Path]) -> float:
    block = bytearray(BLOCK_BYTES)
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - started
