"""Parameter shards that rest in a store while nobody needs them.

forward     load | gather | use | release          the pages go to the next block, nothing is written
step        load 1 | update 0 | save               each shard in memory only while it is updated
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..offload import FileStore, StagedStore, Store, Transfer

if TYPE_CHECKING:
    from .group import ShardedGroup


class ShardRest:
    """Brings shards into the memory that their groups have for them, and takes them back.

    At most three are in memory outside of a unit's use: one that is worked on, one that comes and one that leaves.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: tuple[ShardedGroup, bool] | None = None
        self._leaving: list[tuple[ShardedGroup, Transfer]] = []  # changed while they were full
        self._sizes: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes in the store."""
        return sum(self._sizes.values())

    def announce(self, name: str, nbytes: int) -> None:
        """Says how much room the shard of the group `name` takes."""
        self._sizes[name] = nbytes

    def reserve(self) -> None:
        """Takes room for all shards that were announced. Raises OffloadError, with the numbers."""
        if isinstance(self._store, FileStore | StagedStore):
            self._store.reserve(FileStore.bytes_needed(self._sizes.values()))

    def fetch(self, group: ShardedGroup, into: Tensor | None = None) -> Transfer:
        """Begins to bring the shard into `into`, (shard_numel,), or into `group.shard`, which has memory."""
        return self._store.load(group.name, _bytes_of(group.shard if into is None else into))

    def keep(self, group: ShardedGroup, values: Tensor | None = None) -> Transfer:
        """Begins to save `values`, (shard_numel,), or `group.shard`."""
        return self._store.save(group.name, _bytes_of(group.shard if values is None else values))

    def open(self, group: ShardedGroup, changes: bool) -> Tensor:
        """The values of a shard, until another one is opened; saved then, if anyone opened it for changes."""
        if self._open is None or self._open[0] is not group:
            self.settle()
            group.take_own_memory()
            self._store.load(group.name, _bytes_of(group.shard)).wait()
            self._open = (group, False)
        if changes:
            self._open = (group, True)
        return group.shard

    def leave(self, group: ShardedGroup) -> None:
        """Saves the shard of a group that was full, whose memory goes as soon as that is done."""
        self._leaving.append((group, self.keep(group)))
        while len(self._leaving) > 1:
            self._let_go()

    def make_way(self, group: ShardedGroup) -> None:
        """Ends what is under way with the group, which is about to be loaded."""
        if self._open is not None and self._open[0] is group:
            self.settle()
        while any(other is group for other, _ in self._leaving):
            self._let_go()

    def settle(self) -> None:
        """Puts the shard that is open back, and lets those go that are being saved."""
        while self._leaving:
            self._let_go()
        if self._open is None:
            return
        (group, changed), self._open = self._open, None
        try:
            if changed:
                self.keep(group).wait()
        finally:
            group.give_own_memory()

    def close(self) -> None:
        """Gives the room back."""
        self._leaving.clear()
        self._store.close()

    def _let_go(self) -> None:
        group, transfer = self._leaving.pop(0)
        try:
            transfer.wait()
        finally:
            group.give_all_memory()


def _bytes_of(shard: Tensor) -> Tensor:
    return shard.detach().view(torch.uint8)
