"""The way of a group's gradients into flat memory, and the memory in which those of a step add up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..offload import PagePool, TransientBuffer, bytes_in_memory, huge_zeros
from .group import ShardedGroup
from .host_update import HostUpdate

Region = tuple[int, int, Tensor]
"""[start, end) of the flat buffer, and the memory for it, (end - start,)."""


def stages_early(device: torch.device) -> bool:
    """Whether gradients are staged as they come, while they are in the processor's cache, and not a unit's together.

    Elsewhere the host starts a kernel for each, and the device has to wait for it.
    """
    return device.type == "cpu"


class Staging:
    """Takes gradients one by one, in any order, and frees them; `finish` takes the others, all at once.

        param.grad    |  weight       |  bias |  weight          |
        regions       |       slot        |    shard    |   slot   |

    A gradient that is taken as soon as it is there is still in the processor's cache, and two large ones are never
    there at once. All of them together are one kernel on a device.
    """

    def __init__(self, group: ShardedGroup, regions: Sequence[Region], adds: bool) -> None:
        """regions: disjoint, all of the flat buffer together. adds: to what is there, else in place of it."""
        self._group = group
        self._regions = regions
        self._adds = adds
        self._taken: set[int] = set()
        self._given: set[int] = set()

    def place(self, index: int) -> Tensor | None:
        """Memory that the gradient of parameter `index`, of its shape, can be written to, and then be taken from.

        None where it is in several pieces or of another dtype, where the gradient must be added to what is there, and
        when it is asked for again.
        """
        slot, param = self._group.layout.slots[index], self._group.params[index]
        if self._adds or param.grad is not None or index in self._given or index in self._taken:
            return None
        for start, end, memory in self._regions:
            if start <= slot.offset_in_flat and slot.end_in_flat <= end and memory.dtype == param.dtype:
                self._given.add(index)
                return memory[slot.offset_in_flat - start : slot.end_in_flat - start].view(slot.shape)
        return None

    def take(self, indices: Iterable[int]) -> None:
        """The gradients of these parameters of the group, which are freed; not where one was added up, or made, there.

        A gradient that comes again is added, as autograd would have.
        """
        places, parts = [], []
        for index in indices:
            slot, param = self._group.layout.slots[index], self._group.params[index]
            comes_again = index in self._taken and not self._adds
            self._taken.add(index)
            gradient, param.grad = param.grad, None
            assert gradient is not None
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            for start, end, memory in self._regions:
                low, high = max(start, slot.offset_in_flat), min(end, slot.end_in_flat)
                if low >= high:
                    continue
                place, part = memory[low - start : high - start], gradient
                if high - low == slot.numel:
                    place = place.view(slot.shape)
                else:
                    part = gradient.reshape(-1)[low - slot.offset_in_flat : high - slot.offset_in_flat]
                if place.data_ptr() == part.data_ptr():
                    continue
                if comes_again:
                    place.copy_(place.to(part.dtype).add_(part))
                else:
                    places.append(place)
                    parts.append(part)
        if places:
            torch._foreach_add_(places, parts) if self._adds else torch._foreach_copy_(places, parts)

    def finish(self) -> set[int]:
        """Takes what is left, and writes zeros where there is none, and between the parameters.

        Returns which parameters had a gradient.
        """
        if self._taken or not self._take_whole():
            self.take([index for index, param in enumerate(self._group.params) if param.grad is not None])
        if not self._adds:
            for low, high in self._group.layout.outside(self._taken):
                for start, end, memory in self._regions:
                    if max(start, low) < min(end, high):
                        memory[max(start, low) - start : min(end, high) - start].zero_()
        return self._taken

    def _take_whole(self) -> bool:
        """All gradients by one operator, with a view for none; whether that can be. As FSDP2 does it."""
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
            and not start <= gradient.data_ptr() < end  # it lies in its place already
        ]
        if len(gradients) < len(params):
            return False
        for param in params:
            param.grad = None
        torch._chunk_cat(gradients, 0, 1, out=memory[: layout.slots[-1].end_in_flat].view(1, -1))
        self._taken.update(range(len(params)))
        return True


class LocalSum:
    """Gradients of a step's earlier microbatches, where reductions wait for the accumulation boundary.

    They stay full on each rank: in `param.grad`, where autograd adds them up, if the dtypes agree; else flat,
    (padded_numel,) of the accumulation dtype.
    """

    def __init__(self, group: ShardedGroup, dtype: torch.dtype, is_kept: bool = True) -> None:
        """is_kept: the flat memory stays for the next step, and is not given back with each sum."""
        self._group = group
        self._is_kept = is_kept
        self.is_flat = dtype != group.plan.dtype
        self._dtype = dtype
        self._flat: Tensor | None = None
        self.has_values = False
        """In the flat memory."""

    @property
    def nbytes(self) -> int:
        """Of the flat memory, while it is not lent."""
        return 0 if self._flat is None else bytes_in_memory(self._flat)

    @property
    def flat(self) -> Tensor | None:
        """The flat memory, where there is some."""
        return self._flat

    def add(self) -> set[int]:
        """Takes the gradients of a backward; of which parameters. None where they stay with their parameters."""
        if not self.is_flat:
            return set()
        flat = self._open_flat()
        taken = Staging(self._group, [(0, flat.numel(), flat)], adds=self.has_values).finish()
        self.has_values = True
        return taken

    def take_back(self, total: Tensor) -> None:
        """Adds a sum that seemed final, (padded_numel,)."""
        flat = self._open_flat()
        flat.add_(total) if self.has_values else flat.copy_(total)
        self.has_values = True

    def _open_flat(self) -> Tensor:
        if self._flat is None:
            numel = self._group.layout.padded_numel
            self._flat = torch.zeros(numel, dtype=self._dtype, device=self._group.full.device)
        return self._flat

    def pour(self, regions: Sequence[Region], adds: bool) -> None:
        """Goes on in other memory, where the last gradients are added to it. adds: there is something already."""
        assert self._flat is not None
        for start, end, memory in regions:
            memory.add_(self._flat[start:end]) if adds else memory.copy_(self._flat[start:end])
        self.has_values = False
        if not (self.is_flat and self._is_kept):
            self._flat = None


class ShardMemory:
    """Memory of a group's reduced gradient, (shard_numel,) of `dtype`.

    | mode        | memory                                 | when it is dropped                         |
    |-------------|----------------------------------------|--------------------------------------------|
    | common      | one for all replicas, from their route | stays                                      |
    | handed over | new for each step                      | goes with the last reference to it         |
    | else        | of its own                             | is given back, and taken anew by the next  |
    """

    def __init__(
        self, group: ShardedGroup, dtype: torch.dtype, common: Tensor | None = None, is_handed_over: bool = False
    ) -> None:
        """common: each replica writes its region of the final sum there, so nobody may change it. Only where nothing is
        accumulated in the shard, and all replicas come to a fence between the last use of a gradient and the next
        backward. is_handed_over: the gradient of a step may still be used when the next one comes.
        """
        self._numel, self._dtype, self._device = group.layout.shard_numel, dtype, group.full.device
        self._common = common
        self._is_handed_over = is_handed_over
        self._num_owners = group.axes.replicas.size
        self._pages: TransientBuffer | None = None

    def take(self) -> Tensor:
        """The memory, with any values."""
        if self._common is not None:
            return self._common
        if self._device.type != "cpu" or not PagePool.is_possible():
            return torch.empty(self._numel, dtype=self._dtype, device=self._device)
        if self._is_handed_over:
            return huge_zeros(self._numel, self._dtype, self._device)
        self._pages = self._pages or TransientBuffer(self._numel, self._dtype)
        return self._pages.tensor

    def drop(self) -> None:
        """Nobody uses it any more, until it is taken again."""
        if self._pages is not None:
            self._pages.drop()

    def nbytes(self, taken: Tensor | None) -> int:
        """This rank's part of what is held. taken: the memory, while it is in use."""
        if self._common is not None:
            return self._common.nbytes // self._num_owners
        return 0 if taken is None else taken.nbytes


class HostSum:
    """The sum of a group's reduced gradients, in host memory: they leave the device one by one, and are added there."""

    def __init__(self, host: HostUpdate) -> None:
        self._host = host
        self.total: Tensor | None = None
        """Complete after `arrive`."""
        self._last = 0  # of the gradients that have left, which one

    def add(self, shard: Tensor, on_arrived: Callable[[], None] | None) -> Tensor:
        """Takes a shard whose memory on the device goes with it; on_arrived: called then. Returns the sum so far."""
        self.total = self._host.take(shard, self.total, on_arrived)
        self._last = self._host.num_taken
        return self.total

    def has(self, shard: Tensor) -> bool:
        """Whether that is the memory of the sum, and not one that a shard can be made in."""
        return shard is self.total

    def arrive(self) -> None:
        """Returns when all that was taken is in the sum, whatever has left after it."""
        self._host.arrive(self._last)

    def hand_over(self) -> None:
        """The sum is the caller's, until `give_back`."""
        self.total = None

    def give_back(self, total: Tensor) -> None:
        """A sum that was handed over was used up."""
        self._host.give(total)

    def drop(self) -> None:
        """The sum was used up."""
        if self.total is not None:
            self.arrive()
            self.give_back(self.total)
            self.total = None
