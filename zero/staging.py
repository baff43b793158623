"""The way of a group's gradients from their parameters into flat memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .group import ShardedGroup
from .layout import Slot

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

    def take(self, index: int) -> None:
        """The gradient of parameter `index` of the group. One that comes again is added, as autograd would have."""
        if index in self._taken and not self._adds:
            for place, part in self._moves([index]):
                place.copy_(place.to(part.dtype).add_(part))
        else:
            self._take([index])

    def finish(self) -> set[int]:
        """Takes what is left, and writes zeros where there is none, and between the parameters.

        Returns which parameters had a gradient.
        """
        if self._take_whole():
            return self._taken
        left = [index for index, param in enumerate(self._group.params) if param.grad is not None]
        for index in self._taken.intersection(left):  # comes again
            self.take(index)
        self._take([index for index in left if index not in self._taken])
        if not self._adds:
            self._zero_rest()
        return self._taken

    def _take_whole(self) -> bool:
        """All gradients by one operator, with a view for none; whether that can be. As FSDP2 does it."""
        layout, params = self._group.layout, self._group.params
        if self._taken or self._adds or len(self._regions) > 1 or not layout.is_dense:
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
        self._zero(layout.slots[-1].end_in_flat, layout.padded_numel)
        self._taken.update(range(len(params)))
        return True

    def _take(self, indices: list[int]) -> None:
        moves = self._moves(indices)
        self._taken.update(indices)
        if not moves:
            return
        places, parts = zip(*moves, strict=True)
        if self._adds:
            torch._foreach_add_(places, parts)
        else:
            torch._foreach_copy_(places, parts)

    def _zero_rest(self) -> None:
        """Where no gradient was, and between the parameters."""
        end = 0
        for index, slot in enumerate(self._group.layout.slots):
            start = slot.offset_in_flat if index in self._taken else slot.end_in_flat
            if end < start:
                self._zero(end, start)
            end = slot.end_in_flat
        self._zero(end, self._group.layout.padded_numel)

    def _zero(self, low: int, high: int) -> None:
        for start, end, memory in self._regions:
            if max(start, low) < min(end, high):
                memory[max(start, low) - start : min(end, high) - start].zero_()

    def _moves(self, indices: Iterable[int]) -> list[tuple[Tensor, Tensor]]:
        """(memory, what belongs there) for gradients, which are freed; not where one was added up, or made, there."""
        moves = []
        for index in indices:
            slot, param = self._group.layout.slots[index], self._group.params[index]
            gradient, param.grad = param.grad, None
            assert gradient is not None
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            moves += [one for one in self._overlaps(slot, gradient) if one[0].data_ptr() != one[1].data_ptr()]
        return moves

    def _overlaps(self, slot: Slot, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(memory, the part of the gradient that belongs there) for each region that the parameter touches."""
        if len(self._regions) == 1:
            ((_, _, memory),) = self._regions
            yield memory[slot.offset_in_flat : slot.end_in_flat].view(slot.shape), gradient
            return
        for start, end, memory in self._regions:
            low, high = max(start, slot.offset_in_flat), min(end, slot.end_in_flat)
            if low >= high:
                continue
            place = memory[low - start : high - start]
            if high - low == slot.numel:
                yield place.view(slot.shape), gradient
            else:
                yield place, gradient.reshape(-1)[low - slot.offset_in_flat : high - slot.offset_in_flat]
