"""The batch sizes: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks.

[Note: what stays] A job may continue on a different number of ranks. Learning rate, schedule and data order are made
for a global batch, so train_batch_size stays. The microbatch decides on memory, so it stays too, and accumulation makes
up for missing ranks. If that does not divide, the next smaller microbatch is used; a larger one only if the config
leaves the microbatch open, and last.

[Note: elasticity] The section `elasticity` chooses a global batch that many numbers of ranks divide, as DeepSpeed does
(0.6 to 0.18). Candidates are each microbatch, and the least common multiple of all, times the largest highly composite
number within `max_train_batch_size`. The candidate that most numbers of ranks divide wins.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...configs.section import Bool, Int, NonNegative, Positive
from .errors import Fault, SwitchedSection, no_effect

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Batch:
    """All three batch sizes."""

    train: int
    micro: int
    accumulation: int


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of `unit` next to `value`, as text: "8 or 12"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def nearest_divisors(value: int, of: int) -> str:
    """Return the divisors of `of` next to `value`, as text: "2 or 4"."""
    divisors = [d for d in range(1, of + 1) if of % d == 0]
    below = [d for d in divisors if d <= value][-1:]
    above = [d for d in divisors if d > value][:1]
    return " or ".join(str(d) for d in below + above)


def fill_batch(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> Batch | Fault:
    """Complete the batch sizes, or return the fault that shows why it is impossible.

    If two are missing, accumulation is 1, then the microbatch is 1.
    """
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro * accumulation * world_size, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        unit, unknown = accumulation * world_size, "train_micro_batch_size_per_gpu"
        # Rounded down: the equation below shows whether it holds.
        micro = train // unit
    elif accumulation is None:
        unit, unknown = micro * world_size, "gradient_accumulation_steps"
        accumulation = train // unit
    else:
        unit, unknown = micro * accumulation * world_size, ""
    if micro * accumulation * world_size == train:
        return Batch(train, micro, accumulation)
    m = "?" if unknown.startswith("train") else str(micro)
    a = "?" if unknown.startswith("gradient") else str(accumulation)
    equation = (
        f"train_batch_size({train}) = train_micro_batch_size_per_gpu({m}) x gradient_accumulation_steps({a}) "
        f"x data-parallel ranks({world_size})"
    )
    if unknown:
        fix = f"set train_batch_size to a multiple of {unit}: {nearest_multiples(train, unit)}"
        return Fault("train_batch_size", "conflict", f"no whole {unknown} makes {equation} hold; {fix}")
    fixes = [f"train_batch_size {unit}"]
    if train % (accumulation * world_size) == 0:
        fixes.append(f"train_micro_batch_size_per_gpu {train // (accumulation * world_size)}")
    if train % (micro * world_size) == 0:
        fixes.append(f"gradient_accumulation_steps {train // (micro * world_size)}")
    message = f"{equation} does not hold: the product is {unit}; the nearest legal values are {', or '.join(fixes)}"
    return Fault("train_batch_size", "conflict", message)


VARIABLE = "LOWTIDE_FIRST_WORLD_SIZE"  # set by `lowtide launch`


def first_world_size(environ: Mapping[str, str], world_size: int) -> int | None:
    """Return the number of ranks of the job's first attempt, or None if it is unknown.

    The variable counts only if WORLD_SIZE equals `world_size`: a process that a rank starts inherits the variable, but
    is a different job. Raises ValueError if the variable is not a number of ranks.
    """
    text = environ.get(VARIABLE)
    if text is None or environ.get("WORLD_SIZE") != str(world_size):
        return None
    # Digits of further alphabets pass `isdigit`, and `int` reads them.
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(
            f'{VARIABLE}: expected the number of ranks of the first attempt, at least 1, found "{text}"; unset it: '
            "`lowtide launch` sets it for every rank"
        )
    return int(text)


@dataclass(frozen=True)
class KeptBatch:
    """The global batch of a first attempt, on a different number of ranks.

    same: ranks that take the same data. is_micro_given: by the config. can_accumulate: whether the schedule and the
    other settings accept this accumulation. divisor: must divide the number of data-parallel ranks.
    """

    first: Batch
    first_world_size: int
    same: int
    is_micro_given: bool
    can_accumulate: Callable[[int], bool]
    divisor: int

    def on(self, data_size: int) -> Batch | None:
        """Return the batch sizes on `data_size` data-parallel ranks, or None if they do not divide the global batch.

        If no accumulation suits `can_accumulate`, the preferred microbatch is returned.
        """
        share, rest = divmod(self.first.train, data_size)
        if rest:
            return None
        # In order of preference: see [Note: what stays].
        triples = [Batch(self.first.train, micro, share // micro) for micro in self._micros(share)]
        return next((triple for triple in triples if self.can_accumulate(triple.accumulation)), triples[0])

    def note(self, world_size: int) -> str:
        """Return the note with the new and the first batch sizes, for a legal number of ranks."""
        batch = self.on(world_size // self.same)
        assert batch is not None
        return (
            f"train_batch_size: stays {batch.train} on {_ranks(world_size)}, as the job began on "
            f"{self.first_world_size}: microbatch x accumulation x data-parallel ranks is now "
            f"{self._product(batch, world_size)}, was {self._product(self.first, self.first_world_size)}"
        )

    def fault(self, world_size: int) -> Fault:
        """Say why the job cannot continue on `world_size` ranks, and on how many it can."""
        first, same = self.first, self.same
        text = (
            f"the job began on {_ranks(self.first_world_size)}, and its global batch stays: train_batch_size"
            f"({first.train}) = {self._product(first, self.first_world_size)}"
        )
        if world_size % same == 0 and self.on(world_size // same) is None:
            text += (
                f"; no whole numbers make train_batch_size({first.train}) = train_micro_batch_size_per_gpu(?) x "
                f"gradient_accumulation_steps(?) x data-parallel ranks({world_size // same}) hold"
            )
        text += (
            f". It cannot continue on {_ranks(world_size)}; the nearest legal numbers of ranks are "
            f"{self._nearest_worlds(world_size)}. Use one of these with train_batch_size {first.train} in the "
            "config, or set a train_batch_size that more numbers of ranks divide"
        )
        return Fault("train_batch_size", "conflict", text)

    def _micros(self, share: int) -> list[int]:
        """Return the microbatches that divide a rank's share of the global batch, in order of preference."""
        divisors = [micro for micro in range(1, share + 1) if share % micro == 0]
        # A microbatch that the config gives fits in memory. Nobody knows whether a larger microbatch does.
        larger = [micro for micro in divisors if micro > self.first.micro and not self.is_micro_given]
        return [micro for micro in divisors[::-1] if micro <= self.first.micro] + larger

    def _product(self, batch: Batch, world_size: int) -> str:
        return f"{batch.micro} x {batch.accumulation} x {world_size // self.same}"

    def _nearest_worlds(self, world_size: int) -> str:
        """Return the legal world sizes next to `world_size`. The first attempt's is legal, so there is one."""
        # Only divisors can be legal: the global batch is a multiple of the data-parallel ranks.
        sizes = [size for size in range(1, self.first.train + 1) if self.first.train % size == 0]
        below = [size for size in sizes if size * self.same < world_size]
        above = [size for size in sizes if size * self.same > world_size]
        nearest = (next(filter(self._is_legal, side), None) for side in (below[::-1], above))
        return " or ".join(str(size * self.same) for size in nearest if size is not None)

    def _is_legal(self, data_size: int) -> bool:
        batch = self.on(data_size)
        return batch is not None and data_size % self.divisor == 0 and self.can_accumulate(batch.accumulation)


