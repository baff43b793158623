"""Hide transfers behind the computation: load the next resident (an `Offloadable`), work on it, save the previous.

                  time ->
    resident 0    load  WORK  save
    resident 1          load  WORK  save
    resident 2                load  WORK  save

With equal sizes a resident takes max(load + save, work); the first load and the last save are added. Memory is needed
for the loading resident, the resident in use, and `max_leaving` residents being saved.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .store import FINISHED, Store, Transfer, wait_for


@dataclass(frozen=True)
class OldVersion:
    """The version of a resident before a change that may be undone."""

    nbytes: int  # memory that the old version takes
    restore: Callable[[], None]

    @classmethod
    def of(cls, values: Tensor) -> OldVersion:
        """Copy the values in memory."""
        old = values.clone()

        def restore() -> None:
            values.copy_(old)

        return cls(old.nbytes, restore)


@dataclass(frozen=True, eq=False)
class Offloadable:
    """Bytes with a placement. A `Window` brings them into memory for use, and back.

    | placement               | memory in use          | for example                                |
    |-------------------------|------------------------|--------------------------------------------|
    | a key of a store        | a buffer of a pool     | optimizer states in a file                 |
    | a key of a store        | pages of a flat group  | an offloaded parameter shard               |
    | device memory           | a host buffer          | a parameter shard that the host updates    |
    | a host buffer           | device memory          | a gradient that leaves the device          |
    | the memory in use       | the same memory        | anything not offloaded: the default        |
    """

    name: str  # for errors
    take: Callable[[], Tensor]  # allocate memory; it has the values only if it is also their placement
    give: Callable[[Tensor], None] = lambda values: None  # free the memory of `take`
    load: Callable[[Tensor], Transfer] = lambda out: FINISHED  # start to fill the memory
    save: Callable[[Tensor], Transfer] = lambda values: FINISHED  # start to write the memory back
    fork: Callable[[Tensor], OldVersion] = OldVersion.of  # keep the old version; later changes make a new version

    @classmethod
    def of(cls, store: Store, key: str, take: Callable[[], Tensor], give: Callable[[Tensor], None]) -> Offloadable:
        """Make an offloadable for a key of a store. A second version is kept under a second key."""
        keys = [key, f"{key} (other)"]

        def load(out: Tensor) -> Transfer:
            return store.load(keys[0], _bytes_of(out))

        def save(values: Tensor) -> Transfer:
            return store.save(keys[0], _bytes_of(values))

        def fork(values: Tensor) -> OldVersion:
            # The next save goes to the other key, so the old bytes stay under this key without a copy.
            keys.reverse()
            return OldVersion(0, keys.reverse)

        return cls(key, take, give, load, save, fork)

    def made_anew(self) -> Offloadable:
        """Return the same resident without loading, for bytes that are completely overwritten in use."""
        return replace(self, load=lambda out: FINISHED)


def _bytes_of(values: Tensor) -> Tensor:
    return values.detach().view(torch.uint8)


@dataclass
class _Stay:
    """The state of a resident in memory."""

    values: Tensor
    has_changed: bool = False
    is_held: bool = False  # not in use, but kept for its next user
    is_opened: bool = False  # released when another resident is loaded


class Window:
    """Brings residents into memory and back, in a known order (`expect`) or in any order. Not thread-safe.

    | state    | begins with                      | ends with                                                          |
    |----------|----------------------------------|--------------------------------------------------------------------|
    | coming   | `prefetch`, or the order is near | `acquire`, or another resident is acquired in its place            |
    | here     | `acquire`, `create`, `open`      | `release`: saved if changed                                        |
    | leaving  | `release`                        | more than `max_leaving` are leaving, or the resident is used again |

    A failed transfer raises OffloadError in the call that waits for it, and its memory is freed. `close` frees all
    memory in any state.
    """

    def __init__(self, max_leaving: int = 1) -> None:
        self._max_leaving = max_leaving
        self._order: deque[Offloadable] = deque()
        self._coming: dict[Offloadable, tuple[Tensor, Transfer]] = {}
        self._here: dict[Offloadable, _Stay] = {}
        self._leaving: dict[Offloadable, tuple[Tensor, Transfer]] = {}  # oldest first

    # -- in a known order -----------------------------------------------------------------------------------------

    def expect(self, order: Iterable[Offloadable]) -> None:
        """Announce the order of the next uses. Uses may skip residents of the order and insert others."""
        for offloadable in self._order:
            self._cancel(offloadable)
        self._order = deque(order)

    @contextlib.contextmanager
    def use(self, offloadable: Offloadable, changes: bool = True) -> Iterator[Tensor]:
        """Wrap work on a resident in place. Meanwhile the next residents load, and earlier residents are saved.

        changes: save the resident afterwards, except after an exception. A resident that was acquired before stays in
        memory.
        """
        stay = self._here.get(offloadable)
        is_nested = stay is not None and not stay.is_held
        values = self.acquire(offloadable)
        try:
            yield values
            self._here[offloadable].has_changed |= changes
        finally:
            if not is_nested and offloadable in self._here:
                self.release(offloadable)

    # -- in any order ---------------------------------------------------------------------------------------------

    def is_in_memory(self, offloadable: Offloadable) -> bool:
        """Return True if the resident is in memory."""
        return offloadable in self._here

    def prefetch(self, offloadable: Offloadable) -> None:
        """Start to load a resident, unless it is here or coming. Releases opened residents.

        Waits only if the resident is still leaving.
        """
        if offloadable in self._coming or offloadable in self._here:
            return
        # Only a store orders a load after a save of the same bytes. Copies to and from a device use two streams.
        if offloadable in self._leaving:
            self._end_transfer(self._leaving, offloadable, gives=True)
        for other in [other for other, stay in self._here.items() if stay.is_opened]:
            self.release(other)
        memory = offloadable.take()
        try:
            self._coming[offloadable] = (memory, offloadable.load(memory))
        except BaseException:
            offloadable.give(memory)
            raise

    def acquire(self, offloadable: Offloadable, changes: bool = False) -> Tensor:
        """Return the bytes to be worked on in place until `release`, which saves them if `changes`. Waits until they
        are loaded.

        Raises OffloadError if they cannot be loaded.
        """
        if offloadable in self._order:
            # The order has skipped these residents: their loads hold memory for nothing.
            while (passed := self._order.popleft()) is not offloadable:
                self._cancel(passed)
        self.prefetch(offloadable)
        if offloadable in self._here:  # in use from now on: `prefetch` must not release it
            self._here[offloadable].is_held = self._here[offloadable].is_opened = False
        if self._order:
            self.prefetch(self._order[0])
        if offloadable in self._coming:
            self._here[offloadable] = _Stay(self._end_transfer(self._coming, offloadable))
        self._here[offloadable].has_changed |= changes
        return self._here[offloadable].values

    def create(self, offloadable: Offloadable) -> Tensor:
        """Return memory for new bytes, with arbitrary content. Then as after `acquire`, and changed."""
        self.drop(offloadable)
        self._here[offloadable] = _Stay(offloadable.take(), has_changed=True)
        return self._here[offloadable].values

    def drop(self, offloadable: Offloadable) -> None:
        """Free the memory of a resident in any state. Changes that are not leaving are lost."""
        for state in (self._coming, self._leaving):
            if offloadable in state:
                self._end_transfer(state, offloadable, gives=True)
        if offloadable in self._here:
            offloadable.give(self._here.pop(offloadable).values)

    def open(self, offloadable: Offloadable, changes: bool = False) -> Tensor:
        """Return the bytes until another resident is loaded, or until `release_idle`. Saved if any opening asked for
        changes.

        A resident that is already in use stays until its user releases it.
        """
        if offloadable not in self._here:
            self.acquire(offloadable)
            self._here[offloadable].is_held = self._here[offloadable].is_opened = True
        self._here[offloadable].has_changed |= changes
        return self._here[offloadable].values

    def hold(self, offloadable: Offloadable) -> None:
        """Keep a used resident in memory for its next user, or until `release_idle`. Call it instead of `release`."""
        self._here[offloadable].is_held = True

    def end_hold(self, offloadable: Offloadable) -> None:
        """Release a held or opened resident. Does nothing if it is in use or not in memory."""
        stay = self._here.get(offloadable)
        if stay is not None and stay.is_held:
            self.release(offloadable)

    def release(self, offloadable: Offloadable) -> None:
        """End the work on a resident. A changed resident is saved; otherwise its memory is freed at once."""
        if offloadable not in self._here:
            raise ValueError(f"expected an acquired resident, found '{offloadable.name}', which is not in memory")
        stay = self._here.pop(offloadable)
        if not stay.has_changed:
            offloadable.give(stay.values)
            return
        try:
            self._leaving[offloadable] = (stay.values, offloadable.save(stay.values))
        except BaseException:
            offloadable.give(stay.values)
            raise
        while len(self._leaving) > self._max_leaving:
            self._retire_oldest()

    # -- all of them ----------------------------------------------------------------------------------------------

    def release_idle(self) -> None:
        """Release all residents that are opened or held."""
        if self._here:
            for offloadable in [offloadable for offloadable, stay in self._here.items() if stay.is_held]:
                self.release(offloadable)

    def wait(self) -> None:
        """Wait for the saves of released residents. Raises OffloadError for the first failed save."""
        while self._leaving:
            self._retire_oldest()

    def close(self) -> None:
        """Wait for running transfers and free all memory. Failed transfers are ignored: see `wait`."""
        self._order.clear()
        for state in (self._coming, self._leaving):
            for offloadable in list(state):
                with contextlib.suppress(Exception):
                    self._end_transfer(state, offloadable, gives=True)
        while self._here:
            offloadable, stay = self._here.popitem()
            offloadable.give(stay.values)

    # -- transfers ------------------------------------------------------------------------------------------------

    def _cancel(self, offloadable: Offloadable) -> None:
        """Drop a prefetch that was not needed. Its failure is not an error."""
        if offloadable in self._coming:
            with contextlib.suppress(Exception):
                self._end_transfer(self._coming, offloadable, gives=True)

    def _retire_oldest(self) -> None:
        self._end_transfer(self._leaving, next(iter(self._leaving)), gives=True)

    def _end_transfer(
        self, state: dict[Offloadable, tuple[Tensor, Transfer]], offloadable: Offloadable, gives: bool = False
    ) -> Tensor:
        """Wait for a transfer. Frees its memory if `gives`, or if the transfer failed."""
        memory, transfer = state.pop(offloadable)
        try:
            wait_for(transfer, offloadable.name)
        except Exception:  # not on KeyboardInterrupt: the transfer still runs and needs the memory
            offloadable.give(memory)
            raise
        if gives:
            offloadable.give(memory)
        return memory
