"""Updates of a device's parameters on the host: the copies of shards and gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..offload import HostCopies, HostPool, Offloadable, Window
from .group import ShardedGroup
from .placement import ShardStore

MAX_LEAVING = 2  # each holds a gradient shard's memory on the device


class HostUpdate:
    """The copies between device and host, and their buffers, shared by the shards that the host updates.

        device    gradients leave ----.                      .---- parameters return
        host                          update n | update n-1 | ...

    Gradients leave in the order of the backward. Those of several microbatches are added up on the host:

        device   reduce n | reduce n-1 | reduce n-2 | ...
        link              |   copy n   |  copy n-1  | ...
        host                           | add n, its squares | add n-1 ...

    At most two copies are in flight. Then the host waits, so it is never further ahead of the device.

    Source: ZeRO-Offload, arXiv 2101.06840, section 4.
    """

    def __init__(self, copies: HostCopies, pool: HostPool) -> None:
        self._copies = copies
        self._pool = pool
        self._gradients = Window(max_leaving=MAX_LEAVING)
        self.num_taken = 0

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
                load=lambda out: self._copies.to_host(shard, out),
                save=lambda values: self._copies.to_device(values, shard),
            )
        return offloadable if needs_values else offloadable.made_anew()

    def take(self, values: Tensor, total: Tensor | None, on_arrived: Callable[[], None] | None) -> Tensor:
        """Start to copy a gradient shard, (n,), to the host. Its device memory is freed with the last reference.

        total: the sum to add it to; None for the first. on_arrived: called on arrival. Returns the sum, (n,), complete
        after `arrive`. The caller has it until `give`.
        """
        arriving = self._pool.take(values.nbytes).view(values.dtype)

        def arrive(_: Tensor) -> None:
            if total is not None:
                total.add_(arriving)
                self.give(arriving)
            if on_arrived is not None:
                on_arrived()

        leaving = Offloadable(
            "gradient", lambda: values, arrive, save=lambda shard: self._copies.to_host(shard, arriving)
        )
        self.num_taken += 1
        self._gradients.create(leaving)
        self._gradients.release(leaving)
        return arriving if total is None else total

    def lasting(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) zeros in host memory, for copies to and from the device."""
        return self._pool.take(numel * dtype.itemsize).view(dtype).zero_()

    def arrive(self, number: int | None = None) -> None:
        """Wait for the gradients taken until `num_taken` was `number`; None: all."""
        self._gradients.wait(0 if number is None else self.num_taken - number)

    def give(self, total: Tensor) -> None:
        """Free the memory of a gradient after its use."""
        self._pool.give(total)

    def close(self) -> None:
        """Free the buffers."""
        self.arrive()
        self._pool.close()
