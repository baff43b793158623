"""The loop that hides a store's transfers behind work: load the next, work on this one, save the one before.

             time ->
    key 0    load  WORK  save
    key 1          load  WORK  save
    key 2                load  WORK  save

A slot of time has one load, one piece of work and one save, so that with equal sizes the whole takes
max(load + save, work) a key, and the first load and the last save besides. That needs three buffers: `depth` + 2, where
`depth` is how many keys are loaded ahead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from torch import Tensor

from .errors import OffloadError
from .host_pool import HostPool
from .store import Store, Transfer


class Window:
    """Brings bytes from a store into buffers of a pool and back, never holding more than depth + 2 buffers.

    Keys may come in any order. A buffer is in one of three states:

    | state    | begins with            | ends with                                          |
    |----------|------------------------|----------------------------------------------------|
    | coming   | `prefetch`             | `acquire`, or room is wanted: the guess was wrong  |
    | acquired | `acquire`, `create`    | `release`, `fork`                                  |
    | leaving  | `release(key, True)`   | room is wanted, or `acquire`: no need to load it   |

    A failed transfer raises OffloadError in the call that waits for it, and its buffer is given back. `close` gives
    every buffer back, whatever happened before. To be used by one thread.
    """

    def __init__(
        self,
        store: Store,
        pool: HostPool,
        sizes: Mapping[str, int],  # bytes of a key; looked up when the key is first used, so it may grow
        depth: int = 1,
    ) -> None:
        if depth < 0:
            raise ValueError(f"depth: expected 0 or more keys to load ahead, found {depth}")
        self._store = store
        self._pool = pool
        self._sizes = sizes
        self.max_buffers = depth + 2
        self._coming: dict[str, tuple[Tensor, Transfer]] = {}
        self._acquired: dict[str, Tensor] = {}
        self._leaving: dict[str, tuple[Tensor, Transfer]] = {}

    @property
    def num_buffers(self) -> int:
        return len(self._coming) + len(self._acquired) + len(self._leaving)

    def prefetch(self, key: str) -> bool:
        """Begins to load a key. False, and nothing happens, where all buffers are in use or the pool is at its limit.

        May wait for saves that have begun; never for anything else.
        """
        if key in self._coming or key in self._acquired or key in self._leaving:
            return True
        nbytes = self._sizes[key]
        if not self._make_room(nbytes, drop_guesses=False):
            return False
        self._load(key, nbytes)
        return True

    def acquire(self, key: str) -> Tensor:
        """(n,) uint8: the key's bytes, to be worked on in place until `release`. Waits until they are here.

        Raises OffloadError where they cannot be loaded, or where all buffers are acquired.
        """
        if key in self._acquired:
            raise ValueError(f"expected '{key}' to be acquired once and then released, found it acquired again")
        for state in (self._coming, self._leaving):
            if key in state:
                break
        else:
            self._want_room(key)
            state = self._coming
            self._load(key, self._sizes[key])
        buffer = self._end_transfer(state, key)
        self._acquired[key] = buffer
        return buffer

    def create(self, key: str) -> Tensor:
        """(n,) uint8, content arbitrary: a buffer for a key that the store need not have yet. Then as `acquire`."""
        self._forget(key)
        self._want_room(key)
        self._acquired[key] = self._pool.take(self._sizes[key])
        return self._acquired[key]

    def fork(self, key: str, other: str) -> Tensor:
        """(n,) uint8: goes on with the work on an acquired key as `other`; the store keeps what `key` was."""
        if key not in self._acquired:
            raise ValueError(f"expected a key that was acquired, found '{key}', which is not")
        self._forget(other)
        self._acquired[other] = self._acquired.pop(key)
        return self._acquired[other]

    def release(self, key: str, changed: bool) -> None:
        """Ends the work on a key: what has changed is saved, anything else given back at once."""
        if key not in self._acquired:
            raise ValueError(f"expected a key that was acquired, found '{key}', which is not")
        buffer = self._acquired.pop(key)
        if not changed:
            self._pool.give(buffer)
            return
        try:
            self._leaving[key] = (buffer, self._store.save(key, buffer))
        except BaseException:
            self._pool.give(buffer)
            raise

    def wait(self) -> None:
        """Returns when everything released has been saved; raises OffloadError for the first that could not be."""
        while self._leaving:
            self._retire_oldest()

    def close(self) -> None:
        """Waits for the transfers that run, gives every buffer back, and says nothing of failed ones: see `wait`."""
        for state in (self._coming, self._leaving):
            for key in list(state):
                with contextlib.suppress(Exception):
                    self._pool.give(self._end_transfer(state, key))
        while self._acquired:
            self._pool.give(self._acquired.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the saves, unless an error is on its way already; then closes."""
        try:
            if error is None:
                self.wait()
        finally:
            self.close()

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _forget(self, key: str) -> None:
        """Gives back what is here of a key that is made anew."""
        if key in self._acquired:
            raise ValueError(f"expected '{key}' to be released before it is made anew, found it acquired")
        for state in (self._coming, self._leaving):
            if key in state:
                self._pool.give(self._end_transfer(state, key))

    def _want_room(self, key: str) -> None:
        """Room for a key that is needed now. Raises OffloadError where there is none."""
        if self._make_room(self._sizes[key], drop_guesses=True):
            return
        if self.num_buffers < self.max_buffers:
            return  # then it is the pool that has none, and taking says so, with the numbers
        held = ", ".join(f"'{other}'" for other in self._acquired)
        raise OffloadError(
            f"a buffer for '{key}': {len(self._acquired)} acquired ({held}) + 1 > depth + 2 = {self.max_buffers}; "
            "release one of them first, or make the window deeper"
        )

    def _make_room(self, nbytes: int, drop_guesses: bool) -> bool:
        """True when one more buffer may be taken. Waits for saves, the oldest first, as long as that helps."""
        while self.num_buffers >= self.max_buffers or not self._pool.has_room(nbytes):
            if self._leaving:
                self._retire_oldest()
            elif drop_guesses and self._coming:
                with contextlib.suppress(OffloadError):  # a wrong guess is never an error
                    self._pool.give(self._end_transfer(self._coming, next(iter(self._coming))))
            else:
                return False
        return True

    def _load(self, key: str, nbytes: int) -> None:
        buffer = self._pool.take(nbytes)
        try:
            self._coming[key] = (buffer, self._store.load(key, buffer))
        except BaseException:
            self._pool.give(buffer)
            raise

    def _retire_oldest(self) -> None:
        self._pool.give(self._end_transfer(self._leaving, next(iter(self._leaving))))

    def _end_transfer(self, state: dict[str, tuple[Tensor, Transfer]], key: str) -> Tensor:
        """Waits for a transfer and gives its buffer; where it failed the buffer goes back to the pool."""
        buffer, transfer = state.pop(key)
        try:
            transfer.wait()
        except Exception:  # an interrupt is none: the transfer would still run, and the buffer stays taken
            self._pool.give(buffer)
            raise
        return buffer


def run_window(
    keys: Sequence[str],
    sizes: Sequence[int],  # bytes of each key
    store: Store,
    pool: HostPool,
    compute: Callable[[int, Tensor], bool],
    depth: int = 1,
) -> None:
    """Calls compute(index, buffer) for every key in order, while the next are loaded and those before are saved.

    buffer: (sizes[index],) uint8 in host memory, worked on in place; what compute returns True for is saved. Every save
    has ended on return. After an exception in compute no transfer runs, and the store has that key as it was before.
    Raises OffloadError for transfers that failed, ValueError for keys that are not all different.
    """
    size_of = dict(zip(keys, sizes, strict=True))
    if len(size_of) != len(keys):
        twice = sorted({key for key in keys if list(keys).count(key) > 1})
        raise ValueError(f"keys: expected each once, found {', '.join(twice)} more often")
    with Window(store, pool, size_of, depth) as window:
        num_prefetched = 0
        for index, key in enumerate(keys):
            while num_prefetched < min(index + 1 + depth, len(keys)) and window.prefetch(keys[num_prefetched]):
                num_prefetched += 1
            buffer = window.acquire(key)
            num_prefetched = max(num_prefetched, index + 1)
            window.release(key, compute(index, buffer))
