"""Keep bytes under a key: the contract of a store, and the store in host memory.

| store       | bytes are kept in       | takes tensors   | a transfer runs                            |
|-------------|-------------------------|-----------------|--------------------------------------------|
| HostStore   | host memory of its pool | on any device   | CPU: at once; device: on a separate stream |
| FileStore   | a file                  | in host memory  | in its threads                             |
| StagedStore | another store           | on any device   | through host buffers, in threads           |
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from .host_memory import HostPool, OffloadError
from .tensor_chunk import round_up


@dataclass(frozen=True)
class Transfer:
    """Bytes on their way into a store or out of it."""

    asks: Callable[[], bool]
    wait: Callable[[], object]
    """Waits until the caller's bytes may be used: by the host, or for a device tensor by its current stream.

    Raises OffloadError if the transfer failed, at every call.
    """

    @property
    def is_done(self) -> bool:
        """True if `wait` would not block. Also True after a failure."""
        return bool(self.asks())


FINISHED = Transfer(lambda: True, lambda: None)
"""A transfer that completed in the call that started it."""


class Store(Protocol):
    """Keeps bytes under keys. Transfers of a key run in the order of the calls."""

    alignment_bytes: int
    """Alignment of buffers for the fast path. Other addresses work, but slower."""

    is_host_memory: bool
    """True if the kept bytes take host memory."""

    def reserve(self, sizes: Iterable[int]) -> None:
        """Ensure room for keys of these sizes, the most that will be kept at a time.

        Raises OffloadError with the numbers if there is too little.
        """

    def save(self, key: str, values: Tensor) -> Transfer:
        """Start to keep the bytes under the key, replacing older bytes. values: (n,) uint8 contiguous.

        The values must be final when this is called, on the host for host memory, and unchanged until `Transfer.wait`.
        Raises ValueError for other tensors.
        """

    def load(self, key: str, out: Tensor) -> Transfer:
        """Start to read the bytes, and keep them. out: (n,) uint8 contiguous of the saved size, not touched until
        `Transfer.wait`.

        Raises ValueError for other tensors, OffloadError for an unknown key.
        """

    def drop(self, key: str) -> None:
        """Stop keeping the bytes, after running transfers. Raises OffloadError for an unknown key."""

    def close(self) -> None:
        """Wait for running transfers and release everything. May be called twice."""


class HostStore:
    """Keeps copies in host memory. Raises OffloadError above the pool's limit.

    Device tensors are copied on a separate stream, after all work queued on the current stream.

    [Note: dropped memory]
    The pool reuses host memory without regard to streams, so it gets memory back when the last copy is done. `drop`
    does not wait for this. `save` does, before it would let the pool grow.
    """

    alignment_bytes = 64  # a cache line
    is_host_memory = True

    def __init__(self, pool: HostPool | None = None, pinned: bool = False) -> None:
        """pinned: pin the memory, if no pool is given."""
        self.pool = pool if pool is not None else HostPool(alignment=self.alignment_bytes, pinned=pinned)
        self._owns_pool = pool is None
        self._streams: dict[torch.device, torch.Stream] = {}
        self._kept: dict[str, Tensor] = {}
        self._running: dict[str, torch.Event] = {}
        self._dropped: deque[tuple[torch.Event, Tensor]] = deque()  # [Note: dropped memory]
        self._is_closed = False

    def reserve(self, sizes: Iterable[int]) -> None:
        """Do nothing: memory is allocated on `save`."""

    def save(self, key: str, values: Tensor) -> Transfer:
        check_bytes("values", values)
        if self._is_closed:
            raise closed_error(key)
        kept = self._kept.get(key)
        if kept is None or kept.numel() != values.numel():
            if kept is not None:
                self.drop(key)
            kept = self._kept[key] = self._take(values.numel())
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
        kept = self._kept.pop(key)
        if running := self._running.pop(key, None):
            self._dropped.append((running, kept))
        else:
            self.pool.give(kept)

    def close(self) -> None:
        for key in list(self._kept):
            self.drop(key)
        for copied, kept in self._dropped:
            copied.synchronize()
            self.pool.give(kept)
        self._dropped.clear()
        self._is_closed = True
        if self._owns_pool:
            self.pool.close()

    def _take(self, nbytes: int) -> Tensor:
        """Take a buffer of the pool. Waits for copies of dropped memory rather than let the pool grow."""
        pool = self.pool
        while self._dropped:
            copied, kept = self._dropped[0]
            if not copied.query():
                if pool.bytes_in_use + round_up(nbytes, pool.alignment) <= pool.peak_bytes:
                    break
                copied.synchronize()
            self._dropped.popleft()
            pool.give(kept)
        return pool.take(nbytes)

    def _copy(self, key: str, values: Tensor, into: Tensor, caller: Tensor) -> Transfer:
        running = self._running.pop(key, None)
        if caller.device.type == "cpu":
            # A copy of this key to or from a device may still use the kept bytes.
            if running is not None:
                running.synchronize()
            into.copy_(values)
            return FINISHED
        stream = self._streams.get(caller.device)
        if stream is None:
            stream = self._streams[caller.device] = torch.Stream(caller.device)
        stream.wait_stream(torch.accelerator.current_stream(caller.device))
        if running is not None:  # its copy may run on the stream of another device
            stream.wait_event(running)
        event = self._running[key] = copy_on(stream, values, into)
        # The transfer does not keep the caller's tensor alive: the caller waits before it frees the tensor.
        return Transfer(event.query, partial(stream_waits, caller.device, event))


def copy_on(stream: torch.Stream, values: Tensor, out: Tensor) -> torch.Event:
    """Start a copy on a stream of the device. Returns the event that ends it. Any thread may call it.

    `with stream:` would keep the stream before it in the object, and two threads may be there at once.
    """
    index, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    # This makes the stream's device current too: hence the index.
    torch.accelerator.set_stream(stream)
    try:
        out.copy_(values, non_blocking=True)
        return stream.record_event()
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def use_device(device: torch.device) -> None:
    """Set the thread's current device, which begins as device 0.

    torch sets it again after it has recorded, awaited or freed an event, which takes memory of device 0 for a context.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def stream_waits(device: torch.device, event: torch.Event) -> None:
    """Let later work on the device's current stream wait for the event."""
    torch.accelerator.current_stream(device).wait_event(event)


