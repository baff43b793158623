"""Host memory of exact size, allocated from and returned to the system, and a pool of it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from .tensor_chunk import round_up


class OffloadError(RuntimeError):
    """Bytes could not be kept or moved. Names the place (file, rank, key or pool), the expected and the found value."""


_HUGE_PAGE_BYTES = 2 << 20
_LARGEST_HEAP_BLOCK_BYTES = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX of glibc on 64 bits
_M_MMAP_THRESHOLD = -3


def host_is_pinned(device: torch.device) -> bool:
    """Return True if asynchronous copies to and from the device need pinned host memory.

    Asks for the model's device, because pinning opens a context on the accelerator.
    """
    return device.type != "cpu"


def allocate_host(nbytes: int, alignment: int = mmap.PAGESIZE, pinned: bool = False) -> Tensor:
    """Allocate (nbytes,) uint8, zero, at a multiple of `alignment`. Returns to the system with its last view.

    Takes memory only when it is written, unlike a heap block, which may be resident. Raises OffloadError if the system
    has too little.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # CUDA and ROCm can pin existing pages. torch's pinned allocator, the only way on other accelerators, rounds sizes
    # up to powers of two.
    if pinned and not _has_driver():
        return _allocate_pinned(nbytes, alignment)
    spare = alignment if alignment > mmap.PAGESIZE else 0  # a mapping begins at a page: leave room to align
    try:
        pages = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OffloadError(
            f"expected {nbytes:,} bytes of host memory, but the system refuses: {error}. Offload less."
        ) from error
    # O_DIRECT is twice as fast with huge pages as with small pages.
    if nbytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    if hasattr(mmap, "MADV_DONTFORK"):
        # A fork, for example of a data loader, shares pages until either side writes. Before Linux 5.19 a concurrent
        # O_DIRECT read could end in the child's copy.
        pages.madvise(mmap.MADV_DONTFORK)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    skip = -begin % alignment
    # torch keeps the array alive as long as a view of the storage exists, and the array keeps the pages.
    array = (ctypes.c_char * nbytes).from_buffer(pages, skip)
    if pinned:
        _pin(begin + skip, nbytes)
        # Runs before the pages are unmapped, since the array is finalized first.
        weakref.finalize(array, _unpin, begin + skip).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


class HostPool:
    """Lends host buffers, and keeps returned buffers for the next request of the same size. Thread-safe.

    Sizes are rounded up to `alignment`, not to powers of two. A kept pinned buffer also serves smaller requests, so
    varying sizes do not pin again and again. Kept buffers never raise the pool above its highest use: the oldest kept
    buffers of other sizes are freed first. So `peak_bytes`, the highest use, is also the most memory that the pool ever
    held.
    """

    def __init__(self, alignment: int = 4096, pinned: bool = False) -> None:
        """alignment: of addresses and sizes, a power of two."""
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment: expected a power of two, found {alignment}")
        self.alignment = alignment
        self.pinned = pinned
        self.bytes_in_use = 0
        self.peak_bytes = 0
        self._kept_bytes = 0
        self._kept: dict[int, list[Tensor]] = {}  # whole buffers by size; the size returned last is last
        self._lent: dict[int, Tensor] = {}  # whole buffers by address
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """Take (nbytes,) uint8, aligned, with arbitrary content, until `give`.

        Raises OffloadError if the system has too little memory.
        """
        with self._lock:
            size = round_up(nbytes, self.alignment)
            if not size:
                return torch.empty(0, dtype=torch.uint8)
            buffer = self._kept_buffer(size)
            if buffer is None:
                buffer = allocate_host(size, self.alignment, self.pinned)
            self.bytes_in_use += buffer.numel()
            self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
            self._lent[buffer.data_ptr()] = buffer
            return buffer[:nbytes]

    def give(self, buffer: Tensor) -> None:
        """Return a buffer, or a view from its first byte on. Do not use it afterwards.

        Raises ValueError if it is not lent by this pool.
        """
        if not buffer.numel():
            return
        with self._lock:
            whole = self._lent.pop(buffer.data_ptr(), None)
            if whole is None:
                raise ValueError(
                    f"expected a buffer that this pool has lent, found {buffer.nbytes:,} bytes at "
                    f"{buffer.data_ptr():#x}"
                )
            size = whole.numel()
            self.bytes_in_use -= size
            self._kept_bytes += size
            self._kept[size] = [*self._kept.pop(size, []), whole]

    def close(self) -> None:
        """Free the kept buffers. Buffers in use are freed with their last view."""
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0

    def _kept_buffer(self, size: int) -> Tensor | None:
        """Return a kept buffer of that size, or None after making room for a new buffer."""
        fitting = size if self._kept.get(size) else self._larger_kept(size)
        if fitting is not None:
            self._kept_bytes -= fitting
            return self._kept[fitting].pop()
        highest = max(self.peak_bytes, self.bytes_in_use + size)
        while self.bytes_in_use + self._kept_bytes + size > highest:
            oldest = next(iter(self._kept))
            if self._kept[oldest]:
                self._kept[oldest].pop()
                self._kept_bytes -= oldest
            else:
                del self._kept[oldest]
        return None

    def _larger_kept(self, size: int) -> int | None:
        """Return the next larger size of a kept pinned buffer. Unpinning another buffer would stop the device."""
        if not self.pinned:
            return None
        larger = [kept for kept, buffers in self._kept.items() if buffers and kept > size]
        return min(larger, default=None)


