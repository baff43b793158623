"""Host memory of exact size, straight from the system and straight back to it; and a pool of it with a limit."""

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


class OffloadError(RuntimeError):
    """Bytes could not be kept or moved. Says where (file, rank, key or pool), what was expected, and what was found."""


_HUGE_PAGE_BYTES = 2 << 20
_LARGEST_HEAP_BLOCK_BYTES = 32 << 20  # of glibc on 64 bits: DEFAULT_MMAP_THRESHOLD_MAX
_M_MMAP_THRESHOLD = -3


def host_is_pinned(device: torch.device) -> bool:
    """Whether host memory has to be pinned for copies that run beside the work of the device.

    Pinning opens a context on the accelerator, so it is the model's device that is asked, not the machine.
    """
    return device.type != "cpu"


def allocate_host(nbytes: int, alignment: int = mmap.PAGESIZE, pinned: bool = False) -> Tensor:
    """(nbytes,) uint8, zero; its address is a multiple of `alignment`. Goes back to the system with its last view.

    Unlike a block of the heap, which may be resident from an earlier use, it takes memory only where it is written to.

    Pinned memory of CUDA and ROCm is registered page by page, since torch's own pinned allocator rounds every size up
    to a power of two; other accelerators give no way to. Raises OffloadError where the system has not enough.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if pinned and not _has_driver():
        return _allocate_pinned(nbytes, alignment)
    spare = alignment if alignment > mmap.PAGESIZE else 0  # a mapping begins at a page, and a multiple lies within
    try:
        pages = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OffloadError(
            f"expected {nbytes:,} bytes of host memory, and the system refuses them: {error}; "
            "lower the limit of the host buffers, or offload less"
        ) from error
    # A transfer with O_DIRECT is twice as fast to and from huge pages as to and from small ones.
    if nbytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    if hasattr(mmap, "MADV_DONTFORK"):
        # A fork, of a loader of data for instance, shares pages until one side writes: before Linux 5.19 a read with
        # O_DIRECT that ran meanwhile could end in the child's copy.
        pages.madvise(mmap.MADV_DONTFORK)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    skip = -begin % alignment
    # torch keeps the array for as long as a view of the storage exists, and the array keeps the pages.
    array = (ctypes.c_char * nbytes).from_buffer(pages, skip)
    if pinned:
        _pin(begin + skip, nbytes)
        # Before the pages go: the array's own finalizer comes first.
        weakref.finalize(array, _unpin, begin + skip).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


class HostPool:
    """Lends host buffers and keeps those that come back for the next who wants the same size.

    No rounding to powers of two: a buffer takes its size, rounded up to `alignment`; a pinned one that is kept is lent
    for a smaller size too, so that sizes that vary come to an end of pinning. What is kept never makes the pool
    larger than its highest use was: buffers of other sizes go back to the system first, oldest first. So the pool's
    highest use, `peak_bytes`, is also the most memory that it ever held.
    Any thread may use it.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,  # of the buffers in use, each rounded up; None: no limit
        alignment: int = 4096,  # of addresses and sizes, a power of two
        pinned: bool = False,  # page-locked, for copies from and to an accelerator
    ) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment: expected a power of two, found {alignment}")
        if limit_bytes is not None and limit_bytes < 0:
            raise ValueError(f"limit_bytes: expected a number of bytes or None, found {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.alignment = alignment
        self.pinned = pinned
        self.bytes_in_use = 0
        self.peak_bytes = 0
        self._kept_bytes = 0
        self._kept: dict[int, list[Tensor]] = {}  # whole buffers by size; the size that was given back last stands last
        self._lent: dict[int, Tensor] = {}  # whole buffers by address
        self._lock = threading.Lock()

    @property
    def bytes_held(self) -> int:
        """Bytes that the pool has from the system: in use, and kept for the next."""
        return self.bytes_in_use + self._kept_bytes

    def rounded(self, nbytes: int) -> int:
        """How many bytes a buffer for nbytes takes."""
        return -(-nbytes // self.alignment) * self.alignment

    def has_room(self, nbytes: int) -> bool:
        """True where `take` of so many bytes stays within the limit."""
        return self.limit_bytes is None or self.bytes_in_use + self.rounded(nbytes) <= self.limit_bytes

    def take(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8 at a multiple of the alignment, content arbitrary; until it is given back.

        Raises OffloadError where that is more than the limit, or more than the system has.
        """
        with self._lock:
            size = self.rounded(nbytes)
            if not self.has_room(nbytes):
                raise OffloadError(
                    f"host buffers: {self.bytes_in_use:,} bytes in use + {size:,} wanted "
                    f"= {self.bytes_in_use + size:,} > limit {self.limit_bytes:,}; "
                    "raise the limit, or use fewer or smaller buffers at once"
                )
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
        """Takes a buffer back, or a view of it from its first byte on in any dtype; nobody may use it any more.

        Raises ValueError for one that was not taken from here.
        """
        if not buffer.numel():
            return
        with self._lock:
            whole = self._lent.pop(buffer.data_ptr(), None)
            if whole is None:
                raise ValueError(
                    f"expected a buffer that was taken from this pool and not given back yet, found {buffer.nbytes:,} "
                    f"bytes at {buffer.data_ptr():#x}"
                )
            size = whole.numel()
            self.bytes_in_use -= size
            self._kept_bytes += size
            self._kept[size] = [*self._kept.pop(size, []), whole]

    def close(self) -> None:
        """Gives what is kept back to the system; buffers in use go back with their last view."""
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0

    def _kept_buffer(self, size: int) -> Tensor | None:
        """One of that size, or None with room made for a new one."""
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
        """The next larger size of a pinned buffer: unpinning one for another of the right size stops the device."""
        if not self.pinned:
            return None
        larger = [kept for kept, buffers in self._kept.items() if buffers and kept > size and self.has_room(kept)]
        return min(larger, default=None)


def keep_heap() -> None:
    """Lets the heap keep what is freed at its end, up to 64 MiB, for the next tensors.

    glibc gives the end of the heap back to the system as soon as more is free there than twice the largest block that
    it has ever unmapped (mallopt(3), "dynamic mmap threshold"). Most programs free a large block early, and it is
    64 MiB from then on. An engine maps its large memory itself, so it would stay small, and every microbatch would
    fault its gradients in anew: 120 000 pages a step of a 25M stage. One block that is taken and freed, and never
    written, says the same. Settings of the user's (MALLOC_TRIM_THRESHOLD_ and the like) are left as they are, and
    other allocators take no notice.
    """
    torch.empty(_LARGEST_HEAP_BLOCK_BYTES - 16 * mmap.PAGESIZE, dtype=torch.uint8)


def trim_heap() -> None:
    """Gives the system back what is free anywhere in the heap. Allocators that are not glibc's take no notice.

    For who takes and frees large blocks beside small ones that stay: a hole is too small for the next large one then.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@functools.cache
def return_large_blocks(min_bytes: int) -> bool:
    """Lets blocks of min_bytes and more go back to the system as soon as they are freed, in the whole process.

    Else glibc keeps them once the first has been freed, and up to 2.37 does not even use one again for the next block
    of the same size, since torch asks for aligned ones: the process stays as large as if nothing were freed. The price
    is a page fault for every 4 KiB of a new block. False where the C library is another one.
    """
    with contextlib.suppress(OSError, AttributeError):
        if sys.platform.startswith("linux"):
            return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, min(min_bytes, _LARGEST_HEAP_BLOCK_BYTES)))
    return False


def _has_driver() -> bool:
    """Whether there is one that pins memory which it has not allocated."""
    return torch.cuda.is_available()


def _allocate_pinned(nbytes: int, alignment: int) -> Tensor:
    try:
        memory = torch.empty(nbytes + alignment, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise OffloadError(
            f"expected to pin {nbytes:,} bytes of host memory, and torch refuses: {error}; "
            "lower the limit of the host buffers, or set pin_memory to false"
        ) from error
    skip = -memory.data_ptr() % alignment
    return memory[skip : skip + nbytes].zero_()


def _pin(address: int, nbytes: int) -> None:
    code = _cudart().cudaHostRegister(address, nbytes, 0)
    if int(code):
        raise OffloadError(
            f"expected to pin {nbytes:,} bytes of host memory, and the driver refuses (error {int(code)}); "
            "lower the limit of the host buffers, or raise `ulimit -l`"
        )


def _unpin(address: int) -> None:
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
