"""The batch triple: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks.

[Note: what stays] A job may go on with other ranks than it began with. Learning rate, schedule and order of the data
are made for a global batch, so train_batch_size stays. The microbatch decides on memory: it stays too, and accumulation
makes up for the ranks that are missing; where that does not divide, the next smaller microbatch is taken. A larger one
is taken only if the config leaves it open, after all others.

[Note: elasticity] The section `elasticity` chooses a global batch that many numbers of ranks divide, as DeepSpeed does
(0.6 to 0.18, which has removed it since): each microbatch, and the least common multiple of all, times the largest
highly composite number that stays within `max_train_batch_size`; of these the batch that the most numbers of ranks
divide.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...configs.section import Bool, Int, NonNegative, Positive
from .errors import ConfigSection, Fault, no_effect

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Batch:
    """The three sizes, all filled."""

    train: int
    micro: int
    accumulation: int


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`, as text: "8 or 12"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def nearest_divisors(value: int, of: int) -> str:
    """The divisors of `of` next to `value`, as text: "2 or 4"."""
    divisors = [d for d in range(1, of + 1) if of % d == 0]
    below = [d for d in divisors if d <= value][-1:]
    above = [d for d in divisors if d > value][:1]
    return " or ".join(str(d) for d in below + above)


def fill_batch(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> Batch | Fault:
    """The whole triple from what is given, or the fault that shows why there is none.

    One or two values give the rest: a missing accumulation or microbatch is 1 where the others leave it open.
    """
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro * accumulation * world_size, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        unit, unknown = accumulation * world_size, "train_micro_batch_size_per_gpu"
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
    """The number of ranks of the job's first attempt; None where nothing says so.

    The variable counts only beside a WORLD_SIZE that is `world_size`: a process that a rank has started for itself
    inherits it, and is not that job. Raises ValueError if it is no number of ranks.
    """
    text = environ.get(VARIABLE)
    if text is None or environ.get("WORLD_SIZE") != str(world_size):
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(
            f'{VARIABLE}: expected the number of ranks of the first attempt, at least 1, found "{text}"; '
            "`lowtide launch` sets it for every rank, leave it out elsewhere"
        )
    return int(text)


@dataclass(frozen=True)
class KeptBatch:
    """The global batch of a first attempt, on other ranks.

    same: ranks that take the same data. is_micro_given: by the config. can_accumulate: whether the config's schedule
    and its other settings take so many microbatches. divisor: what must divide the data-parallel ranks.
    """

    first: Batch
    first_world_size: int
    same: int
    is_micro_given: bool
    can_accumulate: Callable[[int], bool]
    divisor: int

    def on(self, data_size: int) -> Batch | None:
        """The triple on so many data-parallel ranks; None where they do not divide the global batch.

        Where no microbatch suits `can_accumulate`, it is the one that would be taken otherwise.
        """
        share, rest = divmod(self.first.train, data_size)
        if rest or not share:
            return None
        triples = [Batch(self.first.train, micro, share // micro) for micro in self._micros(share)]
        return next((triple for triple in triples if self.can_accumulate(triple.accumulation)), triples[0])

    def note(self, world_size: int) -> str:
        """The triple that is taken on a legal number of ranks, and the one that was before."""
        batch = self.on(world_size // self.same)
        assert batch is not None
        return (
            f"train_batch_size: stays {batch.train} on {_ranks(world_size)}, as the job began on "
            f"{self.first_world_size}: microbatch x accumulation x data-parallel ranks is now "
            f"{self._product(batch, world_size)}, was {self._product(self.first, self.first_world_size)}"
        )

    def fault(self, world_size: int) -> Fault:
        """Why the job cannot go on with so many ranks, as far as it is for the batch, and with how many it can."""
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
            f". It cannot go on with {_ranks(world_size)}; the nearest numbers that it can go on with are "
            f"{self._nearest_worlds(world_size)}. Start it on one of these with train_batch_size {first.train} in the "
            "config, or with a train_batch_size that more numbers of ranks divide"
        )
        return Fault("train_batch_size", "conflict", text)

    def _micros(self, share: int) -> list[int]:
        """The microbatches that divide a rank's share of the global batch, the wished ones first."""
        divisors = [micro for micro in range(1, share + 1) if share % micro == 0]
        larger = [micro for micro in divisors if micro > self.first.micro and not self.is_micro_given]
        return [micro for micro in divisors[::-1] if micro <= self.first.micro] + larger

    def _product(self, batch: Batch, world_size: int) -> str:
        return f"{batch.micro} x {batch.accumulation} x {world_size // self.same}"

    def _nearest_worlds(self, world_size: int) -> str:
        """The legal world sizes next to `world_size`; that of the first attempt is one, so there is one."""
        sizes = [size for size in range(1, self.first.train + 1) if self.first.train % size == 0]
        below = [size for size in sizes if size * self.same < world_size]
        above = [size for size in sizes if size * self.same > world_size]
        nearest = (next(filter(self._is_legal, side), None) for side in (below[::-1], above))
        return " or ".join(str(size * self.same) for size in nearest if size is not None)

    def _is_legal(self, data_size: int) -> bool:
        batch = self.on(data_size)
        return batch is not None and data_size % self.divisor == 0 and self.can_accumulate(batch.accumulation)


