"""What measured steps say of the machine on which they were planned.

[Note: two factors] The planned seconds of a step are a sum: what computes (forwards, backwards, updates), and what
waits for bytes. A few trials that are much alike cannot tell more numbers of a machine apart than one factor for each,
and often not even these two. So they are drawn to the one factor that fits all, and part from it where the trials say
so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .machine import Machine
from .measured import Factors

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
