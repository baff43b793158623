"""Coordinates of the ranks on the axes of a job. Integers only: no process group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class ParallelDims:
    """Named axes, outermost first. Consecutive ranks differ on the last axis.

    8 ranks, ("pipe", 2), ("replica", 2), ("shard", 2):        pipe 0    pipe 1
                                                     shard ->
                                             replica  0 1       4 5
                                                |     2 3       6 7

    | ranks that differ only on | share                                                                          |
    |---------------------------|--------------------------------------------------------------------------------|
    | `data`                    | parameters, except experts; each has different samples (data parallel)         |
    | `parts`                   | parameters and samples; each has a part of the sequences (sequence parallel)   |
    | `layers`                  | samples and unsplit weights; each has a part of the layers (tensor parallel)   |
    | the remaining axes        | samples; each has different layers (pipeline stages)                           |
    """

    sizes: tuple[tuple[str, int], ...]
    data: tuple[str, ...]
    parts: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes over which gradients of replicated parameters are summed."""
        return self.data + self.parts

    @property
    def num_ranks(self) -> int:
        return math.prod(size for _, size in self.sizes)

    def size(self, names: Sequence[str]) -> int:
        """Count the ranks that differ only on these axes."""
        sizes = dict(self.sizes)
        return math.prod(sizes[name] for name in names)

    def reach(self, names: Sequence[str]) -> int:
        """Return the distance from the lowest to the highest rank of those that differ only on these axes."""
        found, stride = 0, 1
        for name, size in reversed(self.sizes):
            found += (size - 1) * stride if name in names else 0
            stride *= size
        return found

    def wide(self, names: Sequence[str]) -> tuple[str, ...]:
        """Select the axes that have several ranks."""
        sizes = dict(self.sizes)
        return tuple(name for name in names if sizes[name] > 1)

    def lines(self, folds: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
        """List each axis with several ranks, then each fold of several such axes."""
        single = [(name,) for name, size in self.sizes if size > 1]
        folded = dict.fromkeys(self.wide(names) for names in folds)
        return [*single, *(names for names in folded if len(names) > 1)]

    def place(self, rank: int, names: Sequence[str]) -> int:
        """Return the coordinate of `rank` on these axes taken together. The last axis varies fastest."""
        sizes, places, place = dict(self.sizes), self._places(rank), 0
        for name in names:
            place = place * sizes[name] + places[name]
        return place

    def ranks(self, rank: int, names: Sequence[str]) -> tuple[int, ...]:
        """List the ranks that differ from `rank` only on these axes, by coordinate."""
        sizes, places = dict(self.sizes), self._places(rank)
        strides, stride = {}, 1
        for name, size in reversed(self.sizes):
            strides[name], stride = stride, stride * size
        # The first rank of the line: coordinate 0 on each of the axes.
        found = [rank - sum(places[name] * strides[name] for name in names)]
        for name in names:  # by ranges: a long axis costs no loop over its ranks
            reach, step = sizes[name] * strides[name], strides[name]
            found = list(chain.from_iterable(range(other, other + reach, step) for other in found))
        return tuple(found)

    def _places(self, rank: int) -> dict[str, int]:
        found = {}
        for name, size in reversed(self.sizes):
            rank, found[name] = divmod(rank, size)
        return found

    def __str__(self) -> str:
        return " x ".join(f"{name}({size})" for name, size in self.sizes)
