"""The way of a group's gradients from their parameters into flat memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from .group import ShardedGroup
from .layout import Slot

Region = tuple[int, int, Tensor]
"""[start, end) of the flat buffer, and the memory for it, (end - start,)."""


class Staging:
    """Takes gradients one by one, in any order, and frees them; `finish` takes the others.

        param.grad    |  weight       |  bias |  weight          |
        regions       |       slot        |    shard    |   slot   |

    A gradient that is taken as soon as it is there is still in the processor's cache, and two large ones are never
    there at once.
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
        slot, param = self._group.layout.slots[index], self._group.params[index]
        gradient, param.grad = param.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        for place, part in self._overlaps(slot, gradient):
            if place.data_ptr() == part.data_ptr():  # it was added up, or made, there
                continue
            if self._adds:
                place.add_(part)
            elif index in self._taken:
                place.copy_(place.to(part.dtype).add_(part))
            else:
                place.copy_(part)
        self._taken.add(index)

    def finish(self) -> set[int]:
        """Takes what is left, and writes zeros where there is none, and between the parameters.

        Returns which parameters had a gradient.
        """
        end = 0
        for index, (slot, param) in enumerate(zip(self._group.layout.slots, self._group.params, strict=True)):
            is_there = param.grad is not None
            self._zero(end, slot.offset_in_flat if is_there or index in self._taken else slot.end_in_flat)
            end = slot.end_in_flat
            if is_there:
                self.take(index)
        self._zero(end, self._group.layout.padded_numel)
        return self._taken

    def _zero(self, low: int, high: int) -> None:
        for start, end, memory in () if self._adds else self._regions:
            if max(start, low) < min(end, high):
                memory[max(start, low) - start : min(end, high) - start].zero_()

    def _overlaps(self, slot: Slot, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(memory, the part of the gradient that belongs there) for each region that the parameter touches."""
        for start, end, memory in self._regions:
            low, high = max(start, slot.offset_in_flat), min(end, slot.end_in_flat)
            if low >= high:
                continue
            place = memory[low - start : high - start]
            if high - low == slot.numel:
                yield place.view(slot.shape), gradient
            else:
                yield place, gradient.reshape(-1)[low - slot.offset_in_flat : high - slot.offset_in_flat]
