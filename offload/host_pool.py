"""A pool of host buffers of exact size, with a limit."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from .errors import OffloadError
from .host_memory import allocate_host


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
