"""Where the ranks of a job stand on its axes: integers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class ParallelDims:
    """Named axes, outermost first: ranks that follow each other differ on the last one.

    8 ranks, ("pipe", 2), ("replica", 2), ("shard", 2):        pipe 0    pipe 1
                                                     shard ->
                                             replica  0 1       4 5
                                                |     2 3       6 7

    | ranks that differ alone on | have                                                                              |
    |----------------------------|-----------------------------------------------------------------------------------|
    | `data`                     | the same parameters and other data: they are data-parallel to each other; but for |
    |                            | experts, of which ranks of that axis have other ones                              |
    | `parts`                    | the same parameters and other parts of the same data: parts of the same sequences |
    | `layers`                   | parts of the same layers and the same data; what is not split of both is alike    |
    | the others                 | other layers and the same data: stages of a pipeline                              |
    """

    sizes: tuple[tuple[str, int], ...]
    data: tuple[str, ...]  # names of axes
    parts: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    @property
    def summed(self) -> tuple[str, ...]:
        """Axes over which gradients of the same parameters are summed."""
        return self.data + self.parts

    @property
    def num_ranks(self) -> int:
        return math.prod(size for _, size in self.sizes)

    def size(self, names: Sequence[str]) -> int:
        """How many ranks differ on these axes alone."""
        sizes = dict(self.sizes)
        return math.prod(sizes[name] for name in names)

    def reach(self, names: Sequence[str]) -> int:
        """How far apart the first and the last of the ranks are that differ on these axes alone."""
        found, stride = 0, 1
        for name, size in reversed(self.sizes):
            found += (size - 1) * stride if name in names else 0
            stride *= size
        return found

    def wide(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of the axes that have several ranks."""
        sizes = dict(self.sizes)
        return tuple(name for name in names if sizes[name] > 1)

    def lines(self, folds: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
        """Each axis that has several ranks, and each fold of several of them."""
        single = [(name,) for name, size in self.sizes if size > 1]
        folded = dict.fromkeys(self.wide(names) for names in folds)
        return [*single, *(names for names in folded if len(names) > 1)]

    def place(self, rank: int, names: Sequence[str]) -> int:
        """Which of these `rank` is, the last axis the fastest."""
        sizes, places, place = dict(self.sizes), self._places(rank), 0
        for name in names:
            place = place * sizes[name] + places[name]
        return place

    def ranks(self, rank: int, names: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` on these axes alone, by place."""
        sizes, places = dict(self.sizes), self._places(rank)
        strides, stride = {}, 1
        for name, size in reversed(self.sizes):
            strides[name], stride = stride, stride * size
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
