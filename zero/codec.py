"""Encodes gradients and weights for messages to other ranks, decodes them, and adds them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import Axis, Pending, Terms, regions_of
from ..kernels.quantized_blocks import dequantize, quantize, quantized_bytes
from ..kernels.weight_rounding import Rounding


class Coming(NamedTuple):
    """A started sum over the ranks of an axis.

    arrived.wait()  ->  add_up(out[region], ...)  ->  pending = summed()  ->  pending.wait()
    """

    arrived: Pending
    region: slice  # the range of the result that this rank sums
    add_up: Callable[[Tensor, slice, bool], Sequence[Tensor]]
    """(out, held, accumulate): out = (out +) the sum of the terms; see `sum_with_held`.

    Returns the ranks' terms, if a non-finite value can be traced in them.
    """
    summed: Callable[[], Pending | None]  # see `Terms`


Parts = Sequence[Sequence[int]]
"""For each rank of an axis: indices of the equal pieces of the staged gradient that it sums, in order.

Default: a piece for each rank, by its coordinate.
"""


class Codec:
    """Sends gradients unencoded in `dtype`, and adds them in the dtype of the sum, in rank order.

    Each group has a separate codec for each axis. A lossy codec may keep state.
    """

    counts_messages = False
    """Whether `reset` must be called at the end of a step."""

    def __init__(self, axis: Axis, dtype: torch.dtype, parts: Parts | None = None) -> None:
        """dtype: of staged gradients."""
        self.axis = axis
        self.dtype = dtype
        self._parts = parts

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Whether staging keeps the exact values of a gradient of that dtype, and of sums rounded to it."""
        return torch.promote_types(self.dtype, dtype) == self.dtype

    def may_lack_own(self, dtype: torch.dtype) -> bool:
        """Whether this rank's term may lie in the sum, of that dtype, instead of in the message."""
        return self.axis.transport.sums_here and self.dtype == dtype

    def sums_in_place(self, dtype: torch.dtype) -> bool:
        """Whether an all-reduce needs no message: it begins and ends in the shard, of that dtype."""
        return not self.axis.transport.sums_here and self.dtype == dtype

    def next_message(self, numel: int) -> Tensor | None:
        """Return the memory that `open_message` will return, to write early; None if it is not free yet."""
        return self.axis.transport.next_slot(numel, self.dtype)

    def open_message(self, numel: int, what: str) -> Tensor:
        """Return memory to stage the next gradient in, (numel,). May wait for other ranks."""
        return self.axis.transport.open_slot(numel, self.dtype, what)

    def staged(self, shard: Tensor, what: str) -> Tensor:
        """Copy a shard into a message for `all_reduce`, which writes its result to the shard. See `sums_in_place`.

        This rank's part is left out if the transport reads it from the shard.
        """
        if self.sums_in_place(shard.dtype):
            return shard
        own = self._left_out(shard)
        message = self.open_message(self.staged_numel(shard), what)
        message[: own.start].copy_(shard[: own.start])
        message[own.start :].copy_(shard[own.stop :])
        return message

    def staged_numel(self, shard: Tensor) -> int:
        """Elements of the message that `staged` opens."""
        own = self._left_out(shard)
        num_left: int = own.stop - own.start
        return shard.numel() - num_left

    def _left_out(self, shard: Tensor) -> slice:
        if not (self.axis.transport.slots_may_lack_own and self.may_lack_own(shard.dtype)):
            return slice(0, 0)
        return regions_of(shard.numel(), self.axis.size)[self.axis.rank]

    def reduce_scatter(self, staged: Tensor, spare: Tensor | None, what: str) -> Coming:
        """Start to sum a staged gradient over ranks; this rank sums its part. See `Transport.reduce_scatter`."""
        if self._parts is not None:
            # The transport gives the piece at a rank's coordinate to that rank, so the pieces are put in that order.
            by_place = sorted(range(self.axis.size), key=self.axis.places.__getitem__)
            order = [index for rank in by_place for index in self._parts[rank]]
            pieces = staged.view(len(order), -1).unbind()
            # Not by an index: the host would wait until the device has it.
            staged = torch.cat([pieces[number] for number in order])
        terms = self.axis.transport.reduce_scatter(staged, spare, what)
        return Coming(terms.arrived, terms.region, partial(self._sum_up, terms), terms.summed)

    def all_reduce(self, staged: Tensor, out: Tensor, what: str) -> Coming:
        """Start out = the sum over ranks of a staged gradient."""
        terms = self.axis.transport.all_reduce(staged, out, what)
        return Coming(terms.arrived, terms.region, partial(self._sum_up, terms), terms.summed)

    def reset(self) -> None:
        """Begin another step."""

    def _sum_up(self, terms: Terms, out: Tensor, held: slice, accumulate: bool) -> Sequence[Tensor]:
        of_ranks = terms.read()
        sum_with_held(of_ranks, self.axis.rank, out, held, accumulate)
        return of_ranks if self.axis.transport.sums_here else ()


