"""Which options of the optimizer hold for which elements of a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .group import ShardedGroup


@dataclass(frozen=True)
class Run:
    """A stretch of a shard whose parameters have the same options."""

    start: int
    end: int
    options_index: int  # in the optimizer's param_groups


class ShardRuns:
    """The stretches of a group's shard, and the parameters that have a part in it."""

    def __init__(self, group: ShardedGroup, options_index_of: Mapping[int, int]) -> None:
        """options_index_of: id of a parameter -> index in param_groups."""
        self._group = group
        self._options_index_of = options_index_of
        self.param_ids = frozenset(id(group.params[piece.index]) for piece in group.pieces)
        """Of the parameters that have a part here."""
        self.all = [run for run, _ in self.stretches(lambda _: 0)]

    def stretches(self, step_of: Callable[[int], int]) -> list[tuple[Run, int]]:
        """`all`, cut where parameters have made another number of steps, with that number.

        step_of: the identity of a parameter -> its number.
        """
        starts: list[tuple[int, int, int]] = []
        for piece in self._group.pieces:
            param_id = id(self._group.params[piece.index])
            index, step = self._options_index_of[param_id], step_of(param_id)
            if not starts or starts[-1][1:] != (index, step):
                starts.append((piece.offset_in_shard, index, step))
        # A run reaches to the next one, padding included: whole vectors, so that no element is a rest of its own.
        ends = [start for start, *_ in starts[1:]] + [self._group.layout.shard_numel]
        return [(Run(start, end, index), step) for (start, index, step), end in zip(starts, ends, strict=False)]

    def options_index(self, index: int) -> int:
        """In param_groups, of the parameter with that index in the group."""
        return self._options_index_of[id(self._group.params[index])]
