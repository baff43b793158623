"""Messages between ranks with the same data and other pipeline stages."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..watch.progress import Progress
from .errors import CollectiveError, no_answer
from .pending import Pending
from .trail import Trail
from .world import World

NUM_TAGS = 1 << 20  # what a message's own tag stays below
_HEADER_TAG = NUM_TAGS  # objects have the tags above


class Peers:
    """Sends tensors to and receives them from other places of the pipe axis.

    A message is told from others by its tag, so messages of different tags may be received in any order. Gloo keeps the
    tags apart; NCCL has none, and there both ends must start their messages in the same order.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        first_tag: int,
        world: World,
        trail: Trail,
        channel: int,
    ) -> None:
        """ranks: the global rank of each place of the axis. group: of these ranks; None where there is one alone.

        channel: for what is waited for, in the record of this rank's progress.
        """
        self._ranks = ranks
        self._group = group
        self._first_tag = first_tag
        self._world = world
        self._trail = trail
        self._channel = channel

    @property
    def progress(self) -> Progress:
        """The record of what this rank does."""
        return self._world.progress

    def send(self, tensor: Tensor, place: int, tag: int, what: str) -> Pending:
        """Starts to send a contiguous tensor, which must stay as it is until `wait` returns."""
        self._trail.note(what)
        if not tensor.numel():
            return Pending()
        work = self._started(dist.isend, tensor, place, tag, what)
        return Pending(lambda: self._wait(work, place, what), work.is_completed)

    def receive(self, out: Tensor, place: int, tag: int, what: str) -> Pending:
        """Starts to receive into a contiguous tensor, of the shape and dtype that is sent."""
        self._trail.note(what)
        if not out.numel():
            return Pending()
        work = self._started(dist.irecv, out, place, tag, what)
        return Pending(lambda: self._wait(work, place, what))

    def send_object(self, value: Any, place: int, tag: int, what: str) -> Pending:
        """Starts to send a small picklable object: shapes, at start-up."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._world.device)
        size = torch.tensor([data.numel()], dtype=torch.int64, device=self._world.device)
        works = [self._started(dist.isend, part, place, _HEADER_TAG + tag, what) for part in (size, data)]

        def wait() -> None:
            for work, _ in zip(works, (size, data), strict=True):  # the tensors live until they are sent
                self._wait(work, place, what)

        return Pending(wait)

    def receive_object(self, place: int, tag: int, what: str) -> Any:
        """Waits for an object that was sent with `send_object`."""
        self._trail.note(what)
        size = torch.zeros(1, dtype=torch.int64, device=self._world.device)
        self._wait(self._started(dist.irecv, size, place, _HEADER_TAG + tag, what), place, what)
        data = torch.empty(int(size), dtype=torch.uint8, device=self._world.device)
        self._wait(self._started(dist.irecv, data, place, _HEADER_TAG + tag, what), place, what)
        return pickle.loads(data.cpu().numpy().tobytes())

    def close(self) -> None:
        """Lets go of the process group."""
        self._group = None

    def _started(
        self, start: Callable[..., dist.Work | None], tensor: Tensor, place: int, tag: int, what: str
    ) -> dist.Work:
        assert 0 <= tag < 2 * NUM_TAGS, tag
        try:
            work = start(tensor, self._ranks[place], self._group, self._first_tag + tag)
        except RuntimeError as error:  # the other end of the connection is gone
            raise self._error(place, what, 0.0, error) from error
        assert work is not None
        return work

    def _wait(self, work: dist.Work, place: int, what: str) -> None:
        self._world.progress.wait(what, self._channel, 0, self._ranks[place], 1, 1)
        started = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._world.timeout_seconds))
        except RuntimeError as error:
            raise self._error(place, what, time.monotonic() - started, error) from error
        finally:
            self._world.progress.go_on()

    def _error(self, place: int, what: str, waited_seconds: float, error: RuntimeError) -> CollectiveError:
        rank = self._ranks[place]
        text = no_answer(self._world.rank, what, [rank], waited_seconds, error)
        return CollectiveError(text + self._trail.compare([rank]))
