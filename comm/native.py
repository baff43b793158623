"""Collectives of the process group's backend: nccl on CUDA, xccl on XPU, or a backend that the user names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from .axis import Chunk, Numels, Pending, Terms, Transport
from .in_flight import AxisRecorder, InFlight

# asyncOp is torch's default too. Without it NCCL runs in the current stream, and compute waits for it.
_GATHER, _SCATTER, _REDUCE = AllgatherOptions(), ReduceScatterOptions(), AllreduceOptions()
_GATHER.asyncOp = _SCATTER.asyncOp = _REDUCE.asyncOp = True

# Methods of the group: the public functions of torch.distributed around them cost six Python calls each.


def _all_gather(full: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    return group._allgather_base(full, part, _GATHER)


def _reduce_scatter(total: Tensor, slot: Tensor, group: dist.ProcessGroup) -> dist.Work:
    return group._reduce_scatter_base(total, slot, _SCATTER)


def _all_reduce(values: Tensor, group: dist.ProcessGroup) -> dist.Work:
    return group.allreduce([values], _REDUCE)


class NativeTransport(Transport):
    """Asynchronous collectives of the backend. `wait` makes the current stream wait, not the host."""

    name = "native"

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        places: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
        channel: AxisRecorder,
        in_flight: InFlight,
    ) -> None:
        """rank: on the axis. ranks, places: as in `Axis`."""
        super().__init__(device, rank, ranks)
        self._places = None if list(places) == sorted(places) else torch.tensor(places, device=device)
        self._group: dist.ProcessGroup | None = group
        self._channel = channel
        self._in_flight = in_flight
        self._others = [*ranks[:rank], *ranks[rank + 1 :]]

    def gather(self, full: Tensor, part: Tensor, what: str) -> Pending:
        """Gather the parts of all ranks: full[part q] = the `part` of rank q. full: (size * part.numel(),)."""
        assert self._places is None, "nothing is gathered over axes whose parts are in another order"
        return self._start(_all_gather, what, full, part)

    def reduce_scatter(self, slot: Tensor, spare: Tensor | None, what: str) -> Terms:
        """Sum slot[this rank's part] over the ranks. slot: (size * n,). spare: memory for the sum, (n,), or None."""
        if self._places is not None:  # the backend scatters in rank order, the slot is in order of coordinates
            slot = slot.view(self.size, -1)[self._places].view(-1)
        # The backend sums in the dtype of the slot, and `spare` may have a wider dtype.
        if spare is None or spare.dtype != slot.dtype:
            spare = torch.empty(slot.numel() // self.size, dtype=slot.dtype, device=self._device)
        total = spare
        pending = self._start(_reduce_scatter, what, total, slot)
        return Terms(pending, slice(0, total.numel()), lambda: [total], lambda: None)

    def swap(self, out: Tensor, given: Tensor, numels: Numels, what: str) -> Pending:
        """All-to-all of uneven parts. `out` and `given` are in rank order."""
        received, sent = [row[self.rank] for row in numels], list(numels[self.rank])
        collective = partial(dist.all_to_all_single, output_split_sizes=received, input_split_sizes=sent, async_op=True)
        return self._start(collective, what, out, given)

    def pass_on(self, chunks: Tensor, to: Sequence[int], of: Sequence[Chunk], out: Tensor, what: str) -> Pending:
        """Send chunks[n] to rank to[n], and receive into out[n] the chunk of[n] = (rank, index).

        chunks: (any, ...), unchanged until `wait`.

        An all-to-all whose parts are mostly empty, since every backend has an all-to-all.
        """
        given, taken = sorted(range(len(to)), key=to.__getitem__), sorted(range(len(of)), key=of.__getitem__)
        counts, sources = Counter(to), Counter(rank for rank, _ in of)
        sent = chunks if given == list(range(len(to))) else torch.stack([chunks[n] for n in given])
        got = out if taken == list(range(len(of))) else torch.empty_like(out)
        swap = partial(
            dist.all_to_all_single,
            output_split_sizes=[sources[rank] for rank in range(self.size)],
            input_split_sizes=[counts[rank] for rank in range(self.size)],
            async_op=True,
        )
        pending = self._start(swap, what, got, sent)

        def collect() -> None:
            pending.wait()
            if got is not out:
                for arrived, n in zip(got, taken, strict=True):
                    out[n].copy_(arrived)

        return Pending(collect)

    def all_reduce(self, slot: Tensor, out: Tensor, what: str) -> Terms:
        """Sum `slot` over the ranks, whole on each rank."""
        pending = self._start(_all_reduce, what, slot)
        return Terms(pending, slice(0, out.numel()), lambda: [slot], lambda: None)

    def sum_small(self, values: Tensor, what: str) -> Tensor:
        """Sum a small int64 vector over the ranks, in place."""
        self._start(_all_reduce, what, values).wait()
        return values

    def close(self) -> None:
        """Drop the process group."""
        self._group = None

    def _start(self, collective: Callable[..., Any], what: str, *tensors: Tensor) -> Pending:
        sequence = self._channel.begin(what)
        work = self._in_flight.start(partial(collective, *tensors, group=self._group), what, self._others)
        return Pending(partial(self._finish, work, what, sequence))

    def _finish(self, work: dist.Work, what: str, sequence: int) -> None:
        is_recorded = self._channel.progress.is_on
        if is_recorded:
            self._channel.wait(what, sequence)
        self._in_flight.wait(work, what, self._others)
        # On an accelerator only the stream waits here. The host blocks later, in another call. So the record keeps this
        # collective until the next unit or activity begins.
        if is_recorded and self._device.type == "cpu":
            self._channel.progress.end_wait()