def nothing_kept(first_world_size: int, world_size: int) -> str:
    """Return the note if the config leaves the global batch to the script."""
    return (
        f"train_batch_size: the job began on {_ranks(first_world_size)} and continues on {world_size}; neither it nor "
        "train_micro_batch_size_per_gpu is given, so the script decides the global batch"
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


# Numbers with more divisors than any smaller number: https://oeis.org/A002182
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120),
    *(20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400),
    *(665280, 720720),
)
_MAX_BATCH = 10_000_000  # divisors up to here are found in milliseconds
_MAX_MICROS = 32
_SHOWN = 12

_BatchLimit = Annotated[Int, Field(ge=1, le=_MAX_BATCH)]


def _version(value: object) -> object:
    if value not in (0.1, 0.2):
        raise PydanticCustomError("value_error", "expected 0.1 or 0.2")
    return value


def batch_keys(config: Any) -> dict[str, int]:
    """Return the batch sizes that a config gives."""
    found = {key: getattr(config, key) for key in BATCH_KEYS} | {"pipeline.microbatches": config.pipeline.microbatches}
    return {key: value for key, value in found.items() if value is not None}


class ElasticityConfig(SwitchedSection):
    """Choose a global batch that many numbers of ranks divide, in place of given batch sizes."""

    max_train_batch_size: _BatchLimit | None = None
    """The largest global batch. Required if enabled."""

    micro_batch_sizes: Annotated[tuple[Positive, ...], Field(max_length=_MAX_MICROS)] | None = None
    """Microbatches to choose from. Required if enabled."""

    min_gpus: Positive = 1
    """Smallest number of ranks."""

    max_gpus: Positive = 10_000
    """Largest number of ranks."""

    min_time: NonNegative = 0.0
    """Minutes between changes of the number of ranks. For cluster schedulers; no effect here."""

    version: Annotated[float, BeforeValidator(_version), Field(json_schema_extra={"enum": [0.1, 0.2]})] = 0.2
    """0.1: ranks must divide the batch. 0.2: counts hosts; ranks that do not divide the batch get a different one."""

    prefer_larger_batch: Bool = True
    """If equally many numbers of ranks divide two batches, take the larger."""

    ignore_non_elastic_batch_info: Bool = False
    """Ignore given batch sizes; else they are errors."""

    model_parallel_size: Positive = 1
    """parallel.tensor x pipeline x sequence. Version 0.2."""

    num_gpus_per_node: Positive = 1
    """Ranks of a host. Version 0.2."""

    def faults(self, config: Any) -> list[Fault]:
        if not self.enabled:
            return []
        ranks_of_sample = config.parallel.ranks_of_sample
        found = [
            Fault(f"elasticity.{key}", "missing", "must be given: the global batch is chosen from it")
            for key in ("max_train_batch_size", "micro_batch_sizes")
            if not getattr(self, key)
        ]
        limit = self.max_train_batch_size
        if limit is not None:
            # 0 ranks of a host: model_parallel_size is larger than the host, a fault below.
            per_host = limit // (self.num_gpus_per_node // self.model_parallel_size or 1)
            # `legal_sizes` divides the limit of version 0.2 by the data-parallel ranks of a host, too.
            bound = per_host if self.version == 0.2 else limit
            for micro in self.micro_batch_sizes or ():
                if micro > bound:
                    text = f"expected at most {bound}, by max_train_batch_size, found {micro}"
                    found.append(Fault("elasticity.micro_batch_sizes", "conflict", text))
        if self.max_gpus < self.min_gpus:
            text = f"expected at least min_gpus({self.min_gpus}), found {self.max_gpus}"
            found.append(Fault("elasticity.max_gpus", "conflict", text))
        if self.model_parallel_size != ranks_of_sample:
            text = f"expected parallel.tensor x pipeline x sequence = {ranks_of_sample}, found "
            found.append(Fault("elasticity.model_parallel_size", "conflict", f"{text}{self.model_parallel_size}"))
        if self.version == 0.1 and self.model_parallel_size > 1:
            found.append(Fault("elasticity.version", "conflict", "expected 0.2 if model_parallel_size is above 1"))
        if self.num_gpus_per_node % self.model_parallel_size:
            text = f"expected a multiple of model_parallel_size({self.model_parallel_size}), found "
            found.append(Fault("elasticity.num_gpus_per_node", "conflict", f"{text}{self.num_gpus_per_node}"))
        if not self.ignore_non_elastic_batch_info:
            text = (
                "is chosen by the section elasticity; remove the key, or set elasticity.ignore_non_elastic_batch_info"
            )
            found += [Fault(key, "conflict", text) for key in batch_keys(config)]
        return found

    def notes(self, config: Any) -> list[str]:
        if not self.enabled:
            return super().notes(config)
        reason = "the section elasticity chooses the batch sizes"
        notes = [no_effect(key, value, reason) for key, value in batch_keys(config).items()]
        if self.min_time:
            notes.append(no_effect("elasticity.min_time", self.min_time, "it is for the scheduler of a cluster"))
        if self.version == 0.1 and self.num_gpus_per_node > 1:
            reason = "version 0.1 counts ranks, not hosts"
            notes.append(no_effect("elasticity.num_gpus_per_node", self.num_gpus_per_node, reason))
        return notes