class QuantizedCodec(Codec):
    """Sends gradients in blocks of few bits, rounded at random so that the expected value is exact.

        staged  --quantize-->  messages, to each rank its part  --dequantize-->  the sum, in its dtype

    A rank's term for its part is not quantized: it is added first, then the terms of the other ranks in rank order. In
    an all-reduce the sum is quantized again, and its rank uses the dequantized values too, so that all ranks have the
    same. Rounding errors are not kept: they average out over elements and steps. Source: ZeRO++, arXiv 2306.10209,
    section 3.3.
    """

    counts_messages = True

    def __init__(
        self,
        axis: Axis,
        dtype: torch.dtype,
        bits: int,
        rounding: Rounding,
        num_steps: Callable[[], int],
        parts: Parts | None = None,
    ) -> None:
        """rounding: random bits, unique for this group, axis and rank.

        num_steps: completed steps of the training.
        """
        super().__init__(axis, dtype, parts)
        self._bits = bits
        self._rounding = rounding
        self._num_steps = num_steps
        self._num_messages = 0  # of this step
        self._pieces = [[place] for place in axis.places] if parts is None else parts

    def may_lack_own(self, dtype: torch.dtype) -> bool:
        # This rank's term is read from the staged gradient, unquantized, and never from the sum.
        return False

    def staged(self, shard: Tensor, what: str) -> Tensor:
        # No copy: `_exchanged` quantizes each part into a separate message.
        return shard

    def reset(self) -> None:
        self._num_messages = 0

    def reduce_scatter(self, staged: Tensor, spare: Tensor | None, what: str) -> Coming:
        pieces = staged.view(sum(map(len, self._pieces)), -1)
        of_ranks = [[pieces[index] for index in part] for part in self._pieces]
        arrived, messages = self._exchanged(of_ranks, what)
        numel = len(of_ranks[0]) * pieces.shape[1]

        def add_up(out: Tensor, held: slice, accumulate: bool) -> Sequence[Tensor]:
            self._add_up(of_ranks[self.axis.rank], messages, list(out.view(-1, pieces.shape[1])), accumulate)
            return ()

        return Coming(arrived, slice(0, numel), add_up, lambda: None)

    def all_reduce(self, staged: Tensor, out: Tensor, what: str) -> Coming:
        regions = regions_of(out.numel(), self.axis.size)
        mine = regions[self.axis.rank]
        arrived, messages = self._exchanged([[staged[region]] for region in regions], what)
        own = self._new_message(self._bytes([out[mine]]), out)

        def add_up(total: Tensor, held: slice, accumulate: bool) -> Sequence[Tensor]:
            self._add_up([staged[mine]], messages, [total], accumulate)
            rounding, step = self._next_draw()
            quantize(total, self._bits, own, rounding=rounding.at(mine.start), step=step)
            # This rank uses the same dequantized values as the other ranks.
            dequantize(own, self._bits, total)
            return ()

        def summed() -> Pending:
            parts = [out[region] for region in regions]
            spread, sums = self._swap(
                # An all-to-all, as a gather takes equal parts, and regions may differ in size.
                own.repeat(self.axis.size - 1),
                self._to_others([own.numel()] * self.axis.size),
                self._to_others([self._bytes([part]) for part in parts]),
                what,
            )
            return Pending(partial(self._read_sums, spread, sums, parts))

        return Coming(arrived, mine, add_up, summed)

    # -- helpers --------------------------------------------------------------------------------------------------

    def _next_draw(self) -> tuple[Rounding, int]:
        """Return `rounding` and `step` of `quantize` for the next message."""
        # Unequal draws for all messages of a training: fewer than 2^20 belong to a step.
        self._num_messages += 1
        return self._rounding, (self._num_steps() << 20) + self._num_messages

    def _bytes(self, pieces: Sequence[Tensor]) -> int:
        return sum(quantized_bytes(piece.numel(), self._bits) for piece in pieces)

    def _exchanged(self, of_ranks: Sequence[Sequence[Tensor]], what: str) -> tuple[Pending, Sequence[Tensor]]:
        """Send each rank its pieces. Returns the messages of all ranks, valid when `arrived` is done."""
        own = self.axis.rank
        rounding, step = self._next_draw()
        sent = self._to_others([self._bytes(pieces) for pieces in of_ranks])
        given = self._new_message(sum(sent), of_ranks[own][0])
        at = offset = 0
        for rank, pieces in enumerate(of_ranks):
            for piece in pieces if rank != own else ():
                nbytes = self._bytes([piece])
                # By element of the message, so no two elements have the same draw.
                quantize(piece, self._bits, given[at : at + nbytes], rounding=rounding.at(offset), step=step)
                at, offset = at + nbytes, offset + piece.numel()
        return self._swap(given, sent, self._to_others([self._bytes(of_ranks[own])] * self.axis.size), what)

    def _new_message(self, nbytes: int, like: Tensor) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=like.device)

    def _to_others(self, sizes: Sequence[int]) -> list[int]:
        """Return bytes of messages by rank; a rank sends none to itself."""
        return [0 if rank == self.axis.rank else size for rank, size in enumerate(sizes)]

    def _swap(self, given: Tensor, sent: list[int], taken: list[int], what: str) -> tuple[Pending, Sequence[Tensor]]:
        """Exchange messages. given: those to all ranks, in rank order. sent, taken: bytes by rank.

        Returns the messages of all ranks, valid when the handle is done.
        """
        own, size = self.axis.rank, self.axis.size
        # A transport reads only this rank's column of the other rows.
        numels = [[0] * size for _ in range(size)]
        for rank in range(size):
            numels[rank][own] = taken[rank]
        numels[own] = sent
        whole = self._new_message(sum(taken), given)
        return self.axis.transport.swap(whole, given, numels, what), torch.split(whole, taken)

    def _add_up(
        self, own: Sequence[Tensor], messages: Sequence[Tensor], out: Sequence[Tensor], accumulate: bool
    ) -> None:
        """Add all terms to `out`, the pieces of the sum."""
        for piece, total in zip(own, out, strict=True):
            if accumulate:
                total.add_(piece)
            # This rank's term may already lie in the sum.
            elif piece.data_ptr() != total.data_ptr():
                total.copy_(piece)
        for rank, message in enumerate(messages):
            start = 0
            for total in out if rank != self.axis.rank else ():
                end = start + self._bytes([total])
                dequantize(message[start:end], self._bits, total, adds=True)
                start = end

    def _read_sums(self, spread: Pending, sums: Sequence[Tensor], regions: Sequence[Tensor]) -> None:
        spread.wait()
        for rank, (message, region) in enumerate(zip(sums, regions, strict=True)):
            if rank != self.axis.rank:
                dequantize(message, self._bits, region)


