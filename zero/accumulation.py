"""Gradients of a `ShardedGroup` in flat memory.

`Staging` copies them. They are added up before the reduction (`LocalSum`) or after it (`ShardMemory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..offload import PagePool, TransientBuffer, bytes_in_memory, huge_zeros
from .group import ShardedGroup

Region = tuple[int, int, Tensor]
"""[start, end) of the flat buffer, and its memory, (end - start,)."""


def stages_early(device: torch.device) -> bool:
    """Return True if each gradient is copied when it arrives, False if all gradients of a unit are copied together.

    On the CPU a gradient is still in the cache when it arrives. A device would start a kernel for each gradient.
    """
    return device.type == "cpu"


class Staging:
    """Copies gradients into regions of flat memory, in any order, and frees them. `finish` copies the rest together.

        param.grad    |  weight       |  bias |  weight          |
        regions       |       slot        |    shard    |   slot   |

    slot: the memory of a message; shard: this rank's part. A gradient that is copied as it arrives is still in the
    processor's cache, and two large gradients never exist at once. On a device `finish` copies all by a single kernel.
    """

    def __init__(self, group: ShardedGroup, regions: Sequence[Region], adds: bool) -> None:
        """regions: disjoint, covering the flat buffer. adds: adds to the content of the regions, else replaces it."""
        self._group = group
        self._regions = regions
        self._adds = adds
        self._taken: set[int] = set()
        self._given: set[int] = set()

    def place(self, index: int) -> Tensor | None:
        """Return memory, in the parameter's shape, to compute the gradient of parameter `index` in.

        None if the parameter spans several regions, if the dtype differs, if the gradient is added, or at a second
        call.
        """
        param_view, param = self._group.layout.param_views[index], self._group.params[index]
        if self._adds or param.grad is not None or index in self._given or index in self._taken:
            return None
        for start, end, memory in self._regions:
            if start <= param_view.offset_in_flat and param_view.end_in_flat <= end and memory.dtype == param.dtype:
                self._given.add(index)
                return memory[param_view.offset_in_flat - start : param_view.end_in_flat - start].view(param_view.shape)
        return None

    def take(self, indices: Iterable[int]) -> None:
        """Copy the gradients of these parameters and free them. Gradients that already lie in their region are not
        copied.

        A gradient that arrives again is added, as autograd would have done.
        """
        places, parts = [], []
        for index in indices:
            param_view, param = self._group.layout.param_views[index], self._group.params[index]
            # With `_adds` the copy below adds in any case.
            comes_again = index in self._taken and not self._adds
            self._taken.add(index)
            # From here on only `parts` holds the gradient, so it is freed with the list.
            gradient, param.grad = param.grad, None
            assert gradient is not None
            if gradient.is_sparse:
                # The gradient of an embedding with sparse=True.
                gradient = gradient.to_dense()
            for start, end, memory in self._regions:
                low, high = max(start, param_view.offset_in_flat), min(end, param_view.end_in_flat)
                if low >= high:
                    continue
                place, part = memory[low - start : high - start], gradient
                if high - low == param_view.numel:
                    place = place.view(param_view.shape)
                else:
                    part = gradient.reshape(-1)[low - param_view.offset_in_flat : high - param_view.offset_in_flat]
                # A kernel has computed the gradient here: see `place`.
                if place.data_ptr() == part.data_ptr():
                    continue
                if comes_again:
                    # In the gradient's dtype, with the rounding of autograd's sum.
                    place.copy_(place.to(part.dtype).add_(part))
                else:
                    places.append(place)
                    parts.append(part)
        if places:
            # A single kernel on a device.
            torch._foreach_add_(places, parts) if self._adds else torch._foreach_copy_(places, parts)

    def finish(self) -> set[int]:
        """Copy the remaining gradients. Writes zeros for missing gradients and between parameters.

        Returns the indices of the parameters that had a gradient.
        """
        # Gradients that were staged early lie in their regions already.
        if self._taken or not self._take_whole():
            arrived = []
            for index, param in enumerate(self._group.params):
                if param.grad is not None:
                    arrived.append(index)
            self.take(arrived)
        if not self._adds:
            layout = self._group.layout
            is_complete = len(self._taken) == len(layout.param_views)
            # The memory has arbitrary content, and sums over ranks and squares read the whole buffer.
            for low, high in layout.padding if is_complete else layout.outside(self._taken):
                for start, end, memory in self._regions:
                    if max(start, low) < min(end, high):
                        memory[max(start, low) - start : min(end, high) - start].zero_()
        return self._taken

    def _take_whole(self) -> bool:
        """Copy all gradients with a single operator, as FSDP2 does. Returns False if that is impossible."""
        layout, params = self._group.layout, self._group.params
        if self._adds or len(self._regions) > 1 or not layout.is_dense:
            return False
        ((_, _, memory),) = self._regions
        start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        gradients = [
            gradient
            for param in params
            if (gradient := param.grad) is not None
            and gradient.dtype == param.dtype
            and not gradient.is_sparse
            and gradient.is_contiguous()  # CUDA's kernel copies memory in its order
            and not start <= gradient.data_ptr() < end  # it already lies in its region
        ]
        if len(gradients) < len(params):
            return False
        for param in params:
            param.grad = None
        # In a single chunk it joins flattened gradients: `is_dense` excludes padding, empty and 0-dim gradients.
        torch._chunk_cat(gradients, 0, 1, out=memory[: layout.param_views[-1].end_in_flat].view(1, -1))
        self._taken.update(range(len(params)))
        return True


class LocalSum:
    """Gradients of earlier microbatches, if reductions wait for the accumulation boundary.

    They stay full on each rank: in `param.grad`, where autograd adds them up, if the dtypes agree; else flat,
    (padded_numel,) of the accumulation dtype.
    """

    def __init__(self, group: ShardedGroup, dtype: torch.dtype, is_kept: bool = True) -> None:
        """is_kept: the flat memory stays for the next step."""
        self._group = group
        self._is_kept = is_kept
        self.is_flat = dtype != group.plan.dtype
        self._dtype = dtype
        self.flat: Tensor | None = None
        """The flat memory; None: not allocated."""
        self.has_values = False
        """Whether the flat memory has a sum."""

    @property
    def nbytes(self) -> int:
        """Bytes of the flat memory, without pages that are offloaded."""
        return 0 if self.flat is None else bytes_in_memory(self.flat)

    def add(self) -> set[int]:
        """Add the gradients of a backward. Returns the parameters' indices; empty if they stay in `param.grad`."""
        if not self.is_flat:
            return set()
        flat = self._open_flat()
        taken = Staging(self._group, [(0, flat.numel(), flat)], adds=self.has_values).finish()
        self.has_values = True
        return taken

    def add_total(self, total: Tensor) -> None:
        """Take back a total, (padded_numel,), that was already reduced, because another backward adds to it."""
        flat = self._open_flat()
        flat.add_(total) if self.has_values else flat.copy_(total)
        self.has_values = True

    def _open_flat(self) -> Tensor:
        if self.flat is None:
            numel = self._group.layout.padded_numel
            self.flat = torch.zeros(numel, dtype=self._dtype, device=self._group.full.device)
        return self.flat

    def move_sum_to(self, regions: Sequence[Region], adds: bool) -> None:
        """Move the sum into regions, before the last gradients are added. adds: the regions have values already."""
        assert self.flat is not None
        for start, end, memory in regions:
            memory.add_(self.flat[start:end]) if adds else memory.copy_(self.flat[start:end])
        self.has_values = False
        # If not flat, the memory is from `add_total`: few steps need it.
        if not (self.is_flat and self._is_kept):
            self.flat = None


