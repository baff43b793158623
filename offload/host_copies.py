"""Copies between the memory of a device and that of the host, beside the work."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class HostCopy(Protocol):
    """A copy that may still be under way. Both tensors stay as they are until either wait."""

    def wait_on_device(self) -> None:
        """What the device is given from now on comes after the copy; the host goes on."""

    def wait_on_host(self) -> None:
        """Returns when the copy is made."""


class HostCopies(Protocol):
    """Starts copies, each after what the device was given before it."""

    def to_host(self, values: Tensor, out: Tensor) -> HostCopy:
        """values: of the device; out: of the host, pinned, of the same shape and dtype."""

    def to_device(self, values: Tensor, out: Tensor) -> HostCopy:
        """values: of the host, pinned; out: of the device, of the same shape and dtype."""


class StreamCopies:
    """On two streams of the device, one for each direction: a link carries both at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host = torch.Stream(device)
        self._to_device = torch.Stream(device)

    def to_host(self, values: Tensor, out: Tensor) -> HostCopy:
        return self._start(self._to_host, values, out)

    def to_device(self, values: Tensor, out: Tensor) -> HostCopy:
        return self._start(self._to_device, values, out)

    def _start(self, stream: torch.Stream, values: Tensor, out: Tensor) -> HostCopy:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            out.copy_(values, non_blocking=True)
            event = stream.record_event()
        return _StreamCopy(self._device, event)


class _StreamCopy:
    def __init__(self, device: torch.device, event: torch.Event) -> None:
        self._device = device
        self._event = event

    def wait_on_device(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)

    def wait_on_host(self) -> None:
        self._event.synchronize()
