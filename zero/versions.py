"""A second version of parameters and states: of a delayed update, and of a speculative one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..offload import OldVersion, huge_zeros
from .group import ShardedGroup, values_of
from .host_update import HostUpdate


@dataclass(frozen=True)
class Version:
    """The parameters of a shard from element `start` on; those before it are their master weights, rounded."""

    start: int
    values: Tensor  # (shard_numel - start,)


class ParameterVersions:
    """A second version: the old ones of a speculative update, or what a delayed one makes of them while they are used.

    It is beside them, but for what master weights in memory hold already:

                      |  in memory  |   in a store
    without a master  |  `values`   |  `values`           copied from the shard
    with one          |  master     |  `values`           the rounded copy
    """

    def __init__(self, group: ShardedGroup, master: Tensor | None, host: HostUpdate | None) -> None:
        """master: weights of the first elements, beside the parameters. host: where these are updated, if elsewhere."""
        self._group = group
        self._master = master
        self._host = host
        self.ahead = Version(0 if master is None else master.numel(), torch.empty(0, dtype=group.plan.dtype))
        """What the parameters become by a delayed update; without memory until there is one."""

    def begin(self) -> None:
        """Memory for what the parameters become; takes none where there is some from the last time."""
        numel = self._group.layout.shard_numel - self.ahead.start
        if self.ahead.values.numel() != numel:
            dtype, device = self._group.plan.dtype, self._group.shard.device
            values = huge_zeros(numel, dtype, device) if self._host is None else self._host.lasting(numel, dtype)
            self.ahead = Version(self.ahead.start, values)

    def put(self, version: Version) -> None:
        """The parameters become that version of them; master weights are of it already."""
        shard = values_of(self._group.own_values(changes=True))
        if self._master is not None:
            shard[: version.start].copy_(self._master)
        shard[version.start :].copy_(version.values, non_blocking=True)

    def keep(self) -> OldVersion:
        """What they are now."""
        start = self.ahead.start
        old = Version(start, values_of(self._group.own_values())[start:].clone())
        return OldVersion(old.values.nbytes, lambda: self.put(old))


class DelayedUpdate:
    """The update with the gradients of step t, made during step t + 1, which computes with the parameters before it.

        training   | forward, backward t | take over t-1 | forward, backward t+1 | take over t | forward, ...
        thread     |      update t-1     |               |       update t        |             |  update t+1

    | state   | from         | to          | what is where                                                |
    |---------|--------------|-------------|--------------------------------------------------------------|
    | none    | `end`        | `start`     | parameters are those of the last update                      |
    | pending | `start`      | `end`       | the thread alone may touch states and master weights, until  |
    |         |              |             | `wait`; what parameters become is beside them                |

    On a device the thread has a stream of its own, which begins with what the training's stream was given until
    `start`; what that is given after `wait` comes after the update.

    Source: ZeRO-Offload, arXiv 2101.06840, section 5.2, "one-step delayed parameter update".
    """

    def __init__(self, device: torch.device) -> None:
        """device: of the model."""
        self._device = device
        self._thread = ThreadPoolExecutor(1, "lowtide update", partial(_use, device))
        self._stream: torch.Stream | None = None  # made with the first update
        self._running: Future[torch.Event | None] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether an update was started whose result was not taken over."""
        return self._running is not None

    def start(self, update: Callable[[], None], uses: Iterable[Tensor] = ()) -> None:
        """Begins to run `update`, which nobody else may hinder until `wait` has returned.

        uses: tensors that it lets go of.
        """
        assert self._running is None
        begun = None
        if self._device.type != "cpu":
            self._stream = self._stream or torch.Stream(self._device)
            begun = torch.accelerator.current_stream(self._device).record_event()
            for tensor in uses:
                if tensor.device == self._device:
                    tensor.record_stream(self._stream)
        self._running = self._thread.submit(self._run, update, begun)

    def wait(self) -> BaseException | None:
        """Returns when no update runs: the error that has ended it, if any."""
        if self._running is None:
            return None
        error = self._running.exception()
        if error is None:
            ended = self._running.result()
            if ended is not None:
                torch.accelerator.current_stream(self._device).wait_event(ended)
        return error

    def _run(self, update: Callable[[], None], begun: torch.Event | None) -> torch.Event | None:
        if begun is None or self._stream is None:
            update()
            return None
        begun.synchronize()  # this thread may write to host memory that the device was still to read
        with self._stream:
            update()
            return self._stream.record_event()

    def end(self) -> None:
        """The result was taken over, or does not matter any more."""
        self.wait()
        self._running = None

    def close(self) -> None:
        """Waits for what runs, and ends the thread."""
        self._thread.shutdown()


def _use(device: torch.device) -> None:
    """A thread begins with device 0 as the current one."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


class Speculation:
    """A step whose shards are updated as their gradients come, taken back if the norm or a bad value asks for it.

        backward   update n-1, update n-2, ..., update rest        with old values kept
        step       norm within the limit: forget them    else: restore all, and update again in the plain way

    The old values of states in memory are copied, as many bytes as the states take; those in a store stay there, and
    the new ones are written beside them. While it is not open nothing is kept.
    """

    def __init__(self) -> None:
        self._old: list[OldVersion] = []
        self.is_open = False

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that are held now."""
        return sum(old.nbytes for old in self._old)

    def begin(self) -> None:
        self.is_open = True

    def keep(self, make_old: Callable[[], OldVersion]) -> None:
        """What is changed from now on can be taken back."""
        if self.is_open:
            self._old.append(make_old())

    def roll_back(self) -> None:
        """Puts everything back, the last first."""
        while self._old:
            self._old.pop().restore()
        self.is_open = False

    def forget(self) -> None:
        """The step counts: nothing will be asked for again."""
        self._old.clear()
        self.is_open = False
