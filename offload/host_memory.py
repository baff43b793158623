"""Host memory of exact size, straight from the system and straight back to it."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from .errors import OffloadError

_HUGE_PAGE_BYTES = 2 << 20
_LARGEST_HEAP_BLOCK_BYTES = 32 << 20  # of glibc on 64 bits: DEFAULT_MMAP_THRESHOLD_MAX


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
