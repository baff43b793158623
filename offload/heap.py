"""What the C library does with memory that is freed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys

_M_MMAP_THRESHOLD = -3
_MAX_THRESHOLD_BYTES = 32 << 20  # of glibc on 64 bits


@functools.cache
def return_large_blocks(min_bytes: int) -> bool:
    """Lets blocks of min_bytes and more go back to the system as soon as they are freed, in the whole process.

    Else glibc keeps them once the first has been freed, and up to 2.37 does not even use one again for the next block
    of the same size, since torch asks for aligned ones: the process stays as large as if nothing were freed. The price
    is a page fault for every 4 KiB of a new block. False where the C library is another one.
    """
    with contextlib.suppress(OSError, AttributeError):
        if sys.platform.startswith("linux"):
            return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, min(min_bytes, _MAX_THRESHOLD_BYTES)))
    return False
