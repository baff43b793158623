"""Bytes with a home, and how they come into memory to be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .store import FINISHED, Store, Transfer


@dataclass(frozen=True)
class OldVersion:
    """What a resident was before a change that may be taken back."""

    nbytes: int  # of memory that holds it
    restore: Callable[[], None]

    @classmethod
    def of(cls, values: Tensor) -> OldVersion:
        """A copy of values in memory."""
        old = values.clone()

        def restore() -> None:
            values.copy_(old)

        return cls(old.nbytes, restore)


def _nothing_to_move(values: Tensor) -> Transfer:
    return FINISHED


def _nothing_to_give(values: Tensor) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Resident:
    """Bytes with a home; a `Window` brings them into memory while they are used, and back.

    | home                    | memory in use         | for example                                    |
    |-------------------------|-----------------------|------------------------------------------------|
    | a key of a store        | a buffer of a pool    | optimizer states in a file                     |
    | a key of a store        | a group's own pages   | a parameter shard that rests                   |
    | memory of a device      | a buffer of the host  | a parameter shard that the host updates        |
    | a buffer of the host    | memory of a device    | a gradient that leaves                         |
    | where they are used     | the same              | all that is not offloaded: the default         |
    """

    name: str  # for errors
    take: Callable[[], Tensor]  # memory for the bytes; content arbitrary, but where that is their home
    give: Callable[[Tensor], None] = _nothing_to_give  # the end of `take`
    load: Callable[[Tensor], Transfer] = _nothing_to_move  # begins to bring them into memory
    save: Callable[[Tensor], Transfer] = _nothing_to_move  # begins to bring them home
    fork: Callable[[Tensor], OldVersion] = OldVersion.of  # what is changed from now on is a second version

    @classmethod
    def of(cls, store: Store, key: str, take: Callable[[], Tensor], give: Callable[[Tensor], None]) -> Resident:
        """Bytes under a key of a store, of which a second version is kept under another key."""
        keys = [key, f"{key} (other)"]

        def load(out: Tensor) -> Transfer:
            return store.load(keys[0], _bytes_of(out))

        def save(values: Tensor) -> Transfer:
            return store.save(keys[0], _bytes_of(values))

        def fork(values: Tensor) -> OldVersion:
            keys.reverse()
            return OldVersion(0, keys.reverse)

        return cls(key, take, give, load, save, fork)

    def made_anew(self) -> Resident:
        """The same, but its bytes are all written where it is used, and need not come."""
        return replace(self, load=_nothing_to_move)


def _bytes_of(values: Tensor) -> Tensor:
    return values.detach().view(torch.uint8)
