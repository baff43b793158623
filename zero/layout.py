"""Where parameters lie in a flat buffer and in its shards: integers only.

    flat:    |  weight          |bias|.|  weight         .....|     .: padding
    rank:    |    0       |    1       |    2       |    3    |     shards are whole blocks of 1024 elements

[Note: blocks]
A shard is a whole number of blocks, and offsets in the flat buffer do not depend on the number of shards. Sums over
a block and elementwise kernels on whole blocks therefore give the same bits however the buffer is sharded; that is
what makes the stages agree bitwise, norm and clipping included.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from ..offload import Portion

BLOCK_NUMEL = 1024
PARAM_ALIGNMENT_NUMEL = 16


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in the flat buffer, and in the tensor of the model that it is, or is a part of."""

    name: str
    portion: Portion  # of the whole: this parameter
    offset_in_flat: int

    # Cached: a step asks for them some ten times for each parameter.

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.portion.shape

    @cached_property
    def numel(self) -> int:
        return self.portion.numel

    @cached_property
    def end_in_flat(self) -> int:
        return self.offset_in_flat + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in one shard."""

    index: int  # of the slot
    offset_in_param: int
    offset_in_shard: int
    numel: int


class Pieces(tuple[Piece, ...]):
    """What a shard holds of its parameters, in order."""

    def of(self, index: int) -> tuple[Piece, ...]:
        """What it holds of one parameter."""
        return self._by_index.get(index, ())

    @cached_property
    def _by_index(self) -> dict[int, tuple[Piece, ...]]:
        return {index: tuple(pieces) for index, pieces in groupby(self, key=lambda piece: piece.index)}


@dataclass(frozen=True)
class FlatLayout:
    """Parameters one behind the other, each aligned, padded to shard_count shards of whole blocks."""

    slots: tuple[Slot, ...]
    shard_count: int
    shard_numel: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[str, tuple[int, ...]]], shard_count: int) -> FlatLayout:
        """shapes: (name, shape) of each parameter, in order, which is the whole of its tensor."""
        return cls.of_portions([(name, Portion.all_of(shape)) for name, shape in shapes], shard_count)

    @classmethod
    def of_portions(cls, portions: Sequence[tuple[str, Portion]], shard_count: int) -> FlatLayout:
        """portions: (name of the tensor, parameter) in order. Empty parameters take no room."""
        slots, offset = [], 0
        for name, portion in portions:
            slots.append(Slot(name, portion, offset))
            offset += round_up(portion.numel, PARAM_ALIGNMENT_NUMEL)
        return cls(tuple(slots), shard_count, round_up(-(-offset // shard_count), BLOCK_NUMEL))

    @cached_property
    def padded_numel(self) -> int:
        return self.shard_count * self.shard_numel

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the parameters, in order."""
        return tuple(slot.name for slot in self.slots)

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Names of parameters -> indices of their slots."""
        return {name: index for index, name in enumerate(self.names)}

    @cached_property
    def is_dense(self) -> bool:
        """Whether parameters lie one right behind the other, each with elements, and only the end is padding."""
        ends = [0, *(slot.end_in_flat for slot in self.slots)]
        starts = [slot.offset_in_flat for slot in self.slots if slot.shape and slot.numel]
        return bool(starts) and starts == ends[:-1]

    @property
    def numel(self) -> int:
        """Elements of the parameters alone."""
        return sum(slot.numel for slot in self.slots)

    def pieces(self, rank: int) -> Pieces:
        """What of each parameter lies in the shard of `rank`; parameters that do not reach into it are left out."""
        start, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        pieces = []
        for index, slot in enumerate(self.slots):
            low, high = max(start, slot.offset_in_flat), min(end, slot.end_in_flat)
            if low < high:
                pieces.append(Piece(index, low - slot.offset_in_flat, low - start, high - low))
        return Pieces(pieces)

    def outside(self, indices: Set[int]) -> Sequence[tuple[int, int]]:
        """[start, end) of what none of these parameters has: the others, and the padding."""
        if len(indices) == len(self.slots):
            return self._padding
        return self._between(slot for index, slot in enumerate(self.slots) if index in indices)

    @cached_property
    def _padding(self) -> Sequence[tuple[int, int]]:
        return self._between(self.slots)

    def _between(self, slots: Iterable[Slot]) -> list[tuple[int, int]]:
        gaps, end = [], 0
        for slot in slots:
            gaps.append((end, slot.offset_in_flat))
            end = slot.end_in_flat
        return [(low, high) for low, high in [*gaps, (end, self.padded_numel)] if low < high]

    def whole_parameters(self, start: int, end: int) -> tuple[int, int]:
        """[start, end) without the parameters that reach across its ends; start >= end where nothing is left."""
        for slot in self.slots:
            if slot.offset_in_flat < start < slot.end_in_flat:
                start = slot.end_in_flat
            if slot.offset_in_flat < end < slot.end_in_flat:
                end = slot.offset_in_flat
        return start, end

    def slot_at(self, offset_in_flat: int) -> Slot:
        """The parameter that holds the element, or the one before the padding that does."""
        used = [slot for slot in self.slots if slot.numel]
        index = bisect_right([slot.offset_in_flat for slot in used], offset_in_flat) - 1
        return used[index]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below value."""
    return -(-value // multiple) * multiple
