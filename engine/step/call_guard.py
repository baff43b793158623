"""The turn of an engine: it makes a single call at a time, for a single thread, until it is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...comm import ErrorBroadcast
from ...zero.sequence import StateError


def _never() -> bool:
    return False


class CallGuard:
    """The call that an engine makes now. `what` is the call as users write it: "engine.step()"."""

    def __init__(self, error_broadcast: ErrorBroadcast) -> None:
        """error_broadcast: tells the other ranks if an error ends a call."""
        self.error_broadcast = error_broadcast
        self.is_over = False
        self._lock = threading.Lock()
        self._what = ""
        self._thread: threading.Thread | None = None
        self._is_lost: Callable[[], bool] = _never

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Hold the turn. Raise StateError during another call, of this thread or another thread, and after `close`."""
        self.begin(what)
        try:
            with self.error_broadcast.call(what):
                yield
        finally:
            self.end()

    def begin(self, what: str, is_lost: Callable[[], bool] = _never) -> None:
        """Take the turn until `end`. is_lost: asked when another call comes.

        It returns True if the call that holds the turn was ended by an error; then it has given the turn back.
        """
        if self.is_over or not self._lock.acquire(blocking=False):
            self.check(what)  # gives back a lost turn
            # The turn may have been given back by `check`, if the error of a `loss.backward()` had left it behind.
            if not self._lock.acquire(blocking=False):
                raise self._conflict(what)
        self._what, self._thread, self._is_lost = what, threading.current_thread(), is_lost

    def end(self) -> None:
        self._what, self._thread, self._is_lost = "", None, _never
        self._lock.release()

    def check(self, what: str) -> None:
        """Raise StateError as `of` does, but not inside of another call of the same thread."""
        if self.is_over:
            raise StateError(
                f"{what}: expected an open engine, found a closed engine (engine.close(), destroy() in "
                "lowtide.deepspeed); call it before, or make another engine with initialize"
            )
        # `_is_lost` also gives back the turn of a call that an error has ended. Then no thread has it.
        owner = None if self._is_lost() else self._thread
        if owner is not None and owner is not threading.current_thread():
            raise self._conflict(what)

    def close(self) -> None:
        """Refuse all further calls."""
        self.is_over = True

    def _conflict(self, what: str) -> StateError:
        here, owner, other = threading.current_thread(), self._thread, self._what
        if owner is here:
            return StateError(
                f"{what}: expected no call in progress, found {other}: this call comes from inside of it, for example "
                f"from a hook, a loss function or a signal handler; call it when {other} has returned"
            )
        whose = f"thread '{owner.name}' in {other}" if owner is not None else "another thread"
        return StateError(
            f"{what}: an engine belongs to a single thread at a time: expected it free for thread '{here.name}', found "
            f"{whose}; make all calls in the same thread, or hold a lock from the forward to the end of the step"
        )


E = TypeVar("E", bound=Any)  # an engine, with its turn in `_call_guard`
P = ParamSpec("P")
R = TypeVar("R")


def exclusive(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Decorate a public method that must not be called during another call. See `CallGuard.of`."""
    what = "engine(...)" if method.__name__ == "__call__" else f"engine.{method.__name__}()"

    @wraps(method)
    def wrapped(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
        call_guard: CallGuard = self._call_guard
        call_guard.begin(what)
        try:
            # The same as `of`, without the generators of two context managers: this runs several times in each step.
            before = call_guard.error_broadcast.enter(what)
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:
                call_guard.error_broadcast.fail(what, error, before)
                raise
            finally:
                call_guard.error_broadcast.leave()
        finally:
            call_guard.end()

    return wrapped
