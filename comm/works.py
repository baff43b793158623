"""Operations of a backend, started and waited for: with the config's timeout, and in our words where they fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from .errors import CollectiveError, no_answer
from .world import World


class Works:
    """What routes and messages do with a backend's work.

    | backend                  | `wait` returns                     | a rank that does not come is found by |
    |--------------------------|------------------------------------|---------------------------------------|
    | gloo, MPI                | when the result is there           | `wait` itself, after the timeout      |
    | NCCL, and other devices' | at once: the current stream waits  | `Overdue`, after the timeout          |

    NCCL's `wait` with a timeout would block the host.
    """

    def __init__(self, world: World, compare: Callable[[Sequence[int]], str]) -> None:
        """compare: as `Trail.compare`."""
        self._world = world
        self._overdue = world.overdue
        self._compare = compare
        self._timeout = (timedelta(seconds=world.timeout_seconds),) if world.waits_on_host else ()

    def start(self, make: Callable[[], dist.Work | None], what: str, others: Sequence[int]) -> dist.Work:
        """make: starts it. others: the ranks that take part.

        It may wait for them, where their connection is made by its first use. Raises CollectiveError.
        """
        started = time.monotonic()
        if self._overdue.is_on:
            self._overdue.begin(what, others, self._compare, waits=False)
        try:
            work = make()
        except RuntimeError as error:  # the other end of a connection is gone
            raise self._error(what, others, started, error) from error
        finally:
            if self._overdue.is_on:
                self._overdue.end()
        assert work is not None
        return work

    def wait(self, work: dist.Work, what: str, others: Sequence[int]) -> None:
        """Returns when the result may be used on the current stream. Raises CollectiveError."""
        started = time.monotonic()
        if self._overdue.is_on:
            self._overdue.begin(what, others, self._compare, waits=True)
        try:
            work.wait(*self._timeout)
        except RuntimeError as error:
            raise self._error(what, others, started, error) from error
        finally:
            if self._overdue.is_on:
                self._overdue.end()
        if self._overdue.is_on:
            self._overdue.check()

    def _error(self, what: str, others: Sequence[int], started: float, error: RuntimeError) -> CollectiveError:
        if self._overdue.error is not None:
            return self._overdue.error
        text = no_answer(self._world.rank, what, others, time.monotonic() - started, error)
        return CollectiveError(text + self._compare(others))
