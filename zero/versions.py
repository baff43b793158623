"""Second versions of parameters and states, for delayed and speculative updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from ..offload import OldVersion, huge_zeros, use_device
from .group import ShardedGroup, values_of
from .host_update import HostUpdate

Running = Future[torch.Event | None]
"""An update of the thread, with the event that ends it on a device."""


class ParameterVersions:
    """A second version of parameters: the old values of a speculative update, or the results of a delayed update.

    A version is the last elements of the shard. The first need no copy if their master weights are in memory:

                          |  in memory  |   in a store
        without a master  |  `values`   |  `values`           copied from the shard
        with a master     |  master     |  `values`           the rounded copy
    """

    def __init__(self, group: ShardedGroup, master: Tensor | None, host: HostUpdate | None) -> None:
        """master: separate master weights of the first elements. host: set if the host updates them."""
        self._group = group
        self._master = master
        self._host = host
        self._start = 0 if master is None else master.numel()  # of a version in the shard
        self.ahead = torch.empty(0, dtype=group.plan.dtype)
        """The version after a delayed update. Takes memory with the first such update."""

    def begin(self) -> None:
        """Take memory for `ahead`, unless it exists."""
        numel = self._group.layout.shard_numel - self._start
        if self.ahead.numel() != numel:
            dtype, device = self._group.plan.dtype, self._group.shard.device
            self.ahead = huge_zeros(numel, dtype, device) if self._host is None else self._host.lasting(numel, dtype)

    def put(self, version: Tensor) -> None:
        """Set the parameters to a version. Master weights already have it."""
        shard = values_of(self._group.own_values(changes=True))
        if self._master is not None:
            shard[: self._start].copy_(self._master)
        # The host does not wait. `_run` does, before it writes to these values again.
        shard[self._start :].copy_(version, non_blocking=True)

    def keep(self) -> OldVersion:
        """Copy the current parameters."""
        old = values_of(self._group.own_values())[self._start :].clone()
        return OldVersion(old.nbytes, lambda: self.put(old))


class UpdateThread:
    """Runs updates beside the training, in the order of `start`.

    An update on the host of a device's parameters, a shard at a time. Each unit waits for its shard, when it is used:

        training   | backward t | norm | wait, forward 0 | wait, forward 1 | ...
        thread     |                   | update 0, 1, 2, ...

    A delayed update: step t + 1 computes with the old parameters. The new parameters are in a second version:

        training   | forward, backward t | take over t-1 | forward, backward t+1 | take over t | forward, ...
        thread     |      update t-1     |               |       update t        |             |  update t+1

    | state   | from         | to          | meaning                                                      |
    |---------|--------------|-------------|--------------------------------------------------------------|
    | none    | `end`        | `start`     | parameters are those of the last update                      |
    | pending | `start`      | `end`       | until `wait` only the thread may touch states and masters    |

    On a device the thread has a separate stream. An update begins after the work that the training's stream got before
    `start`; work of that stream after `wait` or `follow` comes after the update.

    Source: ZeRO-Offload, arXiv 2101.06840, section 4.1, and 5.2 for the "one-step delayed parameter update".
    """

    def __init__(self, device: torch.device) -> None:
        """device: of the model."""
        self._device = device
        self._thread = ThreadPoolExecutor(1, "lowtide update", partial(use_device, device))
        self._stream: torch.Stream | None = None  # made by the first update
        self._running: list[Running] = []

    @property
    def is_pending(self) -> bool:
        """Whether the results of updates have not been taken over."""
        return bool(self._running)

    def start(self, update: Callable[[], None], uses: Iterable[Tensor] = ()) -> Running:
        """Run `update` in the thread. Nobody may touch its data until `wait` or `follow` has returned.

        uses: tensors that it frees.
        """
        begun = None
        if self._device.type != "cpu":
            self._stream = self._stream or torch.Stream(self._device)
            begun = torch.accelerator.current_stream(self._device).record_event()
            # The thread drops the last reference, and the caching allocator knows only the stream that allocated.
            for tensor in uses:
                if tensor.device == self._device:
                    tensor.record_stream(self._stream)
        running = self._thread.submit(self._run, update, begun)
        self._running.append(running)
        return running

    def follow(self, running: Running) -> None:
        """Wait for an update. Raises the error that ended it."""
        ended = running.result()
        if ended is not None:
            torch.accelerator.current_stream(self._device).wait_event(ended)

    def wait(self) -> BaseException | None:
        """Wait for all updates. Returns the first error that ended an update, or None."""
        # `exception` waits: the pool has a single thread, but a later update may succeed after a failed update.
        errors = [error for running in self._running if (error := running.exception()) is not None]
        if errors or not self._running:
            return errors[0] if errors else None
        # The thread has a single stream, so the last event comes after all updates.
        self.follow(self._running[-1])
        return None

    def _run(self, update: Callable[[], None], begun: torch.Event | None) -> torch.Event | None:
        if begun is None or self._stream is None:
            update()
            return None
        begun.synchronize()  # the device may still read host memory that this thread writes
        with self._stream:
            update()
            return self._stream.record_event()

    def end(self) -> None:
        """End the pending updates: their results were taken over, or are not needed."""
        self.wait()
        self._running.clear()

    def close(self) -> None:
        """Wait for the updates, and end the thread."""
        self._thread.shutdown()


class Speculation:
    """A step whose shards are updated as their gradients arrive, rolled back if the norm or a bad value requires it.

        backward   update n-1, update n-2, ..., update root        old values are kept
        step       norm within the limit: forget them    else: restore all, and update again in the plain way

    Old states in memory are copied, which takes as many bytes as the states. Old states in a store stay there, and new
    values are written beside them. While it is not open, nothing is kept.
    """

    def __init__(self) -> None:
        self._old: list[OldVersion] = []
        self.is_open = False

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(old.nbytes for old in self._old)

    def begin(self) -> None:
        self._old.clear()  # a thread that still updated when the last step was accepted may have kept a value
        self.is_open = True

    def keep(self, make_old: Callable[[], OldVersion]) -> None:
        """Keep a value that changes next, if a step is open."""
        if self.is_open:
            self._old.append(make_old())

    def roll_back(self) -> None:
        """Restore all kept values, the last first."""
        while self._old:
            self._old[-1].restore()
            self._old.pop()  # only now: after an error the next call restores it
        self.is_open = False

    def forget(self) -> None:
        """Free the kept values: the step counts."""
        self._old.clear()
        self.is_open = False
