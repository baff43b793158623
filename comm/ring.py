"""What ranks of several islands exchange: the mean of their values, the same bits on all of them, or nothing on any.

Of k members each sums a k-th of the values, in the order of the islands, and sends the mean to the others:

    island 0   [a0 b0 c0]  --b0-->  1  --c0-->  2        0 has mean(a), 1 has mean(b), 2 has mean(c)
    island 1   [a1 b1 c1]                                 then each sends its mean to the others
    island 2   [a2 b2 c2]

So a rank sends 2 (k - 1) / k of its values, in the form that they have on the wire, and sums are made in float32 or
wider. Who has a mean takes what the others read of it, so all have the same bits in any form.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..watch.log import logger
from .errors import CollectiveError, LeftOutError
from .island_links import LinkError, Links, Watch
from .island_messages import MessageForm
from .islands import Islands
from .votes import Votes

_PAUSE_SECONDS = 0.01
_ATTEMPTS = 3  # with the same members, before that is an error


class Combine(Enum):
    """What becomes of the members' values."""

    MEAN = "mean"
    FIRST = "first"  # those of the first member


@dataclass(frozen=True)
class Agreed:
    """values: (n,) float32 or wider, as they came over the wire. members: the islands whose values are in them."""

    values: Tensor
    members: tuple[int, ...]


