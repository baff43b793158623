"""DeepSpeed's section `elasticity`: one global batch that many numbers of ranks divide, chosen from microbatches.

The choice is DeepSpeed's (0.6 to 0.18, which has removed it since): each microbatch, and the least common multiple of
all, times the largest highly composite number that stays within `max_train_batch_size`; of these the batch that the
most numbers of ranks divide.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...configs.section import Bool, Int, NonNegative, Positive, Section
from .batch import Batch
from .errors import Fault
from .idle import no_effect

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


class ElasticityConfig(Section):
    """A global batch for many numbers of ranks: see docs/config.md. Batch sizes are not given beside it."""

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


GIVEN: tuple[Literal["max_train_batch_size", "micro_batch_sizes"], ...] = ("max_train_batch_size", "micro_batch_sizes")


def elasticity_faults(section: ElasticityConfig, ranks_of_sample: int, batch_keys: list[str]) -> list[Fault]:
    """What the section lacks or contradicts. batch_keys: that are given beside it."""
    if not section.enabled:
        return []
    found = [
        Fault(f"elasticity.{key}", "missing", "must be given: the global batch is chosen from it")
        for key in GIVEN
        if not getattr(section, key)
    ]
    limit = section.max_train_batch_size
    if limit is not None:
        per_host = limit // (section.num_gpus_per_node // section.model_parallel_size or 1)
        bound = per_host if section.version == 0.2 else limit
        for micro in section.micro_batch_sizes or ():
            if micro > bound:
                text = f"expected at most {bound}, which max_train_batch_size leaves of it, found {micro}"
                found.append(Fault("elasticity.micro_batch_sizes", "conflict", text))
    if section.max_gpus < section.min_gpus:
        text = f"expected at least min_gpus({section.min_gpus}), found {section.max_gpus}"
        found.append(Fault("elasticity.max_gpus", "conflict", text))
    if section.model_parallel_size != ranks_of_sample:
        text = f"expected the ranks that share a sample by the section parallel({ranks_of_sample}), found "
        found.append(Fault("elasticity.model_parallel_size", "conflict", f"{text}{section.model_parallel_size}"))
    if section.version == 0.1 and section.model_parallel_size > 1:
        found.append(Fault("elasticity.version", "conflict", "expected 0.2 where model_parallel_size is above 1"))
    if section.num_gpus_per_node % section.model_parallel_size:
        text = f"expected a multiple of model_parallel_size({section.model_parallel_size}), found "
        found.append(Fault("elasticity.num_gpus_per_node", "conflict", f"{text}{section.num_gpus_per_node}"))
    if not section.ignore_non_elastic_batch_info:
        text = "is chosen by the section elasticity; remove the key, or set elasticity.ignore_non_elastic_batch_info"
        found += [Fault(key, "conflict", text) for key in batch_keys]
    return found


def elasticity_notes(section: ElasticityConfig, batch_values: Mapping[str, object]) -> list[str]:
    """Settings without effect in a section that is on, and beside it."""
    if not section.enabled:
        return []
    reason = "the section elasticity chooses the batch sizes"
    notes = [no_effect(key, value, reason) for key, value in batch_values.items()]
    if section.min_time:
        notes.append(no_effect("elasticity.min_time", section.min_time, "it is for the scheduler of a cluster"))
    if section.version == 0.1 and section.num_gpus_per_node > 1:
        reason = "version 0.1 counts ranks, not hosts"
        notes.append(no_effect("elasticity.num_gpus_per_node", section.num_gpus_per_node, reason))
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
