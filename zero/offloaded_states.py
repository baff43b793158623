"""Master weights and optimizer states that rest in a store or in host memory, chunk by chunk.

shard    |  in memory  | chunk 0 | chunk 1 | chunk 2 |
a chunk  [ master | exp_avg | exp_avg_sq ]                 one key of the store, one buffer while it is open

step     load 1 | update 0 | save      all chunks of all shards in one window, see `offload.window`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..offload import HostPool, Resident, Store, Window
from .layout import BLOCK_NUMEL

CHUNK_NUMEL = 4 << 20
"""Elements of a chunk: large enough for the disk, small enough that three of them are little memory."""

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class ChunkLayout:
    """Where the tensors of a chunk lie in its buffer."""

    places: tuple[tuple[str, torch.dtype, int, int], ...]  # (name, dtype, offset in bytes, number of elements)
    nbytes: int

    @classmethod
    def of(cls, kinds: Mapping[str, tuple[torch.dtype, int]]) -> ChunkLayout:
        """kinds: dtype and number of elements of each tensor, in order."""
        places, offset = [], 0
        for name, (dtype, numel) in kinds.items():
            places.append((name, dtype, offset, numel))
            offset += -(-numel * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return cls(tuple(places), offset)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: dtype for name, dtype, _, _ in self.places}

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors in a buffer, (nbytes,) uint8."""
        return {
            name: buffer[offset : offset + numel * dtype.itemsize].view(dtype)
            for name, dtype, offset, numel in self.places
        }


@dataclass(frozen=True, eq=False)
class Chunk:
    """Elements [start, end) of a shard, whose tensors are one resident."""

    start: int
    end: int
    layout: ChunkLayout
    resident: Resident
    window: Window

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Keeps first values of all tensors."""
        buffer = self.window.create(self.resident).zero_()
        for name, target in self.layout.views(buffer).items():
            target.copy_(values[name])
        self.window.release(self.resident)

    def open(self, changes: bool = False) -> dict[str, Tensor]:
        """The tensors, until those of another chunk are opened; kept again then, if anyone opened them for changes."""
        return self.layout.views(self.window.open(self.resident, changes))


class OffloadedStates:
    """Makes the chunks of all shards, and has the window through which they come and go."""

    def __init__(
        self,
        store: Store | None,
        pool: HostPool,
        ratio: float = 1.0,
        keeps_old: bool = False,
        chunk_numel: int = CHUNK_NUMEL,
    ) -> None:
        """store: None: chunks rest in buffers of the pool, and are worked on there.

        ratio: the share of each shard that is kept in the store; the first part of it stays in memory. keeps_old: there
        is room for two of each chunk, so that an update can be taken back.
        """
        assert chunk_numel % BLOCK_NUMEL == 0
        self._store = store
        self._pool = pool
        self._ratio = ratio
        self._num_versions = 2 if keeps_old else 1
        self._chunk_numel = chunk_numel
        self._sizes: list[int] = []
        self._buffers: dict[str, Tensor] = {}  # of the pool, that chunks rest in
        self.window = Window(max_leaving=2)

    @classmethod
    def none(cls) -> OffloadedStates:
        """All states stay in memory with their parameters."""
        return cls(None, HostPool(), ratio=0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of states that are not with the parameters."""
        return sum(self._sizes)

    def resident_numel(self, shard_numel: int) -> int:
        """How many elements at the beginning of a shard stay in memory; whole blocks."""
        return round(shard_numel * (1 - self._ratio)) // BLOCK_NUMEL * BLOCK_NUMEL

    def divide(
        self, name: str, start: int, end: int, kinds_for: Callable[[int], Mapping[str, tuple[torch.dtype, int]]]
    ) -> list[Chunk]:
        """The chunks of elements [start, end) of the shard called `name`.

        kinds_for: dtype and number of elements of the tensors that so many elements of a shard have.
        """
        chunks = []
        for low in range(start, end, self._chunk_numel):
            high = min(low + self._chunk_numel, end)
            layout = ChunkLayout.of(kinds_for(high - low))
            resident = self._resident(f"{name} [{low}, {high})", layout.nbytes)
            chunks.append(Chunk(low, high, layout, resident, self.window))
        return chunks

    def reserve(self) -> None:
        """Takes room for all chunks, where the store has a limit. Raises OffloadError, with the numbers."""
        if self._store is not None:
            self._store.reserve(self._sizes)

    def close(self) -> None:
        """Gives buffers and room back."""
        self.window.close()
        while self._buffers:
            self._pool.give(self._buffers.popitem()[1])
        self._pool.close()
        if self._store is not None:
            self._store.close()

    def _resident(self, key: str, nbytes: int) -> Resident:
        if self._store is None:
            self._sizes.append(nbytes)
            self._buffers[key] = self._pool.take(nbytes)
            return Resident(key, partial(self._buffers.__getitem__, key))
        self._sizes += [nbytes] * self._num_versions
        return Resident.of(self._store, key, partial(self._pool.take, nbytes), self._pool.give)
