"""What an engine does between steps, in the record of its rank's progress."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ..comm import Activity, Progress


class Reporting(Protocol):
    """What has a record."""

    _progress: Progress


E = TypeVar("E", bound=Reporting)
P = ParamSpec("P")
R = TypeVar("R")


def reported(activity: Activity) -> Callable[[Callable[Concatenate[E, P], R]], Callable[Concatenate[E, P], R]]:
    """Decorates a method that is not part of a step: while it runs, the rank is in `activity`."""

    def decorate(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
        @wraps(method)
        def wrapped(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self._progress.during(activity):
                return method(self, *args, **kwargs)

        return wrapped

    return decorate
