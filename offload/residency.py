"""Decide which saved activations stay in memory.

[Note: which activations stay]
Backward needs first the activations that forward saved last. So memory holds the newest, up to a limit, and the store
the oldest:

    forward    saved  0 1 2 3 | 4 5 | 6 7
                      evicted   sent  only in memory     (sends begin at half the limit, to make room in time)

    backward          0 1 2 3 | 4 5   7              (a use loads what comes before it, as far as the limit allows)
                            <--     <- used

A sent activation also stays in memory until its room is needed. So nothing is sent if all fit into half the limit, and
nothing is loaded if all fit into the limit.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from .host_memory import OffloadError, allocate_host
from .store import Store, Transfer, wait_for

_TORCH_ALIGNMENT_BYTES = 64  # of torch's CPU allocations


class Residency:
    """Moves `SavedMemory` between memory and a store. See [Note: which activations stay]. Not thread-safe.

    `limit`: bytes that may be in memory. A single larger memory is held all the same.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.resident_bytes = 0
        """Bytes of offloadable activations in memory now, including running transfers."""
        self.peak_resident_bytes = 0
        self.offloaded_bytes = 0
        """Bytes given to the store since the beginning."""
        # Both in the order of forward.
        self._here: list[SavedMemory] = []
        self._away: list[SavedMemory] = []
        self._used: dict[SavedMemory, None] = {}  # in memory and used by backward, in the order of use
        self._unsent: dict[SavedMemory, None] = {}  # in memory without a started save, oldest first
        self._unsent_bytes = 0
        self._draining: deque[SavedMemory] = deque()  # forgotten while a transfer ran
        self._lingering: list[tuple[StorageWeakRef, int]] = []  # evicted after use, but its user still holds it

    def prepare_for(self, nbytes: int, limit: int) -> None:
        """Make room for nbytes more. Waits for saves if necessary, and raises OffloadError if they fail."""
        while self._unsent and self._unsent_bytes + nbytes > limit // 2:
            self._start_save(next(iter(self._unsent)))
        self._make_room(nbytes, limit)

    def add(self, memory: SavedMemory) -> None:
        """Add a memory that is saved last."""
        self._unsent[memory] = None
        self._unsent_bytes += memory.nbytes
        self._arrive(memory)

    def move_to_end(self, memory: SavedMemory, position: int, pass_number: int) -> None:
        """Move a memory that was saved again: backward needs it earlier than expected."""
        place = self._away if memory.content is None else self._here
        _remove(place, memory)
        memory.position, memory.pass_number = position, pass_number
        bisect.insort(place, memory, key=_position)

    def use(self, memory: SavedMemory, limit: int) -> Tensor:
        """Return the bytes, (nbytes,) uint8, for backward, and start to load the next bytes. Raises OffloadError."""
        if memory.content is None:
            self._make_room(memory.nbytes, limit)
            self._start_load(memory)
        self._used[memory] = self._used.pop(memory, None)  # moves it to the end
        # Before the wait, so that the loads run beside each other.
        self._prefetch(memory, limit)
        self._finish_load(memory)
        if memory.device.type != "cpu":  # the caller's stream waits, since backward may change the bytes in place
            with contextlib.suppress(OffloadError):  # the bytes are here
                self._finish_save(memory)
        assert memory.content is not None
        return memory.content

    def forget(self, memory: SavedMemory) -> None:
        """Free a memory that is not needed any more, as soon as no transfer uses it.

        The device waits for a save, not the host, so its memory is free here, whenever the save ends.
        """
        _remove(self._away, memory)
        _remove(self._here, memory)
        self._used.pop(memory, None)
        if memory in self._unsent:
            del self._unsent[memory]
            self._unsent_bytes -= memory.nbytes
        if memory.transfer is not None:
            if memory.free_after_save():
                self.resident_bytes -= memory.nbytes
            self._draining.append(memory)
        else:
            self._finish(memory)

    def reap(self) -> None:
        """Free memory that was held for transfers or users that have ended."""
        while self._draining and (transfer := self._draining[0].transfer) is not None and transfer.is_done:
            self._finish(self._draining.popleft())
        for item in [item for item in self._lingering if item[0].expired()]:  # type: ignore[no-untyped-call]
            self._lingering.remove(item)
            self.resident_bytes -= item[1]

    def drain(self) -> None:
        """Wait for the transfers of forgotten memory."""
        while self._draining:
            self._finish(self._draining.popleft())

    # -- room -----------------------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int, limit: int) -> None:
        """Evict until nbytes more are within the limit or nothing is left: used memory first, then the oldest."""
        while self.resident_bytes + nbytes > limit:
            if self._draining:
                self._finish(self._draining.popleft())
                continue
            used = (memory for memory in self._used if memory.is_stored)
            victim = next(itertools.chain(used, self._here), None)
            if victim is None:
                return
            self._evict(victim)

    def _evict(self, memory: SavedMemory) -> None:
        with contextlib.suppress(OffloadError):  # a failed load is raised by the use that needs it
            self._finish_load(memory)
        if memory.content is None:
            return
        if memory in self._unsent:
            self._start_save(memory)
        self._finish_save(memory)
        # A node of autograd may still hold the tensor of `use`: then the memory counts until `reap`.
        was_used = memory in self._used
        reference = StorageWeakRef(memory.content.untyped_storage())  # type: ignore[no-untyped-call]
        self._leave(memory)
        memory.evict()
        bisect.insort(self._away, memory, key=_position)
        if was_used and not reference.expired():  # type: ignore[no-untyped-call]
            self._lingering.append((reference, memory.nbytes))
            self.resident_bytes += memory.nbytes

    def _prefetch(self, memory: SavedMemory, limit: int) -> None:
        """Load the memory that backward needs after `memory`, as far as there is room."""
        while index := bisect.bisect_left(self._away, memory.position, key=_position):
            following = self._away[index - 1]
            if following.pass_number != memory.pass_number or self.resident_bytes + following.nbytes > limit:
                return
            try:
                self._start_load(following)
            except (OffloadError, torch.OutOfMemoryError):
                return  # the use that needs it raises

    def _arrive(self, memory: SavedMemory) -> None:
        bisect.insort(self._here, memory, key=_position)
        self.resident_bytes += memory.nbytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)

    def _leave(self, memory: SavedMemory) -> None:
        _remove(self._here, memory)
        self._used.pop(memory, None)
        self.resident_bytes -= memory.nbytes

    # -- transfers ------------------------------------------------------------------------------------------------

    def _start_save(self, memory: SavedMemory) -> None:
        memory.start_save(self._store)
        del self._unsent[memory]
        self._unsent_bytes -= memory.nbytes
        self.offloaded_bytes += memory.nbytes

    def _finish_save(self, memory: SavedMemory) -> None:
        try:
            memory.finish_save()
        except OffloadError:
            self._unsent[memory] = None
            self._unsent_bytes += memory.nbytes
            raise

    def _start_load(self, memory: SavedMemory) -> None:
        # First the call that may raise: the lists then still say where the memory is.
        memory.start_load(self._store)
        _remove(self._away, memory)
        self._arrive(memory)

    def _finish_load(self, memory: SavedMemory) -> None:
        try:
            memory.finish_load()
        except OffloadError:
            self._leave(memory)
            bisect.insort(self._away, memory, key=_position)
            raise

    def _finish(self, memory: SavedMemory) -> None:
        """Free a forgotten memory. Errors are ignored, since nobody needs the bytes."""
        # Asked first: the calls below change both.
        is_counted, is_known = memory.content is not None, memory.was_sent
        for finish in (memory.finish_load, memory.finish_save):
            with contextlib.suppress(OffloadError):
                finish()
        memory.content = None
        if is_counted:
            self.resident_bytes -= memory.nbytes
        if is_known:
            with contextlib.suppress(OffloadError):
                self._store.drop(memory.key)


