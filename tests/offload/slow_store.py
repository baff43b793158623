"""A store whose transfers take time, wait for a word, or fail."""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lowtide.offload import OffloadError, Transfer


class SlowStore:
    """In memory, but counted as elsewhere. Transfers run one after the other in a thread, each for `seconds`.

    Bytes are read and written when a transfer runs, not when it is asked for. Its name is "save KEY" or "load KEY".
    """

    alignment_bytes = 64
    is_host_memory = False

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.failing: set[str] = set()  # names, or "save" or "load": fail when they are waited for
        self.refusing: set[str] = set()  # "save" or "load": fail when they are asked for
        self.kept: dict[str, Tensor] = {}
        self.trail: list[str] = []  # what was asked for
        self.allowed: set[str] | None = None  # what may run; None: everything
        self.ended: set[str] = set()
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1)
        self._transfers: list[Transfer] = []

    @property
    def num_running(self) -> int:
        return sum(not transfer.is_done for transfer in self._transfers)

    def count(self, verb: str) -> int:
        """How many transfers were asked for."""
        return sum(what.startswith(verb) for what in self.trail)

    def allow(self, whats: set[str] | None) -> None:
        """From now on these transfers may run, and those that might before; None: all."""
        with self._changed:
            self.allowed = None if whats is None else (self.allowed or set()) | whats
            self._changed.notify_all()

    def have_ended(self, whats: set[str]) -> bool:
        """Waits until all of these transfers have."""
        with self._changed:
            return self._changed.wait_for(lambda: whats <= self.ended, 30)

    def settle(self) -> None:
        """Returns when every transfer has run."""
        self._thread.submit(lambda: None).result()

    def reserve(self, sizes: Iterable[int]) -> None:
        pass

    def save(self, key: str, values: Tensor) -> Transfer:
        assert values.dtype == torch.uint8 and values.dim() == 1
        self._refuse("save")
        kept = torch.empty(0, dtype=torch.uint8)
        transfer = self._begin("save", key, lambda: kept.resize_(values.numel()).copy_(values))
        self.kept[key] = kept
        return transfer

    def load(self, key: str, out: Tensor) -> Transfer:
        self._refuse("load")
        kept = self.kept[key]
        return self._begin("load", key, lambda: out.copy_(kept))

    def drop(self, key: str) -> None:
        del self.kept[key]

    def close(self) -> None:
        self._thread.shutdown()
        self.kept.clear()

    def _refuse(self, verb: str) -> None:
        if verb in self.refusing:
            raise OffloadError(f"the disk of the test is gone ({verb})")

    def _begin(self, verb: str, key: str, move: Callable[[], object]) -> Transfer:
        what = f"{verb} {key}"
        self.trail.append(what)

        def run() -> None:
            time.sleep(self.seconds)
            with self._changed:
                may_run = self._changed.wait_for(lambda: self.allowed is None or what in self.allowed, 20)
                assert may_run, f"{what} is waited for before the work that should hide it"
            if self.failing & {verb, what}:
                raise OffloadError(f"the disk of the test is full ({verb})")
            move()
            with self._changed:
                self.ended.add(what)
                self._changed.notify_all()

        future = self._thread.submit(run)
        self._transfers.append(Transfer(future.done, future.result))
        return self._transfers[-1]
