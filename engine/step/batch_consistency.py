"""Check that stages of a pipeline, and ranks that split layers or sequences, were given the same batch.

Ranks that split layers must also draw the same random numbers. Their generators start in the same state, and are
compared with each batch, since a script may seed them again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from enum import IntEnum
from typing import Any, Self

import torch
from torch import Tensor

from ...offload import sent
from ...parallel.randomness import draws
from ...pipe.executor import shapes_in
from ...pipe.split.trees import leaves
from ..blueprint.axes import PIPE, TENSOR
from .features import StepFeature
from .parts import Parts


class BatchDifference(IntEnum):
    """The kind of difference between ranks that must agree."""

    NOTHING = 0
    BATCH = 1
    GENERATORS = 2


class BatchConsistencyCheck(StepFeature):
    """Finds loaders that divide data by rank and world_size, so that these ranks silently get different batches."""

    def __init__(self, parts: Parts, axes: Sequence[str]) -> None:
        self._accumulated = parts.steps.accumulated
        self._mesh = mesh = parts.mesh
        self._axes = tuple(axes)
        self._ranks = mesh.parallel_dims.ranks(mesh.world.rank, self._axes)
        # Ranks of a split may have different random states if no layer draws.
        self._draws = mesh.axes[TENSOR].size > 1 and draws(parts.module)
        self._differs = BatchDifference.NOTHING  # in this step; over stages only
        # (4,): for each of _KINDS, how often it differed on this rank since `read`; then the same over all ranks.
        self._found: Tensor | None = None
        self._kinds: set[Hashable] = set()  # shapes of batches that were the same

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        """Return None if no ranks need the same batch."""
        parallel_dims = parts.mesh.parallel_dims
        axes = parallel_dims.wide([name for name, _ in parallel_dims.sizes if name not in parallel_dims.data])
        return cls(parts, axes) if axes else None

    def before_forward(self, batches: Sequence[Any], output: Callable[[], Any] | None) -> None:
        if PIPE in self._axes:
            # Not raised at once, as in an evaluation: the sum of the step tells all ranks, and costs no message.
            self._differs = self.differ(batches)
            self._accumulated.is_void = self._differs is not BatchDifference.NOTHING
            self._accumulated.note_inconsistency(
                self, torch.full((), self._accumulated.is_void, device=self._mesh.world.device)
            )
        elif torch.is_grad_enabled() and (found := self.check(batches)) is not None:
            self._accumulated.note_inconsistency(self, found)

    def before_evaluation(self, batch: Any) -> None:
        if PIPE in self._axes:
            self.refuse(self.differ([batch]))

    def explain_inconsistency(self) -> None:
        if PIPE in self._axes:
            self.refuse(self._differs)
        self.read()

    def differ(self, batches: Sequence[Any]) -> BatchDifference:
        """Return whether the stages of a pipeline, or ranks beside them, got different batches. A collective.

        It comes before the first message: if shapes differ, stages would wait in vain. The hosts of the pipe axis
        exchange digests, so no device has to be waited for.
        """
        what = "the check of the batch"
        pipe, digest = self._mesh.axes[PIPE], _digest_of(batches)
        are_apart = self._draws and torch.is_grad_enabled() and self._generators_differ(what)
        digests = torch.zeros(pipe.size + 1, dtype=torch.int64)
        # Each rank fills its place, so the sum over the axis is a gather of digests.
        digests[pipe.rank], digests[-1] = digest, are_apart
        *found, num_apart = self._mesh.peers.sum_on_host(digests, what).tolist()
        differ = any(other != digest for other in found)
        # Axis by axis the outcome spreads: in the end all ranks that must have this batch know it.
        for axis in (self._mesh.axes[name] for name in self._axes if name != PIPE):
            own = torch.tensor([digest, differ, num_apart], dtype=torch.int64)
            total, others, num_apart = axis.transport.sum_small(own.to(self._mesh.world.device), what).tolist()
            differ = total != digest * axis.size or others > 0
        return BatchDifference.BATCH if differ else BatchDifference.GENERATORS if num_apart else BatchDifference.NOTHING

    def _generators_differ(self, what: str) -> bool:
        axis, own = self._mesh.axes[TENSOR], self._digest_of_generators()
        total = axis.transport.sum_small(torch.tensor([own], device=self._mesh.world.device), what)
        return int(total) != own * axis.size

    def refuse(self, differ: BatchDifference) -> None:
        """Raise ValueError on all ranks if batches differ on any. A collective.

        All ranks must fail together, so that the next step is the same on all of them.
        """
        if self._mesh.world.size > len(self._ranks):
            own = torch.tensor([differ is kind for kind in _KINDS], dtype=torch.int64, device=self._mesh.world.device)
            anywhere = self._mesh.sum_small(own, "the outcome of the check of the batch").tolist()
        else:
            anywhere = [differ is kind for kind in _KINDS]
        for kind, count in zip(_KINDS, anywhere, strict=True):
            if count:
                raise self._error(kind, differ is kind)

    def check(self, batches: Sequence[Any]) -> Tensor | None:
        """Compare batches of ranks that are not stages: `differ` and `refuse` together.

        Returns (2,) on the device, not 0 if batches or generators differ now or differed before; `read` tells the host
        at the end of the step. None if the host knows already: on the CPU, and for the first batch of its shapes,
        since ranks that expect other shapes would wait in vain.
        """
        digest, what = _digest_of(batches), "the check of the batch"
        generators = self._digest_of_generators() if self._draws else 0
        device = self._mesh.world.device
        differs = torch.zeros(2, dtype=torch.int64, device=device)
        for name in self._axes:
            axis = self._mesh.axes[name]
            own = sent(torch.tensor([digest, generators if name == TENSOR else 0]), device)
            # A copy, as `sum_small` overwrites its argument.
            differs |= (axis.transport.sum_small(own.clone(), what) != own * axis.size).long()
        anywhere = differs
        # Ranks with another batch must learn of the difference too: all ranks raise together.
        if self._mesh.world.size > self._mesh.axes[self._axes[0]].size:
            anywhere = self._mesh.sum_small(differs.clone(), what)
        found = torch.cat([differs, anywhere])
        self._found = found if self._found is None else self._found.add_(found)
        kind = shapes_in(batches)
        if device.type == "cpu" or kind not in self._kinds:
            self._kinds.add(kind)
            self.read()
            return None
        return self._found[2:]

    def read(self) -> None:
        """Raise ValueError if batches or generators differed since the last call. Waits for the device."""
        found, self._found = self._found, None
        if found is None:
            return
        counts = found.tolist()
        for kind, own, anywhere in zip(_KINDS, counts[:2], counts[2:], strict=True):
            if anywhere:
                raise self._error(kind, bool(own))

    def _digest_of_generators(self) -> int:
        """Return a digest of the states of torch's generators, of the CPU and the device."""
        device = self._mesh.world.device
        digest = zlib.crc32(torch.get_rng_state().numpy().data)
        if device.type == "cpu":
            return digest
        return zlib.crc32(torch.get_device_module(device).get_rng_state(device).numpy().data, digest)

    def _error(self, kind: BatchDifference, differ: bool) -> ValueError:
        if kind is BatchDifference.GENERATORS:
            size = self._mesh.axes[TENSOR].size
            return ValueError(
                f"random generators: expected the same state on the {size} ranks of parallel.tensor, since dropout "
                "must drop the same elements there, found different states; seed them alike after lowtide.initialize "
                "(torch.manual_seed(seed + engine.data_rank)), and use a separate torch.Generator for numbers that a "
                "single rank draws"
            )
        where = f"ranks {', '.join(map(str, self._ranks))}" if differ else "not this rank's"
        of = "of a pipeline" if self._axes == (PIPE,) else f"of {' x '.join(self._axes)}"
        return ValueError(
            f"batch: expected the same batch on the {len(self._ranks)} ranks {of} ({where}), found different batches; "
            "divide the data by engine.data_rank and engine.data_size, not by engine.rank and engine.world_size"
        )


_KINDS = (BatchDifference.BATCH, BatchDifference.GENERATORS)


def _digest_of(batches: Sequence[Any]) -> int:
    """Return a digest of the batches: of their shapes, and of their values on the CPU."""
    digest = zlib.crc32(repr(shapes_in(batches)).encode())
    for leaf in leaves(batches):
        # Values on a device are left out: the host would wait for them.
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.numel():
            values = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
            digest = zlib.crc32(values.numpy().data, digest)
    return digest
