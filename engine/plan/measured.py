"""Measured speeds of a machine: seconds by size, while a number of ranks work at the same time; and their file.

[Note: the file]
JSON. `lowtide env --measure` writes it, `lowtide plan --machine` and "auto" read it.

    {"format": 1,
     "processor": "AMD EPYC", "cores": 2, "torch": "2.13.0", "lowtide": "0.1.0", "date": "2026-11-22",
     "ranks": {"2": {"threads": 1, "seconds": {"float32 mm": [[524288, 1.9e-05], ...], ...}}, ...},
     "factors": {"cpu, 2 ranks a host": {"computing": 1.1, "moving": 1.3}, "NVIDIA H100 80GB HBM3": ...}}

`factors`, by device, come from `lowtide tune`: real steps took so many times the planned time to compute, and to move
bytes. A new measurement of CPUs starts without factors.

`seconds` has curves by name, a list of [size, seconds] with ascending sizes:

| name                                | size                                                                       |
|-------------------------------------|----------------------------------------------------------------------------|
| float32 mm, float32 bmm, bfloat16 mm | multiplications and additions of a product                                |
| float32 attention, ... backward     | the same; half of them if the mask is causal                               |
| float32 gelu, float32 add_, ...     | bytes that a call reads and writes; see `operations`                       |
| view                                | 0: a call that moves nothing                                               |
| forward call, backward call         | `median_bytes` of the calls of a part: overhead of a call                  |
| update                              | bytes of gradient, parameter and states that are read and written          |
| inspect                             | bytes of a gradient that is checked before the update                      |
| shared_memory reduce, sockets reduce | bytes that a rank sends; staging and summing are included                 |
| sockets gather                      | bytes that a rank sends                                                    |
| sockets message                     | bytes of a message to the next rank                                        |
| file read, file write               | bytes, as the offload to files moves them                                  |
| solo unit 0, sockets unit 3, ...    | 0: host time for a unit of a microbatch, by transport and stage                |
| solo step 0, sockets step 3, ...    | 0: host time for a step; stage 2 equals stage 3                            |
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...kernels.cpu_build import cache_folder

FORMAT = 1
ROUTES = ("solo", "shared_memory", "sockets")
VARIABLE = "LOWTIDE_MACHINE"
_MOVING = (" reduce", " gather", " message")  # ends of the names of curves


def default_path() -> Path:
    """Return the default path of the file: $LOWTIDE_MACHINE, or machine.json in the kernels' cache folder."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else cache_folder() / "machine.json"


@dataclass(frozen=True)
class Curve:
    """Seconds by size: a power law between two measured sizes, constant below them, proportional above them."""

    sizes: tuple[float, ...]
    times: tuple[float, ...]

    def seconds(self, size: float) -> float:
        """Return the seconds for a size."""
        sizes, times = self.sizes, self.times
        # Below the smallest size a call costs its overhead. Above the largest size the speed no longer changes.
        if size <= sizes[0]:
            return times[0]
        if size >= sizes[-1]:
            return times[-1] * size / sizes[-1] if sizes[-1] else times[-1]
        high = bisect_left(sizes, size)
        low = high - 1
        if not sizes[low]:  # 0 has no logarithm
            return times[low] + (times[high] - times[low]) * size / sizes[high]
        # A straight line in logarithms: t = t0 (t1 / t0)^share, share = log(s / s0) / log(s1 / s0).
        share = math.log(size / sizes[low]) / math.log(sizes[high] / sizes[low])
        return float(times[low] * (times[high] / times[low]) ** share)

    def times_as_long(self, factor: float) -> Curve:
        return Curve(self.sizes, tuple(seconds * factor for seconds in self.times))

    @property
    def points(self) -> list[list[float]]:
        """The points as in the file."""
        return [[size, seconds] for size, seconds in zip(self.sizes, self.times, strict=True)]

    @property
    def most_per_second(self) -> float:
        """The highest speed over all measured sizes."""
        return max((size / seconds for size, seconds in zip(self.sizes, self.times, strict=True)), default=0.0)


@dataclass(frozen=True)
class Speeds:
    """Measured curves of each of `ranks` ranks that work at the same time, on `threads` threads."""

    ranks: int
    threads: int
    curves: Mapping[str, Curve] = field(hash=False)

    def seconds(self, name: str, size: float = 0.0) -> float:
        """Return the seconds of a curve, 0 if it was not measured."""
        curve = self.curves.get(name)
        return curve.seconds(size) if curve is not None else 0.0

    def at_most(self, name: str, size: float) -> float:
        """Return the seconds of a curve, but at most those of its largest size."""
        curve = self.curves.get(name)
        return curve.seconds(min(size, curve.sizes[-1])) if curve is not None else 0.0

    def operation(self, name: str, dtype: str, size: float) -> float:
        """Return the seconds of a torch operation: ("mm", "bfloat16", operations) or ("gelu", "float32", bytes).

        An operation that was not measured counts as an addition.
        """
        # Most operations that are not measured move memory as an addition does.
        for known in (f"{dtype} {name}", f"{dtype} add", f"float32 {name}", "float32 add"):
            if known in self.curves:
                return self.curves[known].seconds(size)
        return 0.0

    @property
    def computing(self) -> dict[str, Curve]:
        """The curves without collectives and host times."""
        return {name: curve for name, curve in self.curves.items() if not name.startswith(ROUTES)}

    def slower(self, ranks: int) -> Speeds:
        """Return the speeds of more ranks than were measured, on the same cores."""
        # The same cores serve more ranks in turn.
        times = ranks / self.ranks
        return Speeds(ranks, self.threads, {name: curve.times_as_long(times) for name, curve in self.curves.items()})

    def calibrated(self, factors: Factors) -> Speeds:
        """Return the speeds corrected by the factors of trials."""
        curves = {name: curve.times_as_long(factors.of(name)) for name, curve in self.curves.items()}
        return Speeds(self.ranks, self.threads, curves)


