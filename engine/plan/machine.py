"""Hosts and devices of a planned training: their memory and their speeds.

[Note: two factors] The planned seconds of a step are computing (forwards, backwards, updates) plus waiting for
transfers. The few trials of `lowtide tune` are similar to each other, so they determine at most a factor for each of
the two, and often only a common factor. A penalty on the difference from the common factor therefore pulls both
towards it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from ...comm import ParallelDims
from .measured import Factors, Measured, Speeds
from .profile import PRODUCTS, Operation, median_bytes

GIGA = 1e9
_FLOPS_OF_WIDER = 8.0  # 16-bit matrix products are this much faster than float32


@dataclass(frozen=True)
class Machine:
    """Equal hosts with equal devices. The defaults are hosts of 8 H100.

    Sizes in bytes, speeds in bytes or operations per second as programs reach them, not those of a data sheet.
    """

    num_hosts: int = 1
    devices_per_host: int = 8
    device: Literal["cpu", "cuda"] = "cuda"
    device_bytes: float = 80 * GIGA
    reserved_bytes: float = 3 * GIGA  # of a device: context, buffers of the backend, fragments
    flops: float = 450e12  # 16-bit matrix products
    memory: float = 2800 * GIGA  # of a device
    intra: float = 330 * GIGA  # between devices of a host, per direction and device
    inter: float = 45 * GIGA  # between hosts, per direction and device
    intra_latency: float = 30e-6  # seconds of a collective
    inter_latency: float = 60e-6
    host_bytes: float = 2000 * GIGA
    host_memory: float = 300 * GIGA  # of all processors of a host together
    link: float = 50 * GIGA  # between a device and its host, per direction
    nvme_bytes: float = 28_000 * GIGA  # of a host
    nvme: float = 20 * GIGA  # of all drives of a host together
    speeds: Speeds | None = None  # measured curves; the values above are then their maxima

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_size = field.name.endswith(("_bytes", "_latency"))
            if isinstance(value, str | Speeds | None) or (
                math.isfinite(value) and (value > 0 or (is_size and value == 0))
            ):
                continue
            raise ValueError(f"{field.name}: expected {'at least' if is_size else 'more than'} 0, found {value:g}")

    @classmethod
    def measured(cls, found: Measured, num_ranks: int, device_bytes: float) -> Machine:
        """Make the machine of CPU ranks that were measured, `num_ranks` of which share a host."""
        # Measured while this many ranks work, so a curve is a rank's share. `host_memory` and `nvme` are
        # of the host, hence times `num_ranks`.
        speeds = found.speeds(num_ranks)
        best = {name: curve.most_per_second for name, curve in speeds.curves.items()}
        products = [name for name in best if name.endswith(tuple(f" {product}" for product in PRODUCTS))]
        moving = [name for name in best if name not in products and "file" not in name]
        files = [best[name] for name in ("file read", "file write") if name in best]
        return cls(
            devices_per_host=num_ranks,
            device="cpu",
            device_bytes=device_bytes,
            reserved_bytes=0.0,
            flops=max((best[name] for name in products), default=GIGA),
            memory=max((best[name] for name in moving), default=GIGA),
            # A single host was measured: nothing is known about links between hosts.
            intra=max((best[name] for name in best if name.startswith("sockets")), default=GIGA),
            inter=max((best[name] for name in best if name.startswith("sockets")), default=GIGA),
            intra_latency=0.0,
            inter_latency=0.0,
            host_memory=num_ranks * max((best[name] for name in moving), default=GIGA),
            link=max((best[name] for name in moving), default=GIGA),
            nvme=num_ranks * max(files, default=GIGA),
            speeds=speeds,
        )

    @property
    def overlaps(self) -> bool:
        """Whether collectives overlap with computing. On CPUs the same cores do both."""
        return self.device != "cpu"

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device for tensors."""
        return self.device_bytes - self.reserved_bytes

    def flops_of(self, itemsize: int) -> float:
        """Return the speed of matrix products with elements of `itemsize` bytes."""
        if self.speeds is not None:
            return self.flops
        return self.flops if itemsize <= 2 else self.flops / _FLOPS_OF_WIDER

    def computing(
        self,
        within: Literal["forward", "backward"],
        flops: int,
        traffic: int,
        itemsize: int,
        operations: Sequence[Operation],
    ) -> float:
        """Return seconds of products and memory traffic, or of the listed operations if speeds were measured."""
        if self.speeds is None or not operations:
            # seconds = operations / flops + bytes / memory: kernels run in sequence, each bound by either of the two.
            return flops / self.flops_of(itemsize) + traffic / self.memory
        count = sum(each.calls for each in operations)
        # seconds = sum of curve(size) over calls + calls x overhead: [Note: calls] in measuring/operations.py.
        seconds = sum(each.calls * self.speeds.operation(each.name, each.dtype, each.size) for each in operations)
        return seconds + count * self.speeds.at_most(f"{within} call", median_bytes(operations))

    def moving(self, name: str, nbytes: float, otherwise: float = 0.0) -> float:
        """Return seconds in which the engine moves bytes, by a measured curve (names in `measured.py`).

        otherwise: the result if the curve was not measured.
        """
        if not nbytes:
            return 0.0
        is_known = self.speeds is not None and name in self.speeds.curves
        return self.speeds.seconds(name, nbytes) if self.speeds is not None and is_known else otherwise

    def host(self, name: str) -> float:
        """Return seconds of the host for a unit or a step, 0 unless measured."""
        return self.speeds.seconds(name) if self.speeds is not None else 0.0

    def ranks_on_host(self, parallel_dims: ParallelDims, names: Sequence[str]) -> int:
        """Return the number of ranks on a host that differ in these axes alone; the least if hosts cut their groups."""
        # A host has consecutive ranks, and the last axis varies fastest. Axes beside each other are a single longer
        # axis, whose neighbours are `apart` ranks apart. gcd: if hosts cut groups, some group begins within a host.
        stride, apart, of_axis, count = 1, 1, 1, 1
        for name, size in reversed(parallel_dims.sizes):
            stride *= size
            if name in names:
                of_axis = max(1, math.gcd(stride, self.devices_per_host) // apart)
            elif size > 1:
                apart, of_axis, count = stride, 1, count * of_axis
        return count * of_axis

    def collective(self, nbytes: float, num_ranks: int, on_host: int) -> float:
        """Return seconds of a gather or reduce-scatter of `nbytes` over `num_ranks`, of which `on_host` share a host.

        The ranks form rings. All devices of a host that take part share its traffic to other hosts.
        """
        if num_ranks == 1 or not nbytes:
            return 0.0
        num_hosts = -(-num_ranks // on_host)
        # A ring sends (r - 1) / r of the bytes over each link (Patarasuk and Yuan, JPDC 2009).
        inside = nbytes * (num_ranks - 1) / num_ranks / self.intra if on_host > 1 else 0.0
        if num_hosts == 1:
            return self.intra_latency + inside
        # Rings of different devices leave a host by different network cards. Pieces overlap, so the slower link counts.
        outside = nbytes * (num_hosts - 1) / num_hosts / (on_host * self.inter)
        return self.inter_latency + max(inside, outside)

    def all_to_all(self, nbytes: float, num_ranks: int, on_host: int) -> float:
        """Return seconds in which each rank sends each other rank its part of `nbytes`."""
        if num_ranks == 1 or not nbytes:
            return 0.0
        # Each of the r parts has nbytes / r, and a rank keeps its part. Here no ring shares the traffic to other hosts.
        inside = nbytes * (on_host - 1) / num_ranks / self.intra
        if on_host >= num_ranks:
            return self.intra_latency + inside
        return self.inter_latency + max(inside, nbytes * (num_ranks - on_host) / num_ranks / self.inter)

    def pass_on(self, nbytes: float, is_inside: bool) -> float:
        """Return seconds in which each rank sends `nbytes` to its neighbour. is_inside: all on a single host."""
        if not nbytes:
            return 0.0
        if is_inside:
            return self.intra_latency + nbytes / self.intra
        # Some neighbours are on the same host and some are not. All wait for the slowest.
        return self.inter_latency + nbytes / min(self.inter, self.intra)


_COMPUTES = ("flops", "memory")
_MOVES = ("intra", "inter", "link", "nvme", "host_memory")
_WAITS = ("intra_latency", "inter_latency")
_WEIGHT = 0.1  # of the penalty, relative to the error of a trial
_SPAN, _STEPS = math.log(10), 40  # range of the grid search, and steps in each direction


def fit_factors(steps: Sequence[tuple[Mapping[str, float], float]]) -> Factors:
    """Return the factors that bring planned steps closest to measured steps, by ratio; see [Note: two factors].

    steps: (planned seconds by part as in `Plan.seconds`, measured seconds of the whole step).
    """
    if not steps:
        return Factors()
    parts = []  # (computing, waiting, measured)
    for seconds, measured in steps:
        waiting = sum(each for name, each in seconds.items() if name.endswith("exposed"))
        parts.append((sum(seconds.values()) - waiting, waiting, measured))
    # The factor that alone fits best: the geometric mean of measured / planned.
    common = sum(math.log(measured / (computing + waiting)) for computing, waiting, measured in parts) / len(parts)
    offsets = [_SPAN * (index / _STEPS - 1) for index in range(2 * _STEPS + 1)]

    def loss(first: float, second: float) -> float:
        of_computing, of_waiting = math.exp(common + first), math.exp(common + second)
        ratios = [
            (of_computing * computing + of_waiting * waiting) / measured for computing, waiting, measured in parts
        ]
        # Logarithms: half the time and twice the time are equally wrong.
        return sum(math.log(ratio) ** 2 for ratio in ratios) + _WEIGHT * (first**2 + second**2)

    # A grid of 81 x 81 needs no starting point and cannot diverge. Trials are few.
    first, second = min(((a, b) for a in offsets for b in offsets), key=lambda pair: loss(*pair))
    return Factors(math.exp(common + first), math.exp(common + second))


def calibrated(machine: Machine, factors: Factors) -> Machine:
    """Return the machine with its speeds corrected by the factors."""
    if factors == Factors():
        return machine
    changes = {name: getattr(machine, name) / factors.computing for name in _COMPUTES}
    changes |= {name: getattr(machine, name) / factors.moving for name in _MOVES}
    changes |= {name: getattr(machine, name) * factors.moving for name in _WAITS}
    speeds = machine.speeds and machine.speeds.calibrated(factors)
    return replace(machine, speeds=speeds, **changes)


def gigabytes(nbytes: float) -> str:
    """Return three figures, or all digits of a large number: 4187, 31.4, 1.88, 0.117."""
    value = nbytes / 1e9
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