def nothing_kept(first_world_size: int, world_size: int) -> str:
    """What is said where the config leaves the global batch to the script."""
    return (
        f"train_batch_size: the job began on {_ranks(first_world_size)} and goes on with {world_size}; neither it nor "
        "train_micro_batch_size_per_gpu is given, so the global batch is what the script makes it"
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


# More divisors than any smaller number; https://oeis.org/A002182.
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120),
    *(20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400),
    *(665280, 720720),
)
_MAX_BATCH = 10_000_000  # the divisors of what is below are found in milliseconds
_MAX_MICROS = 32
_SHOWN = 12

_BatchLimit = Annotated[Int, Field(ge=1, le=_MAX_BATCH)]


def _version(value: object) -> object:
    if isinstance(value, bool) or value not in (0.1, 0.2):
        raise PydanticCustomError("value_error", "expected 0.1 or 0.2")
    return value


def batch_keys(config: Any) -> dict[str, int]:
    """Those of a config that are given."""
    found = {key: getattr(config, key) for key in BATCH_KEYS} | {"pipeline.microbatches": config.pipeline.microbatches}
    return {key: value for key, value in found.items() if value is not None}


class ElasticityConfig(ConfigSection):
    """A global batch for many numbers of ranks: see docs/config.md. Batch sizes are not given beside it."""

    path = "elasticity"

    enabled: Bool = False
    """Turns it on."""

    max_train_batch_size: _BatchLimit | None = None
    """The largest global batch. Must be given where the section is on."""

    micro_batch_sizes: Annotated[tuple[Positive, ...], Field(max_length=_MAX_MICROS)] | None = None
    """Samples per forward on each rank, of which one is taken. Must be given where the section is on."""

    min_gpus: Positive = 1
    """The smallest number of ranks that counts."""

    max_gpus: Positive = 10_000
    """The largest."""

    min_time: NonNegative = 0.0
    """Minutes until the scheduler of a cluster may change the number of ranks; for that scheduler."""

    version: Annotated[float, BeforeValidator(_version), Field(json_schema_extra={"enum": [0.1, 0.2]})] = 0.2
    """0.1: numbers of ranks that do not divide the batch are an error. 0.2: numbers of hosts are counted, and another
    number of ranks trains with a global batch of its own."""

    prefer_larger_batch: Bool = True
    """Whether the larger of two batches is taken that as many numbers of ranks divide."""

    ignore_non_elastic_batch_info: Bool = False
    """Batch sizes beside the section have no effect; else they are an error."""

    model_parallel_size: Positive = 1
    """Ranks that share a sample: parallel.tensor x pipeline x sequence. Version 0.2."""

    num_gpus_per_node: Positive = 1
    """Ranks of a host, which come and go together. Version 0.2."""

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
            per_host = limit // (self.num_gpus_per_node // self.model_parallel_size or 1)
            bound = per_host if self.version == 0.2 else limit
            for micro in self.micro_batch_sizes or ():
                if micro > bound:
                    text = f"expected at most {bound}, which max_train_batch_size leaves of it, found {micro}"
                    found.append(Fault("elasticity.micro_batch_sizes", "conflict", text))
        if self.max_gpus < self.min_gpus:
            text = f"expected at least min_gpus({self.min_gpus}), found {self.max_gpus}"
            found.append(Fault("elasticity.max_gpus", "conflict", text))
        if self.model_parallel_size != ranks_of_sample:
            text = f"expected the ranks that share a sample by the section parallel({ranks_of_sample}), found "
            found.append(Fault("elasticity.model_parallel_size", "conflict", f"{text}{self.model_parallel_size}"))
        if self.version == 0.1 and self.model_parallel_size > 1:
            found.append(Fault("elasticity.version", "conflict", "expected 0.2 where model_parallel_size is above 1"))
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
            return []
        reason = "the section elasticity chooses the batch sizes"
        notes = [no_effect(key, value, reason) for key, value in batch_keys(config).items()]
        if self.min_time:
            notes.append(no_effect("elasticity.min_time", self.min_time, "it is for the scheduler of a cluster"))
        if self.version == 0.1 and self.num_gpus_per_node > 1:
            reason = "version 0.1 counts ranks, not hosts"
            notes.append(no_effect("elasticity.num_gpus_per_node", self.num_gpus_per_node, reason))
        return notes


