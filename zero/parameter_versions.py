"""What a shard's parameters become, or were, beside what is computed with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..offload import OldVersion, huge_zeros
from .group import ShardedGroup, values_of
from .host_update import HostUpdate


@dataclass(frozen=True)
class Version:
    """The parameters of a shard from element `start` on; those before it are their master weights, rounded."""

    start: int
    values: Tensor  # (shard_numel - start,)


class ParameterVersions:
    """A second version: the old ones of a speculative update, or what a delayed one makes of them while they are used.

    It is beside them, but for what master weights in memory hold already:

                      |  in memory  |   in a store
    without a master  |  `values`   |  `values`           copied from the shard
    with one          |  master     |  `values`           the rounded copy
    """

    def __init__(self, group: ShardedGroup, master: Tensor | None, host: HostUpdate | None) -> None:
        """master: weights of the first elements, beside the parameters. host: where these are updated, if elsewhere."""
        self._group = group
        self._master = master
        self._host = host
        self.ahead = Version(0 if master is None else master.numel(), torch.empty(0, dtype=group.plan.dtype))
        """What the parameters become by a delayed update; without memory until there is one."""

    def begin(self) -> None:
        """Memory for what the parameters become; takes none where there is some from the last time."""
        numel = self._group.layout.shard_numel - self.ahead.start
        if self.ahead.values.numel() != numel:
            dtype, device = self._group.plan.dtype, self._group.shard.device
            values = huge_zeros(numel, dtype, device) if self._host is None else self._host.lasting(numel, dtype)
            self.ahead = Version(self.ahead.start, values)

    def put(self, version: Version) -> None:
        """The parameters become that version of them; master weights are of it already."""
        shard = values_of(self._group.own_values(changes=True))
        if self._master is not None:
            shard[: version.start].copy_(self._master)
        shard[version.start :].copy_(version.values, non_blocking=True)

    def keep(self) -> OldVersion:
        """What they are now."""
        start = self.ahead.start
        old = Version(start, values_of(self._group.own_values())[start:].clone())
        return OldVersion(old.values.nbytes, lambda: self.put(old))
