"""A few numbers on their way between a device and the host, which waits for neither way."""

from __future__ import annotations

import torch
from torch import Tensor


class Reading:
    """A small tensor on its way to the host, as it is after what its device was given before.

    What the device is given later is not waited for: it computes that while the host reads. On the CPU there is no way.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._copied: torch.Event | None = None
        if values.device.type != "cpu":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.accelerator.current_stream(values.device).record_event()

    def wait(self) -> Tensor:
        """The tensor on the host. Waits for the device, the first time."""
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()
        return self._values


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on a device, for what that is given from now on; itself where it is there.

    From memory that is not pinned the host would wait for the copy, and for all that the device does before it.
    """
    if values.device.type == device.type:
        return values
    return values.pin_memory().to(device, non_blocking=True)
