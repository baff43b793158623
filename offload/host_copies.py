"""Copies between the memory of a device and that of the host, beside the work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from .host_memory import allocate_host
from .store import Transfer, Underway, stream_waits


class HostCopies(Protocol):
    """Starts copies, each after what the device was given before it.

    Both tensors stay as they are until the transfer was waited for: then the copy is made, and the host knows.
    """

    def to_host(self, values: Tensor, out: Tensor) -> Transfer:
        """values: of the device; out: of the host, pinned, of the same shape and dtype."""

    def to_device(self, values: Tensor, out: Tensor) -> Transfer:
        """values: of the host, pinned; out: of the device, of the same shape and dtype.

        What the device is given from now on comes after the copy.
        """


class StreamCopies:
    """On two streams of the device, one for each direction: a link carries both at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host = torch.Stream(device)
        self._to_device = torch.Stream(device)

    def to_host(self, values: Tensor, out: Tensor) -> Transfer:
        copied = self._start(self._to_host, values, out)
        return Underway(copied.query, copied.synchronize)

    def to_device(self, values: Tensor, out: Tensor) -> Transfer:
        copied = self._start(self._to_device, values, out)
        stream_waits(self._device, copied)
        return Underway(copied.query, copied.synchronize)

    def _start(self, stream: torch.Stream, values: Tensor, out: Tensor) -> torch.Event:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            out.copy_(values, non_blocking=True)
            return stream.record_event()


class OnHost:
    """Values of any device on their way to the host, which does not wait for them until it reads them.

    They are as they are after what the device was given before. What it is given later is not waited for: the device
    may do that while the host reads.
    """

    def __init__(self, values: Tensor) -> None:
        """values: small."""
        self._values = values.to("cpu", non_blocking=True)  # into pinned memory, where it comes from a device
        is_there = values.device.type == "cpu"
        self._copied = None if is_there else torch.accelerator.current_stream(values.device).record_event()

    def read(self) -> Tensor:
        """The values. Asks first: where they are there, as they are a step later, the host waits for nothing."""
        copied, self._copied = self._copied, None
        if copied is not None and not copied.query():
            copied.synchronize()
        return self._values


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host on a device, for what that is given from now on; themselves where they are there.

    From memory that is not pinned the host would wait for the copy, and for all that the device does before it.
    """
    if values.device.type == device.type:
        return values
    is_plain = values.layout == torch.strided and not values.is_nested
    if is_plain and not (values.is_pinned() and values.is_contiguous()):  # what has gaps is copied on its way, unpinned
        values = torch.empty_like(values, pin_memory=True).copy_(values)
    return values.to(device, non_blocking=True)


def bytes_in_memory(values: Tensor) -> int:
    """That they take: none while their memory is lent."""
    return values.nbytes if values.untyped_storage().nbytes() else 0


class OffloadedMemory:
    """Takes the memory of tensors on a device from them, and their values to the host, until `reload`.

    The tensors, and what is a view of them, stay the same objects, and must not be used until then. Their storages get
    the memory back, at other addresses perhaps.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device, pinned: bool) -> None:
        """tensors: those on another device are left alone. pinned: the host's memory, for quicker copies.

        Waits for the device. Raises OffloadError where the host has not enough; nothing is changed then.
        """
        found = (one.untyped_storage() for one in tensors if one.device == device)
        storages = {storage.data_ptr(): storage for storage in found if storage.nbytes()}
        self._kept = [
            (storage, allocate_host(storage.nbytes(), pinned=pinned))
            for storage in (storages.values() if device.type != "cpu" else ())
        ]
        self._device = device
        if not self._kept:
            return
        torch.accelerator.synchronize(device)  # other streams may still use them
        for storage, host in self._kept:
            host.copy_(self._bytes_of(storage), non_blocking=pinned)
        torch.accelerator.synchronize(device)
        for storage, _ in self._kept:
            storage.resize_(0)
        torch.accelerator.empty_cache()

    @property
    def nbytes(self) -> int:
        """That are lent."""
        return sum(host.nbytes for _, host in self._kept)

    def reload(self) -> None:
        """The values are on the device again, and the host's memory is given back. Waits for the device."""
        for storage, host in self._kept:
            storage.resize_(host.nbytes)
            self._bytes_of(storage).copy_(host, non_blocking=True)
        if self._kept:
            torch.accelerator.synchronize(self._device)
        self._kept.clear()

    def _bytes_of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