def _remove(place: list[SavedMemory], memory: SavedMemory) -> None:
    """Remove a memory from a list by position, if it is there."""
    index = bisect.bisect_left(place, memory.position, key=_position)
    if index < len(place) and place[index] is memory:
        del place[index]


def _position(memory: SavedMemory) -> int:
    return memory.position


class SavedMemory:
    """A storage, or a part of a storage, that saved tensors need again in backward.

        in memory --save--> in memory and in the store --evict--> in the store --load--> in memory and in the store

    `content`, (nbytes,) uint8, is None while only the store has the bytes. Methods that start or await a transfer raise
    OffloadError if the store fails, and then leave the state unchanged.
    """

    def __init__(self, key: str, tensor: Tensor, start: int, end: int) -> None:
        """Hold the bytes [start, end) of the storage of `tensor`, the first saved tensor that needs them."""
        part = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        part.set_(tensor.untyped_storage(), start, (end - start,), (1,))
        self.key = key
        self.start = start
        self.nbytes = end - start
        self.device = part.device
        self.position = 0  # in the order of forward
        self.pass_number = 0  # number of the forward
        self.num_tensors = 0  # saved tensors that need this memory
        # Reserves the identity of the storage, even after its memory is freed.
        self.origin = StorageWeakRef(part.untyped_storage())  # type: ignore[no-untyped-call]
        self.content: Tensor | None = part
        self.is_stored = False
        self._saving: Transfer | None = None
        self._loading: Transfer | None = None
        self._stream: torch.Stream | None = None  # of the device, on which the save began
        # A tensor that shares the version counter of the saved tensor, without its memory.
        self._counter = tensor.detach()
        self._counter.data = tensor.new_empty(0)
        self._version = tensor._version

    @property
    def was_sent(self) -> bool:
        """True if the store has the bytes, or a save runs."""
        return self.is_stored or self._saving is not None

    @property
    def transfer(self) -> Transfer | None:
        """The running transfer."""
        return self._saving or self._loading

    @property
    def versions(self) -> tuple[int, int]:
        """(current version counter, version counter at the save)."""
        return self._counter._version, self._version

    def has(self, tensor: Tensor, start: int, end: int) -> bool:
        """Return True if these are the bytes [start, end) of the storage of `tensor` in its current version."""
        if not (self.start <= start and end <= self.start + self.nbytes):
            return False
        if not tensor._version == self._version == self._counter._version:
            return False
        # Tensors with separate version counters may share a storage (`unsafe_chunk`, `.data`), and equal counts then
        # say nothing. So increment our counter and look if the counter of `tensor` follows.
        with _unsafe_preserve_version_counter(self._counter):
            increment_version(self._counter)
            return tensor._version != self._version

    def start_save(self, store: Store) -> None:
        assert self.content is not None and not self.was_sent
        if self.device.type != "cpu":
            self._stream = torch.accelerator.current_stream(self.device)
        with _store_errors_explained("save", self.nbytes):
            self._saving = store.save(self.key, self.content)

    def finish_save(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            with _store_errors_explained("save", self.nbytes):
                wait_for(saving, self.key)
            self.is_stored = True

    def free_after_save(self) -> bool:
        """Free memory of a device in the order of its stream, after the running save. False if no save of it runs, or
        if the caller, such as the garbage collector, is on a different stream.
        """
        if self._saving is None or self.content is None or self._stream is None:
            return False
        if torch.accelerator.current_stream(self.device) != self._stream:
            return False
        with contextlib.suppress(OffloadError):  # nobody needs the bytes
            self._saving.wait()
        self.content = None
        return True

    def evict(self) -> None:
        """Free the memory. The store has the bytes."""
        assert self.is_stored and self.transfer is None
        self.content = None

    def start_load(self, store: Store) -> None:
        assert self.content is None and self.is_stored
        content = _empty(self.nbytes, self.device, store.alignment_bytes)
        with _store_errors_explained("load", self.nbytes):
            self._loading = store.load(self.key, content)
        self.content = content

    def finish_load(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            try:
                with _store_errors_explained("load", self.nbytes):
                    wait_for(loading, self.key)
            except OffloadError:
                self.content = None
                raise


def _empty(nbytes: int, device: torch.device, alignment: int) -> Tensor:
    if device.type == "cpu" and alignment > _TORCH_ALIGNMENT_BYTES:
        return allocate_host(nbytes, alignment)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


@contextlib.contextmanager
def _store_errors_explained(verb: str, nbytes: int) -> Iterator[None]:
    """Add to an OffloadError its meaning for the training."""
    try:
        yield
    except OffloadError as error:
        raise OffloadError(
            f"activation offload: expected to {verb} {nbytes:,} bytes of activations, but the store failed: "
            f"{str(error).rstrip('.')}. "
            "This step has changed no parameter. Correct the fault of the store, raise "
            "activation_checkpointing.offload.budget_bytes, or turn the offload off."
        ) from error.with_traceback(None)  # else a cycle transfer -> error -> frames -> transfer keeps the graph alive
