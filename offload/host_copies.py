"""Copies between device and host on streams beside the computation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .host_memory import allocate_host
from .store import copy_on, stream_waits


class HostCopies:
    """Starts copies on two streams of a device, a stream for each direction, since a link carries both at once.

    A copy comes after all work queued before it on the stream of the calling thread. The training and the thread of the
    updates share the streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host = torch.Stream(device)
        self._to_device = torch.Stream(device)

    def to_host(self, values: Tensor, out: Tensor) -> torch.Event:
        """Start a copy from the device into pinned host memory of the same shape and dtype. Returns its end.

        Until the end both tensors must stay as they are.
        """
        return self._start(self._to_host, values, out)

    def to_device(self, values: Tensor, out: Tensor) -> torch.Event:
        """Start a copy from pinned host memory to the device, as `to_host`."""
        return self._start(self._to_device, values, out)

    def wait_on_device(self, copied: torch.Event) -> None:
        """Let later work on the device's current stream wait for the end of a copy. The host goes on."""
        stream_waits(self._device, copied)

    def _start(self, stream: torch.Stream, values: Tensor, out: Tensor) -> torch.Event:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        return copy_on(stream, values, out)


class OnHost:
    """A small tensor on its way to the host. The host does not wait until it reads the values.

    The copy comes after all work queued on the device before it, and does not wait for later work.
    """

    def __init__(self, values: Tensor) -> None:
        """values: small, on any device."""
        self._values = values.to("cpu", non_blocking=True)  # torch copies from a device into pinned memory
        is_there = values.device.type == "cpu"
        self._copied = None if is_there else torch.accelerator.current_stream(values.device).record_event()

    def read(self) -> Tensor:
        """Return the values. If the copy is done, which is usual a step later, the host does not wait."""
        copied, self._copied = self._copied, None
        if copied is not None and not copied.query():
            copied.synchronize()
        return self._values


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy host values to a device without blocking the host. Returns values of the same device type unchanged."""
    if values.device.type == device.type:
        return values
    if values.device.type != "cpu":  # to the host, which waits for them
        return values.to(device)
    is_plain = values.layout == torch.strided and not values.is_nested
    # From memory that is not pinned, or through torch's unpinned copy of a tensor with gaps, the host would wait for
    # the copy and for all work queued on the device before it.
    if is_plain and not (values.is_pinned() and values.is_contiguous()):
        values = torch.empty_like(values, pin_memory=True).copy_(values)
    return values.to(device, non_blocking=True)


def bytes_in_memory(values: Tensor) -> int:
    """Return the bytes of memory behind a tensor: 0 while its memory is offloaded."""
    return values.nbytes if values.untyped_storage().nbytes() else 0


class OffloadedMemory:
    """Moves device tensors to the host and frees their device memory until `reload`.

    The tensors and all views of them stay the same objects. Do not use them before `reload`, which gives their storages
    new device memory.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device, pinned: bool) -> None:
        """Copy to the host and free. Waits for the device.

        tensors: those on another device are ignored. pinned: pin the host memory, for faster copies. Raises
        OffloadError, and changes nothing, if the host has too little memory.
        """
        found = (one.untyped_storage() for one in tensors if one.device == device)
        # Views share a storage, which must be copied and freed once.
        storages = {storage.data_ptr(): storage for storage in found if storage.nbytes()}
        self._kept = [
            (storage, allocate_host(storage.nbytes(), pinned=pinned))
            for storage in (storages.values() if device.type != "cpu" else ())
        ]
        self._device = device
        if not self._kept:
            return
        torch.accelerator.synchronize(device)  # work on other streams may still use the tensors
        for storage, host in self._kept:
            host.copy_(self._bytes_of(storage), non_blocking=pinned)
        torch.accelerator.synchronize(device)
        for storage, _ in self._kept:
            storage.resize_(0)
        # Else torch's allocator would keep the memory from other programs on the device, such as a generator.
        torch.accelerator.empty_cache()

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return sum(host.nbytes for _, host in self._kept)

    def reload(self) -> None:
        """Copy the values back to the device and free the host memory. Waits for the device."""
        for storage, host in self._kept:
            storage.resize_(host.nbytes)
            self._bytes_of(storage).copy_(host, non_blocking=True)
        if self._kept:
            torch.accelerator.synchronize(self._device)
        self._kept.clear()

    def _bytes_of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
