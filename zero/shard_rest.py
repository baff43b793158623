"""Parameter shards that rest in a store while nobody needs them.

forward     load | gather | use | release          the pages go to the next block, nothing is written
step        load 1 | update 0 | save               each shard in memory only while it is updated
backward    load | gather | use | release others | reduce | update | save      where the update does not wait for a step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from ..offload import Resident, Store, Window


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
