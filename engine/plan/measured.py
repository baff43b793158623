"""What a machine was measured to do: seconds by size, while all of so many ranks are at work; and the file of it.

[Note: the file]
JSON. `lowtide env --measure` writes it, `lowtide plan --machine` and "auto" read it.

    {"format": 1,
     "processor": "AMD EPYC", "cores": 2, "torch": "2.13.0", "lowtide": "0.1.0", "date": "2026-11-22",
     "process_bytes": {"alone": 168000000, "alone, recomputing": ..., "alone, bf16": ..., "several": ..., ...},
     "ranks": {"2": {"threads": 1, "seconds": {"float32 mm": [[524288, 1.9e-05], ...], ...}}, ...},
     "factors": {"cpu, 2 ranks a host": {"computing": 1.1, "moving": 1.3}, "NVIDIA H100 80GB HBM3": ...}}

`factors` is what `lowtide tune` adds, by device: by how much longer than planned real steps took to compute, and to
move bytes. What was measured of processors anew has none yet.

`process_bytes` is what a rank takes beside its tensors, alone or one of several, with blocks that are computed
again, in bf16; {} where the system does not say. `seconds` has curves by name, [size, seconds] each, sizes ascending:

| name                                | size                                                                       |
|-------------------------------------|----------------------------------------------------------------------------|
| float32 mm, float32 bmm, bfloat16 mm | operations: multiplications and additions of one product                  |
| float32 attention, ... backward     | operations, half of them where a mask is causal                            |
| float32 gelu, float32 add_, ...     | bytes that one call of torch's operation reads and writes; see `operations` |
| view                                | 0: a call that moves nothing                                               |
| forward call, backward call         | `median_bytes` of the calls of a part: of each call, beside what it does   |
| update                              | bytes of gradient, parameter and states that are read, and of those written |
| inspect                             | bytes of a gradient that is looked at before the update                    |
| shared_memory reduce, sockets reduce | bytes that a rank sends, all of it staged, sent, and summed on each rank  |
| sockets gather                      | bytes that a rank sends                                                    |
| sockets message                     | bytes of one message to the next rank                                      |
| file read, file write               | bytes, as the offload to files does it                                     |
| solo unit 0, sockets unit 3, ...    | 0: what the engine does for a unit of a microbatch, by route and stage     |
| solo step 0, sockets step 3, ...    | 0: what it does for a step; stage 2 is as stage 3                          |
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
    """Where the file is that is read where none is named: $LOWTIDE_MACHINE, or in the cache folder of the kernels."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else cache_folder() / "machine.json"


@dataclass(frozen=True)
class Curve:
    """Seconds by size: between two measured sizes a power of it, below the first as the first, above in proportion."""

    sizes: tuple[float, ...]
    times: tuple[float, ...]

    def seconds(self, size: float) -> float:
        """Of something of this size."""
        sizes, times = self.sizes, self.times
        if size <= sizes[0]:
            return times[0]
        if size >= sizes[-1]:
            return times[-1] * size / sizes[-1] if sizes[-1] else times[-1]
        high = bisect_left(sizes, size)
        low = high - 1
        if not sizes[low]:  # no logarithm of nothing
            return times[low] + (times[high] - times[low]) * size / sizes[high]
        share = math.log(size / sizes[low]) / math.log(sizes[high] / sizes[low])
        return float(times[low] * (times[high] / times[low]) ** share)

    def times_as_long(self, factor: float) -> Curve:
        return Curve(self.sizes, tuple(seconds * factor for seconds in self.times))

    @property
    def points(self) -> list[list[float]]:
        """As the file has them."""
        return [[size, seconds] for size, seconds in zip(self.sizes, self.times, strict=True)]

    @property
    def most_per_second(self) -> float:
        """Of the size at which it is fastest."""
        return max((size / seconds for size, seconds in zip(self.sizes, self.times, strict=True)), default=0.0)


@dataclass(frozen=True)
class Speeds:
    """Of each of `ranks` that all work at the same time, on `threads` threads."""

    ranks: int
    threads: int
    curves: Mapping[str, Curve] = field(hash=False)

    def seconds(self, name: str, size: float = 0.0) -> float:
        """Of one curve. What has none takes no time."""
        curve = self.curves.get(name)
        return curve.seconds(size) if curve is not None else 0.0

    def at_most(self, name: str, size: float) -> float:
        """As `seconds`, and no more than of the largest that was measured: of what caches save, say, and no more."""
        curve = self.curves.get(name)
        return curve.seconds(min(size, curve.sizes[-1])) if curve is not None else 0.0

    def operation(self, name: str, dtype: str, size: float) -> float:
        """Of an operation of torch, (mm, bfloat16, operations) or (gelu, float32, bytes). One that was not measured
        takes what an addition does."""
        for known in (f"{dtype} {name}", f"{dtype} add", f"float32 {name}", "float32 add"):
            if known in self.curves:
                return self.curves[known].seconds(size)
        return 0.0

    @property
    def computing(self) -> dict[str, Curve]:
        """Without what ranks say to each other, and what an engine takes."""
        return {name: one for name, one in self.curves.items() if not name.startswith(ROUTES)}

    def slower(self, ranks: int) -> Speeds:
        """Of more ranks than were measured, which share the same cores."""
        times = ranks / self.ranks
        return Speeds(ranks, self.threads, {name: one.times_as_long(times) for name, one in self.curves.items()})

    def calibrated(self, factors: Factors) -> Speeds:
        """As trials have found them."""
        curves = {name: one.times_as_long(factors.of(name)) for name, one in self.curves.items()}
        return Speeds(self.ranks, self.threads, curves)


