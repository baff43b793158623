"""Keep activations in a store between forward and backward."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..model.compiled import untraced
from .host_memory import OffloadError, return_large_blocks
from .residency import Residency, SavedMemory
from .store import Store

BLOCKS_IN_MEMORY = 3  # a block being computed, a block kept for backward, a block in transfer
_LOGGER = logging.getLogger("lowtide")
# A view below 1/8 of its storage, such as a few rows of a data set, is saved without the remainder.
_PART_OF_STORAGE = 8
_MIN_RETURNED_BYTES = 128 << 10  # the C library keeps smaller freed blocks
_BITS_OF_COUNT = 48  # of a position: a training saves fewer tensors than 2^48
_ALIGNMENT_BYTES = 64  # keeps the offset in a cache line, on which the last bit of a result may depend


class ActivationOffload:
    """Keeps the tensors that autograd saves in forward in a store, and returns them in time for backward.

        with offload:
            loss = model(batch)
        loss.backward()

    | saved tensor                                                | where it is until backward                  |
    |-------------------------------------------------------------|---------------------------------------------|
    | a view of a parameter; below `min_bytes`; not strided       | unchanged                                   |
    | activations, masks, inputs of recomputed blocks             | memory up to the limit, then the store: see |
    |                                                             | [Note: which activations stay]              |

    The storage under the saved tensors is moved, once for all of its views. With a budget, `residency.resident_bytes`
    stays within it unless a single operation saves more. Without a budget, the limit is three blocks (`begin_block`).
    When a graph is freed, its bytes in the store are freed too; a device's memory that is being saved is freed in the
    order of its stream, and what another running transfer held at the next use of this object. One forward at a time;
    backward in any thread.

    Forward or backward raises OffloadError if its transfer failed. Backward raises RuntimeError, like torch, if a saved
    tensor was changed in place.
    """

    def __init__(
        self,
        store: Store,
        min_bytes: int,
        budget_bytes: int | None,
        is_parameter_storage: Callable[[Tensor], bool],  # True for views of memory that outlives the graph
    ) -> None:
        for name, value in (("min_bytes", min_bytes), ("budget_bytes", budget_bytes)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected a number of bytes above 0, found {value}")
        self._moves_from_host = not store.is_host_memory
        self._min_bytes = min_bytes
        self._limit = ActivationLimit(budget_bytes)
        self.is_parameter_storage = is_parameter_storage
        self.residency = Residency(store)
        self._of_storage: dict[int, list[SavedMemory]] = {}  # by identity of the storage
        self._positions = itertools.count()
        self._first_position = 0
        self._lock = threading.Lock()
        self._freed: deque[SavedMemory] = deque()  # memory of freed saved tensors, until the lock is free
        self._pack_hook: Callable[[Tensor], KeptTensor | OffloadedTensor] = self._pack  # as autograd calls it
        self._entered: list[saved_tensors_hooks | None] = []
        self._num_passes = 0
        self._logged: set[str] = set()
        self._is_closed = False

    # -- forward --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._is_closed:
            raise OffloadError("activation offload: expected a forward before close(), found the offload closed")
        if not self._entered:
            self._num_passes += 1
            with self._locked():
                pass  # frees memory of transfers that have ended since the last forward
        hooks = None
        if self._others_decide():
            self._log("saved-tensor hooks of the caller are active around the model, so nothing is offloaded there")
        else:
            # After a graph break, operators of compiled code run alone, and their hooks would be compiled.
            self._pack_hook = untraced(self._pack)
            hooks = saved_tensors_hooks(self._pack_hook, untraced(self._unpack))
            hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hooks = self._entered.pop()
        if hooks is not None:
            hooks.__exit__()
        if not self._entered:
            self._limit.end_forward()

    def begin_block(self) -> None:
        """Begin a block's forward. Has an effect only inside the `with`, and without a budget."""
        if self._entered:
            self._limit.begin_block()

    def begin_part(self, order: int) -> None:
        """Announce that backward needs the tensors saved from now on after all parts of a higher order.

        Without such calls, backward is assumed to run in the reverse order of forward.
        """
        self._first_position = order << _BITS_OF_COUNT

    def close(self) -> None:
        """Wait for running transfers and free everything. Backward of an existing graph then raises."""
        with self._locked():
            self._is_closed = True
            for memory in itertools.chain(*self._of_storage.values()):
                self.residency.forget(memory)
            self._of_storage.clear()
            self.residency.drain()

    def _others_decide(self) -> bool:
        """Return True inside saved-tensor hooks of the caller or of a checkpoint. Our hooks would displace them."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        # Ours are on top inside of a nested `with`.
        return top is not None and top[0] != self._pack_hook

    def _pack(self, tensor: Tensor) -> KeptTensor | OffloadedTensor:
        part = self._part_to_move(tensor)
        if part is None:
            return KeptTensor(tensor)
        with self._locked():
            memory = self._find(tensor, *part) or self._add(tensor, *part)
            memory.num_tensors += 1
            return OffloadedTensor(tensor, memory, self._on_freed)

    def _part_to_move(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the bytes [start, end) of the storage to move, or None to keep the tensor."""
        if not _is_ordinary(tensor) or not tensor.numel():
            return None
        itemsize = tensor.element_size()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if span * itemsize < self._min_bytes or self.is_parameter_storage(tensor):
            return None
        if tensor.device.type == "cpu" and not self._moves_from_host:
            self._log("activations on the CPU are already in host memory and stay there; a file store would take them")
            return None
        if tensor.device.type == "cpu":
            return_large_blocks(max(self._min_bytes, _MIN_RETURNED_BYTES))
        start = int(tensor.storage_offset()) * itemsize
        end = start + span * itemsize
        nbytes = tensor.untyped_storage().nbytes()
        if (end - start) * _PART_OF_STORAGE < nbytes:
            return start // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES, end
        return 0, nbytes

    def _find(self, tensor: Tensor, start: int, end: int) -> SavedMemory | None:
        for memory in self._of_storage.get(tensor.untyped_storage()._cdata, ()):
            if memory.has(tensor, start, end):
                self.residency.move_to_end(memory, self._next_position(), self._num_passes)
                return memory
        return None

    def _add(self, tensor: Tensor, start: int, end: int) -> SavedMemory:
        nbytes, budget = end - start, self._limit.budget_bytes
        if budget is not None and nbytes > budget:
            self._log(
                f"budget_bytes is {budget:,}, but a single saved tensor has {nbytes:,} bytes: "
                "it stays in memory until the next tensor is saved"
            )
        self._limit.add(nbytes)
        self.residency.prepare_for(nbytes, self._limit.nbytes)
        position = self._next_position()
        memory = SavedMemory(f"activation-{id(self):x}-{position}", tensor, start, end)
        memory.position, memory.pass_number = position, self._num_passes
        self._of_storage.setdefault(memory.origin.cdata, []).append(memory)
        self.residency.add(memory)
        return memory

    def _next_position(self) -> int:
        return self._first_position + next(self._positions)

    # -- backward -------------------------------------------------------------------------------------------------

    def _unpack(self, saved: KeptTensor | OffloadedTensor) -> Tensor:
        if isinstance(saved, KeptTensor):
            saved.check_version()
            return saved.tensor
        with self._locked():
            saved.check_version()
            if self._is_closed:
                raise OffloadError(
                    "activation offload: expected backward before close(), found the offload closed and the "
                    "activations of this graph freed"
                )
            return saved.view_of(self.residency.use(saved.memory, self._limit.nbytes))

    # -- the end of a graph -----------------------------------------------------------------------------------------

    def _on_freed(self, memory: SavedMemory) -> None:
        """Note that a saved tensor was freed. May run at any time, even in the garbage collector while this thread has
        the lock.
        """
        self._freed.append(memory)
        self._sweep()

    def _sweep(self) -> None:
        while self._freed and self._lock.acquire(blocking=False):  # if locked, the holder sweeps after its work
            try:
                while self._freed:
                    self._forget_one(self._freed.popleft())
            finally:
                self._lock.release()

    def _forget_one(self, memory: SavedMemory) -> None:
        """Count a saved tensor less, and free its memory after the last."""
        memory.num_tensors -= 1
        if memory.num_tensors or self._is_closed:
            return
        siblings = self._of_storage[memory.origin.cdata]
        siblings.remove(memory)
        if not siblings:
            del self._of_storage[memory.origin.cdata]
        self.residency.forget(memory)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                self.residency.reap()
                yield
        finally:
            self._sweep()

    def _log(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            _LOGGER.info("activation offload: %s", text)


def in_storages_of(tensors: Iterable[Tensor]) -> Callable[[Tensor], bool]:
    """Make a function that says if a tensor is a view of the memory of `tensors`. Resized storages count too."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    # The function holds the storages, so no other storage can get their identity.
    return lambda tensor: tensor.untyped_storage()._cdata in storages


class ActivationLimit:
    """The limit of resident activations: a budget, or three times the largest block so far.

    A block is what is saved between two calls of `begin_block`. The head after the last block may be much larger, and
    counts only while it runs. Without such calls, a block is a single saved tensor.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self._block_bytes: int | None = None  # saved since the last begin_block of this forward
        self._largest_block_bytes = 0
        self._has_blocks = False

    @property
    def nbytes(self) -> int:
        """The current limit."""
        return self.budget_bytes or BLOCKS_IN_MEMORY * max(self._largest_block_bytes, self._block_bytes or 0)

    def begin_block(self) -> None:
        """Begin a block's forward."""
        if not self._has_blocks:  # until now each saved tensor counted as a block
            self._has_blocks, self._largest_block_bytes = True, 0
        self._largest_block_bytes = max(self._largest_block_bytes, self._block_bytes or 0)
        self._block_bytes = 0

    def add(self, nbytes: int) -> None:
        """Count nbytes that are saved together."""
        if self._block_bytes is not None:
            self._block_bytes += nbytes
        elif not self._has_blocks:
            self._largest_block_bytes = max(self._largest_block_bytes, nbytes)

    def end_forward(self) -> None:
        """End the forward."""
        # A forward with a single block: no further `begin_block` has counted it.
        self._largest_block_bytes = self._largest_block_bytes or self._block_bytes or 0
        self._block_bytes = None


class KeptTensor:
    """A saved tensor that stays in memory. Checks the version, since torch does not under hooks."""

    __slots__ = ("_origin", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # A leaf is kept undetached, since its memory may be replaced. Other tensors are detached: they would keep their
        # graph alive.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version
        self._origin = _origin(tensor)

    def check_version(self) -> None:
        """Raise torch's error if the tensor was changed in place since forward."""
        if self.tensor._version != self._version:
            raise _changed(self.tensor.type(), self.tensor.shape, self._origin, self.tensor._version, self._version)


class OffloadedTensor:
    """The metadata of a saved tensor whose bytes are in a `SavedMemory`."""

    __slots__ = ("_dtype", "_kind", "_offset", "_on_freed", "_origin", "_shape", "_stride", "memory")

    def __init__(self, tensor: Tensor, memory: SavedMemory, on_freed: Callable[[SavedMemory], None]) -> None:
        self.memory = memory
        self._on_freed = on_freed
        self._kind = tensor.type()
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset() - memory.start // tensor.element_size()
        self._origin = _origin(tensor)

    def check_version(self) -> None:
        """Raise torch's error if the tensor was changed in place since forward."""
        found, expected = self.memory.versions
        if found != expected:
            raise _changed(self._kind, self._shape, self._origin, found, expected)

    def view_of(self, content: Tensor) -> Tensor:
        """Return the saved tensor as a view of content, (nbytes,) uint8."""
        offset = content.storage_offset() // self._dtype.itemsize + self._offset
        tensor = torch.empty(0, dtype=self._dtype, device=content.device)
        return tensor.set_(content.untyped_storage(), offset, self._shape, self._stride)

    # Autograd has no hook for the end of a graph, but drops this object with the node that saved it.
    def __del__(self) -> None:
        self._on_freed(self.memory)


def _is_ordinary(tensor: Tensor) -> bool:
    """Return True if storage, offset, shape and strides describe the tensor completely."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def _origin(tensor: Tensor) -> str:
    """Describe the node that made the tensor, in the words of torch's message."""
    return f", which is output {tensor.output_nr} of {tensor.grad_fn.name()}," if tensor.grad_fn is not None else ""


def _changed(kind: str, shape: torch.Size, origin: str, found: int, expected: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(shape)}]{origin} is at version {found}; expected version {expected} instead. Hint: enable "
        "anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
