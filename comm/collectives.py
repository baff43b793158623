"""What the ranks of an axis exchange in the middle of a forward or a backward: tensors of any size, at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .axis import Axis, Numels, Pending, Terms

EXCHANGE_SLOTS = 2  # one is being read by others while the next one is written
_LEAST_BYTES = 1 << 16


def exchange_slot_bytes(nbytes: int) -> int:
    """Of a slot through which a tensor of so many bytes goes: a power of two, so that slots are seldom made anew."""
    return max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())


@dataclass(frozen=True)
class Arriving:
    """What other ranks have for this one, on its way."""

    _out: Tensor
    _pending: Pending
    _sent: Tensor  # lives until it has gone

    def wait(self) -> Tensor:
        """It, when it is there."""
        self._pending.wait()
        return self._out


class Collectives:
    """Collectives of tensors that were not announced, over the route of an axis.

    Each returns when the result is there, but for `trade` and `shift`, which are waited for by what they return. All
    ranks of the axis make the same calls with the same shapes, as they run the same layers. Terms are added in the
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
        _sum(self._axis.route.all_reduce(slot, flat, what), flat)
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
        _sum(self._axis.route.reduce_scatter(slot, None, what), out.view(-1))
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
        """x: (ranks, ...), contiguous: what is for each rank. What each has for this one, in the order of the ranks.

        Of fewer ranks, that divide all of them, it is this rank's group of so many neighbours that swaps.
        """
        size = x.shape[0]
        if size < self.size:
            first = self.place - self.place % size
            near = range(first, first + size)
            return x if size == 1 else self.trade(x, near, [(place, self.place - first) for place in near], what).wait()
        return self.swap_rows(x, ((1,) * self.size,) * self.size, what)

    def swap_rows(self, x: Tensor, counts: Numels, what: str) -> Tensor:
        """x: (rows, ...), contiguous, those for one rank behind those for the one before it. The rows for this rank,
        in the order of the ranks.

        counts[i][j]: rows that the i-th rank has for the j-th. All ranks have the same counts, as slots are to hold
        the most that any of them gives; rows may be few or none.
        """
        if self.size == 1:
            return x
        width = math.prod(x.shape[1:])
        own, place = counts[self.place], self.place
        self.bytes_sent += (sum(own) - own[place]) * width * x.element_size()
        out = torch.empty((sum(row[place] for row in counts), *x.shape[1:]), dtype=x.dtype, device=x.device)
        most = max(map(sum, counts)) * width
        if not most:
            return out
        self._reserve(most * x.element_size())
        numels = [[count * width for count in row] for row in counts]
        self._axis.route.swap(out.view(-1), x.view(-1), numels, what).wait()
        return out

    def trade(self, pieces: Tensor, to: Sequence[int], of: Sequence[tuple[int, int]], what: str) -> Arriving:
        """Starts to send pieces[n] to the rank at place to[n], and to receive piece of[n][1] of the one at of[n][0].

        pieces: (any, ...), contiguous, of one shape on all ranks, which must stay as they are until `wait`. Several
        may be under way; they are waited for in the order of their start.
        """
        piece_bytes = pieces[0].numel() * pieces.element_size()
        self.bytes_sent += piece_bytes * sum(place != self.place for place in to)
        out = torch.empty((len(of), *pieces.shape[1:]), dtype=pieces.dtype, device=pieces.device)
        self._reserve(pieces.numel() * pieces.element_size())
        ranks = {place: rank for rank, place in enumerate(self._axis.places)}
        sources = [(ranks[place], piece) for place, piece in of]
        pending = self._axis.route.pass_on(pieces, [ranks[place] for place in to], sources, out, what)
        return Arriving(out, pending, pieces)

    def shift(self, x: Tensor, by: int, what: str) -> Arriving:
        """Starts to send x, contiguous, to the rank `by` places further on, round the axis. As `trade`."""
        to, source = (self.place + by) % self.size, (self.place - by) % self.size
        arriving = self.trade(x[None], [to], [(source, 0)], what)
        return replace(arriving, _out=arriving._out[0])

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


def _sum(terms: Terms, out: Tensor) -> None:
    """out[terms.region] = the sum, when all of `out` has it that the caller gets."""
    terms.arrived.wait()
    _add(terms.read(), out[terms.region])
    pending = terms.summed()
    if pending is not None:
        pending.wait()


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