def elastic_batch(section: ElasticityConfig, data_size: int) -> Batch | Fault:
    """Return the batch sizes of an enabled section on `data_size` data-parallel ranks."""
    batch, sizes = legal_sizes(section)
    micros = section.micro_batch_sizes or ()
    if data_size not in sizes:
        if section.version == 0.1:
            below = [size for size in sizes if size < data_size]
            above = [size for size in sizes if size > data_size]
            nearest = " or ".join(str(size) for size in (*below[-1:], *above[:1])) or "none"
            text = f"expected a number of ranks that divides the global batch {batch} into microbatches of "
            text += f"{_listed(micros)}, from min_gpus to max_gpus, found {data_size}; the nearest are {nearest}"
            return Fault("elasticity", "conflict", text)
        # Version 0.2 runs on any number of ranks: here with the largest multiple of a microbatch within the limit.
        limit = section.max_train_batch_size or 0
        batches = [limit // (micro * data_size) * micro * data_size for micro in micros]
        # 0: not even the smallest microbatch fits. The fault below says so.
        batches = [size for size in batches if size] or [0]
        batch = max(batches) if section.prefer_larger_batch else min(batches)
    share, rest = divmod(batch, data_size)
    micro = max((micro for micro in micros if share and not rest and share % micro == 0), default=0)
    if not micro:
        text = f"expected a global batch of at least {min(micros) * data_size} for the smallest microbatch on "
        text += f"{data_size} data-parallel ranks, found {batch} within max_train_batch_size"
        return Fault("elasticity", "conflict", f"{text}({section.max_train_batch_size})")
    return Batch(batch, micro, share // micro)


def elastic_note(section: ElasticityConfig, batch: Batch, data_size: int, first: Batch | Fault | None) -> str:
    """Return the note on the chosen batch and the numbers of ranks that divide it. first: batch that the job began
    with.
    """
    stays, sizes = legal_sizes(section)
    text = f"elasticity.enabled: it has chosen train_batch_size {batch.train} = microbatch x accumulation x "
    text += f"data-parallel ranks = {batch.micro} x {batch.accumulation} x {data_size}"
    if isinstance(first, Batch) and first.train != batch.train:
        text += f"; the job began with {first.train}"
    return f"{text}; {stays} is the batch on {_listed(sizes)} data-parallel ranks" if sizes else text


def legal_sizes(section: ElasticityConfig) -> tuple[int, tuple[int, ...]]:
    """Return the global batch of an enabled section, and the data-parallel sizes that divide it, in rising order."""
    micros, limit = section.micro_batch_sizes, section.max_train_batch_size
    assert micros and limit is not None
    of_host, ranks = 1, 1
    if section.version == 0.2:  # counts hosts, since the ranks of a host come and go together
        ranks = section.num_gpus_per_node
        of_host = ranks // section.model_parallel_size
    limit //= of_host
    # DeepSpeed takes 0 for "not given": fewer ranks than a host count as 1 host, and 0 hosts as no limit.
    smallest = section.min_gpus // ranks or 1
    largest = section.max_gpus // ranks or limit // min(micros)
    found: list[tuple[int, int, list[int]]] = []
    for base in {*micros, math.lcm(*micros)}:
        if base <= limit:
            batch = base * max(number for number in _HIGHLY_COMPOSITE if number * base <= limit)
            sizes = {size for micro in micros if batch % micro == 0 for size in _divisors(batch // micro)}
            legal = sorted(size for size in sizes if smallest <= size <= largest)
            # The sign lets `max` take the smaller of two batches that equally many numbers of ranks divide.
            found.append((len(legal), batch if section.prefer_larger_batch else -batch, legal))
    _, batch, legal = max(found)
    return abs(batch) * of_host, tuple(size * of_host for size in legal)


@cache
def _divisors(number: int) -> frozenset[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return frozenset(small) | {number // one for one in small}


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:_SHOWN])) + (", ..." if len(sizes) > _SHOWN else "")
