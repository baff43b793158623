"""Master weights and optimizer states of one group's shard, and where they rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.optimizer_step import UpdateRule
from ..offload import Memory, StoredRange
from .gradient import GroupGradient
from .group import part_of
from .layout import Piece
from .offloaded_states import Chunk, OffloadedStates

MASTER = "master"


@dataclass(frozen=True)
class Run:
    """A stretch of a shard whose parameters have the same options."""

    start: int
    end: int
    options_index: int  # in the optimizer's param_groups


@dataclass(frozen=True)
class StatePart:
    """A stretch of a shard while its states are at hand, (end - start,) each."""

    start: int
    end: int
    master: Tensor
    states: Sequence[Tensor]
    is_stored: bool  # the states, and master weights of their own, are a chunk's


class ShardState:
    """Elements [0, resident_numel) of the states are in memory, the rest is in the chunks of a store.

    The master weights are the shard itself where parameters are float32 or wider; such shards are never in a store.
    """

    def __init__(self, gradient: GroupGradient, offloaded: OffloadedStates | None, rule: UpdateRule | None) -> None:
        self.gradient = gradient
        self.group = gradient.group
        self.is_mixed = self.group.dtype in (torch.bfloat16, torch.float16)
        self.master_dtype = torch.float32 if self.is_mixed else self.group.dtype
        numel = self.group.layout.shard_numel
        self._offloaded = offloaded
        self.resident_numel = numel if offloaded is None else offloaded.resident_numel(numel)
        like = self.group.shard[: self.resident_numel]
        self._own_master = torch.zeros_like(like, dtype=torch.float32) if self.is_mixed else None
        self.states: dict[str, Tensor] = {}
        self.runs: list[Run] = []
        self.chunks: list[Chunk] = []
        if offloaded is not None and rule is not None:
            self.chunks = offloaded.divide(
                self.group.name, self.resident_numel, numel, lambda n: self._stored_tensors(rule, n)
            )

    @property
    def master(self) -> Tensor:
        """(n,): the master weights that are in memory; of a shard in a store, while that is open."""
        return self.group.shard if self._own_master is None else self._own_master

    @property
    def pieces(self) -> list[Piece]:
        """The group's pieces, cut where the states lie in different chunks."""
        edges = [chunk.start for chunk in self.chunks]
        return [part for piece in self.group.pieces for part in _cut(piece, edges)]

    def set_runs(self, options_index_of: Mapping[int, int]) -> None:
        """options_index_of: id of a parameter -> index in param_groups."""
        starts: list[tuple[int, int]] = []
        for piece in self.group.pieces:
            index = options_index_of[id(self.group.params[piece.index])]
            if not starts or starts[-1][1] != index:
                starts.append((piece.offset_in_shard, index))
        # A run reaches to the next one, padding included: whole vectors, so that no element is a rest of its own.
        ends = [start for start, _ in starts[1:]] + [self.group.layout.shard_numel]
        self.runs = [Run(start, end, index) for (start, index), end in zip(starts, ends, strict=False)]

    def make_states(self, rule: UpdateRule, start: float) -> None:
        """Takes memory for the states of the part that is in memory, all values `start`."""
        for name in rule.states:
            shape, device = (self.resident_numel,), self.group.shard.device
            self.states[name] = torch.full(shape, start, dtype=self.master_dtype, device=device)

    def fill_chunks(self, start: float) -> None:
        """First values in the store: states `start`, master weights zero."""
        for chunk in self.chunks:
            assert self._offloaded is not None
            self._offloaded.fill(chunk, lambda tensors: _fill_states(tensors, start))

    def parts(self, opened: Iterator[tuple[Chunk, dict[str, Tensor]]]) -> Iterator[StatePart]:
        """Every stretch of the shard, for an update. opened: gives this shard's chunks next."""
        if self.resident_numel:
            master = self.master[: self.resident_numel]
            yield StatePart(0, self.resident_numel, master, list(self.states.values()), False)
        for expected in self.chunks:
            chunk, tensors = next(opened)
            assert chunk is expected
            master = tensors.pop(MASTER) if self.is_mixed else self.master[chunk.start : chunk.end]
            yield StatePart(chunk.start, chunk.end, master, list(tensors.values()), True)

    def master_of(self, piece: Piece, changes: bool = False) -> Memory:
        """The master weights of one of `pieces`."""
        low, high = piece.offset_in_shard, piece.offset_in_shard + piece.numel
        if self._own_master is None:
            return part_of(self.group.own_values(changes), low, high)
        chunk = self._chunk_of(piece)
        if chunk is None:
            return self._own_master[low:high]
        return self._stored(chunk, MASTER, self.master_dtype, low, high, changes)

    def states_of(self, piece: Piece, changes: bool = False) -> dict[str, Memory]:
        """The states of one of `pieces`, by name; those in memory only once they are made."""
        low, high = piece.offset_in_shard, piece.offset_in_shard + piece.numel
        chunk = self._chunk_of(piece)
        if chunk is None:
            return {name: state[low:high] for name, state in self.states.items()}
        return {
            name: self._stored(chunk, name, dtype, low, high, changes)
            for name, dtype, _, _ in chunk.layout.places
            if name != MASTER
        }

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _chunk_of(self, piece: Piece) -> Chunk | None:
        return next((chunk for chunk in self.chunks if chunk.start <= piece.offset_in_shard < chunk.end), None)

    def _stored(self, chunk: Chunk, name: str, dtype: torch.dtype, low: int, high: int, changes: bool) -> StoredRange:
        offloaded = self._offloaded
        assert offloaded is not None
        return StoredRange(
            high - low, dtype, lambda: offloaded.open(chunk, changes)[name][low - chunk.start : high - chunk.start]
        )

    def _stored_tensors(self, rule: UpdateRule, numel: int) -> dict[str, Tensor]:
        like = torch.empty(numel, dtype=self.master_dtype, device="meta")
        return {**({MASTER: like} if self.is_mixed else {}), **dict.fromkeys(rule.states, like)}


def _fill_states(tensors: Mapping[str, Tensor], start: float) -> None:
    for name, tensor in tensors.items():
        tensor.fill_(0.0 if name == MASTER else start)


def _cut(piece: Piece, edges: Sequence[int]) -> Iterator[Piece]:
    """The piece in parts that do not reach across any of the offsets in the shard."""
    low, end = piece.offset_in_shard, piece.offset_in_shard + piece.numel
    for high in [*(edge for edge in edges if low < edge < end), end]:
        start = piece.offset_in_param + low - piece.offset_in_shard
        yield replace(piece, offset_in_param=start, offset_in_shard=low, numel=high - low)
        low = high
