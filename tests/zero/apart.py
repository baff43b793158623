"""A device that is not there: the model's memory counts as another one than the host's, and copies come late.

What is copied by a stream of a GPU has been copied at some time between the call and the wait. Here each copy is made
at one of the two ends, by a coin: what changes a source too early, or uses a target too early, gets wrong numbers.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

from lowtide.engine.blueprint import offload as engine_offload
from lowtide.offload import HostCopies, HostPool, HostStore, PagePool, Transfer
from tests.kit.training import Case, Outcome, train

GARBAGE = 0x7F  # bytes that are no number in any dtype, or a large one


class LateCopy:
    """Made at once or in the first wait."""

    def __init__(self, values: Tensor, out: Tensor, before: Sequence["LateCopy"] = ()) -> None:
        assert values.shape == out.shape and values.dtype == out.dtype
        self._values, self._out = values, out
        self._before = before
        self._lock = threading.Lock()  # the thread of updates and the training may both wait
        self.is_done = False
        if random.random() < 0.5:
            self.wait()
        else:
            out.view(torch.uint8).fill_(GARBAGE)

    def wait(self) -> None:
        for one in self._before:
            one.wait()
        with self._lock:
            if not self.is_done:
                self._out.copy_(self._values)
                self.is_done = True


class LateHostCopy(LateCopy):
    """That it is made does not tell the host that its memory is free: only a wait does."""

    def __init__(self, values: Tensor, out: Tensor, on_host: Tensor) -> None:
        self.address = on_host.data_ptr()
        self.host_knows = False
        super().__init__(values, out)
        self.host_knows = False

    def wait(self) -> None:
        super().wait()
        self.host_knows = True

    def wait_on_device(self) -> None:
        """Then the host still does not know."""
        LateCopy.wait(self)


class LateCopies(HostCopies):
    """Of the device that is not there."""

    last: ClassVar[dict[int, LateHostCopy]] = {}  # by the address of the host's memory

    def __init__(self) -> None:
        """Without streams."""

    def to_host(self, values: Tensor, out: Tensor) -> Any:
        return self._remembered(LateHostCopy(values, out, out))

    def to_device(self, values: Tensor, out: Tensor) -> Any:
        return self._remembered(LateHostCopy(values, out, values))

    def _remembered(self, copy: LateHostCopy) -> LateHostCopy:
        self.last[copy.address] = copy
        return copy


class StrictPool(HostPool):
    """Takes no buffer back that a copy may still use."""

    def give(self, buffer: Tensor) -> None:
        copy = LateCopies.last.pop(buffer.data_ptr(), None)
        assert copy is None or copy.host_knows, "a buffer is given back before the copy is known to be made"
        super().give(buffer)


class LateStore(HostStore):
    """A HostStore whose transfers are late; those of one key keep their order."""

    def __init__(self, *options: Any, **named: Any) -> None:
        super().__init__(*options, **named)
        self._last: dict[str, list[LateCopy]] = {}

    def _copy(self, key: str, values: Tensor, into: Tensor, caller: Tensor) -> Transfer:
        last = self._last.get(key, [])
        if into is not caller:  # the store's own bytes are kept until they are replaced
            for one in last:
                one.wait()
        copy = LateCopy(values, into, last)
        self._last[key] = [copy]
        return copy

    def drop(self, key: str) -> None:
        for one in self._last.pop(key, []):
            one.wait()
        super().drop(key)


@contextmanager
def model_apart() -> Iterator[None]:
    """Engines that are made meanwhile take the host for another memory than the model's."""
    make_storage = torch.empty

    def empty_of_garbage(*shape: Any, **options: Any) -> Tensor:
        memory = make_storage(*shape, **options)
        if memory.device.type == "cpu" and memory.numel():
            memory.view(-1).view(torch.uint8).fill_(GARBAGE)
        return memory

    with (
        patch.object(engine_offload, "model_is_apart", lambda device: True),
        patch.object(engine_offload, "copies_for", lambda world: LateCopies()),
        patch.object(engine_offload, "HostPool", StrictPool),
        patch.object(engine_offload, "HostStore", LateStore),
        patch.object(PagePool, "is_possible", lambda: False),
        patch.object(torch, "empty", empty_of_garbage),
    ):
        yield


def apart(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls a function with the model apart; for ranks."""
    random.seed(0)
    with model_apart():
        return fn(*args, **options)


def train_both_ways(cases: Sequence[tuple[Case, Case]]) -> list[tuple[Outcome, Outcome]]:
    """(plain, the second case with the model apart) of each pair."""
    return [(train(plain), apart(train, moved)) for plain, moved in cases]
