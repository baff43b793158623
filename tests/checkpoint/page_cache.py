"""What of a file is in the page cache, and taking it out."""

import mmap
import os
from pathlib import Path

import pytest

from lowtide.checkpoint import data_file


def forget(path: Path, must: bool = False) -> None:
    """Takes a file out of the page cache. must: skips the test where its file system cannot, or refuses O_DIRECT."""
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if must:
        direct = data_file._open_direct(path)
        if direct < 0 or resident_pages(path):
            pytest.skip("the file system refuses O_DIRECT, or keeps files in memory")
        os.close(direct)


def resident_pages(path: Path) -> int:
    """How many of its pages are in the page cache, asked one by one."""
    with path.open("rb") as file:
        pages = data_file._mapped(file.fileno())
        size = path.stat().st_size
        return sum(data_file._is_cached(pages, at, at + 1) for at in range(0, size, mmap.PAGESIZE))
