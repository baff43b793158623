"""The transport between CPU ranks on any hosts: gloo's point-to-point messages.

gloo's all-gather and reduce-scatter reach a third of the bandwidth of its point-to-point messages, and their order of
sums depends on the number of parts. Here each rank sends to every other rank only the part that it lacks, and sums the
received parts in rank order.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .axis import Chunk, Numels, Pending, Terms, Transport, regions_of
from .errors import CollectiveError, no_answer
from .in_flight import AxisRecorder
from .world import break_connections, note_broken

_TAGS_PER_NAME = 1 << 11
_NUM_NAMES = (1 << 10) - 1
# A channel has 2^21 tags in mesh.py: (2^10 - 1) names times 2^11 operations, and these last 2^11.
_NO_TAG = _NUM_NAMES * _TAGS_PER_NAME  # above the tags of operations


class SocketTransport(Transport):
    """Collectives made of point-to-point messages. All messages of an operation carry its tag."""

    name = "sockets"
    sums_here = True
    slots_may_lack_own = True

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        places: Sequence[int],
        group: dist.ProcessGroup,
        first_tag: int,
        timeout_seconds: float,
        channel: AxisRecorder,
    ) -> None:
        """rank: on the axis. ranks, places: as in `Axis`. first_tag: separates the engines of a process."""
        super().__init__(torch.device("cpu"), rank, ranks)
        self._places = places
        self._group: dist.ProcessGroup | None = group
        self._peers = [peer for peer in range(self.size) if peer != rank]
        self._first_tag = first_tag
        self._num_operations = 0
        self._num_slots_opened = 0
        self._timeout_seconds = timeout_seconds
        self._channel = channel
        self._scratch: dict[str, Tensor] = {}

    @property
    def slot_bytes(self) -> int:
        """Bytes of slots and receive buffers, each at the largest size so far."""
        return sum(one.nbytes for one in self._scratch.values())

    def gather(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """Gather the parts of all ranks: full[part q] = the `part` of rank q. full: (size * part.numel(),)."""
        parts = full.view(self.size, part.numel())
        tag, sequence = self._next_operation(what)
        # gloo sends a message only after the peer has announced its receive. So receives start before sends everywhere.
        in_flight = self._receive({peer: parts[self._places[peer]] for peer in self._peers}, tag, what)
        in_flight += self._send(dict.fromkeys(self._peers, part), tag, what)
        own = parts[self._places[self.rank]]
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        return Pending(lambda: self._wait(in_flight, what, sequence))

    def next_slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the slot that `open_slot` will return next, to be written early."""
        return self._buffer(f"slot {(self._num_slots_opened + 1) % 3}", numel, dtype)

    def open_slot(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """Return an uninitialized buffer to stage a gradient in, (numel,) of dtype."""
        # Three in turn: while a slot is filled, messages of the two before it may be in flight.
        slot = self.next_slot(numel, dtype)
        self._num_slots_opened += 1
        return slot

    def reduce_scatter(self, slot: Tensor, spare: Tensor | None, what: str) -> Terms:
        """Start to sum slot[this rank's part] over the ranks. slot: (size * n,).

        If the slot is ((size - 1) * n,), it has the parts of the other ranks, and `spare`, (n,), has this rank's part.
        """
        lacks_own = spare is not None and slot.numel() < self.size * spare.numel()
        numel = slot.numel() // (self.size - lacks_own)
        own_place = self._places[self.rank]
        # Without this rank's part, the parts behind it lie one part earlier in the slot.
        places = [place - (lacks_own and place > own_place) for place in self._places]
        parts = [slot[place * numel : (place + 1) * numel] for place in places]
        if spare is not None and lacks_own:
            parts[self.rank] = spare
        terms, arrived = self._exchange_parts(parts, what)
        return Terms(arrived, slice(0, numel), lambda: terms, lambda: None)

    def swap(self, out: Tensor, given: Tensor, numels: Numels, what: str) -> Pending:
        """All-to-all of uneven parts. `out` and `given` are in rank order."""
        tag, sequence = self._next_operation(what)
        parts = torch.split(out, [row[self.rank] for row in numels])
        sent = torch.split(given, list(numels[self.rank]))
        in_flight = self._receive({peer: parts[peer] for peer in self._peers}, tag, what)
        in_flight += self._send({peer: sent[peer] for peer in self._peers}, tag, what)
        parts[self.rank].copy_(sent[self.rank])
        return Pending(lambda: self._wait(in_flight, what, sequence))

    def pass_on(self, chunks: Tensor, to: Sequence[int], of: Sequence[Chunk], out: Tensor, what: str) -> Pending:
        """Send chunks[n] to rank to[n], and receive into out[n] the chunk of[n] = (rank, index).

        chunks: (any, ...), unchanged until `wait`.
        """
        tag, sequence = self._next_operation(what)
        in_flight: list[dist.Work] = []
        # Sorted, since each sender starts its messages in ascending order of chunks.
        for (rank, chunk), one in sorted(zip(of, out, strict=True), key=lambda pair: pair[0]):
            if rank == self.rank:
                one.copy_(chunks[chunk])
            else:  # messages of the same tag match in the order of their start
                in_flight += self._receive({rank: one}, tag, what)
        for rank, one in zip(to, chunks, strict=True):
            if rank != self.rank:
                in_flight += self._send({rank: one}, tag, what)
        return Pending(lambda: self._wait(in_flight, what, sequence))

    def all_reduce(self, slot: Tensor, out: Tensor, what: str) -> Terms:
        """Start out = sum over ranks of slot. Each rank sums its region and sends the sum to the other ranks.

        slot: the size of `out`, or without this rank's region, which is then in `out`.
        """
        bounds = regions_of(out.numel(), self.size)
        regions = [out[region] for region in bounds]
        lacks_own = slot.numel() < out.numel()
        sizes = [0 if lacks_own and peer == self.rank else one.numel() for peer, one in enumerate(regions)]
        parts = list(torch.split(slot, sizes))
        if lacks_own:
            parts[self.rank] = regions[self.rank]
        terms, arrived = self._exchange_parts(parts, what)
        # Taken now: when `send` is called, ranks may differ in the operations that they have started since.
        tag, sequence = self._next_operation(what)

        def send() -> Pending:
            in_flight = self._receive({peer: regions[peer] for peer in self._peers}, tag, what)
            in_flight += self._send(dict.fromkeys(self._peers, regions[self.rank]), tag, what)
            return Pending(lambda: self._wait(in_flight, what, sequence))

        return Terms(arrived, bounds[self.rank], lambda: terms, send)

    def sum_small(self, values: Tensor, what: str) -> Tensor:
        """Sum a small int64 vector over the ranks. Also a barrier."""
        # Messages, since threads of gloo's all-reduce keep the tensor after it: [Note: threads at exit] in world.py.
        tag, sequence = self._next_operation(what)
        everyone = torch.empty(self.size, values.numel(), dtype=values.dtype)
        everyone[self.rank].copy_(values)
        in_flight = self._receive({peer: everyone[peer] for peer in self._peers}, tag, what)
        in_flight += self._send(dict.fromkeys(self._peers, everyone[self.rank]), tag, what)
        self._wait(in_flight, what, sequence)
        return everyone.sum(dim=0)

    def close(self) -> None:
        """Drop the process group and the buffers."""
        self._group = None
        self.release_slots()

    def release_slots(self) -> None:
        """Give back the memory of slots and receive buffers."""
        self._scratch.clear()

    def _exchange_parts(self, parts: Sequence[Tensor], what: str) -> tuple[list[Tensor], Pending]:
        """Send each rank its part. Returns the terms of this rank's part in rank order, and a handle."""
        mine = parts[self.rank]
        numel = mine.numel()
        tag, sequence = self._next_operation(what)
        which = self._num_slots_opened % 3  # as the slots: terms of earlier operations may not be added up yet
        received = self._buffer(f"received {which}", (self.size - 1) * numel, mine.dtype)
        received = received.view(self.size - 1, numel)
        contributions = [mine] * self.size
        for index, peer in enumerate(self._peers):
            contributions[peer] = received[index]
        in_flight = self._receive({peer: contributions[peer] for peer in self._peers}, tag, what)
        in_flight += self._send({peer: parts[peer] for peer in self._peers}, tag, what)
        return contributions, Pending(lambda: self._wait(in_flight, what, sequence))

    def _buffer(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._scratch[name] = torch.empty(nbytes, dtype=torch.uint8)
        return buffer[:nbytes].view(dtype)

    def _next_operation(self, what: str) -> tuple[int, int]:
        """Return the tag and the sequence number of the next operation."""
        # The tag includes the name, so ranks at different operations time out instead of receiving wrong data.
        sequence = self._channel.begin(what)
        # crc32 is equal in all processes. `hash` of a string is not.
        name = zlib.crc32(what.encode()) % _NUM_NAMES
        tag = self._first_tag + name * _TAGS_PER_NAME + self._num_operations % _TAGS_PER_NAME
        self._num_operations += 1
        return tag, sequence

    def _send(self, tensors: dict[int, Tensor], tag: int, what: str) -> list[dist.Work]:
        return self._started(dist.isend, tensors, tag, what)

    def _receive(self, tensors: dict[int, Tensor], tag: int, what: str) -> list[dist.Work]:
        return self._started(dist.irecv, tensors, tag, what)

    def _started(
        self, start: Callable[..., dist.Work | None], tensors: dict[int, Tensor], tag: int, what: str
    ) -> list[dist.Work]:
        try:
            in_flight = [
                start(tensor, self.ranks[peer], self._group, tag) for peer, tensor in tensors.items() if tensor.numel()
            ]
        except RuntimeError as error:  # the peer closed the connection
            raise self._error(what, 0.0, error) from error
        return [work for work in in_flight if work is not None]

    def _wait(self, in_flight: Sequence[dist.Work], what: str, sequence: int) -> None:
        self._channel.wait(what, sequence)
        started = time.monotonic()
        self._channel.error_broadcast.wait(self._channel.begun, self._break)
        try:
            for work in in_flight:
                work.wait(timedelta(seconds=self._timeout_seconds))
        except RuntimeError as error:
            raise self._error(what, time.monotonic() - started, error) from error
        finally:
            self._channel.error_broadcast.end_wait()
            self._channel.progress.end_wait()

    def _break(self) -> None:
        break_connections(self._group, [self.ranks[peer] for peer in self._peers], self._first_tag + _NO_TAG)

    def _error(self, what: str, waited_seconds: float, error: RuntimeError) -> CollectiveError:
        note_broken(self._group, str(error))
        peers = [self.ranks[peer] for peer in self._peers]
        if found := self._channel.error_broadcast.found or self._channel.alone(peers):
            return CollectiveError(f"rank {self.ranks[self.rank]} in {what}: {found}")
        what_to_do = self._channel.error_broadcast.what_to_do
        text = no_answer(self.ranks[self.rank], what, peers, waited_seconds, error, what_to_do)
        return CollectiveError(text + self._channel.recorder.compare(peers))