class WeightCodec:
    """Sends weights unquantized, directly to the memory of their use; or quantized, rounded to the nearest.

    The sending rank uses the dequantized values too:

        gather:    full = Q(part)                       new each time: errors do not add up
        update:    full = full + Q(part - full)         the next difference includes the last error

    So `full` is equal on all ranks, and its error is that of the last difference alone. This is error feedback, whose
    memory is the rank's part beside `full`. Sources: qwZ of ZeRO++, arXiv 2306.10209, section 3.1; weight differences
    of SDP4Bit, arXiv 2410.15526, section 3.1.
    """

    def __init__(self, bits: int | None) -> None:
        """bits: per element; None: unquantized."""
        self._bits = bits
        self.is_exact = bits is None

    def gather(self, axis: Axis, full: Tensor, part: Tensor, what: str, is_update: bool = False) -> Pending:
        """full[part of rank q] = the `part` of rank q, for every q. full: (size * part.numel(),).

        is_update: `full` has the values of the gather before, so differences are sent.
        """
        bits = self._bits
        if bits is None:
            return axis.transport.gather(full, part, what)
        nbytes = quantized_bytes(part.numel(), bits)
        messages = torch.empty(axis.size * nbytes, dtype=torch.uint8, device=part.device)
        own = messages.view(axis.size, nbytes)[axis.place]
        quantize(part, bits, own, less=full.view(axis.size, -1)[axis.place] if is_update else None)
        pending = axis.transport.gather(messages, own, what)

        def collect() -> None:
            pending.wait()
            for message, values in zip(messages.view(axis.size, nbytes), full.view(axis.size, -1), strict=True):
                dequantize(message, bits, values, adds=is_update)

        return Pending(collect)