@dataclass(frozen=True)
class Factors:
    """By how much longer than planned it takes to compute, and to move bytes."""

    computing: float = 1.0
    moving: float = 1.0

    def of(self, name: str) -> float:
        """Of a curve."""
        return self.moving if name.startswith("file ") or name.endswith(_MOVING) else self.computing


def device_key(name: str, ranks_per_host: int) -> str:
    """Of `Measured.factors`. name: "cpu", whose speed depends on how many ranks share it, or as its driver calls it."""
    return name if name != "cpu" else f"cpu, {ranks_per_host} rank{'s' if ranks_per_host > 1 else ''} a host"


@dataclass(frozen=True)
class Measured:
    """The file."""

    by_ranks: Mapping[int, Speeds]
    process_bytes: Mapping[str, int] = field(default_factory=dict)
    factors: Mapping[str, Factors] = field(default_factory=dict)  # by `device_key`
    about: Mapping[str, Any] = field(default_factory=dict)  # processor, cores, versions, date

    def speeds(self, ranks: int) -> Speeds:
        """Where so many ranks work on one host: those of as many, or of the next number that was measured."""
        counts = sorted(self.by_ranks)
        at_least = [count for count in counts if count >= ranks]
        return self.by_ranks[at_least[0]] if at_least else self.by_ranks[counts[-1]].slower(ranks)

    def factor(self, key: str) -> Factors:
        """What trials have found of a device; 1 where there were none."""
        return self.factors.get(key, Factors())

    def write(self, path: Path) -> None:
        """See [Note: the file]. Raises OSError."""
        ranks = {
            str(count): {
                "threads": one.threads,
                "seconds": {name: curve.points for name, curve in sorted(one.curves.items())},
            }
            for count, one in sorted(self.by_ranks.items())
        }
        found = {"format": FORMAT, **self.about, "process_bytes": dict(self.process_bytes), "ranks": ranks}
        found["factors"] = {key: asdict(one) for key, one in self.factors.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Raises ValueError where it is not such a file, with what to do."""
        advice = f"write it anew: lowtide env --measure {path}"
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
            by_ranks = {int(count): _speeds(int(count), one) for count, one in found.pop("ranks").items()}
            factors = {str(key): _factors(one) for key, one in found.pop("factors", {}).items()}
            process = {str(name): int(nbytes) for name, nbytes in found.pop("process_bytes").items()}
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{path}: expected curves and factors, found {type(error).__name__}: {error}; {advice}"
            ) from error
        if not by_ranks and not factors:
            raise ValueError(f"{path}: expected numbers of at least one count of ranks, found none; {advice}")
        return cls(by_ranks, process, factors, {key: value for key, value in found.items() if key != "format"})


def curve(points: Sequence[Sequence[float]]) -> Curve:
    """points: (size, seconds), sizes ascending. Raises ValueError where they are not, or where no time passes."""
    sizes, times = (tuple(float(one[place]) for one in points) for place in (0, 1))
    if not sizes or any(high <= low for low, high in pairwise(sizes)) or sizes[0] < 0:
        raise ValueError(f"sizes {list(sizes)} do not ascend")
    if not all(math.isfinite(one) and one > 0 for one in times):
        raise ValueError(f"seconds {list(times)} are not all more than 0")
    return Curve(sizes, times)


def _factors(found: Mapping[str, Any]) -> Factors:
    made = Factors(float(found["computing"]), float(found["moving"]))
    if not all(math.isfinite(one) and one > 0 for one in (made.computing, made.moving)):
        raise ValueError(f"factors {made.computing:g} and {made.moving:g} are not both more than 0")
    return made


def _speeds(ranks: int, found: Mapping[str, Any]) -> Speeds:
    threads = int(found["threads"])
    curves = {name: curve(points) for name, points in found["seconds"].items()}
    if "call" in curves:  # as older files have it
        either = curves.pop("call")
        curves |= {"forward call": either, "backward call": either}
    return Speeds(ranks, threads, curves)
