"""Shards, one after the other, in memory in which an update can change them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ..offload import HostCopies, HostCopy, HostPool, Transfer

if TYPE_CHECKING:
    from .group import ShardedGroup
    from .shard_rest import ShardRest


class Visit(Protocol):
    """The stay of one shard's values, (shard_numel,), in memory: `begin`, `values`, `finish`, `end`."""

    def begin(self) -> None:
        """Starts to bring them."""

    def values(self) -> Tensor:
        """Waits until they are there. They may be changed until `finish`."""

    def finish(self) -> None:
        """Starts to bring them back. What the device is given from now on sees them."""

    def end(self) -> None:
        """Waits until they are back, and gives the memory back."""


def visiting(visits: Sequence[Visit]) -> Generator[Visit]:
    """Each while its values are there; meanwhile the next comes and the last, which the caller has finished, leaves."""
    begun = 0
    leaving: list[Visit] = []
    try:
        for index, visit in enumerate(visits):
            while begun < min(index + 2, len(visits)):
                visits[begun].begin()
                begun += 1
            yield visit
            leaving.append(visit)
            if len(leaving) > 1:
                leaving.pop(0).end()
    finally:
        while leaving:
            leaving.pop(0).end()


class InPlace:
    """Values that are where the update runs."""

    def __init__(self, group: ShardedGroup) -> None:
        self._group = group

    def begin(self) -> None:
        pass

    def values(self) -> Tensor:
        return self._group.shard

    def finish(self) -> None:
        pass

    def end(self) -> None:
        pass


class FromRest:
    """Values of a store, in the group's own memory."""

    def __init__(self, group: ShardedGroup, rest: ShardRest) -> None:
        self._group = group
        self._rest = rest
        self._coming: Transfer | None = None
        self._leaving: Transfer | None = None

    def begin(self) -> None:
        self._group.take_own_memory()
        self._coming = self._rest.fetch(self._group)

    def values(self) -> Tensor:
        assert self._coming is not None
        self._coming.wait()
        return self._group.shard

    def finish(self) -> None:
        self._leaving = self._rest.keep(self._group)

    def end(self) -> None:
        try:
            if self._leaving is not None:
                self._leaving.wait()
        finally:
            self._group.give_own_memory()


class OnHost:
    """Values of a device, in a buffer of the host."""

    def __init__(self, group: ShardedGroup, copies: HostCopies, pool: HostPool, needs_values: bool) -> None:
        """needs_values: else all of them are written, and none is read."""
        self._group = group
        self._copies = copies
        self._pool = pool
        self._needs_values = needs_values
        self._buffer: Tensor | None = None
        self._coming: HostCopy | None = None
        self._leaving: HostCopy | None = None

    def begin(self) -> None:
        shard = self._group.shard
        self._buffer = self._pool.take(shard.nbytes).view(shard.dtype)
        if self._needs_values:
            self._coming = self._copies.to_host(shard, self._buffer)

    def values(self) -> Tensor:
        assert self._buffer is not None
        if self._coming is not None:
            self._coming.wait_on_host()
        return self._buffer

    def finish(self) -> None:
        assert self._buffer is not None
        self._leaving = self._copies.to_device(self._buffer, self._group.shard)
        self._leaving.wait_on_device()

    def end(self) -> None:
        assert self._buffer is not None
        if self._leaving is not None:
            self._leaving.wait_on_host()
        self._pool.give(self._buffer)


class OnHostFromRest:
    """Values of a store, in a buffer of the host: the device does not see them."""

    def __init__(self, group: ShardedGroup, rest: ShardRest, pool: HostPool, needs_values: bool) -> None:
        """needs_values: as above."""
        self._group = group
        self._rest = rest
        self._pool = pool
        self._needs_values = needs_values
        self._buffer: Tensor | None = None
        self._coming: Transfer | None = None
        self._leaving: Transfer | None = None

    def begin(self) -> None:
        shard = self._group.shard
        self._buffer = self._pool.take(shard.nbytes).view(shard.dtype)
        if self._needs_values:
            self._coming = self._rest.fetch(self._group, self._buffer)

    def values(self) -> Tensor:
        assert self._buffer is not None
        if self._coming is not None:
            self._coming.wait()
        return self._buffer

    def finish(self) -> None:
        self._leaving = self._rest.keep(self._group, self._buffer)

    def end(self) -> None:
        assert self._buffer is not None
        try:
            if self._leaving is not None:
                self._leaving.wait()
        finally:
            self._pool.give(self._buffer)