@dataclass(frozen=True)
class Factors:
    """Measured time divided by planned time, for computing and for moving bytes."""

    computing: float = 1.0
    moving: float = 1.0

    def of(self, name: str) -> float:
        """Return the factor of a curve."""
        return self.moving if name.startswith("file ") or name.endswith(_MOVING) else self.computing


def device_key(name: str, ranks_per_host: int) -> str:
    """Return the key of a device in `Measured.factors`.

    name: "cpu", whose speed depends on the number of ranks that share it, or the device name that its driver reports.
    """
    return name if name != "cpu" else f"cpu, {ranks_per_host} rank{'s' if ranks_per_host > 1 else ''} a host"


@dataclass(frozen=True)
class Measured:
    """The content of the file."""

    by_ranks: Mapping[int, Speeds]
    factors: Mapping[str, Factors] = field(default_factory=dict)  # by `device_key`
    about: Mapping[str, Any] = field(default_factory=dict)  # processor, cores, versions, date

    def speeds(self, ranks: int) -> Speeds:
        """Return the speeds of `ranks` ranks on a host, measured with this or the next larger number of ranks."""
        counts = sorted(self.by_ranks)
        # More ranks share memory and caches, so the next larger count is the safe side.
        at_least = [count for count in counts if count >= ranks]
        return self.by_ranks[at_least[0]] if at_least else self.by_ranks[counts[-1]].slower(ranks)

    def factor(self, key: str) -> Factors:
        """Return the factors of a device; 1 if there were no trials."""
        return self.factors.get(key, Factors())

    def write(self, path: Path) -> None:
        """Write the file, see [Note: the file]. Raises OSError."""
        ranks = {
            str(count): {
                "threads": speeds.threads,
                "seconds": {name: curve.points for name, curve in sorted(speeds.curves.items())},
            }
            for count, speeds in sorted(self.by_ranks.items())
        }
        content = {"format": FORMAT, **self.about, "ranks": ranks}
        content["factors"] = {key: asdict(factors) for key, factors in self.factors.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(path)  # readers never see half a file

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Read the file. Raises ValueError if it is not valid."""
        advice = f"write it again: lowtide env --measure {path}"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: expected numbers of a machine, found {error.strerror}; {advice}") from error
        except ValueError as error:
            raise ValueError(f"{path}: expected JSON, found {error}; {advice}") from error
        version = found.get("format") if isinstance(found, dict) else None
        if version != FORMAT:
            raise ValueError(f'{path}: expected "format": {FORMAT}, found {version!r}; {advice}')
        try:
            by_ranks = {int(count): _speeds(int(count), each) for count, each in found.pop("ranks").items()}
            factors = {str(key): _factors(each) for key, each in found.pop("factors", {}).items()}
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{path}: expected curves and factors, found {type(error).__name__}: {error}; {advice}"
            ) from error
        if not by_ranks and not factors:
            raise ValueError(f"{path}: expected speeds of at least 1 number of ranks, found none; {advice}")
        return cls(by_ranks, factors, {key: value for key, value in found.items() if key != "format"})


def curve(points: Sequence[Sequence[float]]) -> Curve:
    """Make a curve of (size, seconds) points. Raises ValueError unless sizes ascend and seconds are more than 0."""
    sizes, times = (tuple(float(point[place]) for point in points) for place in (0, 1))
    if not sizes or any(high <= low for low, high in pairwise(sizes)) or sizes[0] < 0:
        raise ValueError(f"sizes {list(sizes)} do not ascend")
    if not all(math.isfinite(seconds) and seconds > 0 for seconds in times):
        raise ValueError(f"seconds {list(times)} are not all more than 0")
    return Curve(sizes, times)


def _factors(found: Mapping[str, Any]) -> Factors:
    made = Factors(float(found["computing"]), float(found["moving"]))
    if not all(math.isfinite(factor) and factor > 0 for factor in (made.computing, made.moving)):
        raise ValueError(f"factors {made.computing:g} and {made.moving:g} are not both more than 0")
    return made


def _speeds(ranks: int, found: Mapping[str, Any]) -> Speeds:
    threads = int(found["threads"])
    curves = {name: curve(points) for name, points in found["seconds"].items()}
    if "call" in curves:  # older files have a single curve
        call = curves.pop("call")
        curves |= {"forward call": call, "backward call": call}
    return Speeds(ranks, threads, curves)
