"""A store for device tensors in front of a store that takes host memory, through pinned buffers and threads.

| transfer | path                                      | `wait` returns                   |
|----------|-------------------------------------------|----------------------------------|
| save     | device, stream, buffer, thread, store     | when the buffer has the bytes    |
| load     | store, thread, buffer, stream, device     | when the device has the bytes    |
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from .host_memory import HostPool
from .store import (
    Store,
    Transfer,
    check_bytes,
    check_size,
    closed_error,
    copy_on,
    stream_waits,
    unknown_key_error,
    use_device,
)

_NUM_THREADS = 4  # a thread only waits for a key; the inner store does the work


class StagedStore:
    """A Store for tensors on any device in front of `store`. Closes `store` too.

    Thread-safe, if each key has one thread at a time.

    Buffers come from `pool` and are held until the inner store has the bytes. If the pool is full, the oldest transfer
    is awaited. `wait` of a save returns before the inner store has the bytes. If the inner store then fails, `load`
    raises.
    """

    def __init__(self, store: Store, pool: HostPool) -> None:
        self._store = store
        self._pool = pool
        self.alignment_bytes = 64  # the caller's memory is only copied, so any alignment would do
        self.is_host_memory = store.is_host_memory
        self._sizes: dict[str, int] = {}
        self._last: dict[str, Future[None]] = {}  # by key: its newest transfer
        self._running: deque[tuple[str, Future[None]]] = deque()  # oldest first
        self._streams: dict[torch.device, torch.Stream] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "lowtide staging")
        self._lock = threading.Lock()
        self._is_closed = False

    def reserve(self, sizes: Iterable[int]) -> None:
        self._store.reserve(sizes)

    def save(self, key: str, values: Tensor) -> Transfer:
        with self._lock:
            check_bytes("values", values)
            if self._is_closed:
                raise closed_error(key)
            buffer = self._take(values.numel())
            # Here, not in the thread: the caller may free or change the values after `wait`, which awaits only this.
            copied = self._copy(values, into=buffer, device=values.device, after=self._now(values.device))
            self._sizes[key] = values.numel()
            future = self._begin(key, partial(self._write, key, buffer, copied, values.device))

            def wait() -> None:
                if copied is not None:
                    stream_waits(values.device, copied)
                if future.done():  # raise an error if it is already known
                    future.result()

            return Transfer(lambda: copied is None or copied.query(), wait)

    def load(self, key: str, out: Tensor) -> Transfer:
        with self._lock:
            check_bytes("out", out)
            if key not in self._sizes:
                raise closed_error(key) if self._is_closed else unknown_key_error(key)
            check_size(key, self._sizes[key], out)
            buffer = self._take(out.numel())
            future = self._begin(key, partial(self._read, key, buffer, out, self._now(out.device)))
            # The thread waits for the end of the copy, so any stream may use the result without waiting.
            return Transfer(future.done, future.result)

    def drop(self, key: str) -> None:
        with self._lock:
            if key not in self._sizes:
                raise closed_error(key) if self._is_closed else unknown_key_error(key)
            del self._sizes[key]
            self._begin(key, partial(self._store.drop, key))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._threads.shutdown()
        self._sizes.clear()
        self._last.clear()
        self._store.close()

    # -- buffers and threads --------------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> Tensor:
        """Take a buffer of the pool, and forget the transfers that have ended."""
        while self._running and self._running[0][1].done():
            key, future = self._running.popleft()
            # A dropped key: else `_last` would grow with every key that ever was.
            if key not in self._sizes and self._last.get(key) is future:
                del self._last[key]
        return self._pool.take(nbytes)

    def _begin(self, key: str, work: Callable[[], None]) -> Future[None]:
        """Run work in a thread, after all earlier work on this key."""
        future = self._last[key] = self._threads.submit(_after, self._last.get(key), work)
        self._running.append((key, future))
        return future

    def _write(self, key: str, buffer: Tensor, copied: torch.Event | None, device: torch.device) -> None:
        try:
            use_device(device)
            if copied is not None:
                copied.synchronize()
            self._store.save(key, buffer).wait()
        finally:
            self._pool.give(buffer)

    def _read(self, key: str, buffer: Tensor, out: Tensor, asked: torch.Event | None) -> None:
        try:
            use_device(out.device)
            self._store.load(key, buffer).wait()
            copied = self._copy(buffer, into=out, device=out.device, after=asked)
            if copied is not None:
                copied.synchronize()
        finally:
            self._pool.give(buffer)

    def _now(self, device: torch.device) -> torch.Event | None:
        """Record the position of the current stream. None on the CPU."""
        return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()

    def _copy(
        self, values: Tensor, into: Tensor, device: torch.device, after: torch.Event | None
    ) -> torch.Event | None:
        """Copy on a separate stream after the event `after`. Returns None if the copy is done."""
        if after is None:
            into.copy_(values)
            return None
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
        stream.wait_event(after)
        return copy_on(stream, values, into)


def _after(previous: Future[None] | None, work: Callable[[], None]) -> None:
    # Cannot deadlock, with any number of threads: work begins in the order of `submit`, so `previous` has begun.
    if previous is not None:
        previous.exception()  # waits
    work()
