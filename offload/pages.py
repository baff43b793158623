"""Buffers with fixed addresses and temporary memory: pages move from a buffer to the next.

[Note: moving pages]
Stage 3 gathers the full parameters of a block after the other, each at fixed addresses, since autograd keeps views of
them. To free and allocate the memory each time would cost a page fault for every 4 KiB: 10 to 20 ms for a block of 28
MiB, twice a step. Instead the pages of a released range move to the next range with `mremap(MREMAP_FIXED |
MREMAP_DONTUNMAP)`, in 20 to 80 microseconds and without faults on first use. The old addresses read as zero until they
get pages again.

    addresses   block 0   block 1   block 2
    forward 0   [pages]      .         .
    forward 1      .  ---> [pages]     .
    forward 2      .         .  ---> [pages]

Works on Linux on the CPU. `PagePool.is_possible` tests it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from .tensor_chunk import round_up

PAGE_BYTES = mmap.PAGESIZE
_ALIGNMENT_BYTES = 2 << 20  # equal alignment of both ends lets the kernel move whole page tables
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
_DONTNEED, _HUGEPAGE = 4, 14
_PROT_READ_WRITE = 3
# NORESERVE: reserved addresses do not count as committed memory.
_MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x2 | 0x20 | 0x4000
_FAILED = ctypes.c_void_p(-1).value


class PagedBuffer:
    """A tensor of `numel` elements with fixed addresses. Only populated ranges have memory."""

    def __init__(self, pool: PagePool, numel: int, dtype: torch.dtype) -> None:
        self._pool = pool
        nbytes = numel * dtype.itemsize
        self.base = pool.reserve(nbytes)
        array = (ctypes.c_char * max(nbytes, 1)).from_address(self.base)
        # torch keeps the array alive as long as a view of the storage exists.
        finalizer = weakref.finalize(array, pool.unmap, self.base, nbytes)
        # Not at exit: callbacks that the user registered before, and threads, may still read the tensor.
        finalizer.atexit = False
        self.tensor: Tensor = (
            torch.frombuffer(array, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)
        )

    def populate(self, start: int, end: int) -> None:
        """Give memory to the elements [start, end): vacated pages first, then new pages. The content is arbitrary."""
        self._pool.take(*self._range(start, end))

    def vacate(self, start: int, end: int) -> None:
        """Offer the memory of the elements [start, end) to other ranges. Pages that extend beyond the range stay."""
        self._pool.give(*self._range(start, end))

    def _range(self, start: int, end: int) -> tuple[int, int]:
        """Return the whole pages inside the range as (address, bytes)."""
        itemsize = self.tensor.element_size()
        low = self.base + round_up(start * itemsize, PAGE_BYTES)
        high = self.base + end * itemsize // PAGE_BYTES * PAGE_BYTES
        return low, max(high - low, 0)


class TransientBuffer:
    """A buffer whose memory returns to the system on `drop`, and is allocated again when it is written.

    Uses huge pages if the system has them, so allocation costs clearing, and few page faults. A heap returns large
    blocks only sometimes, and small blocks never.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        pages = PagedBuffer(PagePool(), numel, dtype)
        self.tensor = pages.tensor
        self._whole_pages = pages.base, self.tensor.nbytes // PAGE_BYTES * PAGE_BYTES
        self._madvise = _libc().madvise
        # Advice: on a kernel without huge pages the call fails, and small pages serve.
        self._madvise(*self._whole_pages, _HUGEPAGE)

    def drop(self) -> None:
        """Return the memory to the system. Whole pages then read as zero."""
        self._madvise(*self._whole_pages, _DONTNEED)


