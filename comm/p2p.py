"""Point-to-point messages between pipeline stages."""

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

NUM_TAGS = 1 << 20  # tags of tensors are below this number
_HEADER_TAG = NUM_TAGS  # tags of objects start here


class P2P:
    """Sends tensors to and receives tensors from other coordinates of the pipe axis.

    [Note: messages without tags]
    gloo matches messages by tag, so they may be received in any order. NCCL has no tags: it matches the messages
    between two ranks in the order of their start, and a message blocks its communicator until both ends have started
    it. So on NCCL each direction has a communicator, and both directions run at the same time. Two ranks can then never
    wait for each other's receive. Both ends must start the messages of a direction in the same order. This holds since
    the action lists of all ranks follow a common order (see [Note: an order that cannot deadlock] in
    pipe/schedules/passes.py), and so do all other messages sent here. For the same reason it is safe if the first
    message between two ranks blocks the host. Source of a group for each direction: Megatron-LM,
    megatron/core/pipeline_parallel/p2p_communication.py.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        ways: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None],
        first_tag: int,
        world: World,
        recorder: FlightRecorder,
        in_flight: InFlight,
        channel: int,
        on_host: Transport,
    ) -> None:
        """ranks: the global rank of each coordinate. channel: the channel of the progress record for waits.

        ways: groups of these ranks for messages to later and to earlier coordinates; None if the axis has a single
        rank. on_host: a transport between these ranks for CPU tensors.
        """
        self._ranks = ranks
        self._place = ranks.index(world.rank)
        self._ways: tuple[dist.ProcessGroup | None, ...] = ways
        self._first_tag = first_tag
        self._world = world
        self._recorder = recorder
        self._in_flight = in_flight
        self._channel = channel
        self._on_host = on_host
        # gloo sends CPU tensors only
        self._is_staged = world.waits_on_host and world.device.type != "cpu"

    @property
    def progress(self) -> Progress:
        """This rank's progress record."""
        return self._world.progress

    def send(self, tensor: Tensor, place: int, tag: int, what: str) -> Pending:
        """Start to send a contiguous tensor. Do not change it until `wait` returns."""
        self._recorder.note(what)
        if not tensor.numel():
            return Pending()
        work = self._started(dist.isend, tensor.cpu() if self._is_staged else tensor, place, tag, what)
        # No poll on a device: memory would be released at a time that varies, and so would all later addresses.
        return Pending(lambda: self._wait(work, place, what), work.is_completed if self._world.waits_on_host else None)

    def receive(self, out: Tensor, place: int, tag: int, what: str) -> Pending:
        """Start to receive into a contiguous tensor of the sent shape and dtype."""
        self._recorder.note(what)
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
        """Start to send `given` and to receive `out` from a rank that does the same.

        The message of the earlier coordinate goes first. With several partners, call this in the order of their
        coordinates.
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
        """Start to send a small picklable object, such as shapes at start-up."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._device)
        size = torch.tensor([data.numel()], dtype=torch.int64, device=self._device)
        in_flight = [self._started(dist.isend, part, place, _HEADER_TAG + tag, what) for part in (size, data)]

        def wait() -> None:
            for work, _ in zip(in_flight, (size, data), strict=True):  # keeps the tensors alive until they are sent
                self._wait(work, place, what)

        return Pending(wait)

    def receive_object(self, place: int, tag: int, what: str) -> Any:
        """Wait for an object from `send_object`."""
        self._recorder.note(what)
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._wait(self._started(dist.irecv, size, place, _HEADER_TAG + tag, what), place, what)
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self._wait(self._started(dist.irecv, data, place, _HEADER_TAG + tag, what), place, what)
        return pickle.loads(data.cpu().numpy().tobytes())

    def sum_on_host(self, values: Tensor, what: str) -> Tensor:
        """Sum a small int64 CPU vector over the axis. Waits for the hosts of the axis, not for a device."""
        total: Tensor = self._on_host.sum_small(values, what)
        return total

    def close(self) -> None:
        """Drop the process groups."""
        self._ways = (None, None)
        self._on_host.close()

    @property
    def _device(self) -> torch.device:
        """The device of the tensors that are sent."""
        return torch.device("cpu") if self._is_staged else self._world.device

    def _started(
        self, start: Callable[..., dist.Work | None], tensor: Tensor, place: int, tag: int, what: str
    ) -> dist.Work:
        assert 0 <= tag < 2 * NUM_TAGS, tag
        # A message runs to a later coordinate if this rank sends it there, or receives it from an earlier coordinate.
        is_to_later = (place > self._place) == (start is dist.isend)
        group, rank = self._ways[0 if is_to_later else 1], self._ranks[place]
        return self._in_flight.start(lambda: start(tensor, rank, group, self._first_tag + tag), what, [rank])

    def _wait(self, work: dist.Work, place: int, what: str) -> None:
        # Sequence 0, since messages are not numbered; the awaited ranks are this peer alone.
        self._world.progress.wait(what, self._channel, 0, self._ranks[place], 1, 1)
        try:
            self._in_flight.wait(work, what, [self._ranks[place]])
        finally:
            self._world.progress.end_wait()
