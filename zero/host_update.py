"""Updates of a device's parameters on the host: the copies of shards and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..offload import FINISHED, HostCopies, HostPool, Offloadable, Transfer, Window
from .group import ShardedGroup
from .placement import ShardStore

MAX_LEAVING = 2  # gradient shards in flight to the host: each holds its memory on the device


class HostUpdate:
    """The copies between device and host, and their buffers, shared by the shards that the host updates.

        device    gradients leave ----.                      .---- parameters return
        host                          update n | update n-1 | ...

    Gradients leave in the order of the backward. The device adds up and inspects them; the host only keeps a sum
    between two microbatches:

        device     reduce n + sum n | reduce n-1 + sum n-1 | ...
        to host                     |  sum n               | sum n-1 ...
        to device  sum n-1          |  sum n-2             | ...

    The device waits for copies, in the order of its streams, and the host does not: memory is freed in that order.

    Source: ZeRO-Offload, arXiv 2101.06840, section 4.
    """

    def __init__(self, copies: HostCopies, pool: HostPool) -> None:
        self._copies = copies
        self._pool = pool
        self.window = Window()
        """Brings shards that rest on the device to the host, for their update."""
        self._gradients = Window(MAX_LEAVING)
        self._left: dict[Offloadable, None] = {}  # gradients in the order in which they have left in this backward

    def offloadable(self, group: ShardedGroup, shard_store: ShardStore | None, needs_values: bool) -> Offloadable:
        """The group's shard, (shard_numel,), loaded into a host buffer for the update.

        shard_store: its store, if it is offloaded and not on the device. needs_values: else the update overwrites all
        values.
        """
        shard = group.shard

        def take() -> Tensor:
            return self._pool.take(shard.nbytes).view(shard.dtype)

        if shard_store is not None:
            offloadable = shard_store.offloadable(group.plan.name, take, self._pool.give)
        else:
            offloadable = Offloadable(
                group.plan.name,
                take,
                self._pool.give,
                load=lambda out: _awaited_by_host(self._copies.to_host(shard, out)),
                save=lambda values: self.put_back(values, shard),
            )
        return offloadable if needs_values else offloadable.made_anew()

    def put_back(self, values: Tensor, out: Tensor) -> Transfer:
        """Start a copy from a buffer to the device. Later work on the current stream waits for it."""
        copied = self._copies.to_device(values, out)
        self._copies.wait_on_device(copied)
        return _awaited_by_host(copied)

    def lasting(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) zeros in host memory, for copies to and from the device."""
        return self._pool.take(numel * dtype.itemsize).view(dtype).zero_()

    def close(self) -> None:
        """Free the buffers."""
        self._gradients.close()
        self.window.close()
        self._pool.close()


class HostSum:
    """A group's reduced gradient, (shard_numel,): on the device while it is summed, in host memory from then on.

    | state  | memory              | begins with                                                              |
    |--------|---------------------|--------------------------------------------------------------------------|
    | empty  | none                | `drop`, `hand_over`                                                      |
    | open   | device              | `open`, which brings the sum of earlier microbatches back                |
    | away   | host, and device    | `leave`; the device's memory is freed two gradients later                |
    """

    def __init__(self, host: HostUpdate, take: Callable[[], Tensor]) -> None:
        """take: allocates memory on the device."""
        self._host = host
        self._resident = Offloadable("gradient", take, load=self._load, save=self._save)
        self.total: Tensor | None = None
        """The sum in host memory, once it has left; complete after `arrived`."""
        self.arrived: Transfer = FINISHED
        """The copy of the sum to the host: `wait` lets the host wait."""

    @property
    def is_open(self) -> bool:
        """Whether the sum is on the device."""
        return self._host._gradients.is_in_memory(self._resident)

    def open(self) -> Tensor:
        """Return the sum on the device, or arbitrary values if there is none yet."""
        host, resident = self._host, self._resident
        if self.total is None:
            return host._gradients.create(resident)
        if resident in host._left:  # another backward: sums come in the order in which they have left
            host._gradients.expect(host._left)
            # `expect` has copied the order, and the gradients of this backward leave anew.
            host._left.clear()
        return host._gradients.acquire(resident, changes=True)

    def leave(self) -> Tensor:
        """Send the sum to the host. Returns `total`."""
        self._host._left[self._resident] = None
        self._host._gradients.release(self._resident)
        assert self.total is not None
        return self.total

    def hand_over(self) -> None:
        """Give the sum to the caller, until `give_back`."""
        self._forget()
        self.total = None

    def give_back(self, total: Tensor) -> None:
        """Free a sum that was handed over."""
        self._host._pool.give(total)

    def drop(self) -> None:
        """Free the sum."""
        self._forget()
        if self.total is not None:
            self.arrived.wait()  # the pool lends the buffer again, and a copy into it may still run
            self._host._pool.give(self.total)
            self.total = None

    def _forget(self) -> None:
        self._host._left.pop(self._resident, None)
        self._host._gradients.drop(self._resident)

    def _load(self, out: Tensor) -> Transfer:
        assert self.total is not None
        return self._awaited_by_device(self._host._copies.to_device(self.total, out))

    def _save(self, values: Tensor) -> Transfer:
        if self.total is None:
            self.total = self._host._pool.take(values.nbytes).view(values.dtype)
        copied = self._host._copies.to_host(values, self.total)
        self.arrived = _awaited_by_host(copied)
        return self._awaited_by_device(copied)

    def _awaited_by_device(self, copied: torch.Event) -> Transfer:
        return Transfer(copied.query, partial(self._host._copies.wait_on_device, copied))


def _awaited_by_host(copied: torch.Event) -> Transfer:
    return Transfer(copied.query, copied.synchronize)
