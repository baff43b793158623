"""Values of tensors that may be on the pretended device, for the host: how the group gets at them."""

import os
import threading
from typing import Any

import torch
from torch import Tensor


def settle() -> None:
    """What the current stream was given is done: what starts now comes after it."""
    if device_name() != "cpu":
        from tests.pretend import device

        device.settle()


def opened(tensor: Tensor) -> Tensor:
    """Its memory, for the host."""
    if tensor.device.type == "cpu":
        return tensor.detach()
    from tests.pretend import device

    with _idle_stream(tensor.device):  # of this thread: opening waits for the current one, in whose midst this may be
        return device.open_for_host(tensor.detach())


def _idle_stream(device: torch.device) -> torch.Stream:
    if not hasattr(_OWN, "stream"):
        _OWN.stream = torch.Stream(device)
    stream: torch.Stream = _OWN.stream
    return stream


def read(tensor: Tensor) -> Tensor:
    return opened(tensor).clone()


def write(tensor: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        opened(tensor).copy_(values)


def poison(tensor: Tensor) -> None:
    """What is still to come is not there."""
    if tensor.is_floating_point():
        opened(tensor).fill_(float("nan"))


def unowned(value: Any) -> Any:
    """A tensor of the device at the same address, which does not keep its memory; other values as they are."""
    return torch.ops.pretend.unowned(value) if isinstance(value, Tensor) and value.device.type != "cpu" else value


def is_capturing() -> bool:
    return bool(torch.ops.pretend.is_capturing())


def device_name() -> str:
    return "cpu" if os.environ.get("PRETEND_NCCL_ON_CPU") else "pretend"


def shape_of(tensor: Tensor) -> str:
    return f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"


_OWN = threading.local()
