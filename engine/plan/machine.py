"""The hosts and devices on which a training is planned: what they hold, and how fast they are.

[Note: two factors] The planned seconds of a step are a sum: what computes (forwards, backwards, updates), and what
waits for bytes. A few trials that are much alike cannot tell more numbers of a machine apart than one factor for each,
and often not even these two. So they are drawn to the one factor that fits all, and part from it where the trials say
so.
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
    speeds: Speeds | None = None  # as measured; what is above is then the most that was reached

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
        """This machine's processors, shared by so many ranks, as they were measured."""
        speeds = found.speeds(num_ranks)
        best = {name: curve.most_per_second for name, curve in speeds.curves.items()}
        products = [name for name in best if name.endswith(tuple(f" {one}" for one in PRODUCTS))]
        moving = [name for name in best if name not in products and "file" not in name]
        files = [best[name] for name in ("file read", "file write") if name in best]
        return cls(
            devices_per_host=num_ranks,
            device="cpu",
            device_bytes=device_bytes,
            reserved_bytes=0.0,
            flops=max((best[name] for name in products), default=GIGA),
            memory=max((best[name] for name in moving), default=GIGA),
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
        """Whether collectives run beside what is computed. On processors the cores that compute send as well."""
        return self.device != "cpu"

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def usable_bytes(self) -> float:
        """Of a device, for tensors."""
        return self.device_bytes - self.reserved_bytes

    def flops_of(self, itemsize: int) -> float:
        """Of matrices whose elements have so many bytes."""
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
        """Seconds of products and of bytes that are moved; of the same, call by call, where both were measured."""
        if self.speeds is None or not operations:
            return flops / self.flops_of(itemsize) + traffic / self.memory
        count = sum(one.calls for one in operations)
        seconds = sum(one.calls * self.speeds.operation(one.name, one.dtype, one.size) for one in operations)
        return seconds + count * self.speeds.at_most(f"{within} call", median_bytes(operations))

    def moving(self, name: str, nbytes: float, otherwise: float = 0.0) -> float:
        """Seconds of what the engine does with bytes: see the names in `measured.py`. otherwise: if not measured."""
        if not nbytes:
            return 0.0
        is_known = self.speeds is not None and name in self.speeds.curves
        return self.speeds.seconds(name, nbytes) if self.speeds is not None and is_known else otherwise

    def host(self, name: str) -> float:
        """Seconds of the host for a unit or a step, where they were measured."""
        return self.speeds.seconds(name) if self.speeds is not None else 0.0

    def ranks_on_host(self, parallel_dims: ParallelDims, names: Sequence[str]) -> int:
        """How many ranks that differ on these axes alone have one host."""
        sizes, stride, count = dict(parallel_dims.sizes), 1, 1
        for name, size in reversed(parallel_dims.sizes):
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

    def all_to_all(self, nbytes: float, num_ranks: int, on_host: int) -> float:
        """Seconds in which each of `num_ranks`, `on_host` to a host, gives each other one its part of so many bytes."""
        if num_ranks == 1 or not nbytes:
            return 0.0
        inside = nbytes * (on_host - 1) / num_ranks / self.intra
        if on_host >= num_ranks:
            return self.intra_latency + inside
        return self.inter_latency + max(inside, nbytes * (num_ranks - on_host) / num_ranks / self.inter)

    def pass_on(self, nbytes: float, is_inside: bool) -> float:
        """Seconds in which each rank gives so many bytes to another one, of its host or, some of them, of the next."""
        if not nbytes:
            return 0.0
        if is_inside:
            return self.intra_latency + nbytes / self.intra
        return self.inter_latency + nbytes / min(self.inter, self.intra)


_COMPUTES = ("flops", "memory")
_MOVES = ("intra", "inter", "link", "nvme", "host_memory")
_WAITS = ("intra_latency", "inter_latency")
_WEIGHT = 0.1  # of the draw to one factor, beside one trial
_SPAN, _STEPS = math.log(10), 40  # of the search, to both sides


@dataclass(frozen=True)
class MeasuredStep:
    """seconds: of its planned parts, as `Plan.seconds` has them. measured: of the whole."""

    seconds: Mapping[str, float]
    measured: float

    @property
    def computing(self) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if not _is_wait(name))

    @property
    def waiting(self) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if _is_wait(name))

    def expected(self, factors: Factors) -> float:
        """Seconds of the whole on a machine of which these factors are true."""
        return factors.computing * self.computing + factors.moving * self.waiting


def _is_wait(name: str) -> bool:
    return name.endswith("exposed")


def fit(steps: Sequence[MeasuredStep]) -> Factors:
    """The factors under which the planned steps are nearest to the measured ones, by ratio; see [Note: two factors]."""
    if not steps:
        return Factors()
    common = sum(math.log(one.measured / (one.computing + one.waiting)) for one in steps) / len(steps)
    offsets = [_SPAN * (index / _STEPS - 1) for index in range(2 * _STEPS + 1)]

    def loss(first: float, second: float) -> float:
        factors = Factors(math.exp(common + first), math.exp(common + second))
        errors = sum(math.log(one.expected(factors) / one.measured) ** 2 for one in steps)
        return errors + _WEIGHT * (first**2 + second**2)

    first, second = min(((a, b) for a in offsets for b in offsets), key=lambda pair: loss(*pair))
    return Factors(math.exp(common + first), math.exp(common + second))


def calibrated(machine: Machine, factors: Factors) -> Machine:
    """The machine whose speeds are what the factors say of this one's."""
    if factors == Factors():
        return machine
    changes = {name: getattr(machine, name) / factors.computing for name in _COMPUTES}
    changes |= {name: getattr(machine, name) / factors.moving for name in _MOVES}
    changes |= {name: getattr(machine, name) * factors.moving for name in _WAITS}
    speeds = machine.speeds and machine.speeds.calibrated(factors)
    return replace(machine, speeds=speeds, **changes)
