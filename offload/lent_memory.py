"""Memory of a device that is lent to others, with what was in it on the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .host_memory import allocate_host


def bytes_in_memory(values: Tensor) -> int:
    """That they take: none while their memory is lent."""
    return values.nbytes if values.untyped_storage().nbytes() else 0


class LentMemory:
    """Takes the memory of tensors on a device from them, and their values to the host, until `take_back`.

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

    def take_back(self) -> None:
        """The values are on the device again, and the host's memory is given back. Waits for the device."""
        for storage, host in self._kept:
            storage.resize_(host.nbytes)
            self._bytes_of(storage).copy_(host, non_blocking=True)
        if self._kept:
            torch.accelerator.synchronize(self._device)
        self._kept.clear()

    def _bytes_of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
