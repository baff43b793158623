"""Whether ranks that must be given the same data were: stages of a pipeline, ranks that split layers or sequences."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import Mesh
from ..offload import OnHost
from ..pipe.executor import shapes_in
from ..pipe.split.trees import leaves
from .axes import PIPE


class SameBatch:
    """A loader that divides its data by rank and world_size gives each of them another part: wrong, and not seen."""

    def __init__(self, mesh: Mesh) -> None:
        arrangement = mesh.arrangement
        self._mesh = mesh
        self._axes = arrangement.wide([name for name, _ in arrangement.sizes if name not in arrangement.data])
        self._ranks = arrangement.ranks(mesh.world.rank, self._axes)
        self._unread: OnHost | None = None  # whether ranks were given other batches
        self._kinds: set[Hashable] = set()  # of batches, that were the same

    def check(self, batches: Sequence[Any]) -> Tensor | None:
        """A collective. Raises ValueError where ranks were given other batches, or were before.

        Returns (1,) on the device, not 0 where that is so: the host is told at the end, by `read`. But not for the
        first of its shapes: stages that expect other shapes than are sent would wait in vain. None where it knows.
        """
        if not self._axes:
            return None
        self.read()
        digest, what = _digest_of(batches), "the check of the batch"
        device = self._mesh.world.device
        own = torch.full((1,), digest, dtype=torch.int64, device=device)
        differs = torch.zeros_like(own)
        for name in self._axes:
            axis = self._mesh.axes[name]
            differs |= (axis.route.sum_small(own, what) != digest * axis.size).long()
        anywhere = differs
        if self._mesh.world.size > self._mesh.axes[self._axes[0]].size:  # a step that fails must fail on all ranks
            anywhere = self._mesh.sum_small(differs, what)
        self._unread = OnHost(torch.cat([differs, anywhere]))
        kind = shapes_in(batches)
        if device.type == "cpu" or kind not in self._kinds:
            self._kinds.add(kind)
            self.read()
            return None
        return anywhere

    def read(self) -> None:
        """Raises ValueError where ranks were given other batches, which nobody was told yet."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        differs, anywhere = unread.read().tolist()
        if anywhere:
            where = f"ranks {', '.join(map(str, self._ranks))}" if differs else "not this rank's"
            of = "of a pipeline" if self._axes == (PIPE,) else f"of {' x '.join(self._axes)}"
            raise ValueError(
                f"batch: expected the same one on the {len(self._ranks)} ranks {of} ({where}), found different ones; "
                "divide the data by engine.data_rank and engine.data_size, not by engine.rank and engine.world_size"
            )


def _digest_of(batches: Sequence[Any]) -> int:
    """A number that differs where batches do: of shapes, and of the values that are on the CPU."""
    digest = zlib.crc32(repr(shapes_in(batches)).encode())
    for leaf in leaves(batches):
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.numel():
            values = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
            digest = zlib.crc32(values.numpy().data, digest)
    return digest
