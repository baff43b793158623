"""The way of matrices that lie in pieces on several ranks to one owner each, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import Exchange
from .group import ShardedGroup
from .layout import FlatLayout, Piece

SHARDED, REPLICATED = ("shard",), ("replica",)
"""The axes over which matrices are dealt out: over which states are divided, or, where they are not, repeated."""


@dataclass(frozen=True)
class MatrixTrip:
    """Of the matrices of one group, whose owners are balanced by what an orthogonalisation costs.

        rank 0 | a a a b |  bring   | a a a a   |  take_back  | a a a b |
        rank 1 | a b b . |          |       b b b|            | a b b . |

    Each rank sends what it has of a matrix to the owner, and gets back as much; where all ranks have all of it,
    nothing is brought, and the owner sends it to all.
    """

    group: ShardedGroup
    exchange: Exchange
    owners: tuple[int, ...]  # the place of each slot's
    pieces: tuple[tuple[Piece, ...], ...]  # of the layout, that each place has
    is_repeated: bool

    @classmethod
    def of(cls, group: ShardedGroup) -> MatrixTrip:
        is_repeated = group.axes.states.size == 1
        exchange = group.axes.exchange_along(REPLICATED if is_repeated else SHARDED)
        owners = tuple(owners_of(group.layout, exchange.size))
        pieces = tuple(tuple(group.layout.pieces(0 if is_repeated else place)) for place in range(exchange.size))
        return cls(group, exchange, owners, pieces, is_repeated)

    def bring(self, values: Tensor) -> dict[int, Tensor]:
        """values: (shard_numel,) -> the whole of each matrix that this rank owns, flat, by slot."""
        place, slots = self.exchange.place, self.group.layout.slots
        if self.is_repeated:
            return {i: values[s.offset_in_flat : s.end_in_flat] for i, s in enumerate(slots) if self.owners[i] == place}
        given = [values[p.offset_in_shard :][: p.numel] for p in self._to_owners(place)]
        counts = self._counts()
        arrived = self.exchange.swap_rows(_joined(given, values), counts, f"matrices of {self.group.plan.name}")
        owned = {i: values.new_empty(slot.numel) for i, slot in enumerate(slots) if self.owners[i] == place}
        low = 0
        for pieces in self.pieces:
            for piece in pieces:
                if piece.index in owned:
                    owned[piece.index][piece.offset_in_param :][: piece.numel] = arrived[low : low + piece.numel]
                    low += piece.numel
        return owned

    def take_back(self, owned: Mapping[int, Tensor], values: Tensor) -> None:
        """Puts what the owners have made of the matrices into values, (shard_numel,)."""
        given = [
            owned[piece.index][piece.offset_in_param :][: piece.numel]
            for pieces in self.pieces
            for piece in pieces
            if piece.index in owned
        ]
        counts = tuple(zip(*self._counts(), strict=True))
        arrived = self.exchange.swap_rows(_joined(given, values), counts, f"matrices back to {self.group.plan.name}")
        low = 0
        for piece in self._to_owners(self.exchange.place):
            values[piece.offset_in_shard :][: piece.numel] = arrived[low : low + piece.numel]
            low += piece.numel

    def _to_owners(self, place: int) -> list[Piece]:
        """The pieces of a place, in the order of their owners."""
        return sorted(self.pieces[place], key=lambda piece: self.owners[piece.index])

    def _counts(self) -> tuple[tuple[int, ...], ...]:
        """[i][j]: how many elements the i-th place has of what the j-th owns."""
        found = [[0] * self.exchange.size for _ in self.pieces]
        for place, pieces in enumerate(self.pieces):
            for piece in pieces:
                found[place][self.owners[piece.index]] += piece.numel
        return tuple(map(tuple, found))


def owners_of(layout: FlatLayout, num_places: int) -> list[int]:
    """The place of each slot's owner: the costliest first, to who has least. Cost: of an iteration's products."""
    loads = [0] * num_places
    owners = [0] * len(layout.slots)
    costs = [slot.numel * min(slot.shape) if len(slot.shape) == 2 else slot.numel for slot in layout.slots]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else like.new_empty(0)
