"""Messages between ranks with the same data and other pipeline stages."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..watch.progress import Progress
from .axis import Pending, Transport
from .in_flight import FlightRecorder, InFlight
from .world import World

NUM_TAGS = 1 << 20  # what a message's own tag stays below
_HEADER_TAG = NUM_TAGS  # objects have the tags above


class P2P:
    """Sends tensors to and receives them from other places of the pipe axis.

    [Note: messages without tags]
    gloo tells messages apart by their tags, so they may be received in any order. NCCL has no tags: messages between
    two ranks match in the order in which they were started, and each keeps the next one of its communicator waiting
    until both ends have come. So there a communicator has messages of one way alone, to later places or to earlier
    ones: no two ranks can both wait for the other to receive, and both ways are used at a time. Both ends must start
    the messages of one way in the same order. All ranks' lists of a schedule are parts of one order (see [Note: an
    order that cannot deadlock] in pipe/schedules/passes.py), and so is everything else that is sent here. Hence it is
    also safe where a message blocks the host until its other end has come, as the first one of two ranks does.
    Source of one group for each way: Megatron-LM, megatron/core/pipeline_parallel/p2p_communication.py.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        ways: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None],
        first_tag: int,
        world: World,
        trail: FlightRecorder,
        works: InFlight,
        channel: int,
        on_host: Transport,
    ) -> None:
        """ranks: the global rank of each place of the axis. channel: for what is waited for, in the record of progress.

        ways: groups of these ranks, for messages to later places and to earlier ones; None where there is one alone.
        on_host: between these ranks, for values of the CPU.
        """
        self._ranks = ranks
        self._place = ranks.index(world.rank)
        self._ways: tuple[dist.ProcessGroup | None, ...] = ways
        self._first_tag = first_tag
        self._world = world
        self._trail = trail
        self._works = works
        self._channel = channel
        self._on_host = on_host
        # gloo has no messages of a device's tensors
        self._is_staged = world.waits_on_host and world.device.type != "cpu"

    @property
    def progress(self) -> Progress:
        """The record of what this rank does."""
        return self._world.progress

    def send(self, tensor: Tensor, place: int, tag: int, what: str) -> Pending:
        """Starts to send a contiguous tensor, which must stay as it is until `wait` returns."""
        self._trail.note(what)
        if not tensor.numel():
            return Pending()
        work = self._started(dist.isend, tensor.cpu() if self._is_staged else tensor, place, tag, what)
        # A device's is not asked how far it is: when memory is given back would depend on the time, and so would the
        # addresses of all that is taken after it.
        return Pending(lambda: self._wait(work, place, what), work.is_completed if self._world.waits_on_host else None)

    def receive(self, out: Tensor, place: int, tag: int, what: str) -> Pending:
        """Starts to receive into a contiguous tensor, of the shape and dtype that is sent."""
        self._trail.note(what)
        if not out.numel():
            return Pending()
        arriving = torch.empty_like(out, device="cpu") if self._is_staged else out
        work = self._started(dist.irecv, arriving, place, tag, what)

        def finish() -> None:
            self._wait(work, place, what)
            if arriving is not out:
                out.copy_(arriving)

        return Pending(finish)

    def exchange(self, given: Tensor, out: Tensor, place: int, tag: int, what: str) -> Pending:
        """Starts to send `given` and to receive `out`, where the other rank does the same.

        The earlier place's comes first. A rank that exchanges with several goes through them in their order.
        """
        if place > self._place:
            pending = [self.send(given, place, tag, what), self.receive(out, place, tag, what)]
        else:
            pending = [self.receive(out, place, tag, what), self.send(given, place, tag, what)]

        def finish() -> None:
            for one in pending:
                one.wait()

        return Pending(finish)

    def send_object(self, value: Any, place: int, tag: int, what: str) -> Pending:
        """Starts to send a small picklable object: shapes, at start-up."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._device)
        size = torch.tensor([data.numel()], dtype=torch.int64, device=self._device)
        works = [self._started(dist.isend, part, place, _HEADER_TAG + tag, what) for part in (size, data)]

        def wait() -> None:
            for work, _ in zip(works, (size, data), strict=True):  # the tensors live until they are sent
                self._wait(work, place, what)

        return Pending(wait)

    def receive_object(self, place: int, tag: int, what: str) -> Any:
        """Waits for an object that was sent with `send_object`."""
        self._trail.note(what)
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._wait(self._started(dist.irecv, size, place, _HEADER_TAG + tag, what), place, what)
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self._wait(self._started(dist.irecv, data, place, _HEADER_TAG + tag, what), place, what)
        return pickle.loads(data.cpu().numpy().tobytes())

    def sum_on_host(self, values: Tensor, what: str) -> Tensor:
        """The exact sum over the axis of a small int64 vector of the CPU. Waits for its hosts, and for no device."""
        total: Tensor = self._on_host.sum_small(values, what)
        return total

    def close(self) -> None:
        """Lets go of the process groups."""
        self._ways = (None, None)
        self._on_host.close()

    @property
    def _device(self) -> torch.device:
        """Of what is sent."""
        return torch.device("cpu") if self._is_staged else self._world.device

    def _started(
        self, start: Callable[..., dist.Work | None], tensor: Tensor, place: int, tag: int, what: str
    ) -> dist.Work:
        assert 0 <= tag < 2 * NUM_TAGS, tag
        is_to_later = (place > self._place) == (start is dist.isend)
        group, rank = self._ways[0 if is_to_later else 1], self._ranks[place]
        return self._works.start(lambda: start(tensor, rank, group, self._first_tag + tag), what, [rank])

    def _wait(self, work: dist.Work, place: int, what: str) -> None:
        self._world.progress.wait(what, self._channel, 0, self._ranks[place], 1, 1)
        try:
            self._works.wait(work, what, [self._ranks[place]])
        finally:
            self._world.progress.go_on()
