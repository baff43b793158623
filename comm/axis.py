"""One axis of the mesh as this rank sees it, and what every route of it can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from .pending import Numels, Pending, Terms

Piece = tuple[int, int]
"""A rank of the axis, and which of its pieces: see `Route.pass_on`."""


class Route(Protocol):
    """How bytes move between the ranks of an axis. `what` names the operation in error messages."""

    name: str
    sums_here: bool  # the caller sums, a term of each rank; else the backend has
    slots_may_lack_own: bool  # reductions take a slot without this rank's part, which is in `spare` or `out` then
    copies_are_shared: bool  # buffers from `allocate` are one copy for all ranks of the axis

    @property
    def slot_bytes(self) -> int:
        """What this rank keeps between operations for slots, and for what comes to them."""

    def allocate(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]: ...
    def reserve_slots(self, nbytes: int, count: int) -> None: ...
    def gather(self, full: Tensor, part: Tensor, what: str) -> Pending: ...
    def gather_copies(self, full: Tensor, part: Tensor, what: str) -> Pending: ...
    def next_slot(self, numel: int, dtype: torch.dtype) -> Tensor | None: ...
    def open_slot(self, numel: int, dtype: torch.dtype, what: str) -> Tensor: ...
    def reduce_scatter(self, slot: Tensor, spare: Tensor | None, what: str) -> Terms: ...
    def swap(self, out: Tensor, given: Tensor, numels: Numels, what: str) -> Pending: ...
    def pass_on(self, pieces: Tensor, to: Sequence[int], of: Sequence[Piece], out: Tensor, what: str) -> Pending: ...
    def all_reduce(self, slot: Tensor, out: Tensor, what: str) -> Terms: ...
    def sum_small(self, values: Tensor, what: str) -> Tensor: ...
    def fence(self, what: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Axis:
    """A mesh axis, or several that are folded into one: this rank's number on it, and the route between its ranks."""

    name: str
    rank: int
    ranks: tuple[int, ...]  # the global rank of each, ascending: the order of sums
    places: tuple[int, ...]  # which part of what is divided over the axis each has
    route: Route

    # Cached: a step asks for them some ten times for each block.

    @cached_property
    def place(self) -> int:
        """Which part this rank has."""
        return self.places[self.rank]

    @cached_property
    def size(self) -> int:
        return len(self.ranks)