class ShardMemory:
    """Memory of a group's reduced gradient, (shard_numel,) of `dtype`.

    | mode        | memory                                    | drop                                      |
    |-------------|-------------------------------------------|-------------------------------------------|
    | common      | shared by replicas, from the transport    | keeps it                                  |
    | handed over | new for each step                         | freed with the last reference             |
    | else        | private                                   | freed, and taken again by the next `take` |
    """

    def __init__(
        self, group: ShardedGroup, dtype: torch.dtype, common: Tensor | None = None, is_handed_over: bool = False
    ) -> None:
        """common: each replica writes its region of the final sum, so no rank may change it. Only if nothing
        accumulates in the shard, and all replicas pass a fence between the last use of a gradient and the next
        backward.

        is_handed_over: a step's gradient may still be in use when the next gradient arrives.
        """
        self._numel, self._dtype, self._device = group.layout.shard_numel, dtype, group.full.device
        self._common = common
        self._is_handed_over = is_handed_over
        self._num_owners = group.axes.replicas.size
        self._pages: TransientBuffer | None = None

    def take(self) -> Tensor:
        """Return the memory, with arbitrary values."""
        if self._common is not None:
            return self._common
        if self._device.type != "cpu" or not PagePool.is_possible():
            return torch.empty(self._numel, dtype=self._dtype, device=self._device)
        if self._is_handed_over:
            return huge_zeros(self._numel, self._dtype, self._device)
        self._pages = self._pages or TransientBuffer(self._numel, self._dtype)
        return self._pages.tensor

    def drop(self) -> None:
        """Free the memory until the next `take`."""
        if self._pages is not None:
            self._pages.drop()

    def nbytes(self, taken: Tensor | None) -> int:
        """Return this rank's part of the bytes. taken: the memory, while it is in use."""
        if self._common is not None:
            return self._common.nbytes // self._num_owners
        return 0 if taken is None else taken.nbytes