def check_bytes(name: str, values: Tensor) -> None:
    """Raise ValueError unless the tensor is (n,) uint8 and contiguous."""
    if values.dtype != torch.uint8 or values.dim() != 1 or not values.is_contiguous():
        layout = "contiguous" if values.is_contiguous() else "not contiguous"
        raise ValueError(
            f"{name}: expected a contiguous tensor of uint8 with one dim, found {values.dtype} of shape "
            f"{tuple(values.shape)}, {layout}. View it as bytes with `tensor.view(-1).view(torch.uint8)`."
        )


def check_size(key: str, saved: int, out: Tensor) -> None:
    """Raise ValueError unless the tensor has as many bytes as were saved."""
    if out.numel() != saved:
        raise ValueError(f"out: expected the {saved:,} bytes saved under '{key}', found {out.numel():,}")


def unknown_key_error(key: str) -> OffloadError:
    return OffloadError(f"expected a saved key, found '{key}', which was never saved or has been dropped")


def closed_error(key: str) -> OffloadError:
    return OffloadError(f"expected an open store for '{key}', found it closed")


_Listener = tuple[int, Callable[[str], None], Callable[[], None]]
_listeners: list[_Listener] = []


def listen(on_wait: Callable[[str], None], on_end_wait: Callable[[], None]) -> Callable[[], None]:
    """Call back on each wait of this thread ("transfer of layers.7") and on its end, until the result is called."""
    listener = (threading.get_ident(), on_wait, on_end_wait)
    _listeners.append(listener)

    def stop() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return stop


def wait_for(transfer: Transfer, what: str) -> None:
    """Wait for a transfer and report it to listeners. what: the name of the moved bytes."""
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

    open: loads the values, (numel,) of dtype, valid until another range is opened. Changes to them are kept if the
    maker of the range allows changes.
    """

    numel: int
    dtype: torch.dtype
    open: Callable[[], Tensor]

    def part(self, low: int, high: int) -> StoredRange:
        return StoredRange(high - low, self.dtype, lambda: self.open()[low:high])


Memory = Tensor | StoredRange
"""(n,) values, in memory or in a store."""
