"""State that is worked on where it rests: in host memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .host_pool import HostPool


class HostChunks:
    """As a `Window`, on buffers of a pool that keep their keys for good: nothing moves, and nothing is waited for."""

    def __init__(self, pool: HostPool, sizes: Mapping[str, int]) -> None:
        """sizes: bytes of a key; looked up when the key is first used, so it may grow."""
        self._pool = pool
        self._sizes = sizes
        self._buffers: dict[str, Tensor] = {}

    def prefetch(self, key: str) -> bool:
        return True

    def acquire(self, key: str) -> Tensor:
        """(n,) uint8: the key's bytes, to be worked on in place. KeyError for a key that was never made."""
        return self._buffers[key]

    def create(self, key: str) -> Tensor:
        """(n,) uint8, content arbitrary: the buffer of a key. Raises OffloadError where the pool has no room."""
        if key not in self._buffers:
            self._buffers[key] = self._pool.take(self._sizes[key])
        return self._buffers[key]

    def fork(self, key: str, other: str) -> Tensor:
        """(n,) uint8: a copy of a key under another one. Raises OffloadError where the pool has no room."""
        return self.create(other).copy_(self.acquire(key))

    def release(self, key: str, changed: bool) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self) -> None:
        """Gives every buffer back."""
        for buffer in self._buffers.values():
            self._pool.give(buffer)
        self._buffers.clear()
        self._pool.close()
