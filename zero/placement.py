"""Where parameters and states of a rank's shards rest while nobody needs them.

forward     load | gather | use | release          the pages go to the next block, nothing is written
step        load 1 | update 0 | save               each shard in memory only while it is updated
backward    load | gather | use | release others | reduce | update | save      where the update does not wait for a step

Master weights and optimizer states rest chunk by chunk:

shard    |  in memory  | chunk 0 | chunk 1 | chunk 2 |
a chunk  [ master | exp_avg | exp_avg_sq ]                 one key of the store, one buffer while it is open

step     load 1 | update 0 | save      all chunks of all shards in one window, see `offload.window`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..offload import HostPool, Resident, Store, Window
from .layout import BLOCK_NUMEL


class ShardRest:
    """The store of a rank's shards, and the window through which they come and go.

    At most three are in memory outside of a unit's use: one that is worked on, one that comes and one that leaves; and
    those that are held for an update in the backward.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.window = Window()

    def reserve(self, sizes: Iterable[int]) -> None:
        """Takes room for shards of these bytes. Raises OffloadError, with the numbers."""
        self._store.reserve(sizes)

    def resident(self, name: str, take: Callable[[], Tensor], give: Callable[[Tensor], None]) -> Resident:
        """The shard of the group `name`, which comes to the memory that `take` gives."""
        return Resident.of(self._store, name, take, give)

    def drop(self, name: str) -> None:
        """The shard of the group `name` is kept no longer. Raises OffloadError where an earlier one cannot be saved."""
        self.window.put_back()
        self.window.wait()
        self._store.drop(name)

    def close(self) -> None:
        """Gives the room back."""
        self.window.close()
        self._store.close()


CHUNK_NUMEL = 4 << 20
"""Elements of a chunk: large enough for the disk, small enough that three of them are little memory."""

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class StatesPlan:
    """Which elements of a rank's shards have their states elsewhere, and in which chunks: integers only."""

    ratio: float = 0.0
    """The share of the states that is elsewhere; the first part of each shard stays in memory with its parameters."""
    in_whole_shards: bool = False
    """A shard's are elsewhere in one piece or not at all, so that the share is right for all shards together."""
    num_versions: int = 1  # of a chunk in a store: two, where an update can be taken back
    chunk_numel: int = CHUNK_NUMEL  # whole blocks

    def resident_numels(self, shard_numels: Sequence[int]) -> list[int]:
        """How many elements at the beginning of each shard stay in memory; whole blocks."""
        if not self.in_whole_shards:
            return [round(numel * (1 - self.ratio)) // BLOCK_NUMEL * BLOCK_NUMEL for numel in shard_numels]
        seen, kept, found = 0, 0, []
        for numel in shard_numels:
            seen += numel
            is_kept = kept + numel / 2 < self.ratio * seen
            kept += numel * is_kept
            found.append(numel * (not is_kept))
        return found

    def chunks(self, start: int, end: int) -> list[tuple[int, int]]:
        """The elements [start, end) of a shard, cut."""
        return [(low, min(low + self.chunk_numel, end)) for low in range(start, end, self.chunk_numel)]


class OffloadedStates:
    """Makes the chunks of all shards, and has the window through which they come and go."""

    def __init__(self, plan: StatesPlan, store: Store | None, pool: HostPool) -> None:
        """store: None: chunks rest in buffers of the pool, and are worked on there."""
        assert plan.chunk_numel % BLOCK_NUMEL == 0
        self.plan = plan
        self._store = store
        self._pool = pool
        self._sizes: list[int] = []
        self._buffers: dict[str, Tensor] = {}  # of the pool, that chunks rest in
        self.window = Window(max_leaving=2)

    @property
    def nbytes(self) -> int:
        """Bytes of states that are not with the parameters."""
        return sum(self._sizes)

    def divide(
        self, name: str, start: int, end: int, kinds_for: Callable[[int], Mapping[str, tuple[torch.dtype, int]]]
    ) -> list[Chunk]:
        """The chunks of elements [start, end) of the shard called `name`.

        kinds_for: dtype and number of elements of the tensors that so many elements of a shard have.
        """
        chunks = []
        for low, high in self.plan.chunks(start, end):
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
        self._sizes += [nbytes] * self.plan.num_versions
        return Resident.of(self._store, key, partial(self._pool.take, nbytes), self._pool.give)


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