def keep_heap() -> None:
    """Let the heap keep up to 64 MiB of freed memory for the next tensors.

    glibc returns the end of the heap to the system if more is free there than twice the largest block that it has ever
    unmapped (mallopt(3), "dynamic mmap threshold"). Most programs free a large block early, which sets the limit to 64
    MiB. An engine maps its large memory itself, so the limit would stay small, and every microbatch would fault its
    gradients in again: 120 000 pages a step for a stage of 25M parameters. To allocate and free a large block once has
    the same effect. Settings of the user (such as MALLOC_TRIM_THRESHOLD_) keep their effect, and other allocators
    ignore this.
    """
    torch.empty(_LARGEST_HEAP_BLOCK_BYTES - 16 * mmap.PAGESIZE, dtype=torch.uint8)


def trim_heap() -> None:
    """Return all free heap memory to the system. Allocators other than glibc ignore this.

    For code that frees large blocks between small blocks that stay: such holes are too small for the next large block.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@functools.cache
def return_large_blocks(min_bytes: int) -> bool:
    """Make freed blocks of min_bytes and more return to the system at once, in the whole process.

    By default glibc keeps them after the first free, and up to version 2.37 cannot reuse such a block for the next
    aligned block of the same size, so the process stays as large as if nothing were freed. The price is a page fault
    for every 4 KiB of a new block. Returns False for other C libraries.
    """
    with contextlib.suppress(OSError, AttributeError):
        if sys.platform.startswith("linux"):
            return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, min(min_bytes, _LARGEST_HEAP_BLOCK_BYTES)))
    return False


def _has_driver() -> bool:
    """Return True if the driver can pin existing memory."""
    return torch.cuda.is_available()


def _allocate_pinned(nbytes: int, alignment: int) -> Tensor:
    try:
        memory = torch.empty(nbytes + alignment, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise OffloadError(
            f"expected to pin {nbytes:,} bytes of host memory, but torch refuses: {error}. "
            "Offload less, or set pin_memory to false."
        ) from error
    skip = -memory.data_ptr() % alignment
    return memory[skip : skip + nbytes].zero_()


def _pin(address: int, nbytes: int) -> None:
    code = _cudart().cudaHostRegister(address, nbytes, 0)
    if int(code):
        raise OffloadError(
            f"expected to pin {nbytes:,} bytes of host memory, but the driver refuses (error {int(code)}). "
            "Offload less, or raise `ulimit -l`."
        )


def _unpin(address: int) -> None:
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
