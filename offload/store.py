"""A place that keeps bytes under a key: the contract, and the place that is memory.

| store       | bytes are kept in             | tensors to save and load | a transfer runs                         |
|-------------|-------------------------------|--------------------------|-----------------------------------------|
| HostStore   | host memory, of its pool      | on any device            | CPU: at once; else: on a stream beside  |
| FileStore   | a file                        | in host memory           | in threads of its own                   |
| StagedStore | another store                 | on any device            | through host buffers, in threads        |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from .host_memory import HostPool, OffloadError


class Transfer(Protocol):
    """Bytes on their way into a store or out of it."""

    def wait(self) -> None:
        """Returns when the caller's bytes may be used: by the host, or for a tensor of a device by its current stream.

        Raises OffloadError for what went wrong, at every call.
        """

    @property
    def is_done(self) -> bool:
        """True when `wait` would not wait, whether it went well or not."""


class Store(Protocol):
    """Keeps bytes under keys. Transfers of one key happen in the order in which they were asked for."""

    alignment_bytes: int
    """Of the address of a buffer, for the fast way; any other address is right too."""

    is_host_memory: bool
    """Whether what is kept takes as much host memory as it has bytes."""

    def reserve(self, sizes: Iterable[int]) -> None:
        """Makes sure of room for keys of these sizes, which are all that will be kept at once.

        Raises OffloadError, with the numbers, where there is not enough.
        """

    def save(self, key: str, values: Tensor) -> Transfer:
        """Keeps the bytes under the key, in place of what was there. values: (n,) uint8 contiguous.

        They must stay as they are, and in host memory be there for the host to see, until the transfer has been waited
        for. ValueError for any other kind of tensor.
        """

    def load(self, key: str, out: Tensor) -> Transfer:
        """Brings the bytes back, and keeps them. out: (n,) uint8 contiguous, n as it was saved; not to be touched until
        the transfer has been waited for.

        ValueError for any other kind or size of tensor, OffloadError for a key that is not kept.
        """

    def drop(self, key: str) -> None:
        """Keeps the bytes no longer, once the transfers that run have ended. OffloadError for a key not kept."""

    def close(self) -> None:
        """Ends the transfers that run, and gives everything back. May be called twice."""

    @property
    def bytes_held(self) -> int:
        """The sum of the sizes that were saved and not dropped."""


@dataclass(frozen=True)
class Underway:
    """A transfer that somebody else makes: a stream, or a thread."""

    asks: Callable[[], bool]  # whether it is done
    wait: Callable[[], None]

    @property
    def is_done(self) -> bool:
        return bool(self.asks())


FINISHED: Transfer = Underway(lambda: True, lambda: None)
"""A transfer that was done when it was asked for."""


class HostStore:
    """Keeps copies in host memory; OffloadError above the pool's limit.

    Tensors of a device are copied on a stream beside the work, after what the current stream has been given so far.
    """

    alignment_bytes = 64  # a cache line
    is_host_memory = True

    def __init__(self, pool: HostPool | None = None, pinned: bool = False) -> None:
        """pinned: whether memory of its own is, where no pool is given."""
        self.pool = pool if pool is not None else HostPool(alignment=self.alignment_bytes, pinned=pinned)
        self._owns_pool = pool is None
        self._streams: dict[torch.device, torch.Stream] = {}
        self._kept: dict[str, Tensor] = {}
        self._running: dict[str, torch.Event] = {}
        self._is_closed = False

    def reserve(self, sizes: Iterable[int]) -> None:
        """Does nothing: memory is taken when it is saved to."""

    @property
    def bytes_held(self) -> int:
        return sum(kept.numel() for kept in self._kept.values())

    def save(self, key: str, values: Tensor) -> Transfer:
        check_bytes("values", values)
        if self._is_closed:
            raise closed_error(key)
        kept = self._kept.get(key)
        if kept is None or kept.numel() != values.numel():
            if kept is not None:
                self.drop(key)
            kept = self._kept[key] = self.pool.take(values.numel())
        return self._copy(key, values, into=kept, caller=values)

    def load(self, key: str, out: Tensor) -> Transfer:
        check_bytes("out", out)
        if key not in self._kept:
            raise closed_error(key) if self._is_closed else unknown_key_error(key)
        check_size(key, self._kept[key].numel(), out)
        return self._copy(key, self._kept[key], into=out, caller=out)

    def drop(self, key: str) -> None:
        if key not in self._kept:
            raise closed_error(key) if self._is_closed else unknown_key_error(key)
        if running := self._running.pop(key, None):
            running.synchronize()  # host memory is used again without regard to streams
        self.pool.give(self._kept.pop(key))

    def close(self) -> None:
        for key in list(self._kept):
            self.drop(key)
        self._is_closed = True
        if self._owns_pool:
            self.pool.close()

    def _copy(self, key: str, values: Tensor, into: Tensor, caller: Tensor) -> Transfer:
        running = self._running.pop(key, None)
        if caller.device.type == "cpu":
            if running is not None:
                running.synchronize()
            into.copy_(values)
            return FINISHED
        stream = self._streams.get(caller.device)
        if stream is None:
            stream = self._streams[caller.device] = torch.Stream(caller.device)
        stream.wait_stream(torch.accelerator.current_stream(caller.device))
        if running is not None:  # it may be on the stream of another device
            stream.wait_event(running)
        with stream:
            into.copy_(values, non_blocking=True)
            event = self._running[key] = stream.record_event()
        # Does not keep the caller's tensor: the store knows of the copy until the key is dropped.
        return Underway(event.query, partial(stream_waits, caller.device, event))


def stream_waits(device: torch.device, event: torch.Event) -> None:
    """What a device is given from now on comes after the event."""
    torch.accelerator.current_stream(device).wait_event(event)


def check_bytes(name: str, values: Tensor) -> None:
    """Raises ValueError unless it is (n,) uint8 and contiguous."""
    if values.dtype != torch.uint8 or values.dim() != 1 or not values.is_contiguous():
        layout = "contiguous" if values.is_contiguous() else "not contiguous"
        raise ValueError(
            f"{name}: expected a contiguous tensor of uint8 with one dim, found {values.dtype} of shape "
            f"{tuple(values.shape)}, {layout}; view it as bytes with `tensor.view(-1).view(torch.uint8)`"
        )


def check_size(key: str, saved: int, out: Tensor) -> None:
    """Raises ValueError unless the tensor has as many bytes as were saved."""
    if out.numel() != saved:
        raise ValueError(f"out: expected {saved:,} bytes, as many as were saved under '{key}', found {out.numel():,}")


def unknown_key_error(key: str) -> OffloadError:
    return OffloadError(f"expected a key that was saved, found '{key}', which never was or has been dropped")


def closed_error(key: str) -> OffloadError:
    return OffloadError(f"expected an open store for '{key}', found it closed")


_Listener = tuple[int, Callable[[str], None], Callable[[], None]]
_listeners: list[_Listener] = []


def listen(on_wait: Callable[[str], None], on_end_wait: Callable[[], None]) -> Callable[[], None]:
    """Tells of each wait of this thread, "transfer of layers.7", and of its end, until the result is called."""
    listener = (threading.get_ident(), on_wait, on_end_wait)
    _listeners.append(listener)

    def stop() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return stop


def wait_for(transfer: Transfer, what: str) -> None:
    """As `transfer.wait()`. what: the name of what is moved."""
    if not _listeners or transfer.is_done:
        transfer.wait()
        return
    here = threading.get_ident()
    told = [listener for listener in _listeners if listener[0] == here]
    for _, on_wait, _ in told:
        on_wait(f"transfer of {what}")
    try:
        transfer.wait()
    finally:
        for _, _, on_end_wait in told:
            on_end_wait()


@dataclass(frozen=True)
class StoredRange:
    """A range of values in a store.

    open: brings them, (numel,) of dtype, until another range is opened. What is changed in them is kept, where whoever
    made the range said that it is for change.
    """

    numel: int
    dtype: torch.dtype
    open: Callable[[], Tensor]

    def part(self, low: int, high: int) -> StoredRange:
        return StoredRange(high - low, self.dtype, lambda: self.open()[low:high])


Memory = Tensor | StoredRange
"""Where values are, (n,): in memory, or in a store."""
