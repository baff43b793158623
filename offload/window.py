"""The loop that hides transfers behind work: load the next, work on this one, save the one before.

                  time ->
    resident 0    load  WORK  save
    resident 1          load  WORK  save
    resident 2                load  WORK  save

A slot of time has one load, one piece of work and one save, so that with equal sizes the whole takes
max(load + save, work) each, and the first load and the last save besides. That needs memory for `depth` that come, one
that is used, and `max_leaving`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from .store import FINISHED, Store, Transfer, wait_for


@dataclass(frozen=True)
class OldVersion:
    """What a resident was before a change that may be taken back."""

    nbytes: int  # of memory that holds it
    restore: Callable[[], None]

    @classmethod
    def of(cls, values: Tensor) -> OldVersion:
        """A copy of values in memory."""
        old = values.clone()

        def restore() -> None:
            values.copy_(old)

        return cls(old.nbytes, restore)


def _nothing_to_move(values: Tensor) -> Transfer:
    return FINISHED


def _nothing_to_give(values: Tensor) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Offloadable:
    """Bytes with a home; a `Window` brings them into memory while they are used, and back.

    | home                    | memory in use         | for example                                    |
    |-------------------------|-----------------------|------------------------------------------------|
    | a key of a store        | a buffer of a pool    | optimizer states in a file                     |
    | a key of a store        | a group's own pages   | a parameter shard that rests                   |
    | memory of a device      | a buffer of the host  | a parameter shard that the host updates        |
    | a buffer of the host    | memory of a device    | a gradient that leaves                         |
    | where they are used     | the same              | all that is not offloaded: the default         |
    """

    name: str  # for errors
    take: Callable[[], Tensor]  # memory for the bytes; content arbitrary, but where that is their home
    give: Callable[[Tensor], None] = _nothing_to_give  # the end of `take`
    load: Callable[[Tensor], Transfer] = _nothing_to_move  # begins to bring them into memory
    save: Callable[[Tensor], Transfer] = _nothing_to_move  # begins to bring them home
    fork: Callable[[Tensor], OldVersion] = OldVersion.of  # what is changed from now on is a second version

    @classmethod
    def of(cls, store: Store, key: str, take: Callable[[], Tensor], give: Callable[[Tensor], None]) -> Offloadable:
        """Bytes under a key of a store, of which a second version is kept under another key."""
        keys = [key, f"{key} (other)"]

        def load(out: Tensor) -> Transfer:
            return store.load(keys[0], _bytes_of(out))

        def save(values: Tensor) -> Transfer:
            return store.save(keys[0], _bytes_of(values))

        def fork(values: Tensor) -> OldVersion:
            keys.reverse()
            return OldVersion(0, keys.reverse)

        return cls(key, take, give, load, save, fork)

    def made_anew(self) -> Offloadable:
        """The same, but its bytes are all written where it is used, and need not come."""
        return replace(self, load=_nothing_to_move)


def _bytes_of(values: Tensor) -> Tensor:
    return values.detach().view(torch.uint8)


@dataclass
class _Stay:
    """Of a resident in memory."""

    values: Tensor
    has_changed: bool = False
    is_waiting: bool = False  # for its next user, and not used by anybody
    is_opened: bool = False  # gives way to the next that is loaded


class Window:
    """Brings residents into memory and back, in an order that is known (`expect`) or in any other.

    | state    | begins with                      | ends with                                                  |
    |----------|----------------------------------|------------------------------------------------------------|
    | coming   | `prefetch`, a place in the order | `acquire`, or its turn has passed: the guess was wrong     |
    | here     | `acquire`, `create`, `open`      | `release`: saved if it has changed                         |
    | leaving  | `release`                        | more than `max_leaving` are, or somebody wants it again    |

    A failed transfer raises OffloadError in the call that waits for it, and its memory is given back. `close` gives all
    memory back, whatever happened before. To be used by one thread at a time.
    """

    def __init__(self, depth: int = 1, max_leaving: int = 1) -> None:
        """depth: how many of the order are loaded ahead."""
        if depth < 0:
            raise ValueError(f"depth: expected 0 or more residents to load ahead, found {depth}")
        self._depth = depth
        self._max_leaving = max_leaving
        self._order: deque[Offloadable] = deque()
        self._coming: dict[Offloadable, tuple[Tensor, Transfer]] = {}
        self._here: dict[Offloadable, _Stay] = {}
        self._leaving: dict[Offloadable, tuple[Tensor, Transfer]] = {}  # oldest first

    # -- one after the other --------------------------------------------------------------------------------------

    def expect(self, order: Iterable[Offloadable]) -> None:
        """In which order residents are used next. Some may be left out then, and others come between."""
        for offloadable in self._order:
            self._cancel(offloadable)
        self._order = deque(order)

    @contextlib.contextmanager
    def use(self, offloadable: Offloadable, changes: bool = True) -> Iterator[Tensor]:
        """Its bytes, to be worked on in place; meanwhile the next of the order come, and those before are saved.

        changes: they are saved after it; not after an exception. A resident that somebody else has acquired stays here.
        """
        stay = self._here.get(offloadable)
        is_nested = stay is not None and not stay.is_waiting
        values = self.acquire(offloadable)
        try:
            yield values
            self._here[offloadable].has_changed |= changes
        finally:
            if not is_nested and offloadable in self._here:
                self.release(offloadable)

    # -- in any order ---------------------------------------------------------------------------------------------

    def holds(self, offloadable: Offloadable) -> bool:
        """Whether its bytes are here."""
        return offloadable in self._here

    def prefetch(self, offloadable: Offloadable) -> None:
        """Begins to load it, unless it is here or coming. Waits where it is still leaving, for nothing else.

        What is opened gives way.
        """
        if offloadable in self._coming or offloadable in self._here:
            return
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

    def acquire(self, offloadable: Offloadable) -> Tensor:
        """Its bytes, to be worked on in place until `release`. Waits until they are here.

        Raises OffloadError where they cannot be loaded.
        """
        if offloadable in self._order:
            while (passed := self._order.popleft()) is not offloadable:
                self._cancel(passed)
        self.prefetch(offloadable)
        if offloadable in self._here:  # in use from now on, and no longer in the way of others
            self._here[offloadable].is_waiting = self._here[offloadable].is_opened = False
        for following in itertools.islice(self._order, self._depth):
            self.prefetch(following)
        if offloadable in self._coming:
            self._here[offloadable] = _Stay(self._end_transfer(self._coming, offloadable))
        return self._here[offloadable].values

    def create(self, offloadable: Offloadable) -> Tensor:
        """Memory for bytes that are made anew, content arbitrary; then as `acquire`, and changed."""
        for state in (self._coming, self._leaving):
            if offloadable in state:
                self._end_transfer(state, offloadable, gives=True)
        if offloadable in self._here:
            offloadable.give(self._here.pop(offloadable).values)
        self._here[offloadable] = _Stay(offloadable.take(), has_changed=True)
        return self._here[offloadable].values

    def open(self, offloadable: Offloadable, changes: bool = False) -> Tensor:
        """Its bytes, until another one is loaded, or `put_back`; saved then, if anyone opened them for changes.

        Of one that is here already: until whoever has acquired it releases it.
        """
        if offloadable not in self._here:
            self.acquire(offloadable)
            self._here[offloadable].is_waiting = self._here[offloadable].is_opened = True
        self._here[offloadable].has_changed |= changes
        return self._here[offloadable].values

    def hold(self, offloadable: Offloadable) -> None:
        """In place of `release`: its next user finds it here. Until then, or `put_back`."""
        self._here[offloadable].is_waiting = True

    def end_hold(self, offloadable: Offloadable) -> None:
        """The end of `hold`, or of `open`. Does nothing for one that is used, or not here."""
        stay = self._here.get(offloadable)
        if stay is not None and stay.is_waiting:
            self.release(offloadable)

    def release(self, offloadable: Offloadable) -> None:
        """Ends the work on it: what has changed is saved, anything else given back at once."""
        if offloadable not in self._here:
            raise ValueError(f"expected a resident that was acquired, found '{offloadable.name}', which is not here")
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

    def put_back(self) -> None:
        """Releases what nobody uses: opened, or held."""
        if self._here:
            for offloadable in [offloadable for offloadable, stay in self._here.items() if stay.is_waiting]:
                self.release(offloadable)

    def wait(self, num_left: int = 0) -> None:
        """Returns when everything released has been saved, but for the newest, of which so many may still be leaving.

        Raises OffloadError for the first that could not be.
        """
        while len(self._leaving) > num_left:
            self._retire_oldest()

    def close(self) -> None:
        """Waits for the transfers that run, gives all memory back, and says nothing of failed ones: see `wait`."""
        self._order.clear()
        for state in (self._coming, self._leaving):
            for offloadable in list(state):
                with contextlib.suppress(Exception):
                    self._end_transfer(state, offloadable, gives=True)
        while self._here:
            offloadable, stay = self._here.popitem()
            offloadable.give(stay.values)

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

    def _cancel(self, offloadable: Offloadable) -> None:
        """A wrong guess, which is never an error."""
        if offloadable in self._coming:
            with contextlib.suppress(Exception):
                self._end_transfer(self._coming, offloadable, gives=True)

    def _retire_oldest(self) -> None:
        self._end_transfer(self._leaving, next(iter(self._leaving)), gives=True)

    def _end_transfer(
        self, state: dict[Offloadable, tuple[Tensor, Transfer]], offloadable: Offloadable, gives: bool = False
    ) -> Tensor:
        """Waits for a transfer and gives its memory back: where it is asked to, or the transfer has failed."""
        memory, transfer = state.pop(offloadable)
        try:
            wait_for(transfer, offloadable.name)
        except Exception:  # an interrupt is none: the transfer would still run, and the memory stays taken
            offloadable.give(memory)
            raise
        if gives:
            offloadable.give(memory)
        return memory