def huge_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate (numel,) zeros, on the CPU in huge pages if the system has them.

    A buffer that each step reads and writes completely then needs 512 times fewer page faults and TLB entries.
    """
    is_large = numel * dtype.itemsize >= _ALIGNMENT_BYTES
    if device.type != "cpu" or not is_large or not PagePool.is_possible():
        return torch.zeros(numel, dtype=dtype, device=device)
    return TransientBuffer(numel, dtype).tensor


class PagePool:
    """The vacated pages of buffers, by their current addresses."""

    def __init__(self) -> None:
        self._libc = _libc()
        self._vacated: list[tuple[int, int]] = []  # (address, bytes)
        self._mappings: dict[int, tuple[int, int]] = {}  # address of a buffer -> (address, bytes) of its mapping

    @staticmethod
    @functools.cache
    def is_possible() -> bool:
        """Test with a page if pages can be moved."""
        if not sys.platform.startswith("linux"):
            return False
        pool = PagePool()
        first, second = PagedBuffer(pool, PAGE_BYTES, torch.uint8), PagedBuffer(pool, PAGE_BYTES, torch.uint8)
        first.tensor.fill_(7)
        # Linux before 5.7 does not know MREMAP_DONTUNMAP, and a sandbox may forbid mremap.
        return pool._move(first.base, second.base, PAGE_BYTES) and int(second.tensor[0]) == 7

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses for nbytes, without memory."""
        length = nbytes + _ALIGNMENT_BYTES
        address = self._libc.mmap(None, length, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        if address in (None, _FAILED):
            raise MemoryError(
                f"no address space for a buffer of {nbytes} bytes: error {ctypes.get_errno()}; raise `ulimit -v`"
            )
        aligned = round_up(int(address), _ALIGNMENT_BYTES)
        self._mappings[aligned] = (int(address), length)
        return aligned

    def unmap(self, address: int, nbytes: int) -> None:
        """Release addresses, with all pages there."""
        self._vacated = [(a, n) for a, n in self._vacated if not address <= a < address + nbytes]
        self._libc.munmap(*self._mappings.pop(address))

    def take(self, address: int, nbytes: int) -> None:
        """Move pages to [address, address + nbytes). If the pool has too few, first use faults in new pages."""
        for gap_address, gap_bytes in self._gaps(address, nbytes):
            self._fill(gap_address, gap_bytes)

    def _gaps(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """Return the parts of the range without pages. Vacated pages still in the range are used again."""
        gaps, kept = [(address, nbytes)] if nbytes else [], []
        for start, length in self._vacated:
            low, high = max(start, address), min(start + length, address + nbytes)
            if low >= high:
                kept.append((start, length))
                continue
            kept += _parts_outside((start, length), low, high)
            gaps = [part for gap in gaps for part in _parts_outside(gap, low, high)]
        self._vacated = kept
        return gaps

    def _fill(self, address: int, nbytes: int) -> None:
        while nbytes and self._vacated:
            start, length = self._best(nbytes)
            moved = min(length, nbytes)
            # The kernel refuses at `vm.max_map_count` mappings. The first use then faults in new pages.
            if not self._move(start, address, moved):
                self._vacated.append((start, length))
                return
            address, nbytes = address + moved, nbytes - moved
            if length > moved:
                self._vacated.append((start + moved, length - moved))

    def give(self, address: int, nbytes: int) -> None:
        """Allow pages in the range to move elsewhere."""
        if nbytes:
            self._vacated.append((address, nbytes))

    def _best(self, nbytes: int) -> tuple[int, int]:
        """Remove from the list the smallest sufficient range, or else the largest range."""
        enough = [item for item in self._vacated if item[1] >= nbytes]
        chosen = min(enough, key=_length) if enough else max(self._vacated, key=_length)
        self._vacated.remove(chosen)
        return chosen

    def _move(self, source: int, target: int, nbytes: int) -> bool:
        moved = self._libc.mremap(source, nbytes, nbytes, _MAYMOVE | _FIXED | _DONTUNMAP, target)
        return moved not in (None, _FAILED)


def _length(item: tuple[int, int]) -> int:
    return item[1]


def _parts_outside(item: tuple[int, int], low: int, high: int) -> Sequence[tuple[int, int]]:
    """Return the parts of a range before `low` and from `high` on."""
    start, end = item[0], item[0] + item[1]
    parts = ((start, min(end, low) - start), (max(start, high), end - max(start, high)))
    return [part for part in parts if part[1] > 0]


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.restype = libc.mremap.restype = pointer
    libc.mmap.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mremap.argtypes = [pointer, size, size, ctypes.c_int, pointer]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, ctypes.c_int]
    return libc
