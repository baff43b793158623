"""Collectives in the middle of a forward or a backward, for tensors of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .axis import Axis, Numels, Terms

EXCHANGE_SLOTS = 2  # other ranks may still read a slot while the next slot is written
_LEAST_BYTES = 1 << 16


def exchange_slot_bytes(nbytes: int) -> int:
    """Round up to the size of a slot: a power of two, so slots are seldom reallocated."""
    return max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())


class Collectives:
    """Collectives for activations and their gradients, over the transport of an axis.

    All methods return results, except `trade` and `shift`, which return handles. All ranks of the axis run the same
    layers, so they make the same calls with the same shapes. Sums are added in rank order, in float32 or wider, so all
    ranks get the same bits. Data goes through slots of the transport. If a tensor is larger than all before it, all
    ranks enlarge the slots together.
    """

    def __init__(self, axis: Axis) -> None:
        self.size = axis.size
        self.place = axis.place
        self.bytes_sent = 0  # to all other ranks, by the formulas of ring collectives
        self._axis = axis
        self._slot_bytes = 0

    def sum(self, x: Tensor, what: str) -> Tensor:
        """Sum x over the ranks. Returns a new contiguous tensor of x's shape on each rank; x on a single rank."""
        # An empty x is empty on all ranks: no rank waits.
        if self.size == 1 or not x.numel():
            return x
        self.bytes_sent += 2 * x.numel() * x.element_size() * (self.size - 1) // self.size
        transport, slot = self._axis.transport, self._filled_slot(x, what)
        if not transport.sums_here:  # the backend sums in the slot, which is private to this call
            transport.all_reduce(slot, slot, what).arrived.wait()
            return slot.view(x.shape)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        flat = out.view(-1)
        _sum(transport.all_reduce(slot, flat, what), flat)
        return out

    def sum_part(self, x: Tensor, dim: int, what: str) -> Tensor:
        """Sum x over the ranks and return this rank's part along `dim`, whose size is a multiple of the number of
        ranks.
        """
        if self.size == 1:
            return x
        self.bytes_sent += x.numel() * x.element_size() * (self.size - 1) // self.size
        transport, parts = self._axis.transport, _first(x, dim)
        shape = (parts.shape[0] // self.size, *parts.shape[1:])
        if not transport.sums_here:  # the backend reads the parts where they are, and writes the sum to `out`
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
            transport.reduce_scatter(parts.view(-1), out.view(-1), what).arrived.wait()
            return out.transpose(0, dim)
        slot = self._filled_slot(parts, what)
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        _sum(transport.reduce_scatter(slot, None, what), out.view(-1))
        return out.transpose(0, dim)

    def gather(self, x: Tensor, dim: int, what: str) -> Tensor:
        """Concatenate the equally shaped parts of all ranks along `dim`."""
        if self.size == 1:
            return x
        self.bytes_sent += x.numel() * x.element_size() * (self.size - 1)
        part = _first(x, dim)
        full = torch.empty((self.size * part.shape[0], *part.shape[1:]), dtype=x.dtype, device=x.device)
        self._reserve(part.numel() * part.element_size())
        self._axis.transport.gather_copies(full.view(-1), part.view(-1), what).wait()
        return full.transpose(0, dim)

    def swap(self, x: Tensor, what: str) -> Tensor:
        """All-to-all. x: (ranks, ...), contiguous, a row for each rank. Returns the rows for this rank, in rank order.

        If x has fewer rows than the axis has ranks, each group of that many neighbours swaps. The number must divide
        the size.
        """
        size = x.shape[0]
        if size < self.size:
            first = self.place - self.place % size
            near = range(first, first + size)
            return x if size == 1 else self.trade(x, near, [(place, self.place - first) for place in near], what)()
        return self.swap_rows(x, ((1,) * self.size,) * self.size, what)

    def swap_rows(self, x: Tensor, counts: Numels, what: str) -> Tensor:
        """All-to-all of uneven rows. x: (rows, ...), contiguous, in the order of their destination ranks.

        counts[i][j]: rows that rank i sends to rank j, possibly 0. All ranks pass the same counts, since slots have
        room for the largest sender. Returns the rows for this rank in rank order.
        """
        if self.size == 1:
            return x
        width = math.prod(x.shape[1:])
        own, place = counts[self.place], self.place
        self.bytes_sent += (sum(own) - own[place]) * width * x.element_size()
        out = torch.empty((sum(row[place] for row in counts), *x.shape[1:]), dtype=x.dtype, device=x.device)
        most = max(map(sum, counts)) * width
        # All ranks return here or none: `counts` are equal on all ranks.
        if not most:
            return out
        self._reserve(most * x.element_size())
        numels = counts if width == 1 else [[count * width for count in row] for row in counts]
        self._axis.transport.swap(out.view(-1), x.view(-1), numels, what).wait()
        return out

    def trade(
        self, chunks: Tensor, to: Sequence[int], of: Sequence[tuple[int, int]], what: str
    ) -> Callable[[], Tensor]:
        """Start to send chunks[n] to coordinate to[n], and to receive the chunk of each (coordinate, index) in `of`.

        Returns a function that waits for the chunks and returns them. chunks: (any, ...), contiguous, of the same shape
        on all ranks, unchanged until then. Several trades may be in flight. Wait for them in the order of their start.
        """
        chunk_bytes = chunks[0].numel() * chunks.element_size()
        self.bytes_sent += chunk_bytes * sum(place != self.place for place in to)
        out = torch.empty((len(of), *chunks.shape[1:]), dtype=chunks.dtype, device=chunks.device)
        self._reserve(chunks.numel() * chunks.element_size())
        ranks = {place: rank for rank, place in enumerate(self._axis.places)}
        sources = [(ranks[place], chunk) for place, chunk in of]
        pending = self._axis.transport.pass_on(chunks, [ranks[place] for place in to], sources, out, what)

        def arrived(_sent: Tensor = chunks) -> Tensor:  # kept alive until it is sent
            pending.wait()
            return out

        return arrived

    def shift(self, x: Tensor, by: int, what: str) -> Callable[[], Tensor]:
        """Start to send contiguous x to the coordinate `by` places further, cyclically. See `trade`."""
        to, source = (self.place + by) % self.size, (self.place - by) % self.size
        arrived = self.trade(x[None], [to], [(source, 0)], what)
        return lambda: arrived()[0]

    def part(self, x: Tensor, dim: int) -> Tensor:
        """Return a view of this rank's part of x along `dim`."""
        size = x.shape[dim] // self.size
        return x.narrow(dim, self.place * size, size)

    def release_slots(self) -> None:
        """Give back the memory of slots, after a message that is larger than all that follow. Called by all ranks."""
        self._slot_bytes = 0
        self._axis.transport.release_slots()

    def _filled_slot(self, x: Tensor, what: str) -> Tensor:
        self._reserve(x.numel() * x.element_size())
        slot = self._axis.transport.open_slot(x.numel(), x.dtype, what)
        slot.view(x.shape).copy_(x)
        return slot

    def _reserve(self, nbytes: int) -> None:
        # On shared memory `reserve_slots` is a collective. All ranks pass equal sizes, so all reserve at the same call.
        if nbytes > self._slot_bytes or not self._slot_bytes:  # a message without bytes needs a slot too
            self._slot_bytes = exchange_slot_bytes(nbytes)
            self._axis.transport.reserve_slots(self._slot_bytes, EXCHANGE_SLOTS)


def _first(x: Tensor, dim: int) -> Tensor:
    """Move `dim` to the front, contiguous."""
    return x.transpose(0, dim).contiguous()


def _sum(terms: Terms, out: Tensor) -> None:
    """Write the sum to out[terms.region], then wait until all of `out` has its sum."""
    terms.arrived.wait()
    _add(terms.read(), out[terms.region])
    pending = terms.summed()
    if pending is not None:
        pending.wait()


def _add(terms: list[Tensor], out: Tensor) -> None:
    """Compute out = terms[0] + terms[1] + ..., rounded once."""
    if len(terms) == 1:
        out.copy_(terms[0])
    elif len(terms) == 2:
        torch.add(terms[0], terms[1], out=out)  # torch adds two halves in float32
    elif out.dtype in (torch.bfloat16, torch.float16):
        total = terms[0].float()
        for term in terms[1:]:
            total += term
        out.copy_(total)
    else:
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out += term
