"""What the ranks of an axis exchange in the middle of a forward or a backward: tensors of any size, at once."""

from __future__ import annotations

import torch
from torch import Tensor

from .axis import Axis

EXCHANGE_SLOTS = 2  # one is being read by others while the next one is written
_LEAST_BYTES = 1 << 16


def exchange_slot_bytes(nbytes: int) -> int:
    """Of a slot through which a tensor of so many bytes goes: a power of two, so that slots are seldom made anew."""
    return max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())


class Exchange:
    """Collectives of tensors that were not announced, over the route of an axis; each returns when the result is there.

    All ranks of the axis make the same calls with the same shapes, as they run the same layers. Terms are added in the
    order of the ranks, in float32 at least, so all get the same bits. What a call moves goes through slots of the
    route, which are made larger, by all ranks at once, where a tensor is larger than all before it.
    """

    def __init__(self, axis: Axis) -> None:
        self.size = axis.size
        self.place = axis.place
        self.bytes_sent = 0  # to each other rank together, by the formulas of ring collectives
        self._axis = axis
        self._slot_bytes = 0

    def sum(self, x: Tensor, what: str) -> Tensor:
        """The sum over the ranks, on each of them: a new tensor, contiguous, of x's shape."""
        if self.size == 1 or not x.numel():
            return x
        self.bytes_sent += 2 * x.numel() * x.element_size() * (self.size - 1) // self.size
        slot = self._filled_slot(x, what)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        flat = out.view(-1)
        terms = self._axis.route.all_reduce(slot, flat, what)
        terms.arrived.wait()
        _add(terms.read(), flat[terms.region])
        pending = terms.summed()
        if pending is not None:
            pending.wait()
        return out

    def sum_part(self, x: Tensor, dim: int, what: str) -> Tensor:
        """This rank's part along `dim` of the sum over the ranks. The size of x there is a multiple of the ranks'."""
        if self.size == 1:
            return x
        self.bytes_sent += x.numel() * x.element_size() * (self.size - 1) // self.size
        parts = _first(x, dim)
        slot = self._filled_slot(parts, what)
        shape = (parts.shape[0] // self.size, *parts.shape[1:])
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        terms = self._axis.route.reduce_scatter(slot, None, what)
        terms.arrived.wait()
        _add(terms.read(), out.view(-1)[terms.region])
        pending = terms.summed()
        if pending is not None:
            pending.wait()
        return out.transpose(0, dim)

    def gather(self, x: Tensor, dim: int, what: str) -> Tensor:
        """The parts of all ranks, of one shape, one behind the other along `dim`."""
        if self.size == 1:
            return x
        self.bytes_sent += x.numel() * x.element_size() * (self.size - 1)
        part = _first(x, dim)
        full = torch.empty((self.size * part.shape[0], *part.shape[1:]), dtype=x.dtype, device=x.device)
        self._reserve(part.numel() * part.element_size())
        self._axis.route.gather_copies(full.view(-1), part.view(-1), what).wait()
        return full.transpose(0, dim)

    def swap(self, x: Tensor, what: str) -> Tensor:
        """x: (ranks, ...), contiguous: what is for each rank. What each has for this one, in the order of the ranks."""
        if self.size == 1:
            return x
        self.bytes_sent += x.numel() * x.element_size() * (self.size - 1) // self.size
        slot = self._filled_slot(x, what)
        out = torch.empty_like(x)
        terms = self._axis.route.swap(slot, what)
        terms.arrived.wait()
        for part, term in zip(out.view(self.size, -1), terms.read(), strict=True):
            part.copy_(term)
        pending = terms.summed()
        if pending is not None:
            pending.wait()
        return out

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of what all have: a view."""
        size = x.shape[dim] // self.size
        return x.narrow(dim, self.place * size, size)

    def _filled_slot(self, x: Tensor, what: str) -> Tensor:
        self._reserve(x.numel() * x.element_size())
        slot = self._axis.route.open_slot(x.numel(), x.dtype, what)
        slot.view(x.shape).copy_(x)
        return slot

    def _reserve(self, nbytes: int) -> None:
        if nbytes > self._slot_bytes:
            self._slot_bytes = exchange_slot_bytes(nbytes)
            self._axis.route.reserve_slots(self._slot_bytes, EXCHANGE_SLOTS)


def _first(x: Tensor, dim: int) -> Tensor:
    """With `dim` first, contiguous."""
    return x.transpose(0, dim).contiguous()


def _add(terms: list[Tensor], out: Tensor) -> None:
    """out = terms[0] + terms[1] + ..., rounded once."""
    if len(terms) == 1:
        out.copy_(terms[0])
    elif len(terms) == 2:
        torch.add(terms[0], terms[1], out=out)
    elif out.dtype in (torch.bfloat16, torch.float16):
        total = terms[0].float()
        for term in terms[1:]:
            total += term
        out.copy_(total)
    else:
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out += term