def elastic_batch(section: ElasticityConfig, data_size: int) -> Batch | Fault:
    """The triple of a section that is on, on so many data-parallel ranks."""
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
        limit = section.max_train_batch_size or 0
        wholes = [limit // (micro * data_size) * micro * data_size for micro in micros]
        wholes = [whole for whole in wholes if whole] or [0]
        batch = max(wholes) if section.prefer_larger_batch else min(wholes)
    share, rest = divmod(batch, data_size)
    micro = max((micro for micro in micros if share and not rest and share % micro == 0), default=0)
    if not micro:
        text = f"expected a global batch of at least {min(micros) * data_size} for the smallest microbatch on "
        text += f"{data_size} data-parallel ranks, found {batch} as the one that is within max_train_batch_size"
        return Fault("elasticity", "conflict", f"{text}({section.max_train_batch_size})")
    return Batch(batch, micro, share // micro)


def elastic_note(section: ElasticityConfig, batch: Batch, data_size: int, first: Batch | Fault | None) -> str:
    """What is taken, and where it stays. first: what a job that goes on with other ranks began with."""
    stays, sizes = legal_sizes(section)
    text = f"elasticity.enabled: it has chosen train_batch_size {batch.train} = microbatch x accumulation x "
    text += f"data-parallel ranks = {batch.micro} x {batch.accumulation} x {data_size}"
    if isinstance(first, Batch) and first.train != batch.train:
        text += f"; the job began with {first.train}"
    return f"{text}; {stays} is the batch on {_listed(sizes)} data-parallel ranks" if sizes else text


def legal_sizes(section: ElasticityConfig) -> tuple[int, tuple[int, ...]]:
    """(global batch, the numbers of data-parallel ranks that divide it, rising) of a section that is on."""
    micros, limit = section.micro_batch_sizes, section.max_train_batch_size
    assert micros and limit is not None
    of_host, ranks = 1, 1
    if section.version == 0.2:  # hosts are counted: a host's data-parallel ranks come and go together
        ranks = section.num_gpus_per_node
        of_host = ranks // section.model_parallel_size
    limit //= of_host
    smallest = section.min_gpus // ranks or 1
    largest = section.max_gpus // ranks or limit // min(micros)
    found: list[tuple[int, int, list[int]]] = []
    for base in {*micros, math.lcm(*micros)}:
        if base <= limit:
            batch = base * max(number for number in _HIGHLY_COMPOSITE if number * base <= limit)
            sizes = {size for micro in micros if batch % micro == 0 for size in _divisors(batch // micro)}
            legal = sorted(size for size in sizes if smallest <= size <= largest)
            found.append((len(legal), batch if section.prefer_larger_batch else -batch, legal))
    _, batch, legal = max(found)
    return abs(batch) * of_host, tuple(size * of_host for size in legal)


@cache
def _divisors(number: int) -> frozenset[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return frozenset(small) | {number // one for one in small}


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:_SHOWN])) + (", ..." if len(sizes) > _SHOWN else "")