class Ring:
    """The islands that train together, and a thread in which they exchange, one exchange after another."""

    def __init__(self, islands: Islands, rank: int, timeout_seconds: float) -> None:
        """rank: of its island. timeout_seconds: for which others are waited for, in an exchange and in a roll call."""
        self.islands = islands
        self.members = tuple(range(islands.count))
        self.bytes_sent = 0
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._number = self._num_told = 0  # of exchanges, and calls of `tell`
        self._links = Links(islands, rank)
        self._stop = threading.Event()
        self._due: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._due,), name="lowtide outer ring", daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, self._stop, self._due)  # also at the interpreter's exit

    def check_alike(self, text: str) -> None:
        """Raises ValueError where another island has said something else before, on the rank of this one's number."""
        told = self._told("alike", text)
        if told != text:
            raise ValueError(
                "outer: expected the same model, config and ranks on all islands, found a difference on rank "
                f"{self._rank} of island {self.islands.island}:\n  here: {text}\n  there: {told}"
            )

    def tell(self, value: Any) -> dict[int, Any]:
        """The values of all islands that are left, by island; plain data. To be called alike, between exchanges.

        Who does not come in time is left out, by all alike, and gets LeftOutError.
        """
        number, self._num_told = self._num_told, self._num_told + 1
        store, deadline = self.islands.store, time.monotonic() + self._timeout_seconds
        keys = {island: f"told/{number}/{self._rank}/{island}" for island in self.members}
        store.set(keys[self.islands.island], json.dumps(value))
        found = []
        for island, key in keys.items():
            while not (is_there := store.check([key])) and time.monotonic() < deadline:
                if self.islands.gone((island,)):
                    break
                time.sleep(_PAUSE_SECONDS)
            if is_there:
                found.append(island)
        agreed = json.loads(self._told(f"told/{number}/verdict", json.dumps(found)))
        if self.islands.island not in agreed:
            raise LeftOutError(
                f"island {self.islands.island}: the others ({_named(agreed)}) load a checkpoint without it, since it "
                f"did not come within {self._timeout_seconds:g} s; start it again, and if it is only slow, with a "
                "larger outer.timeout_seconds"
            )
        return {island: json.loads(store.get(keys[island])) for island in agreed}

    def _told(self, key: str, text: str) -> str:
        """What the first that asked with this rank's number has said."""
        return str(self.islands.store.compare_set(f"{key}/{self._rank}", "", text).decode())

    def start(self, values: Tensor, form: MessageForm, combine: Combine = Combine.MEAN) -> Future[Agreed]:
        """values: (n,) on the CPU, not to be changed until the result is there. form: in which they are sent.

        To be called alike on all ranks of all islands. The result raises CollectiveError where the store is gone or the
        exchange fails again and again, and LeftOutError.
        """
        number, self._number = self._number, self._number + 1
        future: Future[Agreed] = Future()

        def work() -> None:
            try:
                future.set_result(self._agree(number, values, form, combine))
            except BaseException as error:
                future.set_exception(error)

        self._due.put(work)
        return future

    def leave(self, why: str) -> None:
        """The others go on without this island. To be called when nothing is awaited any more, or after an error."""
        if not self._stop.is_set():
            _end(self._stop, self._due)
            with contextlib.suppress(RuntimeError):  # the store is gone, and nobody to be told
                self.islands.leave(why)  # the thread hears of it too, where it waits for a verdict
            self._thread.join(self._timeout_seconds)
            self._links.close()

    # -- in the thread --------------------------------------------------------------------------------------------

    def _agree(self, number: int, values: Tensor, form: MessageForm, combine: Combine) -> Agreed:
        attempt, failures, why = 0, 0, ""
        call = f"{combine.value} of {values.numel()} numbers in {form}"
        told = self._told(f"{number}/call", call) if len(self.members) > 1 else call
        if told != call:
            raise CollectiveError(
                f"outer exchange {number}: expected the same calls on all islands (steps, load_weights, "
                f"load_checkpoint), found {call} on island {self.islands.island}, {told} on another"
            )
        while len(self.members) > 1:
            name = f"{number}.{attempt}"
            votes = Votes(self.islands, name, self.members, self._timeout_seconds)
            try:
                result = self._exchange(name, votes, values, form, combine)
            except LinkError as error:
                result, why = None, str(error)
            if votes.cast(result is not None):
                assert result is not None
                return Agreed(_widened(result, values), self.members)
            self._links.disconnect()
            if self._stop.is_set():
                raise CollectiveError(f"outer exchange {number}: this engine was closed in the middle of it")
            attempt += 1
            before, self.members = self.members, self._called(f"{number}.{attempt}", number)
            failures = failures + 1 if self.members == before else 0
            if failures == _ATTEMPTS:
                raise CollectiveError(
                    f"outer exchange {number}: islands {_named(self.members)} are all there, and could not exchange in "
                    f"{_ATTEMPTS} attempts ({why}). Is there a firewall between the hosts?"
                )
        return Agreed(_widened(form.read(form.write(values, 0), values.numel()), values), self.members)

    def _called(self, name: str, number: int) -> tuple[int, ...]:
        votes = Votes(self.islands, name + ".roll", self.members, self._timeout_seconds)
        left = votes.call_roll()
        gone = self.islands.gone(self.members)
        lost = [island for island in self.members if island not in left]
        if self.islands.island not in left:
            raise LeftOutError(
                f"island {self.islands.island} in outer exchange {number}: the others ({_named(left) or 'none'}) go on "
                f"without it, since not all of its ranks came within {self._timeout_seconds:g} s; start it again from "
                "a checkpoint, and if it is only slow, with a larger outer.timeout_seconds"
            )
        if lost and not self._rank:
            reasons = "; ".join(f"island {one}: {gone.get(one, 'it did not answer')}" for one in lost)
            logger.warning(
                "outer: exchange %d goes on without %s (%s): means are over %s from now on",
                number,
                ("island " if len(lost) == 1 else "islands ") + _named(lost),
                reasons,
                "this island alone" if len(left) == 1 else f"islands {_named(left)}",
            )
        return left

    def _exchange(self, name: str, votes: Votes, values: Tensor, form: MessageForm, combine: Combine) -> Tensor:
        """(n,), as they were read. Raises LinkError."""
        members = self.members

        def is_over() -> bool:
            return self._stop.is_set() or votes.is_over()

        watch = Watch(is_over, votes.tell_moved, self._timeout_seconds)
        if not self._links.are_open:
            self._links.connect(name, members, watch)
        own = members.index(self.islands.island)
        parts = values.tensor_split(len(members))
        firsts = [0, *itertools.accumulate(part.numel() for part in parts)]
        messages = [form.write(part, first) for part, first in zip(parts, firsts, strict=False)]
        terms = {island: torch.empty_like(messages[own]) for island in members if island != members[own]}
        others = {island: _bytes(messages[at]) for at, island in enumerate(members) if at != own}
        self._links.swap(others, {island: _bytes(one) for island, one in terms.items()}, watch)
        terms[members[own]] = messages[own]
        mean = _combined([form.read(terms[island], parts[own].numel()) for island in members], combine)
        messages[own] = form.write(mean, values.numel() + firsts[own])
        self._links.swap(dict.fromkeys(others, _bytes(messages[own])), others, watch)
        self.bytes_sent += sum(map(len, others.values())) + len(others) * messages[own].numel()
        return torch.cat([form.read(message, part.numel()) for message, part in zip(messages, parts, strict=True)])


def _combined(terms: Sequence[Tensor], combine: Combine) -> Tensor:
    if combine is Combine.FIRST:
        return terms[0]
    total = terms[0].to(torch.promote_types(terms[0].dtype, torch.float32), copy=True)
    for term in terms[1:]:
        total += term
    return total.div_(len(terms))


def _widened(result: Tensor, values: Tensor) -> Tensor:
    return result.to(torch.promote_types(values.dtype, torch.float32))


def _bytes(message: Tensor) -> memoryview:
    """The memory of (n,) uint8 on the CPU."""
    return message.numpy().data


def _named(islands: Sequence[int]) -> str:
    return ", ".join(map(str, islands))


def _work(due: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := due.get()) is not None:
        work()
        del work


def _end(stop: threading.Event, due: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    stop.set()
    due.put(None)
