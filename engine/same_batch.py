"""Whether ranks that must be given the same data were: stages of a pipeline, ranks that split layers or sequences."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import Mesh
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
        self._found: Tensor | None = None  # (2,): on how many axes and ranks others were given since `read`
        self._kinds: set[Hashable] = set()  # of batches, that were the same

    def differ(self, batches: Sequence[Any]) -> bool:
        """Whether stages of a pipeline were given other batches, and those beside them: the same on all of them.

        Where shapes differ too, stages wait in vain for what is not sent. So the hosts of the pipe axis ask each other
        before the first message, and no device has to be waited for. A collective.
        """
        what = "the check of the batch"
        pipe, digest = self._mesh.axes[PIPE], _digest_of(batches)
        digests = torch.zeros(pipe.size, dtype=torch.int64)
        digests[pipe.rank] = digest
        found = self._mesh.peers.sum_on_host(digests, what)
        differ = bool((found != found[0]).any())
        for axis in (self._mesh.axes[name] for name in self._axes if name != PIPE):
            own = torch.tensor([digest, differ], dtype=torch.int64)
            total, others = axis.route.sum_small(own.to(self._mesh.world.device), what).tolist()
            differ = total != digest * axis.size or others > 0
        return differ

    def refuse(self, differ: bool) -> None:
        """Raises ValueError on all ranks where `differ` was so on any: they must fail together, for the next step to be
        the same. A collective."""
        if self.is_anywhere(differ):
            raise self._error(differ)

    def is_anywhere(self, found: bool) -> bool:
        """Whether `found` was so on any rank; those that are given the same batch know it already. A collective."""
        if self._mesh.world.size == len(self._ranks):
            return found
        own = torch.full((1,), found, dtype=torch.int64, device=self._mesh.world.device)
        return bool(self._mesh.sum_small(own, "the outcome of the check of the batch"))

    def check(self, batch: Any) -> Tensor | None:
        """As `differ` and `refuse` in one, of ranks that are not stages.

        Returns (1,) on the device, not 0 where this batch or one before it differs: the host is told at the end, by
        `read`. But not for the first of its shapes: ranks that expect other shapes than are sent would wait in vain.
        None where it knows.
        """
        if not self._axes:
            return None
        digest, what = _digest_of([batch]), "the check of the batch"
        device = self._mesh.world.device
        own = torch.full((1,), digest, dtype=torch.int64, device=device)
        differs = torch.zeros_like(own)
        for axis in (self._mesh.axes[name] for name in self._axes):
            differs |= (axis.route.sum_small(own.clone(), what) != digest * axis.size).long()
        anywhere = differs
        if self._mesh.world.size > self._mesh.axes[self._axes[0]].size:
            anywhere = self._mesh.sum_small(differs.clone(), what)
        found = torch.cat([differs, anywhere])
        self._found = found if self._found is None else self._found.add_(found)
        kind = shapes_in(batch)
        if device.type == "cpu" or kind not in self._kinds:
            self._kinds.add(kind)
            self.read()
            return None
        return self._found[1:]

    def read(self) -> None:
        """Raises ValueError where ranks were given other batches, which nobody was told yet. Waits for the device."""
        found, self._found = self._found, None
        if found is None:
            return
        differs, anywhere = found.tolist()
        if anywhere:
            raise self._error(bool(differs))

    def _error(self, differ: bool) -> ValueError:
        where = f"ranks {', '.join(map(str, self._ranks))}" if differ else "not this rank's"
        of = "of a pipeline" if self._axes == (PIPE,) else f"of {' x '.join(self._axes)}"
        return ValueError(
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
