"""Memory that autograd's saved tensors are views of, on its way to a store and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import OffloadError
from .host_memory import allocate_host
from .store import Store, Transfer
from .waits import wait_for

_TORCH_ALIGNMENT_BYTES = 64  # of memory that torch allocates on the CPU


class SavedMemory:
    """A storage, or a part of one, that saved tensors need again in backward.

        in memory --save--> in memory and in the store --evict--> in the store --load--> in memory and in the store

    `content`, (nbytes,) uint8, is None while only the store has the bytes. Methods that start a transfer or wait for
    one raise OffloadError where the store fails, and leave it where it was before.
    """

    def __init__(self, key: str, tensor: Tensor, start: int, end: int) -> None:
        """The bytes [start, end) of the storage of `tensor`, the first saved tensor that needs them."""
        part = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        part.set_(tensor.untyped_storage(), start, (end - start,), (1,))
        self.key = key
        self.start = start
        self.nbytes = end - start
        self.device = part.device
        self.position = 0  # in the order of forward
        self.pass_number = 0  # of the forward
        self.num_tensors = 0  # saved tensors that need it
        # As long as this exists, no other storage gets the identity, even when the memory is gone.
        self.origin = StorageWeakRef(part.untyped_storage())  # type: ignore[no-untyped-call]
        self.content: Tensor | None = part
        self.is_stored = False
        self._saving: Transfer | None = None
        self._loading: Transfer | None = None
        # A tensor with the version counter of the saved one, and with none of its memory.
        self._counter = tensor.detach()
        self._counter.data = tensor.new_empty(0)
        self._version = tensor._version

    @property
    def was_sent(self) -> bool:
        """True where the store has it, or soon will."""
        return self.is_stored or self._saving is not None

    @property
    def transfer(self) -> Transfer | None:
        """What runs."""
        return self._saving or self._loading

    @property
    def versions(self) -> tuple[int, int]:
        """Torch's count of changes in place: now, and when it was saved."""
        return self._counter._version, self._version

    def has(self, tensor: Tensor, start: int, end: int) -> bool:
        """True where these are the bytes [start, end) of the storage of `tensor` too, which is the same, as it is now.

        Tensors with version counters of their own may share a storage (`unsafe_chunk`, `.data`); that the counts are
        the same says nothing then.
        """
        if not (self.start <= start and end <= self.start + self.nbytes):
            return False
        if not tensor._version == self._version == self._counter._version:
            return False
        with _unsafe_preserve_version_counter(self._counter):
            increment_version(self._counter)
            return tensor._version != self._version

    def start_save(self, store: Store) -> None:
        assert self.content is not None and not self.was_sent
        with _told("save", self.nbytes):
            self._saving = store.save(self.key, self.content)

    def finish_save(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            with _told("save", self.nbytes):
                wait_for(saving, self.key)
            self.is_stored = True

    def evict(self) -> None:
        """Leaves the bytes to the store."""
        assert self.is_stored and self.transfer is None
        self.content = None

    def start_load(self, store: Store) -> None:
        assert self.content is None and self.is_stored
        content = _empty(self.nbytes, self.device, store.alignment_bytes)
        with _told("load", self.nbytes):
            self._loading = store.load(self.key, content)
        self.content = content

    def finish_load(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            try:
                with _told("load", self.nbytes):
                    wait_for(loading, self.key)
            except OffloadError:
                self.content = None
                raise


def _empty(nbytes: int, device: torch.device, alignment: int) -> Tensor:
    if device.type == "cpu" and alignment > _TORCH_ALIGNMENT_BYTES:
        return allocate_host(nbytes, alignment)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


@contextlib.contextmanager
def _told(verb: str, nbytes: int) -> Iterator[None]:
    """Says of an OffloadError what it means for the training."""
    try:
        yield
    except OffloadError as error:
        raise OffloadError(
            f"activation offload: expected to {verb} {nbytes:,} bytes of activations, and the store failed: {error}. "
            "This step has changed no parameter; give the store what it lacks, raise "
            "activation_checkpointing.offload.budget_bytes, or turn the offload off"
        ) from error.with_traceback(None)  # transfer -> error -> frames -> transfer would keep the graph alive
