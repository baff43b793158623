"""The hosts and devices on which a training is planned: what they hold, and how fast they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from ...comm import Arrangement

GIGA = 1e9
_FLOPS_OF_WIDER = 8.0  # float32 on matrix units, beside 16 bits


@dataclass(frozen=True)
class Machine:
    """Equal hosts with equal devices. Bytes, and bytes or operations a second; the defaults are hosts of 8 H100.

    Speeds are those that are reached, not those of a data sheet.
    """

    num_hosts: int = 1
    devices_per_host: int = 8
    device: Literal["cpu", "cuda"] = "cuda"
    device_bytes: float = 80 * GIGA
    reserved_bytes: float = 3 * GIGA  # of a device: the context, buffers of the backend, what no block fits into
    flops: float = 450e12  # of matrices, in 16 bits
    memory: float = 2800 * GIGA  # of a device
    intra: float = 330 * GIGA  # between the devices of a host, each way, each device
    inter: float = 45 * GIGA  # between hosts, each way, each device
    intra_latency: float = 30e-6  # seconds of a collective
    inter_latency: float = 60e-6
    host_bytes: float = 2000 * GIGA
    host_memory: float = 300 * GIGA  # of a host's processors together
    link: float = 50 * GIGA  # between a device and its host, each way
    nvme_bytes: float = 28_000 * GIGA  # of a host
    nvme: float = 20 * GIGA  # of a host's drives together

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_size = field.name.endswith(("_bytes", "_latency"))
            if isinstance(value, str) or (math.isfinite(value) and (value > 0 or (is_size and value == 0))):
                continue
            raise ValueError(f"{field.name}: expected {'at least' if is_size else 'more than'} 0, found {value:g}")

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def usable_bytes(self) -> float:
        """Of a device, for tensors."""
        return self.device_bytes - self.reserved_bytes

    def flops_of(self, itemsize: int) -> float:
        """Of matrices whose elements have so many bytes."""
        return self.flops if itemsize <= 2 else self.flops / _FLOPS_OF_WIDER

    def ranks_on_host(self, arrangement: Arrangement, names: Sequence[str]) -> int:
        """How many ranks that differ on these axes alone have one host."""
        sizes, stride, count = dict(arrangement.sizes), 1, 1
        for name, size in reversed(arrangement.sizes):
            if name in names:
                count *= max(1, min(sizes[name], self.devices_per_host // stride))
            stride *= size
        return count

    def collective(self, nbytes: float, num_ranks: int, on_host: int) -> float:
        """Seconds of a gather to, or a reduce-scatter from, so many bytes of each of `num_ranks`, `on_host` to a host.

        A ring, or rings: what leaves a host is divided over the links of those of its devices that take part.
        """
        if num_ranks == 1 or not nbytes:
            return 0.0
        num_hosts = max(1, num_ranks // on_host)
        inside = nbytes * (num_ranks - 1) / num_ranks / self.intra if on_host > 1 else 0.0
        if num_hosts == 1:
            return self.intra_latency + inside
        outside = nbytes * (num_hosts - 1) / num_hosts / (on_host * self.inter)
        return self.inter_latency + max(inside, outside)
