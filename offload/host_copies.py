"""Copies between the memory of a device and that of the host, beside the work."""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from .store import Transfer

_POLL_SECONDS = 1e-4


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
        return _StreamCopy(self._start(self._to_host, values, out))

    def to_device(self, values: Tensor, out: Tensor) -> Transfer:
        copied = self._start(self._to_device, values, out)
        torch.accelerator.current_stream(self._device).wait_event(copied)
        return _StreamCopy(copied)

    def _start(self, stream: torch.Stream, values: Tensor, out: Tensor) -> torch.Event:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            out.copy_(values, non_blocking=True)
            return stream.record_event()


class OnHost:
    """Values of any device on their way to the host, which does not wait for them until it reads them."""

    def __init__(self, values: Tensor) -> None:
        """values: small."""
        self._values = values.to("cpu", non_blocking=True)  # into pinned memory, where it comes from a device
        is_there = values.device.type == "cpu"
        self._copied = None if is_there else torch.accelerator.current_stream(values.device).record_event()

    def read(self) -> Tensor:
        """The values. Asks first: where they are there, as they are a step later, the host waits for nothing."""
        while self._copied is not None and not self._copied.query():
            time.sleep(_POLL_SECONDS)
        return self._values


class _StreamCopy:
    def __init__(self, copied: torch.Event) -> None:
        self._copied = copied

    @property
    def is_done(self) -> bool:
        return bool(self._copied.query())

    def wait(self) -> None:
        self._copied.synchronize()
