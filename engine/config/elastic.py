"""The batch triple of a job that goes on with other ranks than it began with: the global batch stays.

[Note: what stays]
Learning rate, schedule and order of the data are made for a global batch, so train_batch_size stays. The microbatch
decides on memory: it stays too, and accumulation makes up for the ranks that are missing; where that does not divide,
the next smaller microbatch is taken. A larger one is taken only if the config leaves it open, after all others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .batch import Batch
from .errors import Fault

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
