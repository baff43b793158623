"""Device memory into a store that takes host memory only: through pinned buffers, in threads of its own.

| transfer | way                                                | the caller's bytes are free, or there    |
|----------|----------------------------------------------------|------------------------------------------|
| save     | device, a stream of its own, buffer, thread, store | when the copy into the buffer is made    |
| load     | store, thread, buffer, a stream of its own, device | when the thread has seen the copy's end  |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from .host_memory import HostPool
from .store import Store, Transfer, Underway, check_bytes, check_size, closed_error, stream_waits, unknown_key_error

_NUM_THREADS = 4  # each waits for one key at a time; the store underneath does the work


class StagedStore:
    """A Store for tensors of any device in front of `store`, which it closes too.

    Host memory is that of `pool`, from the copy until the store underneath has the bytes: where the pool has no room,
    the oldest transfer is waited for. A save may be waited for as soon as the copy off the device is made; if the store
    then fails, `load` says so. To be used by one thread at a time.
    """

    def __init__(self, store: Store, pool: HostPool) -> None:
        self._store = store
        self._pool = pool
        self.alignment_bytes = 64  # of the caller's memory, which is only ever copied
        self.is_host_memory = store.is_host_memory
        self._sizes: dict[str, int] = {}
        self._last: dict[str, Future[None]] = {}  # by key, what was asked for last
        self._running: deque[tuple[str, Future[None]]] = deque()  # oldest first
        self._streams: dict[torch.device, torch.Stream] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "lowtide staging")
        self._is_closed = False

    def reserve(self, sizes: Iterable[int]) -> None:
        self._store.reserve(sizes)

    @property
    def bytes_held(self) -> int:
        return sum(self._sizes.values())

    def save(self, key: str, values: Tensor) -> Transfer:
        check_bytes("values", values)
        if self._is_closed:
            raise closed_error(key)
        buffer = self._take(values.numel())
        copied = self._copy(values, into=buffer, device=values.device, after=self._now(values.device))
        self._sizes[key] = values.numel()
        future = self._begin(key, partial(self._write, key, buffer, copied))

        def wait() -> None:
            if copied is not None:
                stream_waits(values.device, copied)
            if future.done():  # an error that is known by then is raised
                _raise_error(future)

        return Underway(lambda: copied is None or copied.query(), wait)

    def load(self, key: str, out: Tensor) -> Transfer:
        check_bytes("out", out)
        if key not in self._sizes:
            raise closed_error(key) if self._is_closed else unknown_key_error(key)
        check_size(key, self._sizes[key], out)
        buffer = self._take(out.numel())
        future = self._begin(key, partial(self._read, key, buffer, out, self._now(out.device)))
        return Underway(future.done, partial(_raise_error, future))  # any stream may use what a thread has seen copied

    def drop(self, key: str) -> None:
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

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> Tensor:
        """A buffer of the pool, which has room again when enough transfers have ended."""
        while self._running and (self._running[0][1].done() or not self._pool.has_room(nbytes)):
            key, future = self._running.popleft()
            future.exception()  # waits; whoever asked for it hears of the error
            if key not in self._sizes and self._last.get(key) is future:
                del self._last[key]
        return self._pool.take(nbytes)

    def _begin(self, key: str, work: Callable[[], None]) -> Future[None]:
        """Does it in a thread, after what was asked for before on this key."""
        future = self._last[key] = self._threads.submit(_after, self._last.get(key), work)
        self._running.append((key, future))
        return future

    def _write(self, key: str, buffer: Tensor, copied: torch.Event | None) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            self._store.save(key, buffer).wait()
        finally:
            self._pool.give(buffer)

    def _read(self, key: str, buffer: Tensor, out: Tensor, asked: torch.Event | None) -> None:
        try:
            self._store.load(key, buffer).wait()
            copied = self._copy(buffer, into=out, device=out.device, after=asked)
            if copied is not None:
                copied.synchronize()
        finally:
            self._pool.give(buffer)

    def _now(self, device: torch.device) -> torch.Event | None:
        """What the current stream has been given so far."""
        return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()

    def _copy(
        self, values: Tensor, into: Tensor, device: torch.device, after: torch.Event | None
    ) -> torch.Event | None:
        """Copies on a stream beside the work; None where it is done on return."""
        if after is None:
            into.copy_(values)
            return None
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
        stream.wait_event(after)
        with stream:
            into.copy_(values, non_blocking=True)
            return stream.record_event()


def _raise_error(future: Future[None]) -> None:
    error = future.exception()
    if error is not None:
        raise error


def _after(previous: Future[None] | None, work: Callable[[], None]) -> None:
    if previous is not None:
        previous.exception()  # waits
    work()
