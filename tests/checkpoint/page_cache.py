"""What of a file is in the page cache, and taking it out."""

import mmap
import os
from pathlib import Path

from lowtide.checkpoint import data_file


def forget(path: Path) -> None:
    """Takes a file out of the page cache, as far as its file system has one."""
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def resident_pages(path: Path) -> int:
    """How many of its pages are in the page cache, asked one by one."""
    with path.open("rb") as file:
        pages = data_file._mapped(file.fileno())
        size = path.stat().st_size
        return sum(data_file._is_cached(pages, at, at + 1) for at in range(0, size, mmap.PAGESIZE))


def supports_direct(path: Path) -> bool:
    """False on tmpfs and the like, or where the file cannot be taken out of the cache."""
    descriptor = data_file._open_direct(path)
    if descriptor < 0:
        return False
    os.close(descriptor)
    return resident_pages(path) == 0
