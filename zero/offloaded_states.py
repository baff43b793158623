"""Master weights and optimizer states that rest in a store or in host memory, chunk by chunk.

shard    |  in memory  | chunk 0 | chunk 1 | chunk 2 |
a chunk  [ master | exp_avg | exp_avg_sq ]                 one key of the store, one buffer while it is open

step     load 1 | update 0 | save      all chunks of all shards in one window, see `offload.window`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..offload import HostChunks, HostPool, Store, Window
from .layout import BLOCK_NUMEL

CHUNK_NUMEL = 4 << 20
"""Elements of a chunk: large enough for the disk, small enough that three of them are little memory."""

_ALIGNMENT_BYTES = 64
_OTHER = " (other)"


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


@dataclass(frozen=True)
class Chunk:
    """Elements [start, end) of a shard, and under which key their tensors are kept."""

    key: str
    start: int
    end: int
    layout: ChunkLayout

    @property
    def numel(self) -> int:
        return self.end - self.start


class OffloadedStates:
    """Opens chunks: all of them one after the other for a step, or single ones for whoever reads and writes them."""

    def __init__(
        self,
        store: Store | None,
        pool: HostPool,
        ratio: float = 1.0,
        keeps_old: bool = False,
        chunk_numel: int = CHUNK_NUMEL,
        in_whole_shards: bool = False,
    ) -> None:
        """store: None: chunks rest in buffers of the pool, and are worked on there.

        ratio: the share of each shard that is kept in the store; the first part of it stays in memory. in_whole_shards:
        shards are kept there in one piece or not at all, so that the share is right for all together. keeps_old: there
        is room for two of each chunk, so that an update can be taken back.
        """
        assert chunk_numel % BLOCK_NUMEL == 0
        self.store = store
        self._ratio = ratio
        self._keeps_old = keeps_old
        self._chunk_numel = chunk_numel
        self._sizes: dict[str, int] = {}
        self._window = HostChunks(pool, self._sizes) if store is None else Window(store, pool, self._sizes, depth=2)
        self._in_whole_shards = in_whole_shards
        self._numel_seen = self._numel_kept = 0
        self._open: tuple[Chunk, dict[str, Tensor], bool] | None = None
        self._has_moved: dict[str, bool] = {}  # chunks whose values are under the other one of their two keys
        self._undecided: list[Chunk] = []

    @property
    def nbytes(self) -> int:
        """Bytes in the store."""
        return sum(self._sizes.values())

    def resident_numel(self, shard_numel: int) -> int:
        """How many elements at the beginning of the next shard stay in memory; whole blocks."""
        if self._in_whole_shards:
            self._numel_seen += shard_numel
            is_kept = self._numel_kept + shard_numel / 2 < self._ratio * self._numel_seen
            self._numel_kept += shard_numel * is_kept
            return shard_numel * (not is_kept)
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
            chunks.append(Chunk(f"{name} [{low}, {high})", low, high, ChunkLayout.of(kinds_for(high - low))))
            for key in (chunks[-1].key, chunks[-1].key + _OTHER)[: 2 if self._keeps_old else 1]:
                self._sizes[key] = chunks[-1].layout.nbytes
        return chunks

    def reserve(self) -> None:
        """Takes room for all chunks, where the store has a limit. Raises OffloadError, with the numbers."""
        if self.store is not None:
            self.store.reserve(self._sizes.values())

    def fill(self, chunk: Chunk, write: Callable[[dict[str, Tensor]], None]) -> None:
        """Keeps the first values of a chunk, which `write` puts into its tensors."""
        self.settle()
        key = self._key_of(chunk)
        buffer = self._window.create(key)
        buffer.zero_()
        write(chunk.layout.views(buffer))
        self._window.release(key, True)

    def updating(self, chunks: Sequence[Chunk], keeps_old: bool = False) -> Iterator[tuple[Chunk, dict[str, Tensor]]]:
        """Each chunk with its tensors, which are then changed; meanwhile the next is read and the last written.

        keeps_old: the store keeps both, until `accept` or `roll_back`.
        """
        self.settle()
        for index, chunk in enumerate(chunks):
            key = self._key_of(chunk)
            buffer = self._window.acquire(key)
            if index + 1 < len(chunks):
                self._window.prefetch(self._key_of(chunks[index + 1]))
            if keeps_old:
                key, old_key = self._other_key_of(chunk), key
                buffer = self._window.fork(old_key, key)
                self._undecided.append(chunk)
            try:
                yield chunk, chunk.layout.views(buffer)
            finally:
                self._window.release(key, True)

    def accept(self) -> None:
        """What was updated beside the old values takes their place."""
        for chunk in self._undecided:
            self._has_moved[chunk.key] = not self._has_moved.get(chunk.key, False)
        self._undecided.clear()

    def roll_back(self) -> None:
        """The old values stay."""
        self._undecided.clear()

    def open(self, chunk: Chunk, changes: bool) -> dict[str, Tensor]:
        """The tensors of a chunk, until another one is opened; kept again then, if anyone opened it for changes."""
        if self._open is None or self._open[0] is not chunk:
            self.settle()
            self._open = (chunk, chunk.layout.views(self._window.acquire(self._key_of(chunk))), False)
        if changes and not self._open[2]:
            self._open = (*self._open[:2], True)
        return self._open[1]

    def settle(self) -> None:
        """Puts the chunk that is open back."""
        if self._open is not None:
            (chunk, _, changed), self._open = self._open, None
            self._window.release(self._key_of(chunk), changed)

    def wait(self) -> None:
        """Returns when all that was changed is in the store. Raises OffloadError where it cannot be kept."""
        self._window.wait()

    def close(self) -> None:
        """Gives buffers and room back."""
        self._window.close()
        if self.store is not None:
            self.store.close()

    def _key_of(self, chunk: Chunk) -> str:
        return chunk.key + _OTHER if self._has_moved.get(chunk.key) else chunk.key

    def _other_key_of(self, chunk: Chunk) -> str:
        return chunk.key if self._has_moved.get(chunk.key) else chunk.key + _OTHER
