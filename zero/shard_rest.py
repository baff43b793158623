"""Parameter shards that rest in a store while nobody needs them.

forward     load | gather | use | release          the pages go to the next block, nothing is written
step        load 1 | update 0 | save               each shard in memory only while it is updated
backward    load | gather | use | release others | reduce | update | save      where the update does not wait for a step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..offload import Store, Transfer

if TYPE_CHECKING:
    from .group import ShardedGroup


class ShardRest:
    """Brings shards into the memory that their groups have for them, and takes them back.

    At most three are in memory outside of a unit's use: one that is worked on, one that comes and one that leaves; and
    those that are held for an update in the backward.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: tuple[ShardedGroup, bool] | None = None
        self._held: dict[ShardedGroup, bool] = {}  # were full, and have they been changed
        self._leaving: list[tuple[ShardedGroup, Transfer, Callable[[], None]]] = []  # changed while they were full
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
        self._store.reserve(self._sizes.values())

    def fetch(self, group: ShardedGroup, into: Tensor | None = None) -> Transfer:
        """Begins to bring the shard into `into`, (shard_numel,), or into `group.shard`, which has memory."""
        return self._store.load(group.name, _bytes_of(group.shard if into is None else into))

    def keep(self, group: ShardedGroup, values: Tensor | None = None) -> Transfer:
        """Begins to save `values`, (shard_numel,), or `group.shard`."""
        return self._store.save(group.name, _bytes_of(group.shard if values is None else values))

    def open(self, group: ShardedGroup, changes: bool) -> Tensor:
        """The values of a shard, until another one is opened; saved then, if anyone opened it for changes.

        One that is held: until `let_go`.
        """
        if group in self._held:
            self._held[group] |= changes
            return group.shard
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
        self._save(group, group.give_all_memory)

    def hold(self, group: ShardedGroup, has_changed: bool) -> None:
        """Keeps the shard of a group that was full in memory, where `open` finds it, until `let_go`."""
        self._held[group] = has_changed

    def holds(self, group: ShardedGroup) -> bool:
        return group in self._held

    def let_go(self, group: ShardedGroup) -> None:
        """The end of `hold`: saves the shard, if it has changed. Does nothing for one that is not held."""
        has_changed = self._held.pop(group, None)
        if has_changed:
            self._save(group, group.give_own_memory)
        elif has_changed is not None:
            group.give_own_memory()

    def make_way(self, group: ShardedGroup) -> None:
        """Ends what is under way with the group, which is about to be loaded."""
        self.let_go(group)
        if self._open is not None and self._open[0] is group:
            self.settle()
        while any(other is group for other, *_ in self._leaving):
            self._end_save()

    def settle(self) -> None:
        """Puts the shard that is open back, and lets those go that are held or being saved."""
        for group in list(self._held):
            self.let_go(group)
        while self._leaving:
            self._end_save()
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
        self._held.clear()
        self._leaving.clear()
        self._store.close()

    def _save(self, group: ShardedGroup, give_memory: Callable[[], None]) -> None:
        self._leaving.append((group, self.keep(group), give_memory))
        while len(self._leaving) > 1:
            self._end_save()

    def _end_save(self) -> None:
        _, transfer, give_memory = self._leaving.pop(0)
        try:
            transfer.wait()
        finally:
            give_memory()


def _bytes_of(shard: Tensor) -> Tensor:
    return shard.detach().view(torch.uint8)