CHUNK_NUMEL = 1 << 17  # 512 KiB of float32: the sum stays in the cache between the passes
NOTHING = slice(0, 0)
"""The empty range."""


def sum_with_held(terms: list[Tensor], own: int, out: Tensor, held: slice, accumulate: bool) -> None:
    """As `sum_in_rank_order`, if this rank's term, terms[own], lies partly in `out`.

    held: the range in `out`; terms[own] has only the values outside. If `held` is not empty, the sum overwrites the
    term, and terms[own] is `out` afterwards.
    """
    if held == NOTHING:
        sum_in_rank_order(terms, out, accumulate)
        return
    for piece in (slice(0, held.start), held, slice(held.stop, out.numel())):
        if piece.start < piece.stop:
            chunk = out[piece]
            chunks = [term[piece] for term in terms]
            if piece is held:
                chunks[own] = chunk
            sum_in_rank_order(chunks, chunk, accumulate)
    terms[own] = out


def sum_in_rank_order(terms: Sequence[Tensor], out: Tensor, accumulate: bool) -> None:
    """out = (out +) terms[0] + terms[1] + ..., added in that order in the dtype of `out`.

    terms: each (numel,) of the reduce dtype. out: (numel,), and may be a term itself.
    """
    if len(terms) == 1:
        if accumulate:
            out.add_(terms[0])
        elif terms[0].data_ptr() != out.data_ptr():
            out.copy_(terms[0])
        return
    same_dtype = all(term.dtype == out.dtype for term in terms)
    # The same bits as the loop below: an addition rounds once.
    if len(terms) == 2 and same_dtype and not accumulate:
        torch.add(terms[0], terms[1], out=out)
        return
    for start in range(0, out.numel(), CHUNK_NUMEL):
        end = start + CHUNK_NUMEL
        chunk = out[start:end]
        # A term in `out` is copied, as the first term overwrites it.
        pieces = [chunk.clone() if term is out else term[start:end] for term in terms]
        if not accumulate:
            chunk.copy_(pieces.pop(0))
        for piece in pieces:
            chunk.add_(piece)
