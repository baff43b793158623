"""Stores for tests of activation offload, and what is alive of the tensors that autograd saved."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.offload import OffloadError
from lowtide.offload.activations import ActivationOffload, in_storages_of


class _Transfer:
    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class MemoryStore:
    """A store in memory whose transfers run one after the other in a thread of its own, and may be slow, or fail.

    Bytes are read and written when the transfer runs, not when it is asked for.
    """

    alignment_bytes = 64
    is_host_memory = False

    def __init__(self, seconds: float = 0.0) -> None:
        """seconds: that a transfer takes."""
        self.seconds = seconds
        self.failing: set[str] = set()  # of "save", "load": fail when they are waited for
        self.refusing: set[str] = set()  # of "save", "load": fail when they are asked for
        self.kept: dict[str, Tensor] = {}
        self.num_saves = self.num_loads = 0
        self.may_run = threading.Event()  # no transfer does before
        self.may_run.set()
        self._thread = ThreadPoolExecutor(1)
        self._lock = threading.Lock()

    @property
    def bytes_held(self) -> int:
        return sum(kept.numel() for kept in self.kept.values())

    def reserve(self, sizes: Iterable[int]) -> None:
        pass

    def save(self, key: str, values: Tensor) -> _Transfer:
        assert values.dtype == torch.uint8 and values.dim() == 1
        self._refuse("save")
        self.num_saves += 1
        self.kept[key] = kept = torch.empty(0, dtype=torch.uint8)

        def move() -> None:
            self._take_time("save")
            kept.resize_(values.numel()).copy_(values)

        return _Transfer(self._thread.submit(move))

    def load(self, key: str, out: Tensor) -> _Transfer:
        self._refuse("load")
        self.num_loads += 1
        kept = self.kept[key]

        def move() -> None:
            self._take_time("load")
            assert out.numel() == kept.numel()
            out.copy_(kept)

        return _Transfer(self._thread.submit(move))

    def drop(self, key: str) -> None:
        del self.kept[key]

    def settle(self) -> None:
        """Returns when every transfer has run."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        self._thread.shutdown()
        self.kept.clear()

    def _take_time(self, verb: str) -> None:
        time.sleep(self.seconds)
        assert self.may_run.wait(30), "somebody waits for a transfer that may not run yet"
        if verb in self.failing:
            raise OffloadError(f"the disk of the test is full ({verb})")

    def _refuse(self, verb: str) -> None:
        if verb in self.refusing:
            raise OffloadError(f"the disk of the test is gone ({verb})")


def offload_for(
    model: nn.Module, store: object, budget_bytes: int | None = None, min_bytes: int = 256
) -> ActivationOffload:
    return ActivationOffload(store, min_bytes, budget_bytes, in_storages_of(model.parameters()))  # type: ignore[arg-type]


def gradients(
    model: nn.Module, loss: Callable[[], Tensor], offload: ActivationOffload | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the gradient of every parameter."""
    model.zero_grad()
    with offload or contextlib.nullcontext():
        value = loss()
    value.backward()
    return value.detach(), [param.grad.clone() for param in model.parameters() if param.grad is not None]


def assert_same_bits(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> None:
    assert found[0].isfinite() and torch.equal(found[0], expected[0])
    assert len(found[1]) == len(expected[1])
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert torch.equal(ours, theirs)


class LiveBytes:
    """Counts the memory under saved tensors that really is alive, independently of what the offload says.

    Looks at every tensor that autograd saves, and at every one that it gets back.
    """

    def __init__(self, offload: ActivationOffload, model: nn.Module) -> None:
        self._offload = offload
        self._is_parameter = in_storages_of(model.parameters())
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.total = 0  # of all that was saved

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        pack, unpack = self._offload._pack, self._offload._unpack

        def watched_pack(tensor: Tensor) -> object:
            packed = pack(tensor)
            self._look(tensor, is_new=True)
            return packed

        def watched_unpack(packed: object) -> Tensor:
            tensor = unpack(packed)  # type: ignore[arg-type]
            self._look(tensor, is_new=False)
            return tensor

        with self._offload, saved_tensors_hooks(watched_pack, watched_unpack):
            yield

    @property
    def now(self) -> int:
        self._storages = {key: item for key, item in self._storages.items() if not item[0].expired()}
        return sum(nbytes for _, nbytes in self._storages.values())

    def _look(self, tensor: Tensor, is_new: bool) -> None:
        if self._is_parameter(tensor):
            return
        reference = StorageWeakRef(tensor.untyped_storage())
        nbytes = tensor.untyped_storage().nbytes()
        if is_new and reference.cdata not in self._storages:
            self.total += nbytes
        self._storages[reference.cdata] = (reference, nbytes)
        self.peak = max(self.peak, self.now)
