"""Gradients that leave the device as soon as they are reduced."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..offload import HostCopies, HostCopy, HostPool

_MAX_LEAVING = 2  # each holds a shard's memory on the device


@dataclass(frozen=True)
class _Leaving:
    """A shard on its way."""

    on_device: Tensor  # kept until the copy is made
    copy: HostCopy
    arriving: Tensor
    total: Tensor
    on_arrived: Callable[[], None] | None


class HostGradients:
    """Brings gradient shards to the host, in the order of the backward, and adds up those of several microbatches.

        device   reduce n | reduce n-1 | reduce n-2 | ...
        link              |   copy n   |  copy n-1  | ...
        host                           | add n, its squares | add n-1 ...

    At most two are on their way. Then the host waits, so it is never further ahead of the device than that.
    """

    def __init__(self, copies: HostCopies, pool: HostPool) -> None:
        self._copies = copies
        self._pool = pool
        self._leaving: deque[_Leaving] = deque()

    def take(self, values: Tensor, total: Tensor | None, on_arrived: Callable[[], None] | None) -> Tensor:
        """Begins to bring a shard, (n,), whose memory on the device goes with the last reference to it.

        total: to which it is added; None: it is the first. on_arrived: called then. Returns the total, (n,), which is
        complete after `arrive`, and is the caller's until `give`.
        """
        arriving = self._pool.take(values.nbytes).view(values.dtype)
        self._leaving.append(
            _Leaving(
                values,
                self._copies.to_host(values, arriving),
                arriving,
                arriving if total is None else total,
                on_arrived,
            )
        )
        while len(self._leaving) > _MAX_LEAVING:
            self._arrive_oldest()
        return arriving if total is None else total

    def arrive(self) -> None:
        """Returns when all that were taken are complete."""
        while self._leaving:
            self._arrive_oldest()

    def give(self, total: Tensor) -> None:
        """The memory of a gradient that was used up."""
        self._pool.give(total)

    def _arrive_oldest(self) -> None:
        one = self._leaving.popleft()
        one.copy.wait_on_host()
        if one.arriving is not one.total:
            one.total.add_(one.arriving)
            self.give(one.arriving)
        if one.on_arrived is not None:
            one.on_arrived()
