"""The places of a rank's parameters and optimizer states between uses.

    forward     load | gather | use | release          pages pass to the next block, nothing is written
    step        load 1 | update 0 | save               a shard is in memory only during its update
    backward    load | gather | use | release others | reduce | update | save      if the update is in the backward

Master weights and optimizer states rest in chunks:

    shard    |  in memory  | chunk 0 | chunk 1 | chunk 2 |
    a chunk  [ master | exp_avg | exp_avg_sq ]                 a key of the store, a buffer while it is open

    step     load 1 | update 0 | save      all chunks of all shards in a window, see `offload.window`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..offload import HostPool, Offloadable, Store, Window
from .layout import BLOCK_NUMEL


class ShardStore:
    """The store of a rank's parameter shards, and the window that loads and saves them.

    Outside of a unit's use at most three shards are in memory: in work, loading and saving; plus the shards that an
    update in the backward holds.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.window = Window()

    def reserve(self, sizes: Iterable[int]) -> None:
        """Reserve room for shards of these sizes in bytes. Raises OffloadError, with the numbers."""
        self._store.reserve(sizes)

    def offloadable(self, name: str, take: Callable[[], Tensor], give: Callable[[Tensor], None]) -> Offloadable:
        """Return the shard of the group `name`, which loads into the memory that `take` returns."""
        return Offloadable.of(self._store, name, take, give)

    def drop(self, name: str) -> None:
        """Remove the shard of the group `name`. Raises OffloadError if an earlier shard cannot be saved."""
        self.window.release_idle()
        self.window.wait()
        # After the window: a save that comes later would make the key again.
        self._store.drop(name)

    def close(self) -> None:
        """Free the store's room."""
        self.window.close()
        self._store.close()


CHUNK_NUMEL = 4 << 20
"""Elements of a chunk: large enough for the disk, small enough that three of them take little memory."""

# A cache line, and a multiple of every item size, as `view` to another dtype requires.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class StatesPlan:
    """The elements of a rank's shards with states in a store, and their chunks: integers only."""

    ratio: float = 0.0
    """The part of the states in the store. The first elements of each shard keep their states beside the parameters."""
    in_whole_shards: bool = False
    """Whether a shard's states are all in the store or all in memory, so that `ratio` holds for all shards together."""
    num_versions: int = 1  # of a chunk in a store: two if an update can be rolled back
    chunk_numel: int = CHUNK_NUMEL  # whole blocks

    def resident_numels(self, shard_numels: Sequence[int]) -> list[int]:
        """Return how many elements at the start of each shard keep their states in memory: whole blocks."""
        if not self.in_whole_shards:
            return [round(numel * (1 - self.ratio)) // BLOCK_NUMEL * BLOCK_NUMEL for numel in shard_numels]
        seen, stored, found = 0, 0, []
        for numel in shard_numels:
            seen += numel
            # Rounds: a shard is stored if more than half of it is still lacking from the ratio of all shards so far.
            is_stored = stored + numel / 2 < self.ratio * seen
            stored += numel * is_stored
            found.append(numel * (not is_stored))
        return found

    def chunks(self, start: int, end: int) -> list[tuple[int, int]]:
        """Cut the elements [start, end) of a shard into chunks."""
        return [(low, min(low + self.chunk_numel, end)) for low in range(start, end, self.chunk_numel)]


class StateChunks:
    """Makes the chunks of all shards, and owns the window that loads and saves them."""

    def __init__(self, plan: StatesPlan, store: Store | None, pool: HostPool) -> None:
        """store: None: chunks rest in buffers of the pool and are updated in them."""
        assert plan.chunk_numel % BLOCK_NUMEL == 0
        self.plan = plan
        self._store = store
        self._pool = pool
        self._sizes: list[int] = []
        self._buffers: dict[str, Tensor] = {}  # of the pool, in which chunks rest
        self.window = Window(max_leaving=2)

    @property
    def nbytes(self) -> int:
        """Bytes of states that are not beside the parameters."""
        return sum(self._sizes)

    def divide(
        self, name: str, start: int, end: int, kinds_for: Callable[[int], Mapping[str, tuple[torch.dtype, int]]]
    ) -> list[StateChunk]:
        """Make the chunks of elements [start, end) of the shard called `name`.

        kinds_for: number of elements of a shard -> dtype and number of elements of each tensor of their states.
        """
        chunks = []
        for low, high in self.plan.chunks(start, end):
            places, nbytes = lay_out(kinds_for(high - low))
            offloadable = self._resident(f"{name} [{low}, {high})", nbytes)
            chunks.append(StateChunk(low, high, places, offloadable, self.window))
        return chunks

    def reserve(self) -> None:
        """Reserve room for all chunks, if the store has a limit. Raises OffloadError, with the numbers."""
        if self._store is not None:
            self._store.reserve(self._sizes)

    def close(self) -> None:
        """Free the buffers and the store's room."""
        # First: a running transfer still uses its buffer.
        self.window.close()
        while self._buffers:
            self._pool.give(self._buffers.popitem()[1])
        self._pool.close()
        if self._store is not None:
            self._store.close()

    def _resident(self, key: str, nbytes: int) -> Offloadable:
        if self._store is None:
            self._sizes.append(nbytes)
            self._buffers[key] = self._pool.take(nbytes)
            # The buffer is the placement and the memory in use, so nothing is loaded or saved.
            return Offloadable(key, partial(self._buffers.__getitem__, key))
        self._sizes += [nbytes] * self.plan.num_versions
        return Offloadable.of(self._store, key, partial(self._pool.take, nbytes), self._pool.give)


Places = Sequence[tuple[str, torch.dtype, int, int]]
"""(name, dtype, offset in bytes, number of elements) of each tensor in a chunk's buffer."""


def lay_out(kinds: Mapping[str, tuple[torch.dtype, int]]) -> tuple[Places, int]:
    """Return the places of a chunk's tensors, in order, and the bytes of its buffer.

    kinds: name -> dtype and number of elements.
    """
    places, offset = [], 0
    for name, (dtype, numel) in kinds.items():
        places.append((name, dtype, offset, numel))
        offset += -(-numel * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return places, offset


@dataclass(frozen=True, eq=False)
class StateChunk:
    """Elements [start, end) of a shard. Their master weights and states load and save together."""

    start: int
    end: int
    places: Places
    offloadable: Offloadable
    window: Window

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Store the first values of all tensors."""
        buffer = self.window.create(self.offloadable).zero_()
        for name, target in self.views(buffer).items():
            target.copy_(values[name])
        self.window.release(self.offloadable)

    def open(self, changes: bool = False) -> dict[str, Tensor]:
        """Return the tensors. They are valid until another chunk is opened, and saved then if opened with `changes`."""
        return self.views(self.window.open(self.offloadable, changes))

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: dtype for name, dtype, _, _ in self.places}

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of the chunk's buffer, (nbytes,) uint8."""
        return {
            name: buffer[offset : offset + numel * dtype.itemsize].view(dtype)
            for name, dtype, offset, numel in self.places
        }
