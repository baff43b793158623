"""The update of a device's parameters on the host."""

from __future__ import annotations

from ..offload import HostCopies, HostPool
from .group import ShardedGroup
from .host_gradients import HostGradients
from .shard_rest import ShardRest
from .visits import OnHost, OnHostFromRest, Visit


class HostUpdate:
    """What the shards that are updated on the host share: the copies between device and host, and their buffers.

        device    gradients leave ----.                      .---- parameters return
        host                          update n | update n-1 | ...

    Source: ZeRO-Offload, arXiv 2101.06840, section 4.
    """

    def __init__(self, copies: HostCopies, pool: HostPool) -> None:
        self._copies = copies
        self._pool = pool
        self.gradients = HostGradients(copies, pool)

    def visit(self, group: ShardedGroup, rest: ShardRest | None, needs_values: bool) -> Visit:
        """Of the group's shard on the host. needs_values: else all are written anew."""
        if rest is not None:
            return OnHostFromRest(group, rest, self._pool, needs_values)
        return OnHost(group, self._copies, self._pool, needs_values)

    def close(self) -> None:
        """Gives the buffers back that are kept for the next step."""
        self.gradients.arrive()
        self._pool.close()
