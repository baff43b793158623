"""Bytes with a home, and how they come into memory to be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .store import FINISHED, Store, Transfer


@dataclass(frozen=True)
class OldVersion:
    """What a resident was before a change that may be taken back."""

    nbytes: int  # of memory that holds it
    restore: Callable[[], None]


def nothing_to_move(values: Tensor) -> Transfer:
    """For a resident whose bytes are where they should be, or are all written anew."""
    return FINISHED


def copy_of(values: Tensor) -> OldVersion:
    """An old version of values in memory."""
    old = values.clone()

    def restore() -> None:
        values.copy_(old)

    return OldVersion(old.nbytes, restore)


def _ignored(values: Tensor) -> Any:
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
    give: Callable[[Tensor], None] = _ignored  # the end of `take`
    load: Callable[[Tensor], Transfer] = nothing_to_move  # begins to bring them into memory
    save: Callable[[Tensor], Transfer] = nothing_to_move  # begins to bring them home
    fork: Callable[[Tensor], OldVersion] = copy_of  # what is changed from now on is a second version


def resident_of(store: Store, key: str, take: Callable[[], Tensor], give: Callable[[Tensor], None]) -> Resident:
    """Bytes under a key of a store, of which a second version is kept under another key."""
    keys = [key, f"{key} (other)"]

    def fork(values: Tensor) -> OldVersion:
        keys.reverse()
        return OldVersion(0, keys.reverse)

    return Resident(
        key,
        take,
        give,
        lambda out: store.load(keys[0], _bytes_of(out)),
        lambda values: store.save(keys[0], _bytes_of(values)),
        fork,
    )


def _bytes_of(values: Tensor) -> Tensor:
    return values.detach().view(torch.uint8)
